"""One attempt, from arrival to the last block given back.

Begin is sent, and blocks are waited for meanwhile -> a batch -> forward, each layer handed to the transfer thread as soon as
it stands -> first tokens out -> every row written -> Commit -> the end is told. Its blocks go back when neither the engine nor
the transfer thread can touch them any more, whatever became of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.clock import Clock
from headrace.config import PrefillConfig
from headrace.engine.request import PrefillJob
from headrace.errors import HeadraceError, InternalError, ManifestMismatch, Unavailable
from headrace.observe import logs, telemetry
from headrace.process.faults import Fault, Faults
from headrace.protocol.common import FinishReason
from headrace.protocol.decode import BeginCommand, CommitCommand, RenewCommand, SampleState
from headrace.protocol.prefill import Committed, FirstToken, FirstTokens
from services.prefill.interfaces import Batcher, Pusher, Writer, Writers
from services.prefill.leg import Leg, settle, settle_error
from services.prefill.report import Report
from services.prefill.room import Room
from services.prefill.sequences import sequences_of

log = logs.get(__name__)

UNANSWERED = "DECODE_UNANSWERED"
DRAIN_LOOK_S = 1.0
"""How long the end of a write is waited for at a time before blocks that it reads are looked at again."""


@dataclass(frozen=True)
class Rank:
    """What all attempts of a rank share."""

    config: PrefillConfig
    room: Room
    block_size: int
    batcher: Batcher
    pusher: Pusher
    writers: Writers
    report: Report
    clock: Clock
    faults: Faults


class Attempt:
    """Drives one leg. `run` ends when nothing of it is left here but its tombstone."""

    def __init__(self, rank: Rank, leg: Leg):
        self._rank = rank
        self.leg = leg
        self._writer: Writer | None = None
        self._tokens: asyncio.Future[list[FirstToken]] = asyncio.get_running_loop().create_future()

    async def run(self, time_left_s: float, on_deadline: HeadraceError) -> None:
        """Answers first tokens, then the end; gives everything back. `on_deadline` ends it when its time is over."""
        leg = self.leg
        timer = self._rank.clock.call_later(time_left_s, lambda: leg.fail(on_deadline))
        try:
            leg.answer(await self._work())
        except HeadraceError as error:
            leg.fail(error)
            leg.answer(error)
        except Exception as error:
            log.error("an attempt met an unexpected error", error=error)
            leg.fail(InternalError(f"prefill: {type(error).__name__}", retryable=True))
            leg.answer(leg.failure or InternalError())
        finally:
            timer.cancel()
            leg.gate.stop(Unavailable("the attempt is over"))
            await self._retire()

    def renew(self) -> None:
        """Puts the promise's expiry off. A refusal ends the leg; silence lets it expire."""
        if self._writer is not None and self.leg.failure is None:
            self._ask_for_time(RenewCommand(self.leg.room.reservation_id), self._renewed)

    # --- the stages ----------------------------------------------------------------------------------------------------

    async def _work(self) -> Committed:
        leg, rank = self.leg, self._rank
        begun = self._begin()
        await rank.room.take(leg)
        if begun is not None:
            await leg.wait(begun)
        job = self._job()
        rank.batcher.add(job)
        leg.was_queued = True
        tokens = await leg.wait(self._tokens)
        leg.answer(FirstTokens(tuple(tokens), leg.cached_tokens, job.num_computed))
        live = [token for token in tokens if token.finish_reason is FinishReason.NONE]
        if live and self._writer is not None:
            await self._hand_over(self._writer, live)
        return Committed(leg.pushed_bytes, rank.report.stages(leg))

    def _begin(self) -> asyncio.Future[None] | None:
        """Uses the promise up; the future is done when decode has confirmed. None without a decode leg."""
        leg = self.leg
        if leg.promise is None:
            return None
        self._writer = self._rank.writers.enter(leg, leg.promise.decode)
        begun = asyncio.get_running_loop().create_future()

        def confirmed(answer: asyncio.Future) -> None:
            if answer.exception() is not None:
                leg.fail(answer.exception())
            else:
                settle(begun)

        self._ask_for_time(BeginCommand(leg.promise.reservation_id), confirmed)
        return begun

    def _ask_for_time(self, command: BeginCommand | RenewCommand, then: Callable[[asyncio.Future], None]) -> None:
        asked = self.leg.now()

        def answered(answer: asyncio.Future) -> None:
            if answer.exception() is None:
                self.leg.gate.renewed(asked + answer.result().expires_in_s)
            then(answer)

        self._writer.ask(command, self._rank.config.renew_every_s).add_done_callback(answered)

    def _renewed(self, answer: asyncio.Future) -> None:
        error = answer.exception()
        if error is not None and error.reason != UNANSWERED:
            self.leg.fail(error)

    def _job(self) -> PrefillJob:
        leg, command = self.leg, self.leg.command
        return PrefillJob(
            key=leg.key,
            sequences=sequences_of(command, leg.sequence_blocks, leg.cached_tokens, self._rank.block_size),
            sampling=command.sampling,
            sample_indices=command.sample_indices,
            delivered_counts=tuple(len(command.delivered.get(sample, ())) for sample in command.sample_indices),
            prompt_length=len(command.prompt_token_ids),
            on_start=self._on_start,
            on_layer=self._on_layer,
            on_tokens=self._on_tokens,
            on_error=self._on_error,
        )

    async def _hand_over(self, writer: Writer, live: Sequence[FirstToken]) -> None:
        leg, retries = self.leg, self._rank.config.commit_retries
        for repeat in range(retries + 1):
            await leg.wait(leg.pushed)
            try:
                await self._commit(writer, live)
                return
            except ManifestMismatch:
                telemetry.counter("headrace.push.repeats").add(1)
                if repeat == retries:
                    raise
                leg.expect_push_again()
                self._rank.pusher.push_again(leg)

    async def _commit(self, writer: Writer, live: Sequence[FirstToken]) -> None:
        leg, command = self.leg, self.leg.command
        fault = self._fault("prefill.commit")
        if fault is not None and fault.kind == "fail":
            raise InternalError("fault injection: commit fails", reason="FAULT_INJECTED", retryable=True)
        if fault is not None:
            await leg.wait(self._later(fault.seconds))
        commit = CommitCommand(
            reservation_id=leg.room.reservation_id,
            request_id=command.request_id,
            attempt=command.attempt,
            manifest=leg.manifest(),
            samples=tuple(
                SampleState(token.sample_index, (*command.delivered.get(token.sample_index, ()), token.token_id))
                for token in live
            ),
            prompt_token_ids=command.prompt_token_ids,
        )
        try:
            await leg.wait(writer.ask(commit, self._rank.config.expiry_margin_s))
        except Unavailable as error:
            if error.reason != UNANSWERED:
                raise
            raise Unavailable(f"Commit: {error.message}", reason="COMMIT_UNANSWERED") from error
        leg.moments.committed = leg.now()

    def _later(self, seconds: float) -> asyncio.Future[None]:
        later = asyncio.get_running_loop().create_future()
        self._rank.clock.call_later(seconds, lambda: settle(later))
        return later

    async def _retire(self) -> None:
        leg = self.leg
        if self._writer is not None:
            self._writer.leave(leg)
        if leg.was_queued and not leg.computed.is_set():
            if self._rank.batcher.cancel(leg.key):
                leg.computed.set()
            await leg.computed.wait()
        while not await leg.writes_ended(DRAIN_LOOK_S):
            pass
        self._rank.room.give_back(leg)
        self._rank.report.finish(leg)

    # --- in the engine thread ------------------------------------------------------------------------------------------

    def _on_start(self) -> None:
        self.leg.moments.started = self.leg.now()
        fault = self._fault("prefill.forward")
        if fault is not None and fault.kind == "fail":
            raise InternalError("fault injection: forward fails", reason="FAULT_INJECTED", retryable=True)
        if fault is not None:
            time.sleep(fault.seconds)

    def _on_layer(self, layer: int, ready: Callable[[], None]) -> None:
        if self.leg.promise is not None:
            self._rank.pusher.push_layer(self.leg, layer, ready)

    def _on_tokens(self, tokens: list[FirstToken]) -> None:
        self.leg.moments.computed = self.leg.now()
        self.leg.post(self._computed, settle, tokens)

    def _on_error(self, error: BaseException) -> None:
        if not isinstance(error, HeadraceError):
            text = f"forward failed: {type(error).__name__}: {error}"
            error = InternalError(text, reason="FORWARD_FAILED", retryable=True)
        self.leg.post(self._computed, settle_error, error)

    def _computed(self, how: Callable, what: object) -> None:
        """On the loop: the engine is done with the leg's blocks."""
        how(self._tokens, what)
        self._tokens.add_done_callback(_look)
        self.leg.computed.set()

    def _fault(self, point: str) -> Fault | None:
        command = self.leg.command
        return self._rank.faults.fire(point, attempt=command.attempt, request_id=command.request_id)


def _look(tokens: asyncio.Future) -> None:
    """So that an error which nobody waits for any more is not complained about."""
    if not tokens.cancelled():
        tokens.exception()
