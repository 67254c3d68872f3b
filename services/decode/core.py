"""One decode rank's decisions: who gets room, which commits are right, which tokens go where, when blocks come back.

Everything here runs on the event loop. The engine thread reaches it through `on_step` and `on_failure`, which only post to
the loop; checksums, row copies and the fence run in worker threads. Blocks of an ended request come back
once nobody can touch them any more: its writer says so (`stop_writer`), or the transfer target is fenced.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from headrace import logs, telemetry
from headrace.cache.blocks import BlockPool, BlockState
from headrace.clock import Clock
from headrace.config import DecodeConfig
from headrace.engine.request import DecodeSequence, SampledToken
from headrace.errors import (
    Cancelled,
    HeadraceError,
    InternalError,
    InvalidRequest,
    ManifestMismatch,
    Overloaded,
    StaleAttempt,
    StaleEpoch,
    Unavailable,
)
from headrace.faults import Faults
from headrace.protocol import (
    CommitCommand,
    DecodeLedger,
    FinishReason,
    Reservation,
    ReserveCommand,
    SampleEnd,
    Stage,
    StopState,
    TargetDescriptor,
    TokenFrame,
    WorkerIdentity,
    WorkerInfo,
)
from services.decode.reservation import OVER, PROMISED, ReservationRecord, ReservationTable, State
from services.decode.seats import SeatPlan, Seats, check_commit, check_counts, check_rows, plan_seats
from services.decode.streams import RouterStream, SampleOutput, TokenStreams

log = logs.get(__name__)

TICK_S = 0.1
"""How finely time-outs are kept. Nobody looks while nothing can time out."""
STOP_RETRY_S = 0.5
"""Pause before a silent writer is asked again."""
FENCE_RETRY_S = 1.0
RETRY_AFTER_S = 1.0
"""The hint given with RESOURCE_EXHAUSTED."""

Checksum = Callable[[int, Sequence[int], int, int], int]
"""(layer, blocks, first_row, num_rows) -> signed 64-bit checksum of those token positions. Called in a worker thread."""
CopyRows = Callable[[int, int, int], None]
"""(source block, target block, rows), in every layer. Called in a worker thread."""
StopWriter = Callable[[WorkerIdentity, str, float], Awaitable[StopState]]
"""(writer, reservation id, wait_s) -> its answer. Bounded in time; raises HeadraceError when there is none."""


class DecodeEngine(Protocol):
    """The batch that steps, as this core uses it."""

    def connect(
        self,
        on_step: Callable[[Sequence[SampledToken]], None],
        on_failure: Callable[[Sequence[DecodeSequence], Exception], None],
    ) -> None:
        """Both are called in the engine thread: after each step, and when a step lost the sequences named."""

    def add(self, sequences: Sequence[DecodeSequence]) -> None:
        """They step from now on. Does not block."""

    async def remove(self, handle: int, sample_index: int | None = None) -> None:
        """Takes one sample or all of a handle out; afterwards no forward touches their blocks. Safe to repeat."""

    @property
    def steps(self) -> int:
        """Forwards since start."""


class Target(Protocol):
    """The written side of the transfer."""

    def descriptor(self) -> TargetDescriptor: ...

    def fence(self) -> TargetDescriptor: ...


@dataclass
class Collaborators:
    """What a Decoder works with."""

    clock: Clock
    pool: BlockPool
    engine: DecodeEngine
    target: Target
    checksum: Checksum
    copy_rows: CopyRows
    stop_writer: StopWriter
    faults: Faults = field(default_factory=Faults)


class _Phase(enum.Enum):
    ACTIVE = "active"
    DRAINING = "draining"
    STOPPED = "stopped"


@dataclass(eq=False)
class _Request:
    """What the core holds for one live reservation record."""

    record: ReservationRecord
    plan: SeatPlan
    traceparent: str
    wait_until: float
    engine_handle: int
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    refusal: HeadraceError | None = None
    callers: int = 0
    promise: Reservation | None = None
    heard: bool = False
    """Somebody got the promise: the writer may know where to write."""
    seats: Seats | None = None
    generation: int = 0
    fence_at: float | None = None
    """When a silent writer's silence ends in a fence. None unless blocks wait for the writer."""
    commit: asyncio.Future | None = None
    settling: asyncio.Task | None = None
    outputs: dict[int, SampleOutput] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)
    timing: _Timing | None = None

    @property
    def command(self) -> ReserveCommand:
        return self.record.command


@dataclass
class _Timing:
    """Readings of the clock, in seconds, of one running request."""

    arrived: float
    committed: float
    first_step_began: float = 0.0
    last_step: int = 0
    step_times: list[float] = field(default_factory=list)

    def stepped(self, step: _Step) -> None:
        """A step made tokens for this request; counted once however many samples it has."""
        if step.number == self.last_step:
            return
        if not self.step_times:
            self.first_step_began = step.began
        self.last_step = step.number
        self.step_times.append(step.ended)


@dataclass(frozen=True)
class _Step:
    """What one step produced. Steps run back to back: one `began` when the one before `ended`, or later."""

    number: int
    began: float
    ended: float
    tokens: Sequence[SampledToken]


class Decoder:
    """The core of a decode rank. Use `async with Decoder.open(...) as core`."""

    def __init__(
        self,
        config: DecodeConfig,
        info: WorkerInfo,
        collaborators: Collaborators,
        tasks: asyncio.TaskGroup,
        *,
        stop_wait_s: float,
        output_chunk: int,
    ):
        self._config, self._info, self._tasks = config, info, tasks
        self._clock, self._pool = collaborators.clock, collaborators.pool
        self._engine, self._target, self._faults = collaborators.engine, collaborators.target, collaborators.faults
        self._checksum, self._copy_rows = collaborators.checksum, collaborators.copy_rows
        self._stop_writer = collaborators.stop_writer
        self._stop_wait_s, self._output_chunk = stop_wait_s, output_chunk
        self._phase = _Phase.ACTIVE
        self._table = ReservationTable(config.reserve_expiry_s, config.reserve_expiry_s + config.quarantine_max_s)
        self._requests: dict[str, _Request] = {}
        self._running: dict[int, _Request] = {}
        self._queue: deque[_Request] = deque()
        self._streams = TokenStreams(self._clock, config.stream_resume_s, self._router_lost, self._watch_time)
        self._engine_handles = itertools.count(1)
        self._generation = 0
        self._fencing = False
        self._steps: deque[_Step] = deque()
        self._last_step = _Step(0, 0.0, 0.0, ())
        self._stepped, self._timed, self._settled = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="decode-check")
        self._background: set[asyncio.Task] = set()

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls,
        config: DecodeConfig,
        info: WorkerInfo,
        collaborators: Collaborators,
        *,
        stop_wait_s: float = 6.0,
        output_chunk: int = 128,
    ) -> AsyncIterator[Decoder]:
        """A decoder that lives as long as the block.

        stop_wait_s   how long a writer may take to end its running writes; above the transfer time-out
        output_chunk  sampled tokens handled between two looks at the event loop
        """
        async with asyncio.TaskGroup() as tasks:
            core = cls(config, info, collaborators, tasks, stop_wait_s=stop_wait_s, output_chunk=output_chunk)
            core._engine.connect(core.on_step, core.on_failure)
            core._spawn(core._keep_time)
            core._spawn(core._process_steps)
            try:
                yield core
            finally:
                core._stop()

    # --- reserve -----------------------------------------------------------------------------------------------------

    async def reserve(self, command: ReserveCommand, time_left_s: float) -> Reservation:
        """Room for one attempt; waits for it at most `time_left_s`. A repeated call gets the first answer.

        Raises InvalidRequest for what can never fit, Overloaded, Unavailable, StaleEpoch, StaleAttempt.
        """
        self._check_epoch(command.decode_epoch)
        parent = telemetry.traceparent()
        with telemetry.span(
            "decode.reserve", attempt=command.attempt, epoch=self._info.identity.epoch, tokens=command.prompt_tokens
        ) as span:
            await self._inject("decode.reserve", attempt=command.attempt, request_id=command.request_id)
            request = self._find_or_queue(command, parent, self._clock.now() + time_left_s)
            promise = await self._wait_for_promise(request)
            span.set(blocks=request.plan.num_blocks)
            return promise

    def _find_or_queue(self, command: ReserveCommand, traceparent: str, wait_until: float) -> _Request:
        plan = self._plan(command)
        stream = self._streams.find(command.router.epoch)
        if stream is None or not stream.is_open:
            raise Unavailable("this router epoch has no open token stream here", reason="NO_TOKEN_STREAM")
        first = self._table.find(command.request_id, command.attempt)
        if first is not None:
            return self._requests[first.reservation_id]
        self._check_admission(command)
        record, superseded = self._table.open(command, self._clock.now())
        request = _Request(record, plan, traceparent, wait_until, next(self._engine_handles))
        self._requests[record.reservation_id] = request
        for older in superseded:
            self._end(self._requests[older.reservation_id], StaleAttempt(f"superseded by attempt {command.attempt}"))
        (self._queue.appendleft if record.keeps_place else self._queue.append)(request)
        self._watch_time()
        self._admit()
        return request

    def _plan(self, command: ReserveCommand) -> SeatPlan:
        plan = plan_seats(command, self._pool.block_size, self._info.max_context_tokens)
        if plan.num_blocks > self._pool.num_blocks:
            raise InvalidRequest(
                f"sampling.max_tokens: {command.prompt_tokens} prompt + {command.sampling.max_tokens} output tokens for "
                f"{len(command.sample_indices)} samples need {plan.num_blocks} blocks of {plan.block_size}; this rank "
                f"has {self._pool.num_blocks}",
                field="sampling.max_tokens",
            )
        return plan

    def _check_admission(self, command: ReserveCommand) -> None:
        if self._phase is not _Phase.ACTIVE:
            raise Unavailable("this decode rank is draining", reason="DRAINING")
        named = ((r.command.router, r.command.handle) for r in self._requests.values())
        if (command.router, command.handle) in named:
            raise InvalidRequest(f"handle: {command.handle} names another attempt of this router", field="handle")
        if len(self._queue) >= self._config.max_waiting_requests and not self._table.keeps_place(command.request_id):
            raise Overloaded(
                f"{len(self._queue)} requests wait for room, the most allowed", retry_after_s=RETRY_AFTER_S
            )

    async def _wait_for_promise(self, request: _Request) -> Reservation:
        request.callers += 1
        try:
            await request.answered.wait()
        except asyncio.CancelledError:
            if request.callers == 1 and not request.heard and request.record.state not in OVER:
                self._release_record(request.record, Cancelled("the caller left"))
            raise
        finally:
            request.callers -= 1
        if request.refusal is not None or request.promise is None:
            raise request.refusal or StaleAttempt("the reservation has ended")
        request.heard = True
        return request.promise

    def _admit(self) -> None:
        """Gives room to those who wait, in order, as far as it goes. Not while the target is being replaced."""
        while self._queue and not self._fencing and self._pool.can_allocate(self._queue[0].plan.num_blocks):
            request = self._queue.popleft()
            try:
                self._grant(request)
            except HeadraceError as error:
                self._drop_waiting(request, error)

    def _grant(self, request: _Request) -> None:
        target = self._target.descriptor()
        blocks = self._pool.allocate(request.plan.num_blocks, BlockState.RESERVED)
        request.seats, request.generation = Seats(request.plan, blocks), self._generation
        self._table.grant(request.record, self._clock.now())
        request.promise = Reservation(
            reservation_id=request.record.reservation_id,
            decode=self._info.identity,
            target=target,
            sequences=request.seats.sequences(),
            layout_fingerprint=self._info.layout.fingerprint,
            held_prefix_tokens=0,
            expires_in_s=self._config.reserve_expiry_s,
        )
        request.answered.set()
        self._watch_time()

    # --- renew, commit -----------------------------------------------------------------------------------------------

    def renew(self, reservation_id: str, writer_epoch: str) -> float:
        """Seconds until the reservation now expires. Raises StaleAttempt, StaleEpoch."""
        return self._table.renew(reservation_id, writer_epoch, self._clock.now())

    async def commit(self, command: CommitCommand) -> float:
        """Seconds from the call to acceptance; the request steps from then on. A repeated call gets the first answer.

        Raises ManifestMismatch (the writer may push and commit again), StaleAttempt, StaleEpoch, InvalidRequest.
        """
        arrived = self._clock.now()
        record = self._table.find_commit(command)
        if record.commit_duration_s is not None:
            return record.commit_duration_s
        request = self._requests[record.reservation_id]
        if request.commit is None:
            check_commit(command, request.command)
            self._table.begin_commit(record, arrived)
            request.commit = self._loop.create_future()
            self._spawn(self._accept, request, command, arrived)
        answer = await asyncio.shield(request.commit)
        if isinstance(answer, HeadraceError):
            raise answer
        return answer

    async def _accept(self, request: _Request, command: CommitCommand, arrived: float) -> None:
        """Resolves `request.commit` with the duration or an error. Goes on when the caller has left."""
        outcome: float | HeadraceError = Unavailable("this decode rank has stopped", reason="DRAINING")
        try:
            with telemetry.span("decode.commit", attempt=command.attempt, tokens=len(command.prompt_token_ids)):
                outcome = await self._check_and_start(request, command, arrived)
        except ManifestMismatch as error:
            telemetry.counter("headrace.decode.manifest_mismatch").add(1)
            log.warning("manifest mismatch", reservation_id=command.reservation_id, reason=str(error))
            outcome = error
        except HeadraceError as error:
            outcome = error
        except Exception as error:
            log.error("commit failed", error=error)
            outcome = InternalError(f"unexpected {type(error).__name__} while checking a commit")
        finally:
            commit, request.commit = request.commit, None
            if commit is not None and not commit.done():
                commit.set_result(outcome)

    async def _check_and_start(self, request: _Request, command: CommitCommand, arrived: float) -> float:
        await self._inject("decode.commit", attempt=command.attempt, request_id=command.request_id)
        assert request.promise is not None and request.seats is not None
        sequences = request.promise.sequences
        check_counts(command.manifest, sequences, self._info.layout.layer_count)
        await self._in_worker(check_rows, command.manifest, sequences, self._checksum)
        self._table.accept(request.record)
        self._pool.move(request.seats.held(), BlockState.RUNNING)
        going_on = tuple(s.sample_index for s in command.samples if s.sample_index not in request.dropped)
        copies = request.seats.copies(going_on)
        if copies:
            await self._in_worker(self._copy_all, copies)
        now = self._clock.now()
        self._table.run(request.record, now - arrived)
        request.timing = _Timing(arrived, now)
        self._start(request, command)
        return now - arrived

    def _copy_all(self, copies: Sequence[tuple[int, int, int]]) -> None:
        for source, target, rows in copies:
            self._copy_rows(source, target, rows)

    def _start(self, request: _Request, command: CommitCommand) -> None:
        """RUNNING: what goes on joins the batch, seats of samples that ended before are given back."""
        seats, reserve = request.seats, request.command
        assert seats is not None
        states = {s.sample_index: s for s in command.samples if s.sample_index not in request.dropped}
        sequences = [
            DecodeSequence(
                handle=request.engine_handle,
                sample_index=sample,
                sampling=reserve.sampling,
                prompt_token_ids=command.prompt_token_ids,
                output_token_ids=list(state.output_token_ids),
                block_table=list(seats.table(sample)),
            )
            for sample, state in states.items()
        ]
        for sample in seats.open_samples():
            if sample not in states:
                self._give_back(seats.leave(sample))
        if not sequences:
            self._finish(request)
            return
        for sample in states:
            request.outputs[sample] = SampleOutput(reserve.handle, sample, reserve.stream_interval, reserve.sampling)
        self._running[request.engine_handle] = request
        self._engine.add(sequences)
        self._admit()

    # --- release -----------------------------------------------------------------------------------------------------

    def release(self, request_id: str, attempt: int, decode_epoch: str, sample_indices: Sequence[int] = ()) -> None:
        """Ends attempts up to `attempt`, or only some of their samples, in any state. Safe to repeat. Raises StaleEpoch.

        Returns at once; blocks come back when nobody can touch them any more.
        """
        self._check_epoch(decode_epoch)
        over = not sample_indices
        for record in self._table.live(request_id, attempt):
            request = self._requests[record.reservation_id]
            going_on = set(request.outputs or request.command.sample_indices) - request.dropped
            if sample_indices and going_on - set(sample_indices):
                for sample in going_on & set(sample_indices):
                    self._drop_sample(request, sample)
            else:
                self._end(request, Cancelled("released"))
                over = True
        if over:
            self._table.bury(request_id, attempt, self._clock.now())
            self._watch_time()

    def _drop_sample(self, request: _Request, sample: int) -> None:
        """One of several samples ends early; before the commit it just will not start."""
        request.dropped.add(sample)
        if request.outputs.pop(sample, None) is not None and request.seats is not None:
            self._pool.move(request.seats.own(sample), BlockState.QUARANTINED)
            self._spawn(self._remove_sample, request, sample)

    async def _remove_sample(self, request: _Request, sample: int) -> None:
        await self._engine.remove(request.engine_handle, sample)
        assert request.seats is not None
        self._give_back(request.seats.leave(sample))
        if not request.seats.open_samples() and request.record.state is State.RUNNING:
            self._finish(request)
        self._admit()

    def _release_record(self, record: ReservationRecord, error: HeadraceError) -> None:
        self._table.bury(*record.key, self._clock.now())
        self._end(self._requests[record.reservation_id], error)

    # --- ends --------------------------------------------------------------------------------------------------------

    def _end(self, request: _Request, error: HeadraceError) -> None:
        """The request is over before its own end. Its blocks are freed by the task that this starts, or here."""
        record = request.record
        if record.state is State.WAITING:
            self._drop_waiting(request, error)
            return
        was = record.state
        request.refusal = error
        self._table.quarantine(record)
        self._running.pop(request.engine_handle, None)
        request.outputs.clear()
        assert request.seats is not None
        self._pool.move(request.seats.held(), BlockState.QUARANTINED)
        writer_knows = request.heard and was in PROMISED
        if not writer_knows and request.commit is None and was is not State.RUNNING:
            self._freed(request)
        else:
            request.settling = self._spawn(self._settle, request, was, writer_knows)

    def _drop_waiting(self, request: _Request, error: HeadraceError | None) -> None:
        with contextlib.suppress(ValueError):
            self._queue.remove(request)
        request.refusal = error
        request.answered.set()
        self._table.free(request.record, self._clock.now())
        del self._requests[request.record.reservation_id]
        self._settled.set()

    async def _settle(self, request: _Request, was: State, writer_knows: bool) -> None:
        """Waits until nobody can touch the blocks any more: a commit's worker, a step, the writer."""
        if request.commit is not None:
            await asyncio.wait([request.commit])
        if was is State.RUNNING:
            await self._engine.remove(request.engine_handle, None)
        if not writer_knows or request.generation < self._generation or await self._writer_is_done(request):
            self._freed(request)

    async def _writer_is_done(self, request: _Request) -> bool:
        """True once the writer says that no write will follow; False when only a fence can help, and is on its way.

        Silence is bounded by the time keeper, which fences; that ends this task.
        """
        request.fence_at = self._clock.now() + self._config.quarantine_max_s
        self._watch_time()
        while True:
            try:
                answer = await self._stop_writer(
                    request.command.writer, request.record.reservation_id, self._stop_wait_s
                )
            except Exception as error:
                log.warning("writer does not answer", writer=request.command.writer.address, reason=repr(error))
                await self._clock.wait(STOP_RETRY_S)
                continue
            if answer is StopState.DRAINED:
                request.fence_at = None
                return True
            self._start_fence()
            return False

    def _freed(self, request: _Request) -> None:
        assert request.seats is not None
        self._table.free(request.record, self._clock.now())
        self._requests.pop(request.record.reservation_id, None)
        self._give_back(request.seats.leave_all())
        self._settled.set()
        self._watch_time()
        self._admit()

    def _finish(self, request: _Request) -> None:
        """All samples ended by themselves. RUNNING -> FREED."""
        self._running.pop(request.engine_handle, None)
        self._freed(request)

    def _give_back(self, blocks: Sequence[int]) -> None:
        if blocks:
            self._pool.free(blocks)

    # --- the fence ---------------------------------------------------------------------------------------------------

    def _start_fence(self) -> None:
        if not self._fencing:
            self._fencing = True
            self._spawn(self._fence)

    async def _fence(self) -> None:
        """Replaces the transfer target; then no write begun before can land, and what waited for one is freed."""
        while True:
            try:
                await self._inject("transfer.fence")
                await asyncio.to_thread(self._target.fence)
                break
            except Exception as error:
                log.error("the transfer target could not be replaced; its quarantined blocks stay held", error=error)
                await self._clock.wait(FENCE_RETRY_S)
        self._generation += 1
        self._fencing = False
        telemetry.counter("headrace.decode.fences").add(1)
        log.warning("transfer target replaced", fences=self._generation)
        for request in [r for r in self._requests.values() if r.fence_at is not None]:
            if request.settling is not None:
                request.settling.cancel()
            request.fence_at = None
            self._freed(request)
        self._admit()

    # --- time --------------------------------------------------------------------------------------------------------

    def _watch_time(self) -> None:
        self._timed.set()

    async def _keep_time(self) -> None:
        """Everything that ends by time, with or without traffic. Sleeps for good while nothing can."""
        while True:
            await self._timed.wait()
            await self._clock.wait(TICK_S)
            try:
                self._look_at_time(self._clock.now())
            except Exception as error:
                log.error("a time-out could not be handled", error=error)

    def _look_at_time(self, now: float) -> None:
        for record in self._table.expired(now):
            self._expire(self._requests[record.reservation_id])
        for request in [r for r in self._queue if r.wait_until <= now]:
            self._drop_waiting(
                request, Overloaded("no room within the deadline", reason="NO_ROOM", retry_after_s=RETRY_AFTER_S)
            )
        if any(r.fence_at is not None and r.fence_at <= now for r in self._requests.values()):
            self._start_fence()
        self._streams.lapse()
        self._table.forget(now)
        if self._table.is_empty and not self._streams.any_broken:
            self._timed.clear()

    def _expire(self, request: _Request) -> None:
        if request.commit is not None:
            return  # being checked; a check always ends
        log.info("reservation expired", reservation_id=request.record.reservation_id)
        self._send_error(request, "RESERVATION_EXPIRED")
        self._release_record(request.record, StaleAttempt("the reservation has expired"))

    def _router_lost(self, router_epoch: str, error: HeadraceError) -> None:
        lost = [r for r in self._requests.values() if r.command.router.epoch == router_epoch]
        for request in [r for r in lost if r.record.state not in OVER]:
            self._release_record(request.record, error)

    # --- tokens ------------------------------------------------------------------------------------------------------

    async def stream_tokens(
        self, router: WorkerIdentity, decode_epoch: str, resume_after_frame: int
    ) -> AsyncIterator[TokenFrame]:
        """The frames of one router, without an end. Raises StaleEpoch, Unavailable, Overloaded (the reader stalled)."""
        if decode_epoch:
            self._check_epoch(decode_epoch)
        if self._phase is _Phase.STOPPED:
            raise Unavailable("this decode rank has stopped", reason="DRAINING")
        async with contextlib.aclosing(self._streams.read(router, resume_after_frame)) as frames:
            async for frame in frames:
                yield frame

    def on_step(self, tokens: Sequence[SampledToken]) -> None:
        """One step's SampledTokens; called in the engine thread, costs it one append and one wake-up of the loop."""
        last = self._last_step
        self._last_step = _Step(last.number + 1, last.ended, self._clock.now(), tokens)
        self._steps.append(self._last_step)
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._stepped.set)

    def on_failure(self, sequences: Sequence[DecodeSequence], error: Exception) -> None:
        """A step failed; called in the engine thread. The requests of these sequences are lost here."""
        handles = {sequence.handle for sequence in sequences}
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._lose, handles, error)

    def _lose(self, handles: set[int], error: Exception) -> None:
        log.error("a decode step failed", error=error, requests=len(handles))
        for request in [self._running[handle] for handle in handles if handle in self._running]:
            self._send_error(request, "ENGINE_FAILED")
            self._release_record(request.record, InternalError("a decode step failed"))

    async def _process_steps(self) -> None:
        while True:
            await self._stepped.wait()
            self._stepped.clear()
            try:
                await self._process_waiting_steps()
            except Exception as error:
                log.error("the output of a step could not be handled", error=error)

    async def _process_waiting_steps(self) -> None:
        """All steps that have gathered become at most one frame a router."""
        touched: set[RouterStream] = set()
        while self._steps:
            step = self._steps.popleft()
            for first in range(0, len(step.tokens), self._output_chunk):
                if first:
                    await asyncio.sleep(0)
                self._take_tokens(step, step.tokens[first : first + self._output_chunk], touched)
        for stream in touched:
            stream.flush()

    def _take_tokens(self, step: _Step, tokens: Sequence[SampledToken], touched: set[RouterStream]) -> None:
        """The one loop that runs once per token: look-ups, an append, nothing else."""
        for token in tokens:
            request = self._running.get(token.handle)
            output = request.outputs.get(token.sample_index) if request is not None else None
            if request is None or output is None:
                continue  # released meanwhile
            request.timing.stepped(step)  # type: ignore[union-attr]
            if not output.add(token) and token.finish_reason is FinishReason.NONE:
                continue
            stream = self._streams.find(request.command.router.epoch)
            if stream is None:
                continue
            touched.add(stream)
            record = output.take()
            if record is not None:
                stream.add_record(record)
            if token.finish_reason is not FinishReason.NONE:
                self._sample_ended(request, token.sample_index, token.finish_reason, stream)

    def _sample_ended(
        self, request: _Request, sample_index: int, finish_reason: FinishReason, stream: RouterStream
    ) -> None:
        assert request.seats is not None
        del request.outputs[sample_index]
        self._give_back(request.seats.leave(sample_index))
        stages = () if request.outputs else self._stages(request)
        stream.add_end(SampleEnd(request.command.handle, sample_index, finish_reason, "", stages))
        if not request.seats.open_samples():
            self._finish(request)
        self._admit()

    def _stages(self, request: _Request) -> tuple[Stage, ...]:
        """Where the time on this rank went since Commit arrived; the same as spans of the request's trace."""
        timing = request.timing
        assert timing is not None
        began = max(timing.committed, timing.first_step_began)
        ended = timing.step_times[-1]
        gaps = np.diff(timing.step_times) if len(timing.step_times) > 1 else np.zeros(1)
        parent, wall = request.traceparent, time.time() - self._clock.now()
        common = {"parent": parent, "request_id": request.command.request_id, "attempt": request.command.attempt}
        telemetry.emit("decode.queue", wall + timing.committed, wall + began, **common)
        telemetry.emit(
            "decode.generate",
            wall + began,
            wall + ended,
            steps=len(timing.step_times),
            itl_mean_s=float(gaps.mean()),
            itl_p99_s=float(np.quantile(gaps, 0.99)),
            **common,
        )
        queue = Stage("decode.queue", timing.committed - timing.arrived, began - timing.committed)
        generate = Stage("decode.generate", began - timing.arrived, ended - began, tokens=len(timing.step_times))
        return queue, generate

    def _send_error(self, request: _Request, reason: str) -> None:
        """Tells the router at once that an attempt is lost here."""
        stream = self._streams.find(request.command.router.epoch)
        if stream is not None:
            for sample in request.outputs or request.command.sample_indices:
                stream.add_end(SampleEnd(request.command.handle, sample, FinishReason.NONE, reason))
            stream.flush()

    # --- life --------------------------------------------------------------------------------------------------------

    def info(self) -> WorkerInfo:
        """Identity, layout and limits."""
        return self._info

    def ledger(self) -> DecodeLedger:
        """Who holds what now."""
        return DecodeLedger(
            blocks=self._pool.ledger(),
            waiting_requests=self._table.count(State.WAITING),
            reserved_requests=self._table.count(*PROMISED),
            running_requests=self._table.count(State.COMMITTED, State.RUNNING),
            quarantined_requests=self._table.count(State.QUARANTINED),
            steps=self._engine.steps,
            fences=self._generation,
            open_streams=self._streams.num_open,
        )

    async def drain(self, grace_s: float) -> None:
        """Refuses new requests, honours promises, lets what runs finish, at most `grace_s`; then ends the streams."""
        self._phase = _Phase.DRAINING
        draining = Unavailable("this decode rank is draining", reason="DRAINING")
        for request in list(self._queue):
            self._drop_waiting(request, draining)
        timeout = self._spawn(self._clock.wait, grace_s)
        while self._table.count(*PROMISED, State.COMMITTED, State.RUNNING) and not timeout.done():
            self._settled.clear()
            settled = self._spawn(self._settled.wait)
            await asyncio.wait((settled, timeout), return_when=asyncio.FIRST_COMPLETED)
            settled.cancel()
        timeout.cancel()
        for request in self._unfinished():
            self._send_error(request, "DRAINING")
            self._release_record(request.record, draining)
        self._streams.close(draining)

    def _stop(self) -> None:
        self._phase = _Phase.STOPPED
        stopped = Unavailable("this decode rank has stopped", reason="DRAINING")
        for request in self._unfinished():
            self._send_error(request, "DRAINING")
            request.refusal = stopped
            request.answered.set()
        self._streams.close(stopped)
        for task in list(self._background):
            task.cancel()
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _unfinished(self) -> list[_Request]:
        return [request for request in self._requests.values() if request.record.state not in OVER]

    # --- inside ------------------------------------------------------------------------------------------------------

    def _check_epoch(self, decode_epoch: str) -> None:
        if decode_epoch != self._info.identity.epoch:
            raise StaleEpoch(f"meant for decode epoch {decode_epoch or '(none)'}, this is {self._info.identity.epoch}")

    def _in_worker(self, function: Callable, *arguments: Any) -> Awaitable[Any]:
        """Runs in the one thread that checks and copies rows: commits queue there, not before the engine."""
        return self._loop.run_in_executor(self._worker, function, *arguments)

    async def _inject(self, point: str, **match: object) -> None:
        """Commits a configured fault: raises, or waits."""
        fault = self._faults.fire(point, **match)
        if fault is not None and fault.kind == "delay":
            await self._clock.wait(fault.seconds)
        elif fault is not None:
            raise Unavailable(f"fault injected at {point}", reason="FAULT_INJECTED")

    def _spawn(self, work: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any) -> asyncio.Task:
        """A task of this core's group. An unexpected error is logged and does not end the others."""
        task = self._tasks.create_task(self._guarded(work, *arguments))
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _guarded(self, work: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any) -> None:
        try:
            await work(*arguments)
        except Exception as error:
            log.error("a background task failed", error=error)
