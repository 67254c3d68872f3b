"""A canary: two tokens through a pair of ranks, the first from prefill, the second from decode."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator

from headrace.clock import Clock, Deadline
from headrace.errors import Unavailable
from headrace.protocol.common import SamplingParams
from services.router.answer import AnswerBuilder
from services.router.attempt import Attempt
from services.router.checkpoint import CheckpointInfo
from services.router.fleet import Fleet
from services.router.placing import PlaceNeed, Placing
from services.router.rank import RankView
from services.router.retry import LostAttempt, suspects
from services.router.stages import StageLog

CANARY_TIMEOUT_S = 10.0
_TOKENS = 8


class CanaryRequest:
    """The owner of a canary's one attempt."""

    def __init__(self, checkpoint: CheckpointInfo, clock: Clock):
        self.leg_id = self.display_id = f"canary-{secrets.token_hex(8)}"
        self.prompt = tuple(token % checkpoint.vocabulary_size for token in range(_TOKENS))
        self.sampling = SamplingParams(max_tokens=2, ignore_eos=True)
        self.stream_interval, self.priority, self.cached_tokens = 1, 0, 0
        self.cache_salt, self.trace_parent = "canary", ""
        self.answer = AnswerBuilder(checkpoint.tokenizer, self.sampling, 1, final_only=True)
        self.deadline = Deadline.after(clock, CANARY_TIMEOUT_S)
        self.stages = StageLog(clock)
        self.ended: asyncio.Future[LostAttempt | None] = asyncio.get_running_loop().create_future()

    def publish(self) -> None:
        """Nobody reads it."""

    def may_leave_broken_prefill(self, attempt: Attempt) -> bool:
        """It asks about this pair."""
        return True

    def on_attempt_end(self, attempt: Attempt, lost: LostAttempt | None) -> None:
        """Ends the wait."""
        if not self.ended.done():
            self.ended.set_result(lost)

    def need(self) -> PlaceNeed:
        """One block is enough."""
        return PlaceNeed(len(self.prompt), len(self.prompt) + 2, lambda block_size: 1, True)


class Canaries:
    """Runs canaries for one router. `handles` are shared with its requests."""

    def __init__(
        self, checkpoint: CheckpointInfo, clock: Clock, fleet: Fleet, placing: Placing, handles: Iterator[int]
    ):
        self._checkpoint, self._clock = checkpoint, clock
        self._fleet, self._placing, self._handles = fleet, placing, handles

    async def run(self, prefill: RankView, decode: RankView) -> None:
        """Through this pair, within CANARY_TIMEOUT_S. Raises what went wrong."""
        request = CanaryRequest(self._checkpoint, self._clock)
        place = self._placing.book(prefill, decode, request.need())
        attempt = Attempt(request, place, 1, next(self._handles), self._clock)
        alarm = self._clock.call_later(CANARY_TIMEOUT_S, lambda: request.on_attempt_end(attempt, None))
        try:
            attempt.start()
            lost = await request.ended
        finally:
            alarm.cancel()
            attempt.cancel()
        if lost is not None:
            self._blame(attempt, lost)
        if request.answer.num_tokens != 2:
            text = f"the canary brought {request.answer.num_tokens} of 2 tokens"
            raise Unavailable(text, reason="CANARY_FAILED")

    def _blame(self, attempt: Attempt, lost: LostAttempt) -> None:
        for rank in suspects(lost, attempt.place, attempt.moved_before):
            self._fleet.suspect(rank, lost.error)
        raise lost.error
