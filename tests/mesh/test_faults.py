"""Things die, rows arrive wrong: what a client sees over real processes. One mesh with two prefill ranks serves every scenario.

Each fault rule names its requests by their ids, so that everything else runs untouched. A test that ends a process leaves it
so; `whole` starts again what the next one needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time

import pytest
from decode_peers import opened
from scenario import GREEDY, Asked, assert_equal, ids, until

from headrace.errors import HeadraceError, StaleEpoch
from headrace.launch.children import wait_ready
from headrace.protocol.common import NumberFormat, WorkerIdentity
from headrace.rpc.channel import open_channel
from headrace.rpc.clients import DecodeClient, PrefillClient, RouterClient
from headrace.rpc.links import DECODE_LINK, PREFILL_LINK, TOKEN_LINK, WRITER_LINK

QUARANTINE_S = 2.0
POOL_BLOCKS = 96
RULES = (
    # D7: what arrives is wrong once, or in all of the first attempt.
    "prefill.push:flip layer=3 request_id=flip times=1",
    "prefill.push:flip layer=0 request_id=flip-first times=1",
    "prefill.push:flip layer=6 attempt=1 request_id=flip-always times=0",
    "prefill.push:drop layer=5 request_id=drop times=1",
    "prefill.push:repeat layer=2 request_id=repeat times=0",
    "prefill.push:delay layer=7 seconds=0.5 request_id=late times=0",
    # Legs of the first attempt that fail.
    "prefill.forward:fail attempt=1 request_id=fail-forward times=0",
    "prefill.push:fail layer=4 attempt=1 request_id=fail-push times=0",
    "prefill.commit:fail attempt=1 request_id=fail-handover times=0",
    "decode.reserve:fail attempt=1 request_id=fail-reserve times=0",
    "decode.commit:fail attempt=1 request_id=fail-commit times=0",
    # C4: one layer is under way when its request is aborted, for less and for longer than decode waits for a writer.
    "prefill.push:delay layer=3 seconds=1.0 request_id=aborted-slow* times=0",
    "prefill.push:hang layer=3 seconds=2.9 request_id=aborted-hung* times=0",
    # D1, D6: phases held open in the first attempt.
    "prefill.forward:slow seconds=20 attempt=1 request_id=hold-forward* times=0",
    "prefill.push:delay seconds=0.5 attempt=1 request_id=hold-push* times=0",
    "prefill.commit:delay seconds=20 attempt=1 request_id=hold-commit* times=0",
    "prefill.forward:slow seconds=1 request_id=drain-prefill times=0",
)

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def broken(start_mesh):
    """Two prefill ranks, one decode rank, and the rules."""
    with start_mesh(
        f"faults={';'.join(RULES)}",
        "prefill.groups=2",
        f"engine.num_blocks={POOL_BLOCKS}",
        f"decode.quarantine_max_s={QUARANTINE_S}",
    ) as mesh:
        yield mesh


# --- starting and ending processes -----------------------------------------------------------------------------------


async def start_again(mesh, *names: str) -> None:
    """Starts processes at their old ports and waits until they are ready and the router has proven them."""
    children = [mesh.spawn(mesh.running[name].plan) for name in names]
    for running in children:
        running.said = await asyncio.to_thread(wait_ready, running.child, 60.0)
    await wait_proven(mesh)


async def wait_proven(mesh) -> None:
    """Until the router calls every worker that runs ready, under its present epoch."""
    workers = [one for one in mesh.running.values() if one.plan.service in ("prefill", "decode") and is_alive(one)]
    epochs = {str(one.said["epoch"]) for one in workers}

    async def proven() -> bool:
        with contextlib.suppress(HeadraceError):
            async with open_channel(mesh.router_address) as channel:
                views = await RouterClient(channel).workers()
            return epochs == {view.info.identity.epoch for view in views if view.ready}
        return False

    await until(proven, f"the router has proven {sorted(epochs)}", timeout_s=30.0)


def is_alive(running) -> bool:
    return running.child.poll() is None


async def whole(mesh, *without: str) -> None:
    """Every process runs, but those in `without`, and every worker is proven."""
    ended = [name for name, one in mesh.running.items() if not is_alive(one) and name not in without]
    if ended:
        await start_again(mesh, *ended)
    for name in without:
        await end(mesh, name, signal.SIGTERM)
    await wait_proven(mesh)


async def end(mesh, name: str, number: signal.Signals) -> int:
    """Sends a signal to a process and waits for its end; its exit status."""
    child = mesh.running[name].child
    if child.poll() is None:
        child.send_signal(number)
    return await asyncio.to_thread(child.wait, 30.0)


async def busy_prefill(mesh) -> str:
    """The prefill rank that works on a request now."""
    for name in [name for name, one in mesh.running.items() if one.plan.service == "prefill" and is_alive(one)]:
        async with open_channel(mesh.address(name)) as channel:
            ledger = await PrefillClient(channel).ledger()
        if ledger.running_requests or ledger.queued_requests:
            return name
    return ""


def fences(mesh) -> int:
    """Transfer engines that decode has replaced so far."""
    return asyncio.run(mesh.ledgers()).decode.fences


# --- D7: rows that arrive wrong --------------------------------------------------------------------------------------


def row_bytes_in_all(mesh) -> int:
    """Bytes that one token's rows take, in all layers."""

    async def ask() -> int:
        async with open_channel(mesh.address("decode-0")) as channel:
            layout = (await DecodeClient(channel).info()).layout
        (region,) = layout.regions
        return region.layer_count * region.row_width * {NumberFormat.FP32: 4, NumberFormat.BF16: 2}[region.format]

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("request_id", "length", "salt", "attempts", "pushes"),
    [
        ("flip", 37, 701, 1, 2.0),
        ("flip-first", 16, 702, 1, 2.0),
        ("drop", 5, 703, 1, 2.0 - 1 / 8),
        ("repeat", 33, 704, 1, 1.0),
        ("late", 48, 705, 1, 1.0),
        ("flip-always", 37, 706, 2, 1.0),
    ],
)
def test_rows_that_arrive_wrong_are_repaired_and_the_repeat_is_counted(
    broken, aggregated, request_id, length, salt, attempts, pushes
):
    """`pushes`: bytes pushed in the attempt that succeeded, in units of what was owed; a second attempt also owes the row of
    the token that the client has already. `salt`: no two prompts share rows, or a lost layer could have been there before."""
    prompt, sampling = ids(length, salt), GREEDY | {"max_tokens": 12}
    asyncio.run(whole(broken))

    async def among_neighbours():
        async with broken.client() as client:
            others = [Asked(client, ids(20 + index, 60 + index), **sampling) for index in range(3)]
            answer = await client.generate(prompt, request_id=request_id, **sampling)
            return answer, [await other.result() for other in others]

    ours, others = asyncio.run(among_neighbours())
    asyncio.run(broken.wait_idle(5.0))
    assert_equal(ours, aggregated.ask(prompt, **sampling))
    for index, other in enumerate(others):
        assert_equal(other, aggregated.ask(ids(20 + index, 60 + index), **sampling))
    assert ours.final.usage.attempts == attempts
    pushed = [stage.bytes for stage in ours.final.stages if stage.name == "prefill.push"]
    assert pushed[-1] == pushes * (len(prompt) + attempts - 1) * row_bytes_in_all(broken)


@pytest.mark.parametrize("where", ["forward", "push", "handover", "reserve", "commit"])
def test_a_leg_that_fails_is_a_new_attempt_and_nothing_else(broken, aggregated, where):
    asyncio.run(whole(broken))
    options = {"max_tokens": 10, "temperature": 0.8, "seed": 3, "n": 2, "ignore_eos": True, "logprobs": 1}
    ours = broken.ask(ids(35, 9), request_id=f"fail-{where}", **options)
    assert_equal(ours, aggregated.ask(ids(35, 9), **options))
    assert ours.final.usage.attempts == 2


# --- C4: writes that outlive their request ---------------------------------------------------------------------------


def pool_filling_requests(salt: int) -> list[tuple[list[int], dict[str, object]]]:
    """Three that together take 90 of decode's 96 blocks, and decode long enough to meet what lands late."""
    return [(ids(150, salt + index), GREEDY | {"max_tokens": 330}) for index in range(3)]


async def ask_all(client, requests):
    return await asyncio.gather(*(client.generate(prompt, **options) for prompt, options in requests))


def oracles(aggregated, requests):
    async def ask():
        async with aggregated.client() as client:
            return await ask_all(client, requests)

    return asyncio.run(ask())


@pytest.mark.parametrize("kind", ["slow", "hung"])
def test_rows_under_way_when_their_request_is_aborted_never_land_in_the_next_owners_blocks(
    broken, aggregated, full, kind
):
    """The next owners come by both prefill ranks, so that some need not wait behind the write that is under way."""

    async def scenario(round_: int, requests):
        await whole(broken)
        before = (await broken.ledgers()).decode.fences
        async with broken.client() as client:
            name = f"aborted-{kind}-{round_}"
            aborted = Asked(client, ids(800, 200 + round_), request_id=name, max_tokens=700, **GREEDY)
            await aborted.wait_tokens(1)
            await asyncio.sleep(0.2 + 0.1 * round_)
            now = (await broken.ledgers()).decode
            assert (now.reserved_requests, now.running_requests) == (1, 0), "its rows are not under way"
            await aborted.cancel()
            answers = await ask_all(client, requests)
        now = await broken.wait_idle(QUARANTINE_S + 5.0)
        return answers, now.decode.fences - before

    for round_ in range(4 if full else 1):
        requests = pool_filling_requests(300 + 10 * round_)
        answers, num_fences = asyncio.run(scenario(round_, requests))
        for ours, oracle in zip(answers, oracles(aggregated, requests), strict=True):
            assert_equal(ours, oracle)
        assert num_fences == (1 if kind == "hung" else 0)


# --- D1: prefill dies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["forward", "push", "commit"])
def test_a_prefill_rank_killed_in_any_phase_is_replaced_by_the_other(broken, aggregated, phase):
    """Killed between reserve and push, in mid-push, before commit. Decode gets its blocks back by a fence."""
    prompt, sampling = ids(90, 20), GREEDY | {"max_tokens": 12}

    async def scenario():
        await whole(broken)
        async with broken.client() as client:
            asked = Asked(client, prompt, request_id=f"hold-{phase}-{time.time()}", **sampling)
            if phase == "forward":
                await until(lambda: reserved(broken), "decode has promised room")
            else:
                await asked.wait_tokens(1)
            await asyncio.sleep(0.6)  # push: one or two of eight layers have gone; commit: all have
            victim = await busy_prefill(broken)
            assert victim and (await broken.ledgers()).decode.reserved_requests == 1
            await end(broken, victim, signal.SIGKILL)
            killed = time.monotonic()
            answer = await asked.result()
            return answer, time.monotonic() - killed, victim

    async def restart_and_settle(victim: str):
        await start_again(broken, victim)
        return await broken.wait_idle(QUARANTINE_S + 5.0)

    before = fences_of_live(broken)
    answer, silence_s, victim = asyncio.run(scenario())
    assert_equal(answer, aggregated.ask(prompt, **sampling))
    assert answer.final.usage.attempts >= 2
    assert silence_s < 10.0, "a dead rank must be found out, not waited for"
    now = asyncio.run(restart_and_settle(victim))
    assert now.decode.fences > before, "nobody says that the dead writer's rows cannot land"


def fences_of_live(mesh) -> int:
    asyncio.run(whole(mesh))
    return fences(mesh)


async def reserved(mesh) -> bool:
    return (await mesh.ledgers()).decode.reserved_requests == 1


def test_a_prefill_rank_frozen_in_mid_push_is_found_out_and_what_it_writes_later_lands_nowhere(broken, aggregated):
    """Its peer stops answering pings: a new attempt elsewhere, the fence here. Thawed, it goes on writing; others decode."""
    prompt, sampling = ids(150, 22), GREEDY | {"max_tokens": 12}
    others = pool_filling_requests(500)

    async def scenario():
        await whole(broken)
        before = (await broken.ledgers()).decode.fences
        async with broken.client() as client:
            asked = Asked(client, prompt, request_id="hold-push-frozen", **sampling)
            await asked.wait_tokens(1)
            await asyncio.sleep(0.3)
            victim = broken.running[await busy_prefill(broken)].child
            victim.send_signal(signal.SIGSTOP)
            try:
                frozen = time.monotonic()
                answer = await asked.result()
                silence_s = time.monotonic() - frozen
                await until(lambda: fenced(before), "the writer's silence ends in a fence")
                after = [Asked(client, one, **options) for one, options in others]
                await asyncio.gather(*(one.wait_tokens(2) for one in after))
            finally:
                victim.send_signal(signal.SIGCONT)
            answers = [await one.result() for one in after]
        await broken.wait_idle(QUARANTINE_S + 5.0)
        return answer, silence_s, answers

    async def fenced(before: int) -> bool:
        async with open_channel(broken.address("decode-0")) as channel:
            ledger = await DecodeClient(channel).ledger()
        return ledger.fences > before and ledger.quarantined_requests == 0

    answer, silence_s, answers = asyncio.run(scenario())
    assert_equal(answer, aggregated.ask(prompt, **sampling))
    assert answer.final.usage.attempts >= 2
    assert silence_s < 12.0, "keep-alive finds a frozen peer in 7 s"
    for ours, oracle in zip(answers, oracles(aggregated, others), strict=True):
        assert_equal(ours, oracle)


def test_the_only_prefill_rank_killed_in_mid_push_is_waited_for_within_the_deadline(broken, aggregated):
    prompt, sampling = ids(90, 21), GREEDY | {"max_tokens": 12}

    async def scenario():
        await whole(broken, "prefill-1")
        async with broken.client() as client:
            asked = Asked(client, prompt, request_id="hold-push-alone", timeout_s=60.0, **sampling)
            hasty = Asked(client, ids(20, 5), request_id="hold-commit-hasty", timeout_s=4.0, **sampling)
            await asyncio.gather(asked.wait_tokens(1), hasty.wait_tokens(1))
            began = time.monotonic()
            await end(broken, "prefill-0", signal.SIGKILL)
            with pytest.raises(HeadraceError):
                await hasty.result()
            assert time.monotonic() - began < 5.0, "longer than its deadline"
            await start_again(broken, "prefill-0")
            answer = await asked.result()
        await broken.wait_idle(QUARANTINE_S + 5.0)
        return answer

    answer = asyncio.run(scenario())
    assert_equal(answer, aggregated.ask(prompt, **sampling))
    assert answer.final.usage.attempts >= 2


# --- D3: the same address, another life ------------------------------------------------------------------------------


def test_a_restarted_rank_refuses_what_is_meant_for_its_earlier_life_and_serves_within_five_seconds(broken, aggregated):
    """Decode dies in mid-stream: the stream pauses and goes on, token for token. Prefill is restarted with it."""
    prompt, options = ids(40, 30), GREEDY | {"max_tokens": 40, "temperature": 0.9, "seed": 8, "n": 2}
    old = {}

    async def scenario():
        await whole(broken)
        old.update({name: str(broken.running[name].said["epoch"]) for name in ("decode-0", "prefill-0")})
        async with broken.client() as client:
            asked = Asked(client, prompt, **options)
            await asked.wait_tokens(12)
            await end(broken, "decode-0", signal.SIGKILL)
            seen = asked.num_tokens
            await end(broken, "prefill-0", signal.SIGKILL)
            assert seen < 80 and not asked.done
            children = [broken.spawn(broken.running[name].plan) for name in ("decode-0", "prefill-0")]
            for running in children:
                running.said = await asyncio.to_thread(wait_ready, running.child, 60.0)
            began = time.monotonic()
            other = await client.generate(ids(25, 31), max_tokens=4, **GREEDY)
            assert time.monotonic() - began < 5.0
            answer = await asked.result()
        await broken.wait_idle(QUARANTINE_S + 5.0)
        return answer, other

    answer, other = asyncio.run(scenario())
    assert_equal(answer, aggregated.ask(prompt, **options))
    assert answer.final.usage.attempts >= 2
    assert_equal(other, aggregated.ask(ids(25, 31), max_tokens=4, **GREEDY))
    asyncio.run(calls_with_old_epochs(broken, old))


async def calls_with_old_epochs(mesh, old: dict[str, str]) -> None:
    """A link of each kind that names the earlier process: nothing can be asked of the one that took its address."""
    own = WorkerIdentity("127.0.0.1:1", "e0")
    for kind in (DECODE_LINK, TOKEN_LINK, WRITER_LINK):
        with pytest.raises(StaleEpoch):
            async with opened(kind, mesh.address("decode-0"), own, old["decode-0"]):
                pass
    with pytest.raises(StaleEpoch):
        async with opened(PREFILL_LINK, mesh.address("prefill-0"), own, old["prefill-0"]):
            pass


# --- D6: asked to stop in mid-stream ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["prefill", "router-0", "decode-0"])
def test_a_process_asked_to_stop_in_mid_stream_finishes_it_and_exits_cleanly(broken, aggregated, name):
    prompt, sampling = ids(40, 40), GREEDY | {"max_tokens": 25}

    async def scenario():
        await whole(broken)
        async with broken.client() as client:
            request_id = "drain-prefill" if name == "prefill" else f"drain-{name}"
            asked = Asked(client, prompt, request_id=request_id, **sampling)
            if name == "prefill":
                await until(lambda: reserved(broken), "prefill computes")
                stopped = await busy_prefill(broken)
            else:
                await asked.wait_tokens(3)
                stopped = name
            assert stopped and not asked.done
            status = await end(broken, stopped, signal.SIGTERM)
            return status, await asked.result()

    status, answer = asyncio.run(scenario())
    assert status == 0
    assert_equal(answer, aggregated.ask(prompt, **sampling))
    assert answer.final.usage.attempts == 1, "nothing is cut within the grace"
