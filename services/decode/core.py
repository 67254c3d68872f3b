"""One decode rank's decisions: who gets room, which commits are right, when blocks come back.

Everything here runs on the event loop; checksums and row copies run in one worker thread. Tokens are `outputs.py`'s
business, late writes `quarantine.py`'s. Each live reservation has one `Request`, and only `_freed` gives its last blocks
back: after a commit's worker, the step that runs and the writer have all let go of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from headrace.cache.blocks import BlockState
from headrace.clock import within
from headrace.config import DecodeConfig
from headrace.engine.request import DecodeSequence
from headrace.errors import (
    Cancelled,
    HeadraceError,
    InternalError,
    InvalidRequest,
    ManifestMismatch,
    StaleAttempt,
    StaleEpoch,
    Unavailable,
)
from headrace.observe import logs, telemetry
from headrace.observe.context import request_id_var
from headrace.protocol import (
    CommitCommand,
    DecodeLedger,
    FinishReason,
    Reservation,
    ReserveCommand,
    SampleEnd,
    TokenFrame,
    WorkerIdentity,
    WorkerInfo,
)
from services.decode.admission import Admission
from services.decode.background import Background
from services.decode.interfaces import Collaborators
from services.decode.outputs import Outputs, RunningRequest
from services.decode.quarantine import Quarantine
from services.decode.request import Request
from services.decode.reservation import OVER, PROMISED, ReservationRecord, ReservationTable, State
from services.decode.seats import check_commit, check_counts, check_rows
from services.decode.streams import SampleOutput, TokenStreams

log = logs.get(__name__)

TICK_S = 0.1
"""How finely time-outs are kept. Nobody looks while nothing can time out."""


class _Phase(enum.Enum):
    ACTIVE = "active"
    DRAINING = "draining"
    STOPPED = "stopped"


class Decoder:
    """The core of a decode rank. Use `async with Decoder.open(...) as core`."""

    def __init__(
        self,
        config: DecodeConfig,
        info: WorkerInfo,
        collaborators: Collaborators,
        background: Background,
        *,
        stop_wait_s: float,
        output_chunk: int,
    ):
        self._config, self._info, self._background = config, info, background
        self._clock, self._pool = collaborators.clock, collaborators.pool
        self._engine, self._faults = collaborators.engine, collaborators.faults
        self._checksums, self._copy_rows = collaborators.checksums, collaborators.copy_rows
        self._phase = _Phase.ACTIVE
        self._table = ReservationTable(config.reserve_expiry_s, config.reserve_expiry_s + config.quarantine_max_s)
        self._requests: dict[str, Request] = {}
        self._by_engine_handle: dict[int, Request] = {}
        self._streams = TokenStreams(self._clock, config.stream_resume_s, self._router_lost, self._watch_time)
        self._outputs = Outputs(self._clock, self._streams, output_chunk, self._sample_ended, self._engine_lost)
        self._quarantine = Quarantine(
            self._clock,
            collaborators.target,
            collaborators.stop_writer,
            background,
            collaborators.faults,
            silence_s=config.quarantine_max_s,
            stop_wait_s=stop_wait_s,
            on_fenced=self._admit,
        )
        self._admission = Admission(
            self._clock,
            info,
            self._pool,
            self._table,
            self._quarantine,
            max_waiting=config.max_waiting_requests,
            expiry_s=config.reserve_expiry_s,
            on_refused=self._forget,
        )
        self._engine_handles = itertools.count(1)
        self._timed, self._settled = asyncio.Event(), asyncio.Event()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="decode-check")

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
            background = Background(tasks)
            core = cls(config, info, collaborators, background, stop_wait_s=stop_wait_s, output_chunk=output_chunk)
            core._engine.connect(core._outputs.on_step, core._outputs.on_failure)
            background.spawn(core._keep_time)
            background.spawn(core._outputs.run)
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

    def _find_or_queue(self, command: ReserveCommand, traceparent: str, wait_until: float) -> Request:
        plan = self._admission.plan(command)
        stream = self._streams.find(command.router.epoch)
        if stream is None or not stream.is_open:
            raise Unavailable("this router epoch has no open token stream here", reason="NO_TOKEN_STREAM")
        first = self._table.find(command.request_id, command.attempt)
        if first is not None:
            return self._requests[first.reservation_id]
        self._check_admission(command)
        record, superseded = self._table.open(command, self._clock.now())
        name = request_id_var.get() or command.request_id
        request = Request(record, plan, name, traceparent, wait_until, next(self._engine_handles))
        self._requests[record.reservation_id] = request
        self._admission.enqueue(request)
        for older in superseded:
            self._end(self._requests[older.reservation_id], StaleAttempt(f"superseded by attempt {command.attempt}"))
        self._watch_time()
        self._admit()
        return request

    def _check_admission(self, command: ReserveCommand) -> None:
        if self._phase is not _Phase.ACTIVE:
            raise Unavailable("this decode rank is draining", reason="DRAINING")
        named = ((r.command.router, r.command.handle) for r in self._requests.values())
        if (command.router, command.handle) in named:
            raise InvalidRequest(f"handle: {command.handle} names another attempt of this router", field="handle")
        self._admission.check_bound(command.request_id)

    async def _wait_for_promise(self, request: Request) -> Reservation:
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
        """Blocks may have come back."""
        self._admission.admit()

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
            request.commit = asyncio.get_running_loop().create_future()
            self._background.spawn(self._accept, request, command, arrived)
        answer = await asyncio.shield(request.commit)
        if isinstance(answer, HeadraceError):
            raise answer
        return answer

    async def _accept(self, request: Request, command: CommitCommand, arrived: float) -> None:
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

    async def _check_and_start(self, request: Request, command: CommitCommand, arrived: float) -> float:
        await self._inject("decode.commit", attempt=command.attempt, request_id=command.request_id)
        assert request.promise is not None and request.seats is not None
        sequences = request.promise.sequences
        check_counts(command.manifest, sequences, self._info.layout.layer_count)
        await self._in_worker(check_rows, command.manifest, sequences, self._checksums)
        self._table.accept(request.record)
        self._pool.move(request.seats.held(), BlockState.RUNNING)
        going_on = tuple(s.sample_index for s in command.samples if s.sample_index not in request.dropped)
        copies = request.seats.copies(going_on)
        if copies:
            await self._in_worker(self._copy_all, copies)
        now = self._clock.now()
        self._table.run(request.record, now - arrived)
        self._start(request, command, arrived, now)
        return now - arrived

    def _copy_all(self, copies: Sequence[tuple[int, int, int]]) -> None:
        for source, target, rows in copies:
            self._copy_rows(source, target, rows)

    def _start(self, request: Request, command: CommitCommand, arrived: float, now: float) -> None:
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
        outputs = {s: SampleOutput(reserve.handle, s, reserve.stream_interval, reserve.sampling) for s in states}
        running = RunningRequest(reserve, request.name, request.traceparent, arrived, now, outputs)
        self._outputs.begin(request.engine_handle, running)
        self._by_engine_handle[request.engine_handle] = request
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
            going_on = self._outputs.samples(request.engine_handle) or set(request.command.sample_indices)
            going_on -= request.dropped
            if sample_indices and going_on - set(sample_indices):
                for sample in going_on & set(sample_indices):
                    self._drop_sample(request, sample)
            else:
                self._end(request, Cancelled("released"))
                over = True
        if over:
            self._table.bury(request_id, attempt, self._clock.now())
            self._watch_time()

    def _drop_sample(self, request: Request, sample: int) -> None:
        """One of several samples ends early; before the commit it just will not start."""
        request.dropped.add(sample)
        if self._outputs.drop(request.engine_handle, sample) and request.seats is not None:
            self._pool.move(request.seats.own(sample), BlockState.QUARANTINED)
            self._background.spawn(self._remove_sample, request, sample)

    async def _remove_sample(self, request: Request, sample: int) -> None:
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

    def _end(self, request: Request, error: HeadraceError) -> None:
        """The request is over before its own end. Its blocks are freed by the task that this starts, or here."""
        record = request.record
        if record.state is State.WAITING:
            self._admission.drop(request, error)
            return
        was = record.state
        request.refusal = error
        self._table.quarantine(record)
        self._outputs.drop(request.engine_handle)
        self._by_engine_handle.pop(request.engine_handle, None)
        assert request.seats is not None
        self._pool.move(request.seats.held(), BlockState.QUARANTINED)
        writer_knows = request.heard and was in PROMISED
        if not writer_knows and request.commit is None and was is not State.RUNNING:
            self._freed(request)
        else:
            self._watch_time()
            self._background.spawn(self._settle, request, was, writer_knows)

    async def _settle(self, request: Request, was: State, writer_knows: bool) -> None:
        """Waits until nobody can touch the blocks any more: a commit's worker, a step, the writer."""
        if request.commit is not None:
            await asyncio.wait([request.commit])
        if was is State.RUNNING:
            await self._engine.remove(request.engine_handle, None)
        if writer_knows:
            await self._quarantine.wait_no_late_writes(
                request.command.writer, request.reservation_id, request.generation
            )
        self._freed(request)

    def _freed(self, request: Request) -> None:
        assert request.seats is not None
        self._table.free(request.record, self._clock.now())
        self._forget(request)
        self._give_back(request.seats.leave_all())
        self._admit()

    def _forget(self, request: Request) -> None:
        """The record is FREED."""
        del self._requests[request.reservation_id]
        self._settled.set()
        self._watch_time()

    def _finish(self, request: Request) -> None:
        """All samples ended by themselves. RUNNING -> FREED."""
        self._by_engine_handle.pop(request.engine_handle, None)
        self._freed(request)

    def _give_back(self, blocks: Sequence[int]) -> None:
        if blocks:
            self._pool.free(blocks)

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
        self._admission.look(now)
        self._quarantine.look(now)
        self._streams.lapse()
        self._table.forget(now)
        self._report()
        if self._table.is_empty and not self._streams.any_broken:
            self._timed.clear()

    def _report(self) -> None:
        blocks = self._pool.ledger()
        for owner in ("free", "cached", "reserved", "running", "quarantined"):
            telemetry.gauge("headrace.decode.blocks").set(getattr(blocks, owner), owner=owner)
        telemetry.gauge("headrace.decode.running").set(self._outputs.num_running)
        telemetry.gauge("headrace.decode.waiting").set(len(self._admission))

    def _expire(self, request: Request) -> None:
        if request.commit is not None:
            return  # being checked; a check always ends
        log.info("reservation expired", reservation_id=request.reservation_id)
        self._send_error(request, "RESERVATION_EXPIRED")
        self._release_record(request.record, StaleAttempt("the reservation has expired"))

    def _router_lost(self, router_epoch: str, error: HeadraceError) -> None:
        lost = [r for r in self._requests.values() if r.command.router.epoch == router_epoch]
        for request in [r for r in lost if r.record.state not in OVER]:
            self._release_record(request.record, error)

    # --- tokens ------------------------------------------------------------------------------------------------------

    async def stream_tokens(
        self, router: WorkerIdentity, decode_epoch: str, resume_after_frame: int
    ) -> AsyncGenerator[TokenFrame, None]:
        """The frames of one router, without an end. Raises StaleEpoch, Unavailable, Overloaded (the reader stalled)."""
        if decode_epoch:
            self._check_epoch(decode_epoch)
        if self._phase is _Phase.STOPPED:
            raise Unavailable("this decode rank has stopped", reason="DRAINING")
        async with contextlib.aclosing(self._streams.read(router, resume_after_frame)) as frames:
            async for frame in frames:
                yield frame

    def _sample_ended(self, handle: int, sample_index: int) -> None:
        """A sample ended by itself: its seat is free, and the request's with the last one."""
        request = self._by_engine_handle[handle]
        assert request.seats is not None
        self._give_back(request.seats.leave(sample_index))
        if not request.seats.open_samples():
            self._finish(request)
        self._admit()

    def _engine_lost(self, handles: set[int], error: Exception) -> None:
        log.error("a decode step failed", error=error, requests=len(handles))
        for request in [self._by_engine_handle[handle] for handle in handles if handle in self._by_engine_handle]:
            self._send_error(request, "ENGINE_FAILED")
            self._release_record(request.record, InternalError("a decode step failed"))

    def _send_error(self, request: Request, reason: str) -> None:
        """Tells the router at once that an attempt is lost here."""
        stream = self._streams.find(request.command.router.epoch)
        if stream is not None:
            for record in self._outputs.take_gathered(request.engine_handle):
                stream.add_record(record)
            for sample in self._outputs.samples(request.engine_handle) or request.command.sample_indices:
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
            fences=self._quarantine.generation,
            open_streams=self._streams.num_open,
        )

    async def drain(self, grace_s: float) -> None:
        """Refuses new requests, honours promises, lets what runs finish, at most `grace_s`; then ends the streams."""
        self._phase = _Phase.DRAINING
        draining = Unavailable("this decode rank is draining", reason="DRAINING")
        self._admission.close(draining)
        try:
            await self._wait_unfinished(grace_s)
        finally:  # also when the caller's own patience ends first
            for request in self._unfinished():
                self._send_error(request, "DRAINING")
                self._release_record(request.record, draining)
            self._streams.close(draining)

    async def _wait_unfinished(self, limit_s: float) -> None:
        async def all_settled() -> None:
            while self._unfinished():
                self._settled.clear()
                await self._settled.wait()

        with contextlib.suppress(TimeoutError):
            await within(self._clock, limit_s, all_settled())

    def _stop(self) -> None:
        self._phase = _Phase.STOPPED
        stopped = Unavailable("this decode rank has stopped", reason="DRAINING")
        for request in self._unfinished():
            self._send_error(request, "DRAINING")
            request.refusal = stopped
            request.answered.set()
        self._streams.close(stopped)
        self._background.cancel()
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _unfinished(self) -> list[Request]:
        return [request for request in self._requests.values() if request.record.state not in OVER]

    # --- inside ------------------------------------------------------------------------------------------------------

    def _check_epoch(self, decode_epoch: str) -> None:
        if decode_epoch != self._info.identity.epoch:
            raise StaleEpoch(f"meant for decode epoch {decode_epoch or '(none)'}, this is {self._info.identity.epoch}")

    def _in_worker(self, function: Callable, *arguments: Any) -> Awaitable[Any]:
        """Runs in the one thread that checks and copies rows: commits queue there, not before the engine."""
        return asyncio.get_running_loop().run_in_executor(self._worker, function, *arguments)

    async def _inject(self, point: str, **match: object) -> None:
        """Commits a configured fault: raises, or waits."""
        fault = self._faults.fire(point, **match)
        if fault is not None and fault.kind == "delay":
            await self._clock.wait(fault.seconds)
        elif fault is not None:
            raise Unavailable(f"fault injected at {point}", reason="FAULT_INJECTED")
