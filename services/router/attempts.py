"""One attempt at one request: Reserve on D, Prefill on P, tokens from D, and both legs released whatever happens.

An attempt owns its two legs. It ends well when every sample has ended, and raises the error that lost it otherwise;
`services/router/core.py` decides whether another one follows. Tokens go straight from the worker's stream into the answer
and on to the reader: no task wakes up for them but the reader's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace import errors
from headrace.clock import Clock, Deadline, first_of, within
from headrace.errors import HeadraceError, InternalError, Unavailable
from headrace.observe import telemetry
from headrace.protocol import (
    Committed,
    FinishReason,
    FirstToken,
    FirstTokens,
    PrefillCommand,
    PrefillFailed,
    Reservation,
    ReserveCommand,
    SampleEnd,
    SamplingParams,
    Stage,
    TokenRecord,
    WorkerIdentity,
)
from services.router.answer import Answer
from services.router.stages import StageLog
from services.router.workers import DecodeWorker, PrefillWorker

LINGER_S = 1.0
"""How long a finished answer waits for the stage times of a worker that has not reported its end yet."""
RELEASE_TIMEOUT_S = 5.0
_KIND_BY_REASON = {
    kind.reason: kind
    for kind in (
        errors.InvalidRequest,
        errors.NotFound,
        errors.Overloaded,
        errors.Unavailable,
        errors.StaleEpoch,
        errors.StaleAttempt,
        errors.TransferError,
        errors.ManifestMismatch,
        errors.LayoutMismatch,
        errors.InternalError,
        errors.DeadlineExceeded,
        errors.Cancelled,
    )
}


@dataclass
class RequestState:
    """What all attempts of a request share. `leg_id` is its name on the workers, unique among all routers."""

    leg_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    stream_interval: int
    cache_salt: str
    answer: Answer
    deadline: Deadline
    stages: StageLog
    publish: Callable[[], None]
    """Sends what is due to the reader; raises Overloaded when the reader has stalled."""
    attempts: int = 0
    cached_tokens: int = 0

    @property
    def needs_decode(self) -> bool:
        """Whether any running sample has more than one token to go."""
        left = (self.sampling.max_tokens - self.answer.count(sample) for sample in self.answer.running())
        return any(count > 1 for count in left)


class LegError(Exception):
    """An attempt is lost: `error` says why, `prefill` and `decode` which legs may be to blame."""

    def __init__(self, error: HeadraceError, *, prefill: bool = False, decode: bool = False):
        super().__init__(str(error))
        self.error, self.prefill, self.decode = error, prefill, decode


class Attempt:
    """One attempt. Also the sink of its handle in the decode rank's token stream."""

    def __init__(
        self,
        state: RequestState,
        prefill: PrefillWorker,
        decode: DecodeWorker | None,
        *,
        handle: int,
        router: WorkerIdentity,
        clock: Clock,
        tasks: asyncio.TaskGroup,
        on_prefilled: Callable[[], None],
    ):
        self._state, self._answer = state, state.answer
        self._prefill, self._decode = prefill, decode
        self._handle, self._router, self._clock, self._tasks = handle, router, clock, tasks
        self._on_prefilled = on_prefilled
        self._number = state.attempts
        self._samples = state.answer.running()
        self._early: list[TokenRecord | SampleEnd] | None = []
        self._committed = False
        self._told_cut = len(state.answer.cut_samples)
        self._decode_stages: tuple[Stage, ...] = ()
        self._decode_ended_some = False
        self._open_ends = set(self._samples)
        self._lost: LegError | None = None
        self._finished = asyncio.Event()  # the answer is complete, or the attempt is lost
        self._ended = asyncio.Event()  # and decode has said so of every sample, or the attempt is lost

    async def run(self) -> None:
        """Until every sample has ended. Raises LegError when the attempt is lost. Releases both legs in any case."""
        reserved = False
        if self._decode is not None:
            self._decode.stream.attach(self._handle, self)
        try:
            reservation = None
            if self._decode is not None:
                reserved = True
                reservation = await self._reserve(self._decode)
            await self._run_prefill(reservation)
            if reservation is not None and self._lost is None:
                await self._wait_tokens()
            self._raise_if_lost()
            self._close_what_has_no_tokens()
        finally:
            self._place_decode_stages()
            if self._decode is not None:
                self._decode.stream.detach(self._handle)
                if reserved and not self._decode_is_done():
                    self._release(())

    # --- decode's room ---------------------------------------------------------------------------------------------------

    async def _reserve(self, decode: DecodeWorker) -> Reservation:
        state = self._state
        command = ReserveCommand(
            request_id=state.leg_id,
            attempt=self._number,
            writer=self._prefill.identity,
            prompt_tokens=len(state.prompt),
            sample_indices=self._samples,
            delivered_counts=tuple(self._answer.count(sample) for sample in self._samples),
            sampling=state.sampling,
            stream_interval=state.stream_interval,
            router=self._router,
            handle=self._handle,
            decode_epoch=decode.identity.epoch,
        )
        try:
            with state.stages.timed("decode.reserve"):
                return await decode.client.reserve(command, state.deadline.left_s())
        except HeadraceError as error:
            raise LegError(error, decode=True) from error

    def _decode_is_done(self) -> bool:
        """Whether decode has freed everything by itself. It has not when every sample ended at its first token."""
        return self._committed and self._decode_ended_some and not self._open_ends

    def _release(self, samples: Sequence[int]) -> None:
        """Sent from a task of the router's own, so that neither the caller's cancel nor ours can stop it."""
        self._tasks.create_task(self._send_release(samples))

    async def _send_release(self, samples: Sequence[int]) -> None:
        assert self._decode is not None
        try:
            await self._decode.client.release(
                self._state.leg_id, self._number, self._decode.identity.epoch, samples, RELEASE_TIMEOUT_S
            )
        except HeadraceError as error:  # it forgets by itself: its reservation expires, its stream is ours
            telemetry.counter("headrace.router.failed_releases").add(1, reason=error.reason)

    # --- the prefill leg -------------------------------------------------------------------------------------------------

    async def _run_prefill(self, reservation: Reservation | None) -> None:
        """Until P says committed, the attempt is lost, or the answer needs neither worker any more."""
        await first_of(self._read_prefill(reservation), self._wait_no_more_prefill())

    async def _wait_no_more_prefill(self) -> None:
        await self._finished.wait()
        if self._lost is None and not self._was_cut_here():
            await self._clock.wait(LINGER_S)

    async def _read_prefill(self, reservation: Reservation | None) -> None:
        state, began = self._state, self._state.stages.elapsed_s()
        command = PrefillCommand(
            request_id=state.leg_id,
            attempt=self._number,
            prompt_token_ids=state.prompt,
            sampling=state.sampling,
            sample_indices=self._samples,
            delivered={x: self._answer.ids(x) for x in self._samples if self._answer.count(x)},
            reservation=reservation,
            cache_salt=state.cache_salt,
            prefill_epoch=self._prefill.identity.epoch,
        )
        try:
            stream = self._prefill.client.prefill(command, state.deadline.left_s())
            async with contextlib.aclosing(stream) as events:
                async for event in events:
                    if isinstance(event, FirstTokens):
                        self._on_first_tokens(event)
                    elif isinstance(event, PrefillFailed):
                        error = _error_of(event)
                        raise LegError(error, prefill=True, decode=_may_be_decode(error))
                    else:
                        self._on_committed(event, began)
        except HeadraceError as error:
            if not self._committed:
                raise LegError(error, prefill=True) from error
        if not self._committed:
            error = Unavailable("prefill ended without committing", reason="PREFILL_STREAM_BROKEN")
            raise LegError(error, prefill=True)

    def _on_first_tokens(self, event: FirstTokens) -> None:
        self._on_prefilled()
        self._state.cached_tokens = event.cached_tokens
        for token in event.tokens:
            self._push(token.sample_index, token.position, (token.token_id,), (token.logprob,), (token.top,))
            if token.finish_reason and self._answer.is_running(token.sample_index):
                self._answer.end(token.sample_index, token.finish_reason)
            self._drop_end_of(token)
        early, self._early = self._early or [], None
        for item in early:
            self._accept(item)
        self.on_frame_end()

    def _drop_end_of(self, token: FirstToken) -> None:
        """Decode never hears of a sample that P ended, so no end will come from there."""
        if token.finish_reason:
            self._open_ends.discard(token.sample_index)

    def _on_committed(self, event: Committed, began_s: float) -> None:
        self._committed = True
        self._state.stages.place(event.stages, began_s)
        self._tell_cut_samples()
        if not self._open_ends:
            self._ended.set()

    def _close_what_has_no_tokens(self) -> None:
        """max_tokens 0: prefill was all that was asked for."""
        if self._state.sampling.max_tokens == 0:
            for sample in self._answer.running():
                self._answer.end(sample, FinishReason.LENGTH)
            self._state.publish()
        if not self._answer.finished:
            error = InternalError("prefill and decode are done and a sample has no end", reason="NO_END")
            raise LegError(error, prefill=True)

    # --- decode's tokens -------------------------------------------------------------------------------------------------

    async def _wait_tokens(self) -> None:
        await self._finished.wait()
        if self._lost is None and not self._was_cut_here() and not self._ended.is_set():
            with contextlib.suppress(TimeoutError):
                await within(self._clock, LINGER_S, self._ended.wait())

    def on_record(self, record: TokenRecord) -> None:
        """Tokens of a frame. They may come before P's first tokens: then they wait for those."""
        self._accept(record)

    def on_end(self, end: SampleEnd) -> None:
        """The end of a sample on decode."""
        self._accept(end)

    def _accept(self, item: TokenRecord | SampleEnd) -> None:
        if self._lost is not None:
            return
        if self._early is not None:
            self._early.append(item)
        elif isinstance(item, SampleEnd):
            self._on_sample_end(item)
        else:
            self._push(item.sample_index, item.first_position, item.token_ids, item.logprobs, item.top)

    def _push(self, sample: int, first: int, ids: Sequence[int], logprobs: Sequence[float] | None, top) -> None:
        """Appends what is new; drops what was seen; a gap loses the attempt."""
        if self._lost is not None:
            return
        if not self._answer.is_running(sample):
            telemetry.counter("headrace.router.tokens_after_end").add(len(ids))
            return
        seen = self._answer.count(sample) - first
        if seen < 0:
            text = f"sample {sample}: position {first} follows {self._answer.count(sample)}"
            self.on_lost(Unavailable(text, reason="TOKEN_GAP"))
            return
        if seen:
            telemetry.counter("headrace.router.repeated_tokens").add(min(seen, len(ids)))
            ids, logprobs, top = ids[seen:], logprobs and logprobs[seen:], top[seen:]
        self._answer.push(sample, ids, logprobs, top)

    def _on_sample_end(self, end: SampleEnd) -> None:
        if end.error_reason or end.finish_reason in (FinishReason.NONE, FinishReason.CANCELLED):
            if self._answer.is_running(end.sample_index):
                reason = end.error_reason or "CANCELLED_BY_DECODE"
                self.on_lost(Unavailable(f"decode gave sample {end.sample_index} up", reason=reason))
                return
        elif self._answer.is_running(end.sample_index):
            self._answer.end(end.sample_index, end.finish_reason)
        self._open_ends.discard(end.sample_index)
        self._decode_ended_some = True
        self._decode_stages = end.stages or self._decode_stages

    def _place_decode_stages(self) -> None:
        """Decode counts from the arrival of Commit; prefill has told when it sent that."""
        stages = self._state.stages
        length_s = max((stage.start_s + stage.duration_s for stage in self._decode_stages), default=0.0)
        began_s = stages.start_of("decode.commit")
        stages.place(self._decode_stages, stages.elapsed_s() - length_s if began_s is None else began_s)

    def on_frame_end(self) -> None:
        """Sends what is due and takes note of what has ended."""
        if self._lost is not None:
            return
        try:
            self._state.publish()
        except HeadraceError as error:
            self._lose(LegError(error))
            return
        if self._committed:
            self._tell_cut_samples()
        if self._answer.finished:
            self._finished.set()
        if not self._open_ends:
            self._ended.set()

    def on_lost(self, error: HeadraceError) -> None:
        """The token stream, or the rank behind it, is gone."""
        if not self._answer.finished:
            self._lose(LegError(error, decode=True))
        self._ended.set()

    def _lose(self, why: LegError) -> None:
        self._lost = self._lost or why
        self._finished.set()
        self._ended.set()

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _was_cut_here(self) -> bool:
        """Whether a stop string ended a sample in this attempt, so that workers would go on with it."""
        return any(sample in self._open_ends for sample in self._answer.cut_samples)

    def _tell_cut_samples(self) -> None:
        """Releases samples that a stop string ended while others go on; when none does, the attempt's end does it."""
        cut = self._answer.cut_samples[self._told_cut :]
        if self._decode is None or not cut or self._answer.finished:
            return
        self._told_cut += len(cut)
        self._open_ends.difference_update(cut)
        self._release(cut)


def _error_of(event: PrefillFailed) -> HeadraceError:
    """A lost leg as one of our errors; what P calls retryable stays retryable."""
    kind = _KIND_BY_REASON.get(event.reason)
    if kind is None or kind.retryable != event.retryable:
        kind = Unavailable if event.retryable else InternalError
    return kind(event.message, reason=event.reason)


def _may_be_decode(error: HeadraceError) -> bool:
    """Whether a failure that P reports may come from the decode rank it talked to."""
    return isinstance(error, errors.StaleEpoch | errors.TransferError | Unavailable | errors.DeadlineExceeded)
