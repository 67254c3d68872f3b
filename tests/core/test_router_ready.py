"""Who gets requests: pairs that a canary went through, of one layout, and only while they serve."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from router_fakes import (
    BLOCK,
    LAYOUT,
    FakeMesh,
    assert_all_is_free,
    collect,
    command,
    open_router,
    run,
    wait_until,
)

from headrace.cache.blocks import block_keys
from headrace.clock import FakeClock
from headrace.config import TelemetryConfig
from headrace.errors import HeadraceError, InternalError, InvalidRequest, Unavailable
from headrace.observe import telemetry
from headrace.protocol.common import NumberFormat

BF16 = (replace(LAYOUT.regions[0], format=NumberFormat.BF16),)


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
        mesh.decodes[0].info = replace(mesh.decodes[0].info, layout=replace(LAYOUT, regions=BF16))
        async with open_router(mesh, ready=False) as router:
            await wait_until(
                lambda: len(router.workers()) == 2 and any("BF16" in v.why_not_ready for v in router.workers())
            )
            assert not router.is_ready
            with pytest.raises(Unavailable, match="BF16"):
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
            mesh.changed()
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


def test_a_prompt_goes_to_the_rank_that_holds_its_prefix():
    async def scenario():
        mesh = FakeMesh(prefills=3)
        keys = block_keys("", tuple(b"x" * 70), BLOCK)
        async with open_router(mesh) as router:
            await wait_until(lambda: sum(view.ready for view in router.workers()) == 4)
            mesh.prefills[2].hold(keys)
            await asyncio.sleep(0.01)
            for _ in range(3):
                await collect(router, command("x" * 70, max_tokens=2))
            assert len(mesh.prefills[2].commands) == 3
            mesh.prefills[1].hold(keys)
            mesh.prefills[2].hold((), gone=keys[1:])
            await asyncio.sleep(0.01)
            await collect(router, command("x" * 70, max_tokens=2))
            assert len(mesh.prefills[1].commands) == 1, "the longer prefix is there now"
            await assert_all_is_free(mesh, router)

    run(scenario)


@pytest.mark.parametrize("incoming", ["", "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"])
def test_one_trace_holds_every_span_of_the_router(tmp_path, incoming):
    async def scenario():
        mesh = FakeMesh()
        seen: list[str] = []
        async with open_router(mesh) as router:
            final = (await collect(router, command(max_tokens=4), trace_parent=incoming)).final
            seen += [mesh.decodes[0].reserved[0].trace_parent, mesh.prefills[0].commands[0].trace_parent]
            spans = [span for span in telemetry.memory() if span.trace_id == final.trace_id]
            root = next(span for span in spans if span.name == "router.generate")
            names = {span.name for span in spans if span.parent_id == root.span_id}
            assert names == {"router.tokenize", "router.queue", "router.route", "router.stream"}
            for parent in seen:
                assert telemetry.trace_id(parent) == final.trace_id and root.span_id in parent
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
            for worker in router.workers():
                assert worker.ready
            router._parts.placing.choose = lambda *_, **__: (_ for _ in ()).throw(ValueError("broken"))
            with pytest.raises(HeadraceError) as caught:
                await collect(router, command(max_tokens=3))
            assert isinstance(caught.value, InternalError)
            await wait_until(lambda: router.ledger().running_requests == 0)

    run(scenario)
