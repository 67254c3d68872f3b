"""One attempt at one request: Reserve on D, Prefill on P, tokens from D, and both legs released whatever happens.

An attempt is driven by what its links say; it has no task. It ends once: well when every sample has ended, or lost. Tokens go
straight from the link into the answer and on to the reader: nobody wakes up for them but the reader.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.clock import Clock, Deadline, Timer
from headrace.errors import HeadraceError, InternalError, Unavailable
from headrace.observe import logs
from headrace.protocol.common import FinishReason, SamplingParams
from headrace.protocol.decode import ReleaseCommand, Reservation, ReserveCommand, SampleEnd, TokenRecord
from headrace.protocol.prefill import CancelPrefillCommand, Committed, FirstTokens, PrefillCommand
from services.router.answer import AnswerBuilder
from services.router.intake import TokenIntake
from services.router.placing import Place
from services.router.retry import LostAttempt, lost_on_prefill
from services.router.stages import StageLog

log = logs.get(__name__)

LINGER_S = 1.0
"""How long a finished answer waits for the stage times of a rank that has not reported its end yet."""
FAILOVER_PRIORITY = 100
"""A request that has lost an attempt queues ahead of new ones."""


class AttemptOwner(Protocol):
    """The request, or the canary. `leg_id` is its name on the ranks, unique among all routers; `display_id` the client's."""

    leg_id: str
    display_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    stream_interval: int
    cache_salt: str
    priority: int
    trace_parent: str
    answer: AnswerBuilder
    deadline: Deadline
    stages: StageLog
    cached_tokens: int

    def publish(self) -> None:
        """Sends what is due to the reader; raises Overloaded when the reader has stalled."""

    def on_attempt_end(self, attempt: Attempt, lost: LostAttempt | None) -> None:
        """Called once, when the attempt has ended by itself."""

    def may_leave_broken_prefill(self, attempt: Attempt) -> bool:
        """Whether another rank could take the prompt now."""


class Attempt:
    """One attempt. Also the sink of its handle in the decode rank's token frames."""

    def __init__(self, owner: AttemptOwner, place: Place, number: int, handle: int, clock: Clock):
        self._owner, self._answer, self.place = owner, owner.answer, place
        self._number, self._handle, self._clock = number, handle, clock
        self.intake = TokenIntake(owner.answer, owner.sampling.logprobs is not None)
        self.moved_before = (place.prefill.moved_count, place.decode.moved_count if place.decode is not None else None)
        """What its ranks had completed when it began."""
        self._began_s = 0.0
        self._reserved = self._prefilling = self._committed = self._ended = False
        self._linger: Timer | None = None

    # --- beginning and end -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Sends the first command. May end the attempt at once."""
        self.place.prefill.legs.add(self)
        try:
            if self.place.decode is not None:
                self._reserve()
            else:
                self._prefill(None)
        except HeadraceError as error:
            self._end(LostAttempt(error, prefill=self.place.decode is None, decode=self.place.decode is not None))

    def cancel(self) -> None:
        """Nobody wants it any more: both legs are released, and the owner hears nothing. Safe to repeat."""
        if not self._ended:
            self._close()

    def _end(self, lost: LostAttempt | None) -> None:
        if not self._ended:
            self._close()
            self._owner.on_attempt_end(self, lost)

    def _close(self) -> None:
        self._ended = True
        if self._linger is not None:
            self._linger.cancel()
        place, links = self.place, self.place.prefill.links
        place.prefill.legs.discard(self)
        if self._prefilling and not links.commands.is_lost:
            links.commands.send(CancelPrefillCommand(self._owner.leg_id, self._number))
        if place.decode is not None:
            place.decode.links.tokens.detach(self._handle)
            if self._reserved and not self._decode_is_done():
                self._release(())
        place.release()
        self._owner.stages.place_after("decode.commit", self.intake.decode_stages)

    def _decode_is_done(self) -> bool:
        """Whether decode has freed everything by itself. It has not when every sample ended at its first token."""
        return self._committed and self.intake.ended_some and not self.intake.open_ends

    def _release(self, samples: Sequence[int]) -> None:
        """Kept by the link until it has arrived. On a lost link there is nothing to send: the rank frees what was ours by itself."""
        assert self.place.decode is not None
        links = self.place.decode.links
        if not links.commands.is_lost:
            links.send_release(ReleaseCommand(self._owner.leg_id, self._number, tuple(samples)))

    # --- decode's room -------------------------------------------------------------------------------------------------------

    def _reserve(self) -> None:
        owner, decode, samples = self._owner, self.place.decode, self.intake.samples
        assert decode is not None
        command = ReserveCommand(
            request_id=owner.leg_id,
            attempt=self._number,
            writer=self.place.prefill.identity,
            prompt_tokens=len(owner.prompt),
            sample_indices=samples,
            delivered_counts=tuple([self._answer.count(sample) for sample in samples]),
            sampling=owner.sampling,
            stream_interval=owner.stream_interval,
            handle=self._handle,
            priority=self._priority(),
            cache_salt=owner.cache_salt,
            trace_parent=owner.trace_parent,
            display_id=owner.display_id,
        )
        self._began_s = owner.stages.elapsed_s()
        decode.links.tokens.attach(self._handle, self)
        decode.links.commands.send(command, deadline=owner.deadline, on_answer=self._on_reserve_answer)
        self._reserved = True

    def _priority(self) -> int:
        return self._owner.priority if self._number == 1 else FAILOVER_PRIORITY

    def _on_reserve_answer(self, body: object) -> None:
        if self._ended:
            return
        stages = self._owner.stages
        stages.add("decode.reserve", self._began_s, stages.elapsed_s() - self._began_s)
        if isinstance(body, HeadraceError):
            self._end(LostAttempt(body, decode=True))
        elif not isinstance(body, Reservation):
            self._end(LostAttempt(InternalError(f"Reserve was answered with {type(body).__name__}"), decode=True))
        else:
            try:
                self._prefill(body)
            except HeadraceError as error:
                self._end(LostAttempt(error, prefill=True))

    # --- the prefill leg -------------------------------------------------------------------------------------------------------

    def _prefill(self, reservation: Reservation | None) -> None:
        owner, links, samples = self._owner, self.place.prefill.links, self.intake.samples
        if not links.is_open:
            raise Unavailable("the link to the prefill rank is broken", reason="LINK_BROKEN")
        command = PrefillCommand(
            request_id=owner.leg_id,
            attempt=self._number,
            prompt_token_ids=owner.prompt,
            sampling=owner.sampling,
            sample_indices=samples,
            delivered={x: self._answer.ids(x) for x in samples if self._answer.count(x)},
            reservation=reservation,
            cache_salt=owner.cache_salt,
            priority=self._priority(),
            trace_parent=owner.trace_parent,
            display_id=owner.display_id,
        )
        self._began_s = owner.stages.elapsed_s()
        links.commands.send(command, deadline=owner.deadline, on_answer=self._on_prefill_answer)
        self._prefilling = True

    def _on_prefill_answer(self, body: object) -> None:
        if self._ended:
            return
        try:
            if isinstance(body, FirstTokens):
                self._on_first_tokens(body)
            elif isinstance(body, Committed):
                self._on_committed(body)
            elif isinstance(body, HeadraceError):
                self._prefilling = False
                if not self._committed:
                    self._end(lost_on_prefill(body))
            else:
                raise InternalError(f"Prefill was answered with {type(body).__name__}")
        except Exception as error:
            log.error("an attempt could not take its tokens", error=error, request_id=self._owner.display_id)
            text = f"tokens could not be taken: {type(error).__name__}"
            self._end(LostAttempt(InternalError(text, reason="SINK_FAILED"), prefill=True))

    def on_prefill_broken(self) -> None:
        """The link to the prefill rank may come back, but the prompt can be computed elsewhere meanwhile."""
        if self._prefilling and not self._ended and self._owner.may_leave_broken_prefill(self):
            error = Unavailable("the link to the prefill rank is broken", reason="LINK_BROKEN")
            self._end(LostAttempt(error, prefill=True))

    def _on_first_tokens(self, event: FirstTokens) -> None:
        self.place.prefilled()
        self._owner.cached_tokens = event.cached_tokens
        self._take(lambda: self.intake.first_tokens(event))
        self.on_frame_end()

    def _on_committed(self, event: Committed) -> None:
        self._committed, self._prefilling = True, False
        self._owner.stages.place(event.stages, self._began_s)
        if self._owner.sampling.max_tokens == 0:  # prefill was all that was asked for
            for sample in self.intake.samples:
                self._answer.end(sample, FinishReason.LENGTH)
        self.on_frame_end()

    # --- decode's tokens ---------------------------------------------------------------------------------------------------------

    def _take(self, tokens: Callable[[], None]) -> None:
        try:
            tokens()
        except HeadraceError as error:
            self._end(LostAttempt(error, decode=True))

    def on_record(self, record: TokenRecord) -> None:
        """Tokens of a frame."""
        if not self._ended:
            try:
                self.intake.record(record)
            except HeadraceError as error:
                self._end(LostAttempt(error, decode=True))

    def on_sample_end(self, end: SampleEnd) -> None:
        """The end of a sample on decode."""
        if not self._ended:
            self._take(lambda: self.intake.end(end))

    def on_frame_end(self) -> None:
        """Ends the attempt when everything has been said; sends what is due otherwise."""
        if self._ended:
            return
        if self._answer.finished:
            self._look_at_end()
        elif self._committed and (self.place.decode is None or not self.intake.open_ends):
            error = InternalError("prefill and decode are done and a sample has no end", reason="NO_END")
            self._end(LostAttempt(error, prefill=True))
        if not self._ended:
            self._publish()

    def _look_at_end(self) -> None:
        """The answer is complete. What ended here by a stop string goes on there: nobody waits for that."""
        decode_said_all = self.place.decode is None or not self.intake.open_ends
        if self.intake.was_cut_here or (self._committed and decode_said_all):
            self._end(None)
        elif self._linger is None:
            self._linger = self._clock.call_later(LINGER_S, lambda: self._end(None))

    def _publish(self) -> None:
        try:
            self._owner.publish()
        except HeadraceError as error:
            self._end(LostAttempt(error))
            return
        if self._answer.cut_samples and self._committed and self.place.decode is not None and not self._answer.finished:
            if cut := self.intake.take_cut():  # when no sample goes on, the attempt's end tells decode
                self._release(cut)

    def on_lost(self, error: HeadraceError) -> None:
        """The token link, or the rank behind it, is gone."""
        self._end(None if self._answer.finished else LostAttempt(error, decode=True))
