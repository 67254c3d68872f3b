"""Rows of an attempt on their way to a decode rank: pushed, stopped, renewed, handed over, broken on purpose."""

from __future__ import annotations

import asyncio
import threading

import pytest
from prefill_fakes import BLOCK, LAYERS, Asked, Bench, attempt, command, nothing, promise, signed, stop

from headrace.errors import HeadraceError, ManifestMismatch, StaleAttempt, StaleEpoch, TransferError, Unavailable
from headrace.process.faults import Faults
from headrace.protocol.common import WorkerIdentity
from headrace.protocol.decode import CommitCommand, RenewCommand, StopState
from headrace.protocol.prefill import Committed, FirstToken
from headrace.transfer.base import FAILED


def test_a_manifest_that_did_not_match_is_pushed_once_more_then_given_up():
    async def scenario():
        for failures, ending in ((1, Committed), (2, HeadraceError)):
            bench = Bench(prefix_cache=False)
            bench.decode.errors[CommitCommand] = [ManifestMismatch("layer 1")] * failures
            async with bench.open() as core:
                events, _ = await attempt(bench, core, command(6))
                assert isinstance(events[-1], ending)
                assert len(bench.source.pushes) == 2 * LAYERS
                if ending is HeadraceError:
                    assert events[-1].reason == "MANIFEST_MISMATCH" and events[-1].retryable
                await bench.settled(core)

    asyncio.run(scenario())


def test_a_failed_write_loses_the_attempt_and_stop_answers_unknown():
    async def scenario():
        bench = Bench(prefix_cache=False)
        bench.source.error = TransferError("gone", reason=FAILED)
        async with bench.open() as core:
            events, _ = await attempt(bench, core, command(6))
            assert events[-1].reason == FAILED and events[-1].retryable
            await bench.settled(core)
            assert await stop(core, "r1", 1.0) is StopState.UNKNOWN
            assert await stop(core, "r1", 1.0) is StopState.UNKNOWN

    asyncio.run(scenario())


def test_stop_during_a_write_waits_for_it_and_no_later_layer_is_written():
    async def scenario():
        bench = Bench(prefix_cache=False)
        bench.source.gate.clear()
        async with bench.open() as core:
            task = Asked(bench, core, command(6))
            await bench.run_job()
            await asyncio.to_thread(bench.source.entered.wait, 5)
            stopping = asyncio.create_task(stop(core, "r1", 5.0))
            await asyncio.sleep(0.05)
            assert not stopping.done()
            bench.source.gate.set()
            assert await stopping is StopState.DRAINED
            events = await task.all()
            assert events[-1].reason == "STALE_ATTEMPT"
            assert len(bench.source.pushes) == 1
            await bench.settled(core)

    asyncio.run(scenario())


def test_a_layer_is_pushed_when_its_rows_stand_and_a_stop_does_not_wait_for_that():
    """On a GPU the engine thread only queues a layer. While its rows are awaited nothing is being written."""

    async def scenario():
        bench = Bench(prefix_cache=False)
        stands, asked = threading.Event(), threading.Event()

        def rows_ready():
            asked.set()
            assert stands.wait(5)

        async with bench.open() as core:
            task = Asked(bench, core, command(6))
            job = await bench.job()
            job.on_start()
            job.on_layer(0, nothing)
            job.on_layer(1, rows_ready)  # returns at once: the engine thread never waits
            await asyncio.to_thread(asked.wait, 5)
            assert [layer for layer, _ in bench.source.pushes] == [0]
            assert await stop(core, "r1", 5.0) is StopState.DRAINED
            stands.set()
            job.on_tokens([FirstToken(0, 0, 70)])
            events = await task.all()
            assert events[-1].reason == "STALE_ATTEMPT"
            assert [layer for layer, _ in bench.source.pushes] == [0]
            await bench.settled(core)

    asyncio.run(scenario())


def test_rows_that_will_never_stand_lose_the_attempt_only():
    async def scenario():
        bench = Bench(prefix_cache=False)

        def device_failed():
            raise RuntimeError("an illegal memory access was encountered")

        async with bench.open() as core:
            task = Asked(bench, core, command(6))
            job = await bench.job()
            job.on_start()
            job.on_layer(0, device_failed)
            job.on_tokens([FirstToken(0, 0, 70)])
            events = await task.all()
            assert events[-1].reason == "PUSH_FAILED" and events[-1].retryable and not bench.source.pushes
            await bench.settled(core)
            events, _ = await attempt(bench, core, command(6, attempt=2))
            assert isinstance(events[-1], Committed)
            await bench.settled(core)

    asyncio.run(scenario())


def test_a_checksum_is_started_before_its_push_and_read_after_it():
    async def scenario():
        bench = Bench(prefix_cache=False)
        order = []

        def begin(layer, blocks, first_row, num_rows):
            order.append(("begun", layer, len(bench.source.pushes)))
            return lambda: order.append(("read", layer, len(bench.source.pushes))) or 7

        bench.rows.begin_checksum = begin
        async with bench.open() as core:
            await attempt(bench, core, command(6))
            assert order == [("begun", 0, 0), ("read", 0, 1), ("begun", 1, 1), ("read", 1, 2)]
            assert [layer.checksum for layer in bench.decode.commits[0].manifest[0].layers] == [7, 7]
            await bench.settled(core)

    asyncio.run(scenario())


def test_stop_that_waits_in_vain_answers_unknown():
    async def scenario():
        bench = Bench(prefix_cache=False)
        bench.source.gate.clear()
        async with bench.open() as core:
            task = Asked(bench, core, command(6))
            await bench.run_job()
            await asyncio.to_thread(bench.source.entered.wait, 5)
            stopping = asyncio.create_task(stop(core, "r1", 2.0))
            await bench.clock.advance(1.0)
            assert not stopping.done()
            await bench.clock.advance(1.5)
            assert await stopping is StopState.UNKNOWN
            bench.source.gate.set()
            await task.all()
            await bench.settled(core)

    asyncio.run(scenario())


def test_a_stopped_reservation_can_never_be_written_even_when_prefill_hears_of_it_later():
    async def scenario():
        bench = Bench()
        async with bench.open() as core:
            assert await stop(core, "r1", 1.0) is StopState.DRAINED
            with pytest.raises(StaleAttempt):
                Asked(bench, core, command(6))
            assert not bench.decode.begins

    asyncio.run(scenario())


def test_a_decode_rank_can_stop_only_what_it_promised_itself():
    async def scenario():
        bench = Bench(prefix_cache=False)
        async with bench.open() as core:
            asked = Asked(bench, core, command(6))
            with pytest.raises(StaleEpoch):
                await stop(core, "r1", 1.0, decode=WorkerIdentity("d:1", "another epoch"))
            await bench.run_job()
            assert isinstance((await asked.all())[-1], Committed)
            await bench.settled(core)

    asyncio.run(scenario())


def test_no_layer_is_written_once_the_reservation_is_about_to_expire():
    async def scenario():
        bench = Bench(prefix_cache=False)
        bench.decode.expires_in_s = bench.config.expiry_margin_s
        async with bench.open() as core:
            order = command(6)
            short = signed(promise(order), expires_in_s=bench.config.expiry_margin_s)
            events, _ = await attempt(bench, core, command(6, reservation=short))
            assert events[-1].reason == "STALE_ATTEMPT" and not bench.source.pushes
            await bench.settled(core)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("rule", "pushed_layers", "flips"),
    [
        ("prefill.push:drop layer=1", [0], 0),
        ("prefill.push:repeat layer=1", [0, 1, 1], 0),
        ("prefill.push:flip layer=0", [0, 1], 2),
    ],
)
def test_faults_on_the_push_do_what_they_say(rule, pushed_layers, flips):
    async def scenario():
        bench = Bench(prefix_cache=False)
        bench.faults = Faults.parse([rule])
        async with bench.open() as core:
            await attempt(bench, core, command(6))
            assert [layer for layer, _ in bench.source.pushes] == pushed_layers
            assert len(bench.rows.flips) == flips
            await bench.settled(core)

    asyncio.run(scenario())


def test_a_byte_is_flipped_where_no_forward_reads_it_any_more():
    """In the last row, which no prefix shares, once the forward is done; and flipped back."""

    async def scenario():
        bench = Bench(prefix_cache=False)
        bench.faults = Faults.parse(["prefill.push:flip layer=0"])
        async with bench.open() as core:
            waiting = Asked(bench, core, command(6))
            job = await bench.job()
            job.on_start()
            job.on_layer(0, nothing)
            await asyncio.sleep(0.05)
            assert bench.rows.flips == [] == bench.source.pushes
            job.on_layer(1, nothing)
            job.on_tokens([FirstToken(0, 0, 70)])
            await waiting.all()
            assert bench.rows.flips == [(0, job.sequences[0].block_table[1], 5 % BLOCK)] * 2
            assert [layer for layer, _ in bench.source.pushes] == [0, 1]
            await bench.settled(core)

    asyncio.run(scenario())


def test_a_reservation_is_renewed_while_its_prompt_waits_for_blocks():
    async def scenario():
        bench = Bench(prefix_cache=False)
        async with bench.open() as core:
            first = Asked(bench, core, command(90, reservation=False))
            second = Asked(bench, core, command(60, attempt=2))
            await asyncio.sleep(0.05)
            for renewals in (0, 1, 2):
                assert (len(bench.batcher.jobs), bench.decode.renewals) == (1, renewals)
                await bench.clock.advance(bench.config.renew_every_s)
            bench.batcher.run()
            await first.all()
            await bench.run_job()
            assert isinstance((await second.all())[-1], Committed)
            await bench.settled(core)

    asyncio.run(scenario())


def test_a_refused_renewal_ends_the_attempt_and_silence_does_not():
    async def scenario():
        bench = Bench(prefix_cache=False)
        async with bench.open() as core:
            asked = Asked(bench, core, command(6))
            await asyncio.sleep(0.02)
            bench.decode.errors[RenewCommand] = [Unavailable("silent", reason="DECODE_UNANSWERED")]
            await bench.clock.advance(bench.config.renew_every_s)
            assert not asked.is_over
            bench.decode.errors[RenewCommand] = [StaleAttempt("taken back")]
            await bench.clock.advance(bench.config.renew_every_s)
            assert (await asked.all())[-1].reason == "STALE_ATTEMPT"
            await bench.settled(core)

    asyncio.run(scenario())


def test_a_decode_rank_that_is_silent_at_commit_costs_the_attempt_and_not_the_request():
    async def scenario():
        bench = Bench(prefix_cache=False)
        bench.decode.errors[CommitCommand] = [Unavailable("silent", reason="DECODE_UNANSWERED")]
        async with bench.open() as core:
            events, _ = await attempt(bench, core, command(6))
            assert (events[-1].reason, events[-1].retryable) == ("COMMIT_UNANSWERED", True)
            await bench.settled(core)

    asyncio.run(scenario())
