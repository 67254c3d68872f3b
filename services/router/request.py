"""One request, from acceptance to its final message.

check and tokenise -> wait for a place -> attempts until every sample has ended -> final message. The caller's coroutine runs `begin`
and reads the outbox; everything between is driven by what links say and by timers. Whoever ends the request (the last token, a stop
string, an error, the caller's leaving, the deadline) ends it in `_end`, once.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headrace.cache.seats import blocks_needed
from headrace.clock import Clock, Deadline, Timer, within
from headrace.config import RouterConfig
from headrace.errors import AlreadyExists, Cancelled, DeadlineExceeded, HeadraceError, InternalError
from headrace.observe import logs, telemetry
from headrace.protocol.common import SamplingParams, Usage
from headrace.protocol.inference import GenerateCommand, GenerateEvent
from services.router import limits, prompt, retry
from services.router.admission import AdmissionQueue, Ticket
from services.router.answer import AnswerBuilder
from services.router.attempt import Attempt
from services.router.checkpoint import CheckpointInfo
from services.router.fleet import Fleet
from services.router.interfaces import Claims
from services.router.outbox import Outbox
from services.router.placing import Place, PlaceNeed, Placing
from services.router.prefix import PromptKeys
from services.router.report import RequestReport
from services.router.retry import LostAttempt, Retries

log = logs.get(__name__)

START_WAIT_S = 2.0
"""How long a new request waits for a ready pair of workers while there has never been one."""
RESTART_WAIT_S = 15.0
"""The same once there has been one: a rank that restarts is back within that."""
QUIET_INTERVAL = 16
"""Tokens per frame when nobody reads along and no stop string is looked for."""
_lost_attempts = telemetry.counter("headrace.router.lost_attempts")


@dataclass(frozen=True)
class RouterParts:
    """What every request of one router works with."""

    config: RouterConfig
    checkpoint: CheckpointInfo
    clock: Clock
    fleet: Fleet
    placing: Placing
    admission: AdmissionQueue
    handles: Iterator[int]
    claims: Claims | None


class Request:
    """One running request: what came in, what goes out, how far it is. It owns its attempts (AttemptOwner)."""

    def __init__(
        self,
        parts: RouterParts,
        command: GenerateCommand,
        request_id: str,
        time_left_s: float,
        trace_parent: str,
        on_end: Callable[[Request], None],
    ):
        self._parts, self._command, self._on_end = parts, command, on_end
        self.display_id = request_id
        # A client may use an id again; workers remember ended attempts by it for a while.
        self.leg_id = f"{request_id}~{secrets.token_hex(4)}" if command.request_id else request_id
        self.cache_salt, self.priority = command.cache_salt, command.priority
        self.deadline = Deadline.after(parts.clock, min(time_left_s, parts.config.max_deadline_s))
        self._report = RequestReport(parts.clock, trace_parent, parts.checkpoint.name)
        self.stages, self.trace_parent = self._report.stages, self._report.trace_parent
        self.outbox = Outbox(parts.config.reader_buffer_bytes)
        self.claimed = ""
        """The name that was claimed for it across all routers, if one was."""
        self.cached_tokens = 0
        self.prompt: tuple[int, ...] = ()
        self.sampling: SamplingParams  # these two from `_tokenize` on
        self.answer: AnswerBuilder
        self.stream_interval = max(parts.config.stream_interval, command.stream_interval)
        self._retries = Retries(parts.config.max_attempts)
        self._keys: PromptKeys
        self._queued_s = 0.0
        self._ticket: Ticket | None = None
        self._attempt: Attempt | None = None
        self._retry_timer: Timer | None = None
        self._retry_until = 0.0
        self._prepared = self._ended = False
        self._deadline_timer = parts.clock.call_later(self.deadline.left_s(), self._on_deadline)

    # --- before any rank hears of it ---------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Runs until the request is on its way or has ended; errors go to the outbox. Cancelling it ends nothing: see `cancel`."""
        try:
            await self._claim()
            await self._tokenize()
            await self._wait_pair()
            if not self._ended:
                self._enter_queue()
        except HeadraceError as error:
            self._end(error)
        except Exception as error:
            self._end(_as_ours(error, self.display_id))

    async def _claim(self) -> None:
        """A client's own id is claimed across all routers while the request runs; nobody waits for a Redis that is away."""
        claims = self._parts.claims
        if not self._command.request_id or claims is None or not claims.reachable:
            return
        name = f"request/{self.display_id}"
        if not await claims.claim(name, self.deadline.left_s() + 1.0):
            raise AlreadyExists(f"request {self.display_id} is running on another router", field="request_id")
        if self._ended:
            await claims.unclaim(name)
        else:
            self.claimed = name

    async def _tokenize(self) -> None:
        parts, command, start_s = self._parts, self._command, self.stages.elapsed_s()
        ids = prompt.token_ids_now(command, parts.checkpoint)
        if isinstance(ids, str):
            ids = await prompt.tokenize_aside(ids, parts.checkpoint)
        self._report.stage("router.tokenize", start_s, len(ids))
        made = prompt.resolve(command, ids, parts.checkpoint, parts.config.default_max_tokens)
        self.prompt, self.sampling = made.token_ids, made.sampling
        if command.final_only and not made.sampling.stop:
            self.stream_interval = max(self.stream_interval, QUIET_INTERVAL)
        self.answer = AnswerBuilder(parts.checkpoint.tokenizer, made.sampling, self.stream_interval, command.final_only)
        self._keys = PromptKeys(command.cache_salt, self.prompt)
        self._prepared = True

    async def _wait_pair(self) -> None:
        """Gives up a little before the deadline, so that the client is told what was missing."""
        fleet, clock = self._parts.fleet, self._parts.clock
        if not fleet.has_pair.is_set():
            wait_s = RESTART_WAIT_S if fleet.had_pair else START_WAIT_S
            with contextlib.suppress(TimeoutError):
                await within(clock, min(wait_s, 0.9 * self.deadline.left_s()), fleet.has_pair.wait())
        if not fleet.has_pair.is_set():
            raise fleet.unavailable()
        field = limits.prompt_field(self._command)
        limits.check_capacity(self.sampling, len(self.prompt), field, fleet.capacity())

    # --- finding a place -----------------------------------------------------------------------------------------------------

    def _enter_queue(self) -> None:
        self._queued_s = self.stages.elapsed_s()
        self._ticket = self._parts.admission.enter(len(self.prompt), self.priority, self._admit)

    def _admit(self) -> bool:
        """What the queue calls when it is our turn: goes on when there is a place."""
        try:
            began_s = self.stages.elapsed_s()
            ahead = self._parts.config.reserve_ahead_tokens
            place = self._parts.placing.choose(self._need(), keys=self._keys, reserve_ahead_tokens=ahead)
            if place is None:
                return False
            self._report.stage("router.queue", self._queued_s, len(self.prompt), began_s)
            self._report.stage(
                "router.route",
                began_s,
                len(self.prompt),
                prefill=place.prefill.identity.address,
                decode=place.decode.identity.address if place.decode is not None else None,
                cached_tokens=place.cached_tokens,
            )
            self._start(place)
        except Exception as error:
            self._end(_as_ours(error, self.display_id))
        return True

    def _need(self) -> PlaceNeed:
        answer, sampling, size = self.answer, self.sampling, len(self.prompt)
        running = answer.running()
        delivered = max([answer.count(sample) for sample in running], default=0)
        return PlaceNeed(
            num_tokens=size + delivered,
            total_tokens=size + sampling.max_tokens,
            blocks=lambda block_size: blocks_needed(size, [size + sampling.max_tokens] * sampling.n, block_size),
            decode=any([sampling.max_tokens - answer.count(sample) > 1 for sample in running]),
        )

    def _start(self, place: Place) -> None:
        parts = self._parts
        self._retries.attempts += 1
        self._attempt = Attempt(self, place, self._retries.attempts, next(parts.handles), parts.clock)
        self._attempt.start()

    # --- what an attempt says (AttemptOwner) -----------------------------------------------------------------------------------

    def publish(self) -> None:
        """Sends what is due. Raises Overloaded when the reader has stalled."""
        if self.answer.num_tokens:
            self._report.has_tokens()
        if not self._command.final_only and (deltas := self.answer.take()):
            self.outbox.put(GenerateEvent(self.display_id, deltas))

    def may_leave_broken_prefill(self, attempt: Attempt) -> bool:
        """Whether another rank could take the prompt now."""
        return self._parts.fleet.has_other(attempt.place.prefill)

    def on_attempt_end(self, attempt: Attempt, lost: LostAttempt | None) -> None:
        """The answer is complete, or another attempt continues by position: delivered tokens are its input."""
        self._attempt = None
        if self._ended:
            return
        try:
            if lost is None or self.answer.finished and lost.error.reason != "READER_STALLED":
                if lost is None:
                    self._parts.fleet.succeeded(attempt.place.prefill, attempt.place.decode)
                self._finish()
            else:
                self._after_loss(attempt, lost)
        except Exception as error:
            self._end(_as_ours(error, self.display_id))

    def _after_loss(self, attempt: Attempt, lost: LostAttempt) -> None:
        parts, place, retries = self._parts, attempt.place, self._retries
        _lost_attempts.add(1, reason=lost.error.reason)
        retries.note(lost, place, attempt.intake.num_new, self.answer.num_tokens)
        for rank in retry.suspects(lost, place, attempt.moved_before):
            parts.fleet.suspect(rank, lost.error)
        if retry.is_fault(lost.error):
            log.warning("attempt lost", request_id=self.display_id, reason=lost.error.reason, detail=lost.error.message)
        blamed = place.decode if lost.decode and not lost.prefill else place.prefill
        has_other = blamed is not None and parts.fleet.has_other(blamed)
        if (error := retries.why_no_more(lost, self.answer.num_tokens, has_other)) is not None:
            self._end(error)
            return
        patience_s = self.deadline.left_s() if self.answer.num_tokens else retry.RETRY_WAIT_S
        self._retry_until = parts.clock.now() + min(patience_s, self.deadline.left_s())
        self._retry_timer = parts.clock.call_later(retries.wait_s(lost), self._try_again)

    def _try_again(self) -> None:
        """Somewhere else if there is such a place; else the same, once it has been probed or has come back."""
        parts, retries = self._parts, self._retries
        try:
            place = parts.placing.choose(self._need(), keys=self._keys, avoid=retries.avoid, keep=retries.keep)
            if place is not None:
                self._start(place)
            elif parts.clock.now() >= self._retry_until:
                self._end(parts.fleet.unavailable())
            else:
                self._retry_timer = parts.clock.call_later(retry.POLL_S, self._try_again)
        except Exception as error:
            self._end(_as_ours(error, self.display_id))

    # --- the end ---------------------------------------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Nobody reads any more. Safe to repeat, also after the end."""
        self._end(Cancelled("the request was cancelled"))

    def _on_deadline(self) -> None:
        self._end(DeadlineExceeded(f"the deadline passed after {self.stages.elapsed_s():.3f} s"))

    def _finish(self) -> None:
        if self.answer.num_tokens:
            self._report.has_tokens()
        final = self._report.summary(self._usage(), self.sampling.seed)
        self._end(None, GenerateEvent(self.display_id, self.answer.take(), final))

    def _usage(self) -> Usage:
        size = len(self.prompt)
        return Usage(
            prompt_tokens=size,
            cached_tokens=self.cached_tokens,
            computed_tokens=size - self.cached_tokens,
            generated_tokens=self.answer.num_tokens if self._prepared else 0,
            attempts=self._retries.attempts,
        )

    def _end(self, error: HeadraceError | None, last: GenerateEvent | None = None) -> None:
        if self._ended:
            return
        self._ended = True
        self._deadline_timer.cancel()
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        if self._ticket is not None:
            self._parts.admission.leave(self._ticket)
        if self._attempt is not None:
            self._attempt.cancel()
        self.outbox.close(last, error)
        self._report.close(error, self.display_id, self._usage(), self.sampling.n if self._prepared else 1)
        self._on_end(self)


def _as_ours(error: Exception, request_id: str) -> HeadraceError:
    """What the reader is told: our own errors as they are, anything else as a fault of ours, logged once."""
    if isinstance(error, HeadraceError):
        return error
    log.error("unexpected error in a request", error=error, request_id=request_id)
    return InternalError(f"unexpected {type(error).__name__}; the router's log has the rest")
