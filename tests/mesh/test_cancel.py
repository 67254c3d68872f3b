"""Requests that end early: cancelled in every state, at once, by their deadline; and many that do not.

Each state of C1 is held open by a fault rule that names its requests by their ids.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest
from scenario import GREEDY, Asked, assert_equal, ids, until

from headrace.errors import DeadlineExceeded

RULES = (
    "prefill.forward:slow seconds=1.0 times=0 request_id=blocker-*",
    "prefill.forward:slow seconds=0.25 times=0 request_id=prefilling-*",
    "prefill.push:delay seconds=0.15 times=0 request_id=pushing-*",
    "prefill.commit:delay seconds=1.0 times=0 request_id=pushed-*",
    "decode.commit:delay seconds=0.9 times=0 request_id=committing-*",
)

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def holding(start_mesh):
    """A mesh with a small pool and a short queue before prefill, whose rules hold requests in each state."""
    with start_mesh(
        f"faults={';'.join(RULES)}",
        "engine.num_blocks=160",
        "router.reserve_ahead_tokens=64",
        "decode.quarantine_max_s=1.5",
    ) as mesh:
        yield mesh


@dataclass(frozen=True)
class State:
    """How many requests of `prompt_tokens` are brought into a state at once, and how one knows that they are in it."""

    name: str
    at_once: int
    is_reached: Callable[..., Awaitable[bool]]
    prompt_tokens: int = 20
    max_tokens: int = 60
    behind: int = 0
    """Prompt tokens of a slow request that is sent first; 0: none."""
    options: dict[str, object] = field(default_factory=dict)


async def _queued(mesh, asked: list[Asked]) -> bool:
    return (await mesh.ledgers()).router.queued_requests == len(asked)


async def _reserved(mesh, asked: list[Asked]) -> bool:
    now = await mesh.ledgers()
    return now.prefill.queued_requests == len(asked) and now.decode.reserved_requests == len(asked) + 1


async def _prefilling(mesh, asked: list[Asked]) -> bool:
    now = await mesh.ledgers()
    return now.prefill.running_requests == len(asked) == now.decode.reserved_requests


async def _has_first_token(mesh, asked: list[Asked]) -> bool:
    """Prefill has computed; decode has not committed, or the second token would be here."""
    held = (await mesh.ledgers()).decode.reserved_requests
    return held == len(asked) and all(one.num_tokens >= 1 for one in asked)


async def _has_first_token_for_long(mesh, asked: list[Asked]) -> bool:
    """The rows of a short prompt are pushed within a fraction of this."""
    if not await _has_first_token(mesh, asked):
        return False
    await asyncio.sleep(0.15)
    return await _has_first_token(mesh, asked)


async def _decoding(mesh, asked: list[Asked]) -> bool:
    return all(one.num_tokens >= 4 for one in asked)


async def _before_the_last_token(mesh, asked: list[Asked]) -> bool:
    """The step that makes the last token has begun: steps run back to back."""
    return any(one.num_tokens >= 3 for one in asked)


STATES = (
    State("queued", 10, _queued, prompt_tokens=40, behind=60),
    State("reserved", 10, _reserved, prompt_tokens=4, behind=20),
    State("prefilling", 1, _prefilling),
    State("pushing", 2, _has_first_token),
    State("pushed", 10, _has_first_token_for_long, prompt_tokens=6),
    State("committing", 5, _has_first_token_for_long, prompt_tokens=6),
    State("decoding", 5, _decoding, max_tokens=100),
    State("decoding two samples", 5, _decoding, max_tokens=60, options={"n": 2, "seed": 5, "temperature": 1.0}),
    State("last step", 2, _before_the_last_token, max_tokens=4),
)


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.name.replace(" ", "-"))
def test_a_cancel_in_any_state_frees_everything_and_the_next_answer_is_right(holding, aggregated, full, state):
    times = 200 if full else 20

    async def scenario():
        steps = (await holding.ledgers()).decode.steps
        async with holding.client() as client:
            for group in range(times // state.at_once):
                await cancel_group(holding, client, state, group)
                await holding.wait_idle(2.0)
        stopped = await holding.wait_idle()
        await asyncio.sleep(0.3)
        assert (await holding.ledgers()).decode.steps == stopped.decode.steps, "a step was computed for nobody"
        if not state.name.startswith(("decoding", "last")):
            assert stopped.decode.steps == steps, "a request that was cancelled before its commit has been decoded"
        assert stopped.decode.fences == fences, "a writer that answers needs no fence"

    fences = asyncio.run(holding.ledgers()).decode.fences
    asyncio.run(scenario())
    prompt = ids(45, salt=STATES.index(state))
    assert_equal(holding.ask(prompt, max_tokens=8, **GREEDY), aggregated.ask(prompt, max_tokens=8, **GREEDY))


async def cancel_group(mesh, client, state: State, group: int) -> None:
    """Brings a few requests into a state and cancels them all."""
    blockers, options = [], GREEDY | {"max_tokens": state.max_tokens} | state.options
    if state.behind:
        blockers.append(Asked(client, ids(state.behind, group), request_id=f"blocker-{group}", **options))
        await until(lambda: _prefilling(mesh, blockers), f"{state.name}: a request that keeps prefill busy")
    name = state.name.replace(" ", "-")
    asked = [
        Asked(client, ids(state.prompt_tokens, 100 + index), request_id=f"{name}-{group}-{index}", **options)
        for index in range(state.at_once)
    ]
    try:
        await until(lambda: state.is_reached(mesh, asked), f"{len(asked)} requests {state.name}", timeout_s=10.0)
    finally:
        await asyncio.gather(*(one.cancel() for one in (*asked, *blockers)))


@pytest.mark.parametrize("which", ["mesh", "aggregated"])
def test_cancels_at_random_moments_free_everything(request, same, full, which):
    running, draw = request.getfixturevalue(which), random.Random(3)

    async def one(client, index: int) -> None:
        asked = Asked(client, ids(1 + index * 7 % 90, index), max_tokens=30, n=1 + index % 2, seed=1, temperature=1.0)
        await asyncio.sleep(draw.uniform(0.0, 0.4))
        await asked.cancel()

    async def scenario():
        async with running.client() as client:
            await asyncio.gather(*(one(client, index) for index in range(200 if full else 40)))
        await running.wait_idle(2.0)

    asyncio.run(scenario())
    same("Once upon a time", max_tokens=8, **GREEDY)


def test_many_cancelled_at_once_are_gone_without_any_traffic(mesh, same, full):
    count, idle_s = (300, 10.0) if full else (100, 2.0)

    async def scenario():
        async with mesh.client() as client:
            asked = [Asked(client, ids(5 + index % 60, index), max_tokens=200, **GREEDY) for index in range(count)]
            await until(lambda: some_tokens(asked), "some of them stream, others wait", timeout_s=60.0)
            await asyncio.gather(*(one.cancel() for one in asked))
        await asyncio.sleep(idle_s)
        now = await mesh.ledgers()
        assert now.is_idle, now

    async def some_tokens(asked: list[Asked]) -> bool:
        return sum(one.num_tokens > 1 for one in asked) >= 5

    asyncio.run(scenario())
    same("Once upon a time", max_tokens=8, **GREEDY)


def test_a_deadline_ends_a_long_generation_in_time_and_frees_everything(holding):
    """Ends are timed ten times; the middle one counts, because other processes share these cores."""

    async def once(client, salt: int) -> float:
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await client.generate(ids(30, salt), max_tokens=2000, timeout_s=0.2, **GREEDY)
        ended = time.monotonic() - began
        await holding.wait_idle(2.0)
        return ended

    async def scenario():
        async with holding.client() as client:
            return sorted([await once(client, salt) for salt in range(10)])

    times = asyncio.run(scenario())
    assert times[0] >= 0.19 and abs(times[len(times) // 2] - 0.2) <= 0.15, times
    assert times[-1] <= 1.0, times


def test_thirty_two_streams_at_once_give_the_oracles_tokens(mesh, aggregated, full):
    """Mixed lengths, greedy and seeded, intervals mixed; the oracle gets the same ones, also many at once."""
    draw = random.Random(7)
    requests = []
    for index in range(500 if full else 60):
        length = draw.choice((1, 3, 15, 16, 17, 31, 32, 33, 48, 60, 97, draw.randrange(1, 200)))
        options = {"max_tokens": draw.randrange(1, 33), "stream_interval": draw.choice((1, 3, 8, 100)), "seed": index}
        options |= {"temperature": draw.choice((0.0, 0.7, 1.0)), "top_p": draw.choice((0.9, 1.0)), "ignore_eos": True}
        if draw.random() < 0.15:
            options["n"] = draw.choice((2, 3))
        requests.append((ids(length, index), options))

    async def ask_all(which):
        free = asyncio.Semaphore(32)
        async with which.client(timeout_s=300.0) as client:

            async def ask(prompt, options):
                async with free:
                    return await client.generate(prompt, **options)

            answers = await asyncio.gather(*(ask(*request) for request in requests))
        await which.wait_idle()
        return answers

    for ours, oracle in zip(asyncio.run(ask_all(mesh)), asyncio.run(ask_all(aggregated)), strict=True):
        assert_equal(ours, oracle)
        assert ours.final.usage.attempts == 1
