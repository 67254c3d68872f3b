"""The prefill core against fakes: a scripted batcher, a recording source, a decode rank that answers as told."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

from headrace.cache.blocks import BlockPool
from headrace.clock import FakeClock
from headrace.config import PrefillConfig
from headrace.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    LayoutMismatch,
    ManifestMismatch,
    Overloaded,
    StaleAttempt,
    StaleEpoch,
    TransferError,
)
from headrace.process.faults import Faults
from headrace.protocol import (
    Committed,
    FinishReason,
    FirstToken,
    FirstTokens,
    KvLayout,
    PrefillCommand,
    PrefillFailed,
    Reservation,
    SamplingParams,
    StopState,
    TargetDescriptor,
    TargetSequence,
    WorkerIdentity,
    WorkerInfo,
)
from headrace.transfer.base import FAILED
from services.prefill import publish
from services.prefill.core import Prefiller
from services.prefill.publish import FLUSH_EVERY_S
from services.prefill.pusher import Pusher

LAYERS, BLOCK, BLOCKS = 2, 4, 32
LAYOUT = KvLayout(LAYERS, 8, "fp32", BLOCK, "interleaved", "model")
ME = WorkerIdentity("p:1", "epoch-p")
INFO = WorkerInfo(ME, "prefill", "tiny", LAYOUT, BLOCKS, max_context_tokens=100, max_batch_tokens=64)
TARGET = TargetDescriptor("fake", "s", 0, 1024, 128, 32, BLOCK, LAYERS, 64)


def nothing():
    """The rows of a layer that stand."""


class Batcher:
    """Runs a job when told to."""

    def __init__(self):
        self.jobs, self.queued_tokens, self.batches, self.cancelled = [], 0, 0, []

    def add(self, job):
        self.jobs.append(job)

    def cancel(self, key):
        self.cancelled.append(key)
        return any(job.key == key for job in self.jobs)

    def run(self, finish=FinishReason.NONE, layers=LAYERS):
        job = self.jobs.pop(0)
        self.batches += 1
        job.on_start()
        for layer in range(layers):
            job.on_layer(layer, nothing)
        tokens = [
            FirstToken(sample, count, 70 + sample, finish_reason=finish)
            for sample, count in zip(job.sample_indices, job.delivered_counts, strict=True)
        ]
        job.on_tokens(tokens)
        return job


class Source:
    """Records pushes; `gate` holds them back; `error` is raised instead."""

    def __init__(self):
        self.pushes, self.gate, self.error = [], threading.Event(), None
        self.entered = threading.Event()
        self.gate.set()

    def push(self, target, layer, runs):
        self.entered.set()
        assert self.gate.wait(5)
        if self.error:
            raise self.error
        self.pushes.append((layer, tuple(runs)))
        return sum(run.num_rows for run in runs) * target.row_bytes


class Rows:
    """Checksums that say what was asked."""

    def __init__(self):
        self.flips = []

    def begin_checksum(self, layer, blocks, first_row, num_rows):
        return lambda: layer * 1000 + first_row * 100 + num_rows

    def flip_byte(self, layer, block, offset):
        self.flips.append((layer, block, offset))


class Decode:
    """A decode rank: counts renewals, remembers commits."""

    def __init__(self):
        self.renewals, self.commits, self.errors = 0, [], []

    async def renew(self, reservation_id, writer_epoch, timeout_s):
        self.renewals += 1
        return 10.0

    async def commit(self, command, timeout_s):
        self.commits.append(command)
        if self.errors:
            raise self.errors.pop(0)
        return 0.001


class Publisher:
    """Remembers keys."""

    def __init__(self):
        self.keys = []

    def publish(self, keys):
        self.keys += keys


class Bench:
    """A core and its fakes."""

    def __init__(self, **config):
        self.batcher, self.source, self.decode, self.rows = Batcher(), Source(), Decode(), Rows()
        self.pool, self.clock, self.publisher = BlockPool(BLOCKS, BLOCK), FakeClock(), Publisher()
        self.config = PrefillConfig(**config)
        self.faults = Faults()

    @contextlib.asynccontextmanager
    async def open(self):
        self.pusher = Pusher(self.source, self.rows, BLOCK, LAYERS, self.config.expiry_margin_s, self.faults)
        self.pusher.start()
        collaborators = dict(
            pool=self.pool,
            batcher=self.batcher,
            pusher=self.pusher,
            decode=lambda address: self.decode,
            publisher=self.publisher,
            clock=self.clock,
            faults=self.faults,
        )
        async with Prefiller.open(self.config, INFO, **collaborators) as core:
            yield core
        self.pusher.stop(5)

    async def settled(self, core):
        """Waits until no leg is left; every block has come back then."""
        for _ in range(400):
            if not core.ledger().running_requests and not core.ledger().queued_requests:
                break
            await asyncio.sleep(0.005)
        ledger = core.ledger()
        assert ledger.blocks.held == 0, ledger
        assert ledger.queued_tokens == 0 and ledger.running_requests == 0
        return ledger


def command(length=10, reservation=True, attempt=1, samples=(0,), delivered=None, **changes):
    delivered = delivered or {}
    longest = length + len(delivered.get(samples[0], ()))
    room = Reservation(
        f"r{attempt}",
        WorkerIdentity("d:1", "epoch-d"),
        TARGET,
        (TargetSequence(samples[0], 0, longest, tuple(range(40, 40 - (-longest // BLOCK)))),),
        LAYOUT.fingerprint,
        0,
        10.0,
    )
    values = dict(
        request_id="q",
        attempt=attempt,
        prompt_token_ids=tuple(range(length)),
        sampling=SamplingParams(),
        sample_indices=samples,
        delivered=delivered,
        reservation=(room if reservation is True else reservation) or None,
        cache_salt="",
        prefill_epoch=ME.epoch,
    )
    return PrefillCommand(**(values | changes))


async def collect(core, order, time_left_s=5.0):
    return [event async for event in core.prefill(order, time_left_s)]


async def run_job(bench, **how):
    for _ in range(400):
        if bench.batcher.jobs:
            return bench.batcher.run(**how)
        await asyncio.sleep(0.005)
    raise AssertionError("no job arrived")


async def attempt(bench, core, order, **how):
    task = asyncio.create_task(collect(core, order))
    job = await run_job(bench, **how)
    return await asyncio.wait_for(task, 5), job


def test_an_attempt_pushes_every_layer_then_commits_and_gives_every_block_back():
    async def scenario():
        bench = Bench(prefix_cache=False)
        async with bench.open() as core:
            events, _ = await attempt(bench, core, command(10))
            assert [type(event) for event in events] == [FirstTokens, Committed]
            assert events[1].pushed_bytes == 10 * LAYERS * TARGET.row_bytes
            commit = bench.decode.commits[0]
            assert [layer.num_rows for layer in commit.manifest[0].layers] == [10] * LAYERS
            assert [layer.checksum for layer in commit.manifest[0].layers] == [10, 1010]
            assert commit.samples[0].output_token_ids == (70,)
            assert bench.decode.renewals >= 1
            ledger = await bench.settled(core)
            assert ledger.blocks.free == BLOCKS and ledger.batches == 1
            assert {stage.name for stage in events[1].stages} >= {"prefill.forward", "prefill.push", "decode.commit"}

    asyncio.run(scenario())


def test_delivered_tokens_are_input_and_the_next_position_is_sampled():
    async def scenario():
        bench = Bench(prefix_cache=False)
        async with bench.open() as core:
            events, job = await attempt(bench, core, command(10, delivered={0: (91, 92)}))
            assert job.sequences[0].token_ids[-2:] == [91, 92]
            assert events[0].tokens[0].position == 2
            assert bench.decode.commits[0].samples[0].output_token_ids == (91, 92, 70)
            await bench.settled(core)

    asyncio.run(scenario())


def test_a_prefix_that_is_still_here_is_not_computed_again_but_pushed_whole():
    async def scenario():
        bench = Bench()
        async with bench.open() as core:
            await attempt(bench, core, command(10))
            await bench.settled(core)
            events, job = await attempt(bench, core, command(10, attempt=2))
            assert events[0].cached_tokens == 8 and events[0].computed_tokens == 2
            assert job.sequences[0].first_computed == 8
            assert events[1].pushed_bytes == 10 * LAYERS * TARGET.row_bytes
            assert len(bench.publisher.keys) == 4
            await bench.settled(core)

    asyncio.run(scenario())


def test_another_salt_finds_nothing_of_the_first():
    async def scenario():
        bench = Bench()
        async with bench.open() as core:
            await attempt(bench, core, command(10))
            events, _ = await attempt(bench, core, command(10, attempt=2, cache_salt="tenant-b"))
            assert events[0].cached_tokens == 0
            await bench.settled(core)

    asyncio.run(scenario())


def test_an_end_at_the_first_token_commits_nothing():
    async def scenario():
        bench = Bench(prefix_cache=False)
        async with bench.open() as core:
            events, _ = await attempt(bench, core, command(5), finish=FinishReason.EOS)
            assert isinstance(events[-1], Committed) and not bench.decode.commits
            await bench.settled(core)

    asyncio.run(scenario())


def test_without_a_reservation_nothing_is_pushed():
    async def scenario():
        bench = Bench(prefix_cache=False)
        async with bench.open() as core:
            events, _ = await attempt(bench, core, command(5, reservation=False))
            assert isinstance(events[-1], Committed) and not bench.source.pushes
            await bench.settled(core)

    asyncio.run(scenario())


def test_a_manifest_that_did_not_match_is_pushed_once_more_then_given_up():
    async def scenario():
        for failures, ending in ((1, Committed), (2, PrefillFailed)):
            bench = Bench(prefix_cache=False)
            bench.decode.errors = [ManifestMismatch("layer 1")] * failures
            async with bench.open() as core:
                events, _ = await attempt(bench, core, command(6))
                assert isinstance(events[-1], ending)
                assert len(bench.source.pushes) == 2 * LAYERS
                if ending is PrefillFailed:
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
            assert await core.stop("r1", ME.epoch, 1.0) is StopState.UNKNOWN
            assert await core.stop("r1", ME.epoch, 1.0) is StopState.UNKNOWN

    asyncio.run(scenario())


def test_stop_during_a_write_waits_for_it_and_no_later_layer_is_written():
    async def scenario():
        bench = Bench(prefix_cache=False)
        bench.source.gate.clear()
        async with bench.open() as core:
            task = asyncio.create_task(collect(core, command(6)))
            await run_job(bench)
            await asyncio.to_thread(bench.source.entered.wait, 5)
            stopping = asyncio.create_task(core.stop("r1", ME.epoch, 5.0))
            await asyncio.sleep(0.05)
            assert not stopping.done()
            bench.source.gate.set()
            assert await stopping is StopState.DRAINED
            events = await asyncio.wait_for(task, 5)
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
            task = asyncio.create_task(collect(core, command(6)))
            while not bench.batcher.jobs:
                await asyncio.sleep(0.005)
            job = bench.batcher.jobs.pop(0)
            job.on_start()
            job.on_layer(0, nothing)
            job.on_layer(1, rows_ready)  # returns at once: the engine thread never waits
            await asyncio.to_thread(asked.wait, 5)
            assert [layer for layer, _ in bench.source.pushes] == [0]
            assert await core.stop("r1", ME.epoch, 5.0) is StopState.DRAINED
            stands.set()
            job.on_tokens([FirstToken(0, 0, 70)])
            events = await asyncio.wait_for(task, 5)
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
            task = asyncio.create_task(collect(core, command(6)))
            while not bench.batcher.jobs:
                await asyncio.sleep(0.005)
            job = bench.batcher.jobs.pop(0)
            job.on_start()
            job.on_layer(0, device_failed)
            job.on_tokens([FirstToken(0, 0, 70)])
            events = await asyncio.wait_for(task, 5)
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
            task = asyncio.create_task(collect(core, command(6)))
            await run_job(bench)
            await asyncio.to_thread(bench.source.entered.wait, 5)
            assert await core.stop("r1", ME.epoch, 0.05) is StopState.UNKNOWN
            bench.source.gate.set()
            await asyncio.wait_for(task, 5)
            await bench.settled(core)

    asyncio.run(scenario())


def test_a_stopped_reservation_can_never_be_written_even_when_prefill_hears_of_it_later():
    async def scenario():
        bench = Bench()
        async with bench.open() as core:
            assert await core.stop("r1", ME.epoch, 1.0) is StopState.DRAINED
            with pytest.raises(StaleAttempt):
                await collect(core, command(6))
            assert await core.stop("r1", "another-epoch", 1.0) is StopState.UNKNOWN

    asyncio.run(scenario())


def test_no_layer_is_written_once_the_reservation_is_about_to_expire():
    async def scenario():
        bench = Bench(prefix_cache=False)
        async with bench.open() as core:
            order = command(6)
            room = order.reservation
            short = Reservation(**{**vars(room), "expires_in_s": bench.config.expiry_margin_s})

            async def unanswered(*arguments):
                await asyncio.Event().wait()

            bench.decode.renew = unanswered
            events, _ = await attempt(bench, core, command(6, reservation=short))
            assert events[-1].reason == "STALE_ATTEMPT" and not bench.source.pushes
            await bench.settled(core)

    asyncio.run(scenario())


def test_leaving_in_each_state_gives_every_block_back():
    async def scenario():
        for state in ("waiting for a batch", "computing", "pushing", "committing"):
            bench = Bench(prefix_cache=False)
            async with bench.open() as core:
                if state == "pushing":
                    bench.source.gate.clear()
                if state == "committing":

                    async def never(*arguments):
                        await asyncio.Event().wait()

                    bench.decode.commit = never
                task = asyncio.create_task(collect(core, command(6)))
                job = None
                if state == "waiting for a batch":
                    while not bench.batcher.jobs:
                        await asyncio.sleep(0.005)
                elif state == "computing":
                    while not bench.batcher.jobs:
                        await asyncio.sleep(0.005)
                    job = bench.batcher.jobs.pop(0)
                    job.on_start()
                else:
                    await run_job(bench)
                await asyncio.sleep(0.05)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                if job is not None:
                    assert core.ledger().blocks.held, "the engine still computes into these blocks"
                    job.on_error(asyncio.CancelledError())
                bench.source.gate.set()
                await bench.settled(core)

    asyncio.run(scenario())


def test_a_prompt_waits_for_blocks_and_gets_them_when_another_ends():
    async def scenario():
        bench = Bench(prefix_cache=False)
        async with bench.open() as core:
            first = asyncio.create_task(collect(core, command(90, reservation=False)))
            second = asyncio.create_task(collect(core, command(60, reservation=False, attempt=2)))
            await asyncio.sleep(0.05)
            assert len(bench.batcher.jobs) == 1
            bench.batcher.run()
            await first
            await run_job(bench)
            await asyncio.wait_for(second, 5)
            await bench.settled(core)

    asyncio.run(scenario())


def test_what_cannot_be_is_refused_before_anything_is_held():
    async def scenario():
        bench = Bench(max_queue_tokens=20)
        async with bench.open() as core:
            other = KvLayout(LAYERS, 8, "bf16", BLOCK, "interleaved", "model")
            bad = Reservation(**{**vars(command().reservation), "layout_fingerprint": other.fingerprint})
            for order, error in (
                (command(prefill_epoch="old"), StaleEpoch),
                (command(101), InvalidRequest),
                (command(reservation=bad), LayoutMismatch),
                (command(samples=(0, 0)), InvalidRequest),
                (command(samples=(-1,)), InvalidRequest),
                (command(samples=tuple(range(17))), InvalidRequest),
                (command(delivered={3: (1,)}), InvalidRequest),
                (command(prompt_token_ids=(1, -2)), InvalidRequest),
            ):
                with pytest.raises(error):
                    await collect(core, order)
            waiting = asyncio.create_task(collect(core, command(15, reservation=False)))
            await asyncio.sleep(0.02)
            bench.batcher.queued_tokens = 15
            with pytest.raises(Overloaded):
                await collect(core, command(10, attempt=2))
            bench.batcher.queued_tokens = 0
            bench.batcher.run()
            await waiting
            await bench.settled(core)

    asyncio.run(scenario())


def test_the_deadline_ends_an_attempt_with_a_reason():
    async def scenario():
        bench = Bench(prefix_cache=False)
        async with bench.open() as core:
            events = await collect(core, command(6), time_left_s=0.05)
            assert events[-1] == PrefillFailed("DEADLINE_EXCEEDED", events[-1].message, False)
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
            waiting = asyncio.create_task(collect(core, command(6)))
            while not bench.batcher.jobs:
                await asyncio.sleep(0.005)
            job = bench.batcher.jobs.pop(0)
            job.on_start()
            job.on_layer(0, nothing)
            await asyncio.sleep(0.05)
            assert bench.rows.flips == [] == bench.source.pushes
            job.on_layer(1, nothing)
            job.on_tokens([FirstToken(0, 0, 70)])
            await asyncio.wait_for(waiting, 5)
            assert bench.rows.flips == [(0, job.sequences[0].block_table[1], 5 % BLOCK)] * 2
            assert [layer for layer, _ in bench.source.pushes] == [0, 1]
            await bench.settled(core)

    asyncio.run(scenario())


def test_a_repeated_attempt_does_not_reach_the_first_ones_job():
    async def scenario():
        bench = Bench(prefix_cache=False)
        async with bench.open() as core:
            first = asyncio.create_task(collect(core, command(6, reservation=False)))
            second = asyncio.create_task(collect(core, command(6, reservation=False)))
            while len(bench.batcher.jobs) < 2:
                await asyncio.sleep(0.005)
            running = bench.batcher.jobs.pop(0)
            running.on_start()
            first.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await first
            assert core.ledger().blocks.running == 4, "one computes, one waits: both hold their two blocks"
            running.on_error(asyncio.CancelledError())
            bench.batcher.run()
            assert isinstance((await asyncio.wait_for(second, 5))[-1], Committed)
            await bench.settled(core)

    asyncio.run(scenario())


def test_a_reservation_is_renewed_while_its_prompt_waits_for_blocks():
    async def scenario():
        bench = Bench(prefix_cache=False)
        async with bench.open() as core:
            first = asyncio.create_task(collect(core, command(90, reservation=False)))
            second = asyncio.create_task(collect(core, command(60, attempt=2)))
            await asyncio.sleep(0.05)
            for renewals in (1, 2, 3):
                assert (len(bench.batcher.jobs), bench.decode.renewals) == (1, renewals)
                await bench.clock.advance(bench.config.renew_every_s)
            bench.batcher.run()
            await first
            await run_job(bench)
            assert isinstance((await asyncio.wait_for(second, 5))[-1], Committed)
            await bench.settled(core)

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [DeadlineExceeded("late"), Cancelled("gone")])
def test_a_decode_rank_that_is_silent_at_commit_costs_the_attempt_and_not_the_request(error):
    async def scenario():
        bench = Bench(prefix_cache=False)
        bench.decode.errors = [error]
        async with bench.open() as core:
            events, _ = await attempt(bench, core, command(6))
            assert (events[-1].reason, events[-1].retryable) == ("COMMIT_UNANSWERED", True)
            await bench.settled(core)

    asyncio.run(scenario())


def test_a_prompt_that_the_engine_refuses_holds_nothing():
    async def scenario():
        bench = Bench(prefix_cache=False)

        def refuse(job):
            raise InvalidRequest("prompt_token_ids: must be 0 to 8191", field="prompt_token_ids")

        bench.batcher.add = refuse
        async with bench.open() as core:
            events = await asyncio.wait_for(collect(core, command(6)), 5)
            assert (events[-1].reason, events[-1].retryable) == ("INVALID_REQUEST", False)
            await bench.settled(core)

    asyncio.run(scenario())


def test_a_forward_that_failed_may_be_tried_elsewhere():
    async def scenario():
        bench = Bench(prefix_cache=False)
        async with bench.open() as core:
            task = asyncio.create_task(collect(core, command(6)))
            while not bench.batcher.jobs:
                await asyncio.sleep(0.005)
            bench.batcher.jobs.pop(0).on_error(RuntimeError("out of memory"))
            events = await asyncio.wait_for(task, 5)
            assert (events[-1].reason, events[-1].retryable) == ("FORWARD_FAILED", True)
            await bench.settled(core)

    asyncio.run(scenario())


def test_a_block_evicted_while_it_is_being_published_is_withdrawn():
    class Catalogue:
        """Evicts in the middle of the first Publish; keeps what it was told."""

        def __init__(self):
            self.known = set()

        async def publish(self, worker, keys, ttl_s, timeout_s):
            if "b" in keys:
                publisher.withdraw(["b"])
            self.known |= set(keys)

        async def withdraw(self, worker, keys, timeout_s):
            self.known -= set(keys)

    async def scenario():
        publisher.publish(["a", "b"])
        running = asyncio.create_task(publisher.run())
        for _ in range(60):  # past several refreshes
            await asyncio.sleep(0)
            await clock.advance(FLUSH_EVERY_S)
        running.cancel()
        assert catalogue.known == {"a"}

    clock, catalogue = FakeClock(), Catalogue()
    publisher = publish.Publisher(ME, lambda: catalogue, clock, ttl_s=6.0)
    asyncio.run(scenario())
