"""One request through the router core, on a scripted mesh."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from router_fakes import (
    EOS,
    LAYOUT,
    FakeMesh,
    checkpoint,
    collect,
    command,
    open_router,
    saying,
    wait_until,
)

from headrace.clock import FakeClock
from headrace.config import TelemetryConfig
from headrace.errors import (
    AlreadyExists,
    DeadlineExceeded,
    HeadraceError,
    InternalError,
    InvalidRequest,
    LayoutMismatch,
    ManifestMismatch,
    Overloaded,
    StaleAttempt,
    Unavailable,
)
from headrace.observe import telemetry
from headrace.observe.context import traceparent_var
from headrace.protocol import ChatMessage, FinishReason, GenerateCommand, PrefixHolder


def run(scenario) -> None:
    """Runs a scenario within a bound."""

    async def bounded():
        async with asyncio.timeout(20):
            await scenario()

    asyncio.run(bounded())


async def assert_all_is_free(mesh: FakeMesh, router) -> None:
    """Both legs are gone and the router holds nothing."""
    await wait_until(lambda: mesh.held == 0, "legs to end")
    await wait_until(lambda: router.ledger().open_handles == 0 and router.ledger().running_requests == 0)
    assert router.ledger().queued_tokens == 0
    assert all(view.in_flight == 0 and view.queued_tokens == 0 for view in router.workers())


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
        async with open_router(mesh, reader_buffer_messages=4) as router:
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


# --- things die ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["before", "after_first", "mismatch", Unavailable("killed"), StaleAttempt("expired")])
@pytest.mark.parametrize("samples", [1, 3])
def test_a_lost_prefill_leg_is_retried_and_continues_by_position(fault, samples):
    async def scenario():
        mesh = FakeMesh(prefills=2)
        async with open_router(mesh) as router:
            await wait_until(lambda: sum(view.ready for view in router.workers()) == 3)
            for prefill in mesh.prefills:
                prefill.faults = [fault] if prefill is mesh.prefills[0] else []
            answer = await collect(router, command(max_tokens=9, n=samples, seed=1))
            assert answer.ids == {s: mesh.script(s)[:9] for s in range(samples)}
            assert answer.final.usage.attempts == 2
            assert answer.final.usage.generated_tokens == 9 * samples
            assert [x.attempt for x in mesh.decodes[0].reserved] == [1, 2], "the same place, a new attempt"
            assert len(mesh.prefills[1].commands) == 1, "another rank is preferred"
            if fault in ("after_first", "mismatch"):
                assert mesh.prefills[1].commands[0].delivered == {s: (mesh.script(s)[0],) for s in range(samples)}
            await assert_all_is_free(mesh, router)

    run(scenario)


def test_a_retry_keeps_its_place_on_decode_when_prefill_may_be_to_blame():
    async def scenario():
        mesh = FakeMesh(prefills=2, decodes=2)
        async with open_router(mesh) as router:
            await wait_until(lambda: sum(view.ready for view in router.workers()) == 4)
            for prefill in mesh.prefills:
                prefill.gate.clear()
            asking = asyncio.ensure_future(collect(router, command(max_tokens=9)))
            await wait_until(lambda: any(prefill.commands for prefill in mesh.prefills))
            first = next(decode for decode in mesh.decodes if decode.reserved)
            # From here on the other rank would be the better choice.
            first.info = replace(first.info, block_count=first.info.block_count // 2)
            next(prefill for prefill in mesh.prefills if prefill.commands).faults.append("before")
            for prefill in mesh.prefills:
                prefill.gate.set()
            answer = await asking
            assert answer.final.usage.attempts == 2
            assert [x.attempt for x in first.reserved] == [1, 2]

    run(scenario)


def test_ranks_of_different_layouts_serve_side_by_side_and_never_meet():
    async def scenario():
        mesh = FakeMesh(prefills=2, decodes=2)
        for worker in (mesh.prefills[1], mesh.decodes[0]):
            worker.info = replace(worker.info, layout=replace(LAYOUT, dtype="bf16"))
        async with open_router(mesh) as router:
            await wait_until(lambda: sum(view.ready for view in router.workers()) == 4)
            await asyncio.gather(*(collect(router, command(max_tokens=5)) for _ in range(20)))
            writers = [{x.writer.address for x in decode.reserved} for decode in mesh.decodes]
            assert writers == [{"p1:1"}, {"p0:1"}]

    run(scenario)


def test_what_cannot_be_helped_by_a_retry_is_not_retried():
    async def scenario():
        mesh = FakeMesh(prefills=2)
        async with open_router(mesh) as router:
            await wait_until(lambda: sum(view.ready for view in router.workers()) == 3)
            for prefill in mesh.prefills:
                prefill.faults = [LayoutMismatch("other rows")]
            with pytest.raises(LayoutMismatch):
                await collect(router, command(max_tokens=9))
            assert sum(len(prefill.commands) for prefill in mesh.prefills) == 1
            await assert_all_is_free(mesh, router)

    run(scenario)


def test_after_three_faults_in_a_row_a_rank_must_pass_a_canary_again():
    async def scenario():
        mesh = FakeMesh()
        async with open_router(mesh, max_attempts=1) as router:
            for faults, canaries in ((1, 1), (2, 1), (3, 2)):
                mesh.prefills[0].faults = [Unavailable("reset")]
                with pytest.raises(Unavailable):
                    await collect(router, command(max_tokens=3))
                await wait_until(lambda: all(view.ready for view in router.workers()))
                assert mesh.prefills[0].canaries == canaries, f"after {faults} faults"
            await collect(router, command(max_tokens=3))
            mesh.prefills[0].faults = [Unavailable("reset")]
            with pytest.raises(Unavailable):
                await collect(router, command(max_tokens=3))
            await wait_until(lambda: all(view.ready for view in router.workers()))
            assert mesh.prefills[0].canaries == 2, "a request that went through has forgiven the faults"

    run(scenario)


def test_attempts_are_bounded():
    async def scenario():
        mesh = FakeMesh()
        async with open_router(mesh, max_attempts=3) as router:
            mesh.prefills[0].faults = ["mismatch"] * 9
            with pytest.raises(ManifestMismatch):
                await collect(router, command(max_tokens=9))
            assert [x.attempt for x in mesh.prefills[0].commands] == [1, 2, 3]
            await assert_all_is_free(mesh, router)

    run(scenario)


@pytest.mark.parametrize("after, samples", [(1, 1), (5, 2), (60, 1)])
def test_a_decode_rank_that_dies_in_mid_stream_costs_no_token(after, samples):
    async def scenario():
        mesh = FakeMesh(decodes=2)
        async with open_router(mesh) as router:
            await wait_until(lambda: sum(view.ready for view in router.workers()) == 3)
            mesh.decodes[0].stop_after = after
            mesh.decodes[0].refuses_resume = True
            answer = await collect(router, command(max_tokens=80, n=samples, logprobs=0))
            assert answer.ids == {s: mesh.script(s)[:80] for s in range(samples)}
            assert answer.logprobs == {s: [-float(k) for k in range(80)] for s in range(samples)}
            assert answer.final.usage.attempts == 2
            assert len(mesh.decodes[1].reserved) == 1
            await assert_all_is_free(mesh, router)

    run(scenario)


def test_the_only_decode_rank_may_restart_and_the_stream_goes_on():
    async def scenario():
        mesh = FakeMesh()
        async with open_router(mesh) as router:
            mesh.decodes[0].stop_after = 7
            asking = asyncio.ensure_future(collect(router, command(max_tokens=30)))
            await wait_until(lambda: not mesh.decodes[0].alive)
            new = mesh.restart("decode", 0, "d-epoch-2")
            mesh.relist()
            answer = await asking
            assert answer.ids[0] == mesh.script(0)[:30]
            assert [x.decode_epoch for x in new.reserved] == ["d-epoch-2"]
            await assert_all_is_free(mesh, router)

    run(scenario)


def test_a_restarted_prefill_rank_is_found_by_asking_it_before_the_registry_knows():
    async def scenario():
        mesh = FakeMesh()
        async with open_router(mesh) as router:
            mesh.restart("prefill", 0, "p-epoch-2")  # the registry still lists the old epoch
            answer = await collect(router, command(max_tokens=6))
            assert answer.ids[0] == mesh.script(0)[:6]
            assert [view.info.identity.epoch for view in router.workers() if view.info.role == "prefill"] == [
                "p-epoch-2"
            ]
            await assert_all_is_free(mesh, router)

    run(scenario)


def test_a_dead_only_prefill_rank_is_waited_for():
    async def scenario():
        mesh = FakeMesh()
        async with open_router(mesh) as router:
            mesh.prefills[0].alive = False
            asking = asyncio.ensure_future(collect(router, command(max_tokens=6)))
            await wait_until(lambda: router.ledger().running_requests == 1 and not router.is_ready)
            assert not asking.done()
            mesh.restart("prefill", 0, "p-epoch-2")
            mesh.relist()
            assert (await asking).ids[0] == mesh.script(0)[:6]

    run(scenario)


def test_a_broken_stream_resumes_without_a_new_attempt():
    async def scenario():
        mesh = FakeMesh()
        async with open_router(mesh) as router:
            decode = mesh.decodes[0]
            decode.gate.clear()
            asking = asyncio.ensure_future(collect(router, command(max_tokens=12)))
            await wait_until(lambda: decode.held and decode.held[next(iter(decode.held))].outputs)
            decode.break_stream()
            decode.gate.set()
            answer = await asking
            assert answer.ids[0] == mesh.script(0)[:12] and answer.final.usage.attempts == 1

    run(scenario)


def test_repeated_tokens_are_dropped():
    async def scenario():
        mesh = FakeMesh()
        mesh.decodes[0].repeats_records = True
        async with open_router(mesh) as router:
            answer = await collect(router, command(max_tokens=12, logprobs=0, stream_interval=3))
            assert answer.ids[0] == mesh.script(0)[:12] and len(answer.logprobs[0]) == 12
            assert answer.final.usage.attempts == 1

    run(scenario)


def test_a_gap_in_the_positions_costs_an_attempt_and_no_token():
    async def scenario():
        mesh = FakeMesh()
        async with open_router(mesh) as router:
            mesh.decodes[0].skips_position = 4
            answer = await collect(router, command(max_tokens=12))
            assert answer.ids[0] == mesh.script(0)[:12]
            assert answer.final.usage.attempts == 2
            await assert_all_is_free(mesh, router)

    run(scenario)


def test_decode_tokens_that_overtake_the_first_token_wait_for_it():
    async def scenario():
        mesh = FakeMesh()
        mesh.prefills[0].commits_early = True
        async with open_router(mesh) as router:
            answer = await collect(router, command(max_tokens=6))
            assert answer.ids[0] == mesh.script(0)[:6] and answer.final.usage.attempts == 1
            await assert_all_is_free(mesh, router)

    run(scenario)


# --- readiness ---------------------------------------------------------------------------------------------------------------


def test_without_workers_a_request_is_told_so_after_a_short_wait():
    async def scenario():
        mesh, clock = FakeMesh(prefills=0), FakeClock()
        async with open_router(mesh, ready=False, clock=clock) as router:
            asking = asyncio.ensure_future(collect(router, command(max_tokens=2)))
            await asyncio.sleep(0.01)
            assert not router.is_ready and not asking.done()
            await clock.advance(2.1)
            with pytest.raises(Unavailable, match="no prefill and decode pair is ready"):
                await asking
            assert router.ledger().running_requests == 0

    run(scenario)


def test_a_new_request_waits_for_a_rank_that_restarts():
    async def scenario():
        mesh, clock = FakeMesh(), FakeClock()
        async with open_router(mesh, clock=clock) as router:
            mesh.decodes[0].die()
            mesh.relist()
            await wait_until(lambda: not router.is_ready)
            asking = asyncio.ensure_future(collect(router, command(max_tokens=4)))
            await asyncio.sleep(0.01)
            await clock.advance(8.0)
            assert not asking.done()
            mesh.restart("decode", 0, "d-epoch-2")
            mesh.relist()
            assert (await asking).ids[0] == mesh.script(0)[:4]
            mesh.decodes[0].die()
            mesh.relist()
            await wait_until(lambda: not router.is_ready)
            asking = asyncio.ensure_future(collect(router, command(max_tokens=4), time_left_s=100))
            await asyncio.sleep(0.01)
            await clock.advance(15.1)
            with pytest.raises(Unavailable, match="no decode rank is known"):
                await asking

    run(scenario)


def test_a_router_is_ready_only_when_a_canary_has_gone_through():
    async def scenario():
        mesh = FakeMesh()
        mesh.prefills[0].alive = False
        async with open_router(mesh, ready=False) as router:
            await asyncio.sleep(0.05)
            assert not router.is_ready
            mesh.prefills[0].alive = True
            async with asyncio.timeout(3):
                await router.wait_ready(True)
            assert router.is_ready and all(view.ready for view in router.workers())

    run(scenario)


def test_workers_with_different_layouts_are_never_paired():
    async def scenario():
        mesh = FakeMesh()
        mesh.decodes[0].info = replace(mesh.decodes[0].info, layout=replace(LAYOUT, dtype="bf16"))
        async with open_router(mesh, ready=False) as router:
            await wait_until(
                lambda: len(router.workers()) == 2 and any("bf16" in v.why_not_ready for v in router.workers())
            )
            assert not router.is_ready
            with pytest.raises(Unavailable, match="bf16"):
                await collect(router, command(max_tokens=2), time_left_s=5)

    run(scenario)


def test_a_worker_that_leaves_the_registry_gets_nothing_new_but_finishes_what_runs():
    async def scenario():
        mesh = FakeMesh(decodes=2)
        async with open_router(mesh) as router:
            await wait_until(lambda: sum(view.ready for view in router.workers()) == 3)
            for decode in mesh.decodes:
                decode.gate.clear()
            asking = asyncio.ensure_future(collect(router, command(max_tokens=12)))
            await wait_until(lambda: any(decode.held for decode in mesh.decodes))
            leaving = next(decode for decode in mesh.decodes if decode.held)
            mesh.listed["decode"].remove(leaving.identity)
            mesh.version += 1
            mesh._change.set()
            await wait_until(lambda: sum(view.ready for view in router.workers()) == 2)
            for decode in mesh.decodes:
                decode.gate.set()
            answer = await asking
            assert answer.ids[0] == mesh.script(0)[:12] and answer.final.usage.attempts == 1
            before = len(leaving.reserved)
            await collect(router, command(max_tokens=3))
            assert len(leaving.reserved) == before

    run(scenario)


def test_what_no_pool_can_hold_is_refused_once():
    async def scenario():
        mesh = FakeMesh()
        mesh.decodes[0].info = replace(mesh.decodes[0].info, block_count=4)
        async with open_router(mesh) as router:
            with pytest.raises(InvalidRequest) as caught:
                await collect(router, command(max_tokens=200))
            assert caught.value.field == "sampling.max_tokens"
            assert not mesh.decodes[0].reserved

    run(scenario)


def test_a_draining_router_finishes_what_runs_and_takes_nothing_new():
    async def scenario():
        mesh = FakeMesh()
        async with open_router(mesh) as router:
            mesh.decodes[0].gate.clear()
            asking = asyncio.ensure_future(collect(router, command(max_tokens=12)))
            await wait_until(lambda: mesh.decodes[0].held)
            draining = asyncio.ensure_future(router.drain(5))
            await asyncio.sleep(0)
            with pytest.raises(Unavailable):
                await collect(router, command())
            mesh.decodes[0].gate.set()
            await draining
            assert (await asking).ids[0] == mesh.script(0)[:12]

    run(scenario)


# --- routing and telemetry -----------------------------------------------------------------------------------------------------


class _Prefixes:
    def __init__(self, holders):
        self.holders, self.asked = holders, 0

    async def lookup(self, salt, token_ids, block_size):
        self.asked += 1
        return self.holders


def test_a_prompt_goes_to_the_rank_that_holds_its_prefix():
    async def scenario():
        mesh = FakeMesh(prefills=3)
        prefixes = _Prefixes((PrefixHolder(mesh.prefills[2].identity, 4),))
        async with open_router(mesh, prefixes=prefixes) as router:
            await wait_until(lambda: sum(view.ready for view in router.workers()) == 4)
            for _ in range(3):
                await collect(router, command("x" * 70, max_tokens=2))
            assert prefixes.asked == 3 and len(mesh.prefills[2].commands) == 3
            await assert_all_is_free(mesh, router)

    run(scenario)


@pytest.mark.parametrize("incoming", ["", "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"])
def test_one_trace_holds_every_span_of_the_router(tmp_path, incoming):
    async def scenario():
        mesh = FakeMesh()
        seen: list[str] = []
        async with open_router(mesh) as router:
            original = mesh.prefills[0].prefill

            def spy(request, timeout_s):
                seen.append(traceparent_var.get())
                return original(request, timeout_s)

            mesh.prefills[0].prefill = spy  # type: ignore[method-assign]
            traceparent_var.set(incoming)
            final = (await collect(router, command(max_tokens=4))).final
            spans = [span for span in telemetry.memory() if span.trace_id == final.trace_id]
            root = next(span for span in spans if span.name == "router.generate")
            names = {span.name for span in spans if span.parent_id == root.span_id}
            assert names == {"router.tokenize", "router.queue", "router.route", "router.stream"}
            assert telemetry.trace_id(seen[0]) == final.trace_id and root.span_id in seen[0]
            if incoming:
                assert final.trace_id == telemetry.trace_id(incoming)

    telemetry.setup("router", "r", TelemetryConfig(), tmp_path)
    try:
        run(scenario)
    finally:
        telemetry.shutdown()


def test_errors_of_a_request_never_reach_the_router_itself():
    async def scenario():
        mesh = FakeMesh()
        async with open_router(mesh) as router:
            mesh.prefills[0].faults = [ValueError("not one of ours")]  # type: ignore[list-item]
            mesh.prefills[0].prefill = lambda *_: (_ for _ in ()).throw(ValueError("broken"))  # type: ignore[method-assign]
            with pytest.raises(HeadraceError) as caught:
                await collect(router, command(max_tokens=3))
            assert isinstance(caught.value, InternalError)
            await wait_until(lambda: router.ledger().running_requests == 0)

    run(scenario)


@pytest.mark.parametrize("trouble", ["INTERNAL", "DEADLINE_EXCEEDED", "CANCELLED"])
def test_a_workers_own_trouble_costs_an_attempt_and_not_the_request(trouble):
    async def scenario():
        mesh = FakeMesh()
        mesh.prefills[0].faults = [trouble]
        async with open_router(mesh) as router:
            answer = await collect(router, command(max_tokens=4))
            assert len(answer.ids[0]) == 4
            assert answer.final.usage.attempts == 2

    run(scenario)


def test_prompt_tokens_are_counted_once_also_after_a_replay():
    async def scenario():
        mesh = FakeMesh()
        mesh.prefills[0].faults = ["after_first"]
        async with open_router(mesh) as router:
            usage = (await collect(router, command(max_tokens=4))).final.usage
            assert usage.attempts == 2 and usage.cached_tokens + usage.computed_tokens == usage.prompt_tokens
            assert usage.generated_tokens == 4

    run(scenario)
