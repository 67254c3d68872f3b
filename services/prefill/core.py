"""The prefill core: queue, run whole prompts, push rows layer by layer, commit.

One attempt walks: match the prefix that this rank still holds -> wait for blocks -> wait for a batch -> forward, each
layer handed to the transfer thread as soon as it stands -> first tokens out -> commit. Its blocks go back when neither the
engine nor the transfer thread can touch them any more; that is one task per leg, independent of the caller.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.cache.blocks import BlockPool, BlockState, block_keys
from headrace.clock import Clock
from headrace.config import PrefillConfig
from headrace.engine.request import PrefillJob
from headrace.errors import (
    Cancelled,
    DeadlineExceeded,
    HeadraceError,
    InternalError,
    InvalidRequest,
    LayoutMismatch,
    ManifestMismatch,
    Overloaded,
    StaleAttempt,
    StaleEpoch,
    Unavailable,
)
from headrace.observe import telemetry
from headrace.observe.context import traceparent_var
from headrace.process.faults import Fault, Faults
from headrace.protocol import (
    CommitCommand,
    Committed,
    FinishReason,
    FirstToken,
    FirstTokens,
    PrefillCommand,
    PrefillEvent,
    PrefillFailed,
    PrefillLedger,
    SampleState,
    StopState,
    WorkerInfo,
)
from services.prefill.leg import Leg
from services.prefill.report import Report, stages_of
from services.prefill.room import Room
from services.prefill.sequences import blocks_for, blocks_needed, check_command, sequence_lengths, sequences_of

log = logging.getLogger(__name__)

TOMBSTONE_S = 120.0
"""How long a stopped reservation is remembered; far above any reservation's life."""


class DecodePort(Protocol):
    """The decode rank a leg writes to (headrace.client.DecodeClient)."""

    async def renew(self, reservation_id: str, writer_epoch: str, timeout_s: float) -> float: ...

    async def commit(self, command: CommitCommand, timeout_s: float) -> float: ...


class BatcherPort(Protocol):
    """Runs whole prompts (headrace.engine.prefill.PrefillBatcher), thread-safe."""

    queued_tokens: int
    batches: int

    def add(self, job: PrefillJob) -> None: ...

    def cancel(self, key: str) -> bool: ...


class PusherPort(Protocol):
    """Writes layers (services.prefill.pusher.Pusher), thread-safe."""

    def push_layer(self, leg: Leg, layer: int, ready: Callable[[], None]) -> None: ...

    def push_again(self, leg: Leg) -> None: ...


class PublisherPort(Protocol):
    """Tells the catalogue which prefixes this rank holds; never waits."""

    def publish(self, keys: Sequence[str]) -> None: ...


class Prefiller:
    """All decisions of a prefill rank. Use `async with Prefiller.open(...)`."""

    def __init__(
        self,
        config: PrefillConfig,
        info: WorkerInfo,
        *,
        pool: BlockPool,
        batcher: BatcherPort,
        pusher: PusherPort,
        decode: Callable[[str], DecodePort],
        publisher: PublisherPort,
        clock: Clock,
        faults: Faults,
    ):
        self.info = info
        self._config = config
        self._pool = pool
        self._batcher = batcher
        self._pusher = pusher
        self._decode = decode
        self._publisher = publisher
        self._clock = clock
        self._faults = faults
        self._legs: dict[str, Leg] = {}
        self._running: set[Leg] = set()
        self._waiting_tokens = 0
        self._tombstones: collections.OrderedDict[str, _Tombstone] = collections.OrderedDict()
        self._room = Room(pool)
        self._report = Report(info.identity)
        self._draining = False
        self._tasks: asyncio.TaskGroup

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, *args, **collaborators) -> AsyncIterator[Prefiller]:
        """The core with its background tasks; on leaving, running legs are stopped and their blocks come back."""
        core = cls(*args, **collaborators)
        async with asyncio.TaskGroup() as tasks:
            core._tasks = tasks
            try:
                yield core
            finally:
                for leg in list(core._running):
                    leg.fail(Unavailable("this prefill rank stops"))
                    core._batcher.cancel(leg.key)

    # --- the rpcs ------------------------------------------------------------------------------------------------------

    async def prefill(self, command: PrefillCommand, time_left_s: float) -> AsyncIterator[PrefillEvent]:
        """Events of one attempt. Raises before any event what the caller did wrong or what is not possible now; yields
        PrefillFailed for what was lost on the way. Leaving the iterator cancels the attempt."""
        self._check(command)
        parent = traceparent_var.get()
        leg = Leg(command, self._clock, self.info.layout.layer_count)
        self._enter(leg)
        try:
            async with asyncio.timeout(time_left_s):
                async for event in self._run(leg, parent):
                    yield event
        except HeadraceError as error:
            leg.stop(error)
            yield PrefillFailed(error.reason, error.message, error.retryable)
        except TimeoutError:
            leg.stop(Cancelled("the deadline passed"))
            yield PrefillFailed("DEADLINE_EXCEEDED", "the deadline passed during prefill", False)
        finally:
            leg.stop(Cancelled("the caller left"))
            self._tasks.create_task(self._retire(leg))

    async def stop(self, reservation_id: str, writer_epoch: str, wait_s: float) -> StopState:
        """No write of this reservation starts from now on; says whether all that were started have ended."""
        if writer_epoch != self.info.identity.epoch:
            return StopState.UNKNOWN
        leg = self._legs.get(reservation_id)
        if leg is None:
            return self._bury(reservation_id, drained=True)
        leg.stop(StaleAttempt("decode took the reservation back"))
        leg.fail(StaleAttempt("decode took the reservation back"))
        if leg.is_writing:
            await asyncio.to_thread(leg.wait_drained, wait_s)
        return self._bury(reservation_id, drained=leg.is_drained)

    def ledger(self) -> PrefillLedger:
        """Who holds what now."""
        queued = self._queued_tokens
        waiting = sum(leg.times.started is None for leg in self._running)
        return PrefillLedger(self._pool.ledger(), waiting, queued, len(self._running) - waiting, self._batcher.batches)

    async def drain(self, grace_s: float) -> None:
        """Refuses new prompts and waits for running ones."""
        self._draining = True
        end = self._clock.now() + grace_s
        while self._running and self._clock.now() < end:
            await self._clock.wait(0.05)

    @property
    def _queued_tokens(self) -> int:
        return self._batcher.queued_tokens + self._waiting_tokens

    # --- one attempt -----------------------------------------------------------------------------------------------------

    def _check(self, command: PrefillCommand) -> None:
        if self._draining:
            raise Unavailable("this prefill rank drains", reason="DRAINING")
        if command.prefill_epoch and command.prefill_epoch != self.info.identity.epoch:
            raise StaleEpoch("this prefill process is not the one that was meant")
        check_command(command)
        length = len(command.prompt_token_ids) + max((len(x) for x in command.delivered.values()), default=0)
        if length > self.info.max_context_tokens:
            raise InvalidRequest(
                f"prompt_token_ids: {length} tokens, the context holds {self.info.max_context_tokens}",
                field="prompt_token_ids",
            )
        if self._queued_tokens + length > self._config.max_queue_tokens and self._running:
            raise Overloaded("the prefill queue is full", reason="PREFILL_QUEUE_FULL", retry_after_s=0.2)
        self._check_reservation(command)

    def _check_reservation(self, command: PrefillCommand) -> None:
        reservation = command.reservation
        if reservation is None:
            return
        if reservation.layout_fingerprint != self.info.layout.fingerprint:
            raise LayoutMismatch(
                f"decode rank {reservation.decode.address} has another KV layout than {self.info.layout}"
            )
        if reservation.reservation_id in self._tombstones or reservation.reservation_id in self._legs:
            raise StaleAttempt("this reservation has been used or taken back")

    def _enter(self, leg: Leg) -> None:
        self._running.add(leg)
        if leg.command.reservation is not None:
            self._legs[leg.command.reservation.reservation_id] = leg

    async def _run(self, leg: Leg, parent: str) -> AsyncIterator[PrefillEvent]:
        async with contextlib.AsyncExitStack() as stack:
            if leg.command.reservation is not None:
                stack.enter_context(_cancelling(self._tasks.create_task(self._keep_renewed(leg))))
            cached = await self._take_blocks(leg)
            job, tokens_ready = self._job(leg, cached)
            self._batcher.add(job)
            leg.was_queued = True
            tokens = await tokens_ready
            self._report.forward(leg, parent, cached)
            self._report.queue(self._queued_tokens)
            computed = sum(len(s.token_ids) - s.first_computed for s in job.sequences)
            yield FirstTokens(tuple(tokens), cached, computed)
            live = [token for token in tokens if token.finish_reason is FinishReason.NONE]
            if live and leg.command.reservation is not None:
                await self._hand_over(leg, live, parent)
            yield Committed(leg.pushed_bytes, stages_of(leg, cached))

    async def _take_blocks(self, leg: Leg) -> int:
        """Blocks for every sequence of the leg; returns how many leading prompt tokens this rank still held."""
        command, size = leg.command, self._pool.block_size
        lengths = sequence_lengths(command)
        needed = blocks_needed(command, lengths, size)
        if needed > self.info.block_count:
            raise InvalidRequest(
                f"prompt_token_ids: needs {needed} blocks of {size} tokens, this rank has {self.info.block_count}",
                field="prompt_token_ids",
            )
        self._waiting_tokens += sum(lengths)
        self._report.queue(self._queued_tokens)
        try:
            async with self._room.wait_turn(needed):
                return self._allocate(leg, lengths)
        finally:
            self._waiting_tokens -= sum(lengths)

    def _allocate(self, leg: Leg, lengths: Sequence[int]) -> int:
        command, size = leg.command, self._pool.block_size
        prompt_blocks = len(command.prompt_token_ids) // size
        held: tuple[int, ...] = ()
        if self._config.prefix_cache:
            keys = block_keys(command.cache_salt, command.prompt_token_ids, size)
            held = self._pool.match_prefix(keys[: (len(command.prompt_token_ids) - 1) // size])
        leg.held_blocks = tuple(held)
        first = blocks_for(lengths[0], size)
        own = self._pool.allocate(first - len(held), BlockState.RUNNING)
        leg.held_blocks += own
        leg.sequence_blocks = [(*held, *own)]
        for length in lengths[1:]:
            tail = self._pool.allocate(blocks_for(length, size) - prompt_blocks, BlockState.RUNNING)
            leg.held_blocks += tail
            leg.sequence_blocks.append((*leg.sequence_blocks[0][:prompt_blocks], *tail))
        return len(held) * size

    def _job(self, leg: Leg, cached: int) -> tuple[PrefillJob, asyncio.Future[list[FirstToken]]]:
        command = leg.command
        ready: asyncio.Future[list[FirstToken]] = asyncio.get_running_loop().create_future()
        writes = command.reservation is not None

        def on_start() -> None:
            leg.times.started = time.time()
            fault = self._fault("prefill.forward", command)
            if fault is not None and fault.kind == "fail":
                raise InternalError("fault injection: forward fails", reason="FAULT_INJECTED", retryable=True)
            if fault is not None:
                time.sleep(fault.seconds)

        def on_layer(layer: int, rows_ready: Callable[[], None]) -> None:
            if writes:
                self._pusher.push_layer(leg, layer, rows_ready)

        def on_tokens(tokens: list[FirstToken]) -> None:
            leg.times.computed = time.time()
            leg.post(_settle, ready, tokens)
            leg.post(leg.computed.set)

        def on_error(error: BaseException) -> None:
            leg.post(_settle_error, ready, error)
            leg.post(leg.computed.set)

        sequences = sequences_of(command, leg.sequence_blocks, cached, self._pool.block_size)
        job = PrefillJob(
            key=leg.key,
            sequences=sequences,
            sampling=command.sampling,
            sample_indices=command.sample_indices,
            delivered_counts=tuple(len(command.delivered.get(sample, ())) for sample in command.sample_indices),
            prompt_length=len(command.prompt_token_ids),
            on_start=on_start,
            on_layer=on_layer,
            on_tokens=on_tokens,
            on_error=on_error,
        )
        return job, ready

    async def _hand_over(self, leg: Leg, live: Sequence[FirstToken], parent: str) -> None:
        for attempt in range(self._config.commit_retries + 1):
            await leg.pushed.wait()
            if leg.failure is not None:
                raise leg.failure
            self._report.push(leg, parent)
            try:
                await self._commit(leg, live)
                return
            except ManifestMismatch:
                telemetry.counter("headrace.push.repeats").add(1)
                if attempt == self._config.commit_retries:
                    raise
                leg.pushed.clear()
                self._pusher.push_again(leg)

    async def _commit(self, leg: Leg, live: Sequence[FirstToken]) -> None:
        command, reservation = leg.command, leg.reservation
        fault = self._fault("prefill.commit", command)
        if fault is not None and fault.kind == "fail":
            raise InternalError("fault injection: commit fails", reason="FAULT_INJECTED", retryable=True)
        if fault is not None:
            await self._clock.wait(fault.seconds)
        commit = CommitCommand(
            reservation_id=reservation.reservation_id,
            request_id=command.request_id,
            attempt=command.attempt,
            writer_epoch=self.info.identity.epoch,
            manifest=leg.manifest(),
            samples=tuple(
                SampleState(token.sample_index, (*command.delivered.get(token.sample_index, ()), token.token_id))
                for token in live
            ),
            prompt_token_ids=command.prompt_token_ids,
        )
        try:
            await self._decode(reservation.decode.address).commit(commit, self._config.expiry_margin_s)
        except (Cancelled, DeadlineExceeded) as error:  # of this call, not of the request: decode is silent or stops
            raise Unavailable(f"decode did not answer Commit: {error.reason}", reason="COMMIT_UNANSWERED") from error
        leg.times.committed = time.time()

    async def _keep_renewed(self, leg: Leg) -> None:
        """Puts the reservation's expiry off until the leg ends. A refusal ends the leg; silence lets it expire."""
        reservation = leg.reservation
        port = self._decode(reservation.decode.address)
        while leg.failure is None:
            asked = self._clock.now()
            try:
                left_s = await port.renew(
                    reservation.reservation_id, self.info.identity.epoch, self._config.renew_every_s
                )
                leg.renewed(asked + left_s)
            except (Unavailable, DeadlineExceeded):
                log.debug("renew unanswered")
            except HeadraceError as error:
                leg.fail(error)
                return
            await self._clock.wait(self._config.renew_every_s)

    async def _retire(self, leg: Leg) -> None:
        """Gives the leg's blocks back once the engine and the transfer thread are done with them."""
        if leg.was_queued and not leg.computed.is_set():
            if self._batcher.cancel(leg.key):
                leg.computed.set()
            await leg.computed.wait()
        while leg.is_writing:
            await asyncio.to_thread(leg.wait_drained, 1.0)
        self._keep_prefix(leg)
        if leg.held_blocks:
            self._pool.free(leg.held_blocks)
        self._room.freed()
        self._running.discard(leg)
        self._report.queue(self._queued_tokens)
        if leg.command.reservation is not None:
            self._bury(leg.reservation.reservation_id, drained=leg.is_drained)
            self._legs.pop(leg.reservation.reservation_id, None)

    def _keep_prefix(self, leg: Leg) -> None:
        if not (self._config.prefix_cache and leg.times.computed and leg.sequence_blocks):
            return
        keys = block_keys(leg.command.cache_salt, leg.command.prompt_token_ids, self._pool.block_size)
        for key, block in zip(keys, leg.sequence_blocks[0], strict=False):
            self._pool.register(key, block)
        self._publisher.publish(keys)

    def _fault(self, point: str, command: PrefillCommand) -> Fault | None:
        return self._faults.fire(point, attempt=command.attempt, request_id=command.request_id)

    def _bury(self, reservation_id: str, *, drained: bool) -> StopState:
        """Remembers that this reservation is over. Once late writes were possible, that is what every later Stop hears."""
        now = self._clock.now()
        earlier = self._tombstones.pop(reservation_id, None)
        tombstone = _Tombstone(now + TOMBSTONE_S, drained and (earlier is None or earlier.drained))
        self._tombstones[reservation_id] = tombstone
        while next(iter(self._tombstones.values())).forget_at < now:
            self._tombstones.popitem(last=False)
        return StopState.DRAINED if tombstone.drained else StopState.UNKNOWN


@dataclass(frozen=True)
class _Tombstone:
    """A reservation that is over: until when that is remembered, and whether its writes are known to have ended."""

    forget_at: float
    drained: bool


@contextlib.contextmanager
def _cancelling(task: asyncio.Task):
    try:
        yield task
    finally:
        task.cancel()


def _settle(future: asyncio.Future, value) -> None:
    if not future.done():
        future.set_result(value)


def _settle_error(future: asyncio.Future, error: BaseException) -> None:
    if future.done():
        return
    if isinstance(error, HeadraceError):
        future.set_exception(error)
    else:
        text = f"forward failed: {type(error).__name__}: {error}"
        future.set_exception(InternalError(text, reason="FORWARD_FAILED", retryable=True))
