"""What is lost costs an attempt and no token: ranks that fail, leave, break or restart under a request."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from router_fakes import (
    LAYOUT,
    FakeMesh,
    assert_all_is_free,
    collect,
    command,
    open_router,
    run,
    wait_until,
)

from headrace.errors import (
    InternalError,
    LayoutMismatch,
    Overloaded,
    StaleAttempt,
    TransferError,
    Unavailable,
)
from headrace.protocol.common import NumberFormat, WorkerRole

BF16 = (replace(LAYOUT.regions[0], format=NumberFormat.BF16),)


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
            first.beat(available_blocks=1)
            next(prefill for prefill in mesh.prefills if prefill.commands).faults.append("INTERNAL")
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
            worker.info = replace(worker.info, layout=replace(LAYOUT, regions=BF16))
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


def test_when_it_is_not_clear_which_leg_failed_both_are_avoided():
    async def scenario():
        mesh = FakeMesh(prefills=2, decodes=2)
        async with open_router(mesh) as router:
            await wait_until(lambda: sum(view.ready for view in router.workers()) == 4)
            mesh.prefills[0].faults = ["before"]
            answer = await collect(router, command(max_tokens=9))
            assert answer.final.usage.attempts == 2
            assert [len(x.commands) for x in mesh.prefills] == [1, 1]
            assert [len(x.reserved) for x in mesh.decodes] == [1, 1]

    run(scenario)


def test_attempts_that_bring_tokens_use_no_budget():
    async def scenario():
        mesh = FakeMesh()
        async with open_router(mesh, max_attempts=2) as router:
            mesh.prefills[0].faults = ["mismatch"] * 5
            answer = await collect(router, command(max_tokens=9))
            assert answer.ids[0] == mesh.script(0)[:9]
            assert answer.final.usage.attempts == 6
            await assert_all_is_free(mesh, router)

    run(scenario)


def test_overload_never_ends_a_stream_that_has_delivered_tokens():
    async def scenario():
        mesh = FakeMesh()
        async with open_router(mesh, max_attempts=2) as router:
            mesh.decodes[0].gate.clear()
            asking = asyncio.ensure_future(collect(router, command(max_tokens=9, priority=-3)))
            await wait_until(lambda: mesh.decodes[0].held and not mesh.prefills[0].running)
            mesh.decodes[0].errors = [Overloaded("full", retry_after_s=0.01)] * 4
            mesh.decodes[0].lose_links()
            mesh.decodes[0].gate.set()
            answer = await asking
            assert answer.ids[0] == mesh.script(0)[:9] and answer.final.usage.attempts == 6
            priorities = [x.priority for x in mesh.decodes[0].reserved]
            assert priorities == [-3] + [100] * 5, "a request that lost an attempt goes ahead of new ones"

    run(scenario)


def test_a_request_under_which_engines_keep_dying_is_ended():
    async def scenario():
        mesh = FakeMesh()
        async with open_router(mesh, canary=False) as router:
            mesh.prefills[0].commit_gate.clear()  # every attempt brings one token
            asking = asyncio.ensure_future(collect(router, command(max_tokens=20)))
            for death in range(1, 7):
                await wait_until(lambda death=death: len(mesh.prefills[0].commands) == death)
                await asyncio.sleep(0.005)
                mesh.prefills[0].lose_links()
            with pytest.raises(InternalError) as caught:
                await asking
            assert caught.value.reason == "POISON_REQUEST"
            assert len(mesh.prefills[0].commands) == 6
            await assert_all_is_free(mesh, router)

    run(scenario)


def test_a_prompt_on_a_broken_link_is_computed_elsewhere_when_there_is_another_rank():
    async def scenario():
        mesh = FakeMesh(prefills=2)
        async with open_router(mesh) as router:
            await wait_until(lambda: sum(view.ready for view in router.workers()) == 3)
            mesh.prefills[0].gate.clear()
            asking = asyncio.ensure_future(collect(router, command(max_tokens=9)))
            await wait_until(lambda: mesh.prefills[0].commands)
            mesh.prefills[0].break_links()
            answer = await asking
            assert answer.ids[0] == mesh.script(0)[:9] and answer.final.usage.attempts == 2
            assert mesh.prefills[0].running == 1
            mesh.prefills[0].resume_links()
            await wait_until(lambda: mesh.prefills[0].running == 0)
            assert mesh.prefills[0].cancelled == 1, "what was said while it was broken arrives"
            await assert_all_is_free(mesh, router)

    run(scenario)


def test_a_broken_link_to_the_only_prefill_rank_is_waited_for():
    async def scenario():
        mesh = FakeMesh()
        async with open_router(mesh) as router:
            mesh.prefills[0].gate.clear()
            asking = asyncio.ensure_future(collect(router, command(max_tokens=9)))
            await wait_until(lambda: mesh.prefills[0].commands)
            mesh.prefills[0].break_links()
            mesh.prefills[0].gate.set()
            await asyncio.sleep(0.02)
            assert not asking.done() and not router.is_ready
            mesh.prefills[0].resume_links()
            assert (await asking).final.usage.attempts == 1

    run(scenario)


def test_a_rank_with_a_broken_link_gets_nothing_new():
    async def scenario():
        mesh = FakeMesh(decodes=2)
        async with open_router(mesh) as router:
            await wait_until(lambda: sum(view.ready for view in router.workers()) == 3)
            mesh.decodes[0].links[1].break_()  # tokens; its commands would go through
            for _ in range(4):
                await collect(router, command(max_tokens=3))
            assert [len(x.reserved) for x in mesh.decodes] == [0, 4]
            mesh.decodes[0].links[1].resume()
            await collect(router, command(max_tokens=3))
            assert [len(x.reserved) for x in mesh.decodes] == [1, 4]

    run(scenario)


def test_lost_links_end_their_attempts_at_once_and_the_same_process_is_dialled_again():
    async def scenario():
        mesh = FakeMesh()
        async with open_router(mesh) as router:
            mesh.decodes[0].gate.clear()
            asking = asyncio.ensure_future(collect(router, command(max_tokens=9)))
            await wait_until(lambda: mesh.decodes[0].held and not mesh.prefills[0].running)
            before = list(mesh.decodes[0].links)
            mesh.decodes[0].lose_links()
            assert router.ledger().open_handles == 0
            mesh.decodes[0].gate.set()
            answer = await asking
            assert answer.ids[0] == mesh.script(0)[:9] and answer.final.usage.attempts == 2
            assert all(link not in before for link in mesh.decodes[0].links)
            assert mesh.decodes[0].released == [], "a lost link is a release"
            await assert_all_is_free(mesh, router)

    run(scenario)


def test_a_release_on_a_broken_link_is_delivered_when_it_resumes():
    async def scenario():
        mesh = FakeMesh()
        async with open_router(mesh) as router:
            mesh.decodes[0].gate.clear()
            asking = asyncio.ensure_future(collect(router, command(max_tokens=50)))
            await wait_until(lambda: mesh.decodes[0].held and not mesh.prefills[0].running)
            mesh.decodes[0].break_links()
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await asyncio.sleep(0.01)
            assert mesh.decodes[0].held and not mesh.decodes[0].released
            mesh.decodes[0].resume_links()
            await assert_all_is_free(mesh, router)
            assert len(mesh.decodes[0].released) == 1

    run(scenario)


def test_an_end_that_counts_more_tokens_than_came_is_a_gap():
    async def scenario():
        mesh = FakeMesh()
        async with open_router(mesh) as router:
            mesh.decodes[0].skips_position = 11  # the last one: no later position shows that it is missing
            answer = await collect(router, command(max_tokens=12))
            assert answer.ids[0] == mesh.script(0)[:12]
            assert answer.final.usage.attempts == 2
            await assert_all_is_free(mesh, router)

    run(scenario)


def test_attempts_are_bounded():
    async def scenario():
        mesh = FakeMesh()
        async with open_router(mesh, max_attempts=3) as router:
            mesh.prefills[0].faults = ["before"] * 9
            with pytest.raises(TransferError):
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
            assert len(new.reserved) == 1
            await assert_all_is_free(mesh, router)

    run(scenario)


def test_a_restarted_prefill_rank_is_found_by_asking_it_before_the_registry_knows():
    async def scenario():
        mesh = FakeMesh()
        async with open_router(mesh) as router:
            mesh.restart("prefill", 0, "p-epoch-2")  # the registry still lists the old epoch
            answer = await collect(router, command(max_tokens=6))
            assert answer.ids[0] == mesh.script(0)[:6]
            assert [view.info.identity.epoch for view in router.workers() if view.info.role is WorkerRole.PREFILL] == [
                "p-epoch-2"
            ]
            await assert_all_is_free(mesh, router)

    run(scenario)


def test_a_dead_only_prefill_rank_is_waited_for():
    async def scenario():
        mesh = FakeMesh()
        async with open_router(mesh) as router:
            mesh.prefills[0].die()
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
            decode.break_links()
            decode.gate.set()
            await asyncio.sleep(0.01)
            assert not asking.done() and not router.is_ready
            decode.resume_links()
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
