"""The hand-over: a writer's proof is checked, and what goes on joins the batch. Checks and copies run in one worker thread."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from headrace.cache.blocks import BlockState
from headrace.engine.request import DecodeSequence
from headrace.errors import HeadraceError, InternalError, ManifestMismatch, Unavailable
from headrace.observe import logs, telemetry
from headrace.protocol.common import WorkerInfo
from headrace.protocol.decode import CommitAccepted, CommitCommand
from services.decode.background import Background
from services.decode.ending import Endings
from services.decode.interfaces import Collaborators
from services.decode.outputs import Outputs
from services.decode.proof import check_commit, check_counts, check_rows, check_token_ids
from services.decode.request import Answer, Request, Requests
from services.decode.reservation import ReservationTable
from services.decode.running import SampleOutput

log = logs.get(__name__)


class Commits:
    """Checks commits and starts what was committed."""

    def __init__(
        self,
        info: WorkerInfo,
        collaborators: Collaborators,
        table: ReservationTable,
        requests: Requests,
        outputs: Outputs,
        endings: Endings,
        background: Background,
    ):
        self._info, self._with = info, collaborators
        self._clock, self._pool = collaborators.clock, collaborators.pool
        self._table, self._requests, self._outputs = table, requests, outputs
        self._endings, self._background = endings, background
        self._num_layers = info.layout.layer_count
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="decode-check")

    def commit(self, writer_epoch: str, command: CommitCommand, answer: Answer) -> None:
        """Answers CommitAccepted, and the request steps from then on; a repeated command gets the first answer.

        Raises StaleAttempt, StaleEpoch, InvalidRequest. Answers ManifestMismatch (the writer may push and commit again),
        InvalidRequest, StaleAttempt.
        """
        arrived = self._clock.now()
        record = self._table.find_commit(command, writer_epoch)
        if record.commit_duration_s is not None:
            answer(CommitAccepted(record.commit_duration_s))
            return
        request = self._requests.of(record)
        if request.commit is None:
            check_commit(command, request.command)
            self._table.extend(record, arrived)
            request.commit = asyncio.get_running_loop().create_future()
            self._background.spawn(self._accept, request, command, arrived)
        request.commit.add_done_callback(lambda done: answer(done.result()))

    def close(self) -> None:
        """No check starts any more."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    async def _accept(self, request: Request, command: CommitCommand, arrived: float) -> None:
        """Resolves `request.commit`. Goes on when the writer has left."""
        outcome: CommitAccepted | HeadraceError = Unavailable("this decode rank has stopped", reason="DRAINING")
        try:
            outcome = await self._check_and_start(request, command, arrived)
        except ManifestMismatch as error:
            telemetry.counter("headrace.decode.manifest_mismatch").add(1)
            log.warning("manifest mismatch", reservation_id=command.reservation_id, reason=str(error))
            outcome = error
        except HeadraceError as error:
            outcome = error
        except Exception as error:
            log.error("commit failed", error=error)
            outcome = InternalError(f"unexpected {type(error).__name__} while checking a commit", retryable=True)
        finally:
            commit, request.commit = request.commit, None
            if commit is not None and not commit.done():
                commit.set_result(outcome)

    async def _check_and_start(self, request: Request, command: CommitCommand, arrived: float) -> CommitAccepted:
        await self._inject(command)
        assert request.seats is not None
        check_counts(command.manifest, request.owed, self._num_layers)
        await self._in_worker(self._check, request, command)
        self._table.accept(request.record)
        self._pool.move(request.seats.held(), BlockState.RUNNING)
        going_on = tuple(s.sample_index for s in command.samples if s.sample_index not in request.dropped)
        copies = request.seats.copies(going_on)
        if copies:
            await self._in_worker(self._copy_all, copies)
        now = self._clock.now()
        self._table.run(request.record, now - arrived)
        request.stage("decode.commit", arrived, now, tokens=request.command.prompt_tokens)
        self._start(request, command, arrived, now)
        return CommitAccepted(now - arrived)

    def _check(self, request: Request, command: CommitCommand) -> None:
        check_token_ids(command, self._info.vocabulary_size)
        check_rows(command.manifest, request.owed, self._with.checksums)

    def _copy_all(self, copies: Sequence[tuple[int, int, int]]) -> None:
        for source, target, rows in copies:
            self._with.copy_rows(source, target, rows)

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
        if sequences:
            outputs = {s: SampleOutput(reserve.handle, s, reserve.stream_interval, reserve.sampling) for s in states}
            self._outputs.begin(request, arrived, now, outputs)
            self._with.engine.add(sequences)
        self._endings.leave(request, [sample for sample in seats.open_samples() if sample not in states])

    def _in_worker(self, function: Callable, *arguments: Any) -> Awaitable[Any]:
        """Runs in the one thread that checks and copies rows: commits queue there, not before the engine."""
        return asyncio.get_running_loop().run_in_executor(self._worker, function, *arguments)

    async def _inject(self, command: CommitCommand) -> None:
        """Fault injection: raises, or waits."""
        fault = self._with.faults.fire("decode.commit", attempt=command.attempt, request_id=command.request_id)
        if fault is not None and fault.kind == "delay":
            await self._clock.wait(fault.seconds)
        elif fault is not None:
            raise Unavailable("fault injected at decode.commit", reason="FAULT_INJECTED")
