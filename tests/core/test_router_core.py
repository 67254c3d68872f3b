"""One request through the router core, on a scripted mesh."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from router_fakes import (
    EOS,
    LAYOUT,
    FakeMesh,
    assert_all_is_free,
    checkpoint,
    collect,
    command,
    open_router,
    run,
    saying,
    wait_until,
)

from headrace.clock import FakeClock
from headrace.errors import (
    AlreadyExists,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
)
from headrace.protocol.common import FinishReason, NumberFormat
from headrace.protocol.inference import ChatMessage, GenerateCommand

BF16 = (replace(LAYOUT.regions[0], format=NumberFormat.BF16),)


# --- what comes out ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 3, 17])
def test_exactly_max_tokens_come_out_and_zero_means_prefill_only(max_tokens):
    async def scenario():
        mesh = FakeMesh()
        async with open_router(mesh) as router:
            answer = await collect(router, command(max_tokens=max_tokens))
            assert answer.ids.get(0, []) == mesh.script(0)[:max_tokens]
            assert answer.reasons == {0: FinishReason.LENGTH}
            assert answer.final.usage.generated_tokens == max_tokens
            assert answer.final.usage.prompt_tokens == 5 and answer.final.usage.computed_tokens == 5
            assert len(mesh.decodes[0].reserved) == (1 if max_tokens > 1 else 0)
            await assert_all_is_free(mesh, router)

    run(scenario)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_an_end_token_as_the_very_first_token_ends_the_answer_unless_ignored(ignore_eos):
    async def scenario():
        mesh = FakeMesh(script=saying("", then=EOS))
        async with open_router(mesh) as router:
            answer = await collect(router, command(max_tokens=4, ignore_eos=ignore_eos))
            assert answer.ids[0] == ([EOS, 120, 120, 120] if ignore_eos else [EOS])
            assert answer.text[0] == ("xxx" if ignore_eos else "")
            assert answer.reasons[0] is (FinishReason.LENGTH if ignore_eos else FinishReason.EOS)
            await assert_all_is_free(mesh, router)

    run(scenario)


@pytest.mark.parametrize("interval", [1, 3, 8, 100])
@pytest.mark.parametrize("text, stop, shown", [
    ("one two three", "two", "one "),
    ("twofold", "two", ""),
    ("a ENDING", ("END", "ENDING"), "a "),
    ("never", "twx", "never"),
])  # fmt: skip
def test_a_stop_string_never_leaks_and_ends_the_answer(interval, text, stop, shown):
    async def scenario():
        mesh = FakeMesh(script=saying(text))
        async with open_router(mesh) as router:
            stops = (stop,) if isinstance(stop, str) else stop
            answer = await collect(router, command(max_tokens=64, stop=stops, stream_interval=interval))
            assert answer.text[0] == shown
            expected = FinishReason.EOS if text == "never" else FinishReason.STOP
            assert answer.reasons[0] is expected
            await assert_all_is_free(mesh, router)

    run(scenario)


def test_a_stop_string_of_one_sample_releases_that_sample_only():
    async def scenario():
        scripts = {0: saying("a stop here")(0), 1: saying("goes on and on", then=None)(1)}
        mesh = FakeMesh(script=lambda sample: scripts[sample])
        async with open_router(mesh) as router:
            answer = await collect(router, command(max_tokens=20, n=2, stop=("stop",)))
            assert answer.text == {0: "a ", 1: "goes on and onxxxxxx"}
            assert answer.reasons == {0: FinishReason.STOP, 1: FinishReason.LENGTH}
            assert [samples for _, _, samples in mesh.decodes[0].released] == [(0,)]
            await assert_all_is_free(mesh, router)

    run(scenario)


def test_several_samples_cost_one_prefill():
    async def scenario():
        mesh = FakeMesh()
        async with open_router(mesh) as router:
            answer = await collect(router, command(max_tokens=6, n=4, seed=7))
            assert {sample: ids for sample, ids in answer.ids.items()} == {s: mesh.script(s)[:6] for s in range(4)}
            assert len(mesh.prefills[0].commands) == 1
            assert mesh.prefills[0].commands[0].sample_indices == (0, 1, 2, 3)
            assert answer.final.seed == 7
            assert answer.final.usage.generated_tokens == 24 and answer.final.usage.prompt_tokens == 5
            await assert_all_is_free(mesh, router)

    run(scenario)


def test_the_whole_answer_comes_in_the_final_message_when_asked_for():
    async def scenario():
        mesh = FakeMesh()
        async with open_router(mesh) as router:
            whole = await collect(router, command(max_tokens=9, n=2, final_only=True, logprobs=0))
            parts = await collect(router, command(max_tokens=9, n=2, logprobs=0))
            assert len(whole.events) == 1 and len(parts.events) > 2
            assert (whole.text, whole.ids, whole.logprobs) == (parts.text, parts.ids, parts.logprobs)

    run(scenario)


def test_a_conversation_is_rendered_by_the_template():
    async def scenario():
        mesh = FakeMesh()
        async with open_router(mesh) as router:
            turns = (ChatMessage("system", "be brief"), ChatMessage("user", "hi"))
            await collect(router, GenerateCommand(chat=turns, sampling={"max_tokens": 1}))
            assert bytes(mesh.prefills[0].commands[0].prompt_token_ids) == b"be brief\nhi"

    run(scenario)


def test_a_long_text_is_tokenised_off_the_loop():
    async def scenario():
        mesh = FakeMesh()
        async with open_router(mesh, model=checkpoint(max_context_tokens=512)) as router:
            with pytest.raises(InvalidRequest, match="3000 tokens"):
                await collect(router, command("x" * 3000))

    run(scenario)


def test_stages_lie_on_the_routers_clock_and_name_every_leg():
    async def scenario():
        mesh = FakeMesh()
        async with open_router(mesh) as router:
            final = (await collect(router, command(max_tokens=5))).final
            names = [stage.name for stage in final.stages]
            for name in ("router.tokenize", "router.queue", "router.route", "decode.reserve", "prefill.forward"):
                assert names.count(name) == 1
            for name in ("decode.commit", "decode.generate", "router.stream", "router.generate"):
                assert names.count(name) == 1
            assert [x.start_s for x in final.stages] == sorted(x.start_s for x in final.stages)
            assert 0 < final.time_to_first_token_s <= final.duration_s

    run(scenario)


# --- ids ---------------------------------------------------------------------------------------------------------------


def test_the_id_is_known_before_anything_else_and_may_be_the_clients():
    async def scenario():
        mesh = FakeMesh()
        async with open_router(mesh) as router:
            seen: list[str] = []

            async def on_accepted(request_id):
                assert len(mesh.prefills[0].commands) == len(seen)
                seen.append(request_id)

            for request_id in ("mine", ""):
                async for event in router.generate(command(max_tokens=1, request_id=request_id), 5, on_accepted):
                    assert event.request_id == seen[-1]
            assert seen[0] == "mine" and len(seen[1]) == 32

    run(scenario)


def test_the_same_id_twice_at_once_is_refused_and_free_again_afterwards():
    async def scenario():
        mesh = FakeMesh()
        mesh.decodes[0].gate.clear()
        async with open_router(mesh) as router:
            first = asyncio.ensure_future(collect(router, command(request_id="mine", max_tokens=8)))
            await wait_until(lambda: mesh.decodes[0].held)
            with pytest.raises(AlreadyExists):
                await collect(router, command(request_id="mine"))
            mesh.decodes[0].gate.set()
            assert (await first).ids[0] == mesh.script(0)[:8]
            again = await collect(router, command(request_id="mine", max_tokens=8))
            assert again.ids[0] == mesh.script(0)[:8], "workers' memory of the first run must not matter"
            await assert_all_is_free(mesh, router)

    run(scenario)


def test_an_id_that_runs_on_another_router_is_refused():
    async def scenario():
        mesh = FakeMesh()
        async with open_router(mesh) as router:
            mesh.claimed.add("request/mine")
            with pytest.raises(AlreadyExists):
                await collect(router, command(request_id="mine", max_tokens=1))
            mesh.claimed.clear()
            await collect(router, command(request_id="mine", max_tokens=1))
            await wait_until(lambda: not mesh.claimed)

    run(scenario)


def test_twenty_malformed_requests_open_no_breaker_and_cost_no_leg():
    async def scenario():
        mesh = FakeMesh()
        async with open_router(mesh) as router:
            bad = [command(""), command(()), command((-1,)), command("x" * 600), command(top_p=0.0)] * 4
            for request in bad:
                with pytest.raises(InvalidRequest) as caught:
                    await collect(router, request)
                assert caught.value.field
            assert not mesh.prefills[0].commands and not mesh.decodes[0].reserved
            assert (await collect(router, command(max_tokens=3))).ids[0] == mesh.script(0)[:3]
            assert all(view.ready for view in router.workers())
            await assert_all_is_free(mesh, router)

    run(scenario)


def test_a_seed_is_drawn_and_reported_and_defaults_come_from_the_checkpoint():
    async def scenario():
        mesh = FakeMesh()
        async with open_router(mesh) as router:
            seeds = {(await collect(router, command(max_tokens=1))).final.seed for _ in range(3)}
            assert len(seeds) == 3
            sampling = mesh.prefills[0].commands[0].sampling
            assert (sampling.temperature, sampling.top_p, sampling.eos_token_ids) == (0.7, 0.9, (EOS,))

    run(scenario)


# --- cancel, deadline, load ----------------------------------------------------------------------------------------------


async def _hold(mesh: FakeMesh, state: str) -> None:
    """Makes the next request stop in `state`."""
    prefill, decode = mesh.prefills[0], mesh.decodes[0]
    {
        "reserving": decode.reserve_gate,
        "prefilling": prefill.gate,
        "committing": prefill.commit_gate,
        "decoding": decode.gate,
    }[state].clear()


async def _is_held(mesh: FakeMesh, state: str) -> None:
    prefill, decode = mesh.prefills[0], mesh.decodes[0]
    reached = {
        "reserving": lambda: len(decode.reserved) == 1,
        "prefilling": lambda: len(prefill.commands) == 1,
        "committing": lambda: len(prefill.commands) == 1 and prefill.running == 1,
        "decoding": lambda: prefill.running == 0 and bool(decode.held),
    }[state]
    await wait_until(reached)


@pytest.mark.parametrize("state", ["reserving", "prefilling", "committing", "decoding"])
def test_a_cancel_in_any_state_releases_both_legs(state):
    async def scenario():
        mesh = FakeMesh()
        async with open_router(mesh) as router:
            await _hold(mesh, state)
            asking = asyncio.ensure_future(collect(router, command(max_tokens=50)))
            await _is_held(mesh, state)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await assert_all_is_free(mesh, router)
            assert mesh.decodes[0].released
            for gate in (mesh.decodes[0].reserve_gate, mesh.decodes[0].gate, mesh.prefills[0].gate):
                gate.set()
            mesh.prefills[0].commit_gate.set()
            steps = mesh.decodes[0].steps
            await asyncio.sleep(0.01)
            assert mesh.decodes[0].steps <= steps + 1
            assert (await collect(router, command(max_tokens=3))).ids[0] == mesh.script(0)[:3]

    run(scenario)


def test_a_cancel_while_queued_leaves_nothing_behind():
    async def scenario():
        mesh = FakeMesh()
        async with open_router(mesh, reserve_ahead_tokens=8) as router:
            mesh.prefills[0].gate.clear()
            first = asyncio.ensure_future(collect(router, command(max_tokens=5)))
            await wait_until(lambda: mesh.prefills[0].commands)
            second = asyncio.ensure_future(collect(router, command(max_tokens=5)))
            await wait_until(lambda: router.ledger().queued_requests == 1)
            second.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second
            await wait_until(lambda: router.ledger().queued_requests == 0)
            mesh.prefills[0].gate.set()
            await first
            assert len(mesh.prefills[0].commands) == 1
            await assert_all_is_free(mesh, router)

    run(scenario)


@pytest.mark.parametrize("state", ["reserving", "prefilling", "committing", "decoding"])
def test_the_one_deadline_ends_a_request_in_any_state(state):
    async def scenario():
        mesh, clock = FakeMesh(), FakeClock()
        async with open_router(mesh, clock=clock) as router:
            await _hold(mesh, state)
            asking = asyncio.ensure_future(collect(router, command(max_tokens=50), time_left_s=0.2))
            await _is_held(mesh, state)
            await clock.advance(0.19)
            assert not asking.done()
            await clock.advance(0.02)
            with pytest.raises(DeadlineExceeded):
                await asking
            await assert_all_is_free(mesh, router)

    run(scenario)


def test_every_leg_is_given_what_is_left_of_the_one_deadline():
    async def scenario():
        mesh, clock = FakeMesh(), FakeClock()
        async with open_router(mesh, clock=clock) as router:
            mesh.decodes[0].reserve_gate.clear()
            mesh.prefills[0].timeouts.clear()
            asking = asyncio.ensure_future(collect(router, command(max_tokens=5), time_left_s=7.0))
            await wait_until(lambda: mesh.decodes[0].reserved)
            await clock.advance(3.0)
            mesh.decodes[0].reserve_gate.set()
            await asking
            assert mesh.decodes[0].timeouts == pytest.approx([7.0])
            assert mesh.prefills[0].timeouts == pytest.approx([4.0])

    run(scenario)


def test_a_stop_string_in_the_first_token_ends_the_answer_while_prefill_still_pushes():
    async def scenario():
        mesh, clock = FakeMesh(), FakeClock()
        async with open_router(mesh, clock=clock) as router:
            mesh.prefills[0].commit_gate.clear()
            answer = await collect(router, command(max_tokens=50, stop=("a",)))
            assert (answer.text[0], answer.ids[0], answer.matched[0]) == ("", [97], "a")
            assert mesh.prefills[0].cancelled == 1
            await assert_all_is_free(mesh, router)

    run(scenario)


def test_a_full_queue_refuses_at_once_with_a_hint():
    async def scenario():
        mesh = FakeMesh()
        async with open_router(mesh, reserve_ahead_tokens=4, max_queue_tokens=12) as router:
            mesh.prefills[0].gate.clear()
            running = [asyncio.ensure_future(collect(router, command(max_tokens=2))) for _ in range(3)]
            await wait_until(lambda: router.ledger().queued_requests == 2)
            with pytest.raises(Overloaded) as caught:
                await collect(router, command(max_tokens=2))
            assert caught.value.retry_after_s > 0
            mesh.prefills[0].gate.set()
            await asyncio.gather(*running)
            await assert_all_is_free(mesh, router)

    run(scenario)


def test_a_full_decode_rank_without_another_is_said_at_once_and_prefill_hears_nothing():
    async def scenario():
        mesh = FakeMesh()
        async with open_router(mesh) as router:
            mesh.decodes[0].errors = [Overloaded("256 wait", retry_after_s=1.5)]
            with pytest.raises(Overloaded) as caught:
                await collect(router, command(max_tokens=5))
            assert caught.value.retry_after_s == 1.5
            assert not mesh.prefills[0].commands and len(mesh.decodes[0].reserved) == 1
            assert all(view.ready for view in router.workers()), "overload opens no breaker"
            await assert_all_is_free(mesh, router)

    run(scenario)


def test_a_full_decode_rank_is_left_for_another():
    async def scenario():
        mesh = FakeMesh(decodes=2)
        async with open_router(mesh) as router:
            await wait_until(lambda: sum(view.ready for view in router.workers()) == 3)
            for decode in mesh.decodes:
                decode.errors = []
            mesh.decodes[0].errors = [Overloaded("full")]
            answer = await collect(router, command(max_tokens=5))
            assert answer.ids[0] == mesh.script(0)[:5]
            assert len(mesh.decodes[1].reserved) == 1

    run(scenario)


def test_a_stalled_reader_is_cut_off_with_a_reason_and_its_legs_are_freed():
    async def scenario():
        mesh = FakeMesh()
        async with open_router(mesh, reader_buffer_bytes=400) as router:
            stream = router.generate(command(max_tokens=400), 10)
            await anext(stream)
            await wait_until(lambda: mesh.held == 0)
            with pytest.raises(Overloaded) as caught:
                async for _ in stream:
                    pass
            assert caught.value.reason == "READER_STALLED"
            await assert_all_is_free(mesh, router)

    run(scenario)


def test_many_at_once_get_what_each_would_get_alone():
    async def scenario():
        mesh = FakeMesh(prefills=2, decodes=2)
        async with open_router(mesh) as router:
            answers = await asyncio.gather(*(collect(router, command(max_tokens=1 + k % 9)) for k in range(64)))
            assert [answer.ids[0] for answer in answers] == [mesh.script(0)[: 1 + k % 9] for k in range(64)]
            await assert_all_is_free(mesh, router)

    run(scenario)
