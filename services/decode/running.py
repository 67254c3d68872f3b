"""A request that steps: what each of its samples has gathered, and where its time goes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.engine.request import SampledToken
from headrace.protocol.common import SamplingParams, Stage
from headrace.protocol.decode import TokenRecord
from services.decode.request import Request
from services.decode.tokens import RouterTokens


@dataclass(frozen=True)
class Step:
    """What one step produced; the engine hands over columns, and a SampledToken is made where the loop looks at it.

    Steps run back to back: one `began` when the one before `ended`, or later.
    """

    number: int
    began: float
    ended: float
    tokens: Sequence[SampledToken]


class SampleOutput:
    """Gathers one sample's tokens until they are due: `interval` since the last send, or the sample's end."""

    __slots__ = ("_first_position", "_handle", "_interval", "_logprobs", "_sample_index", "_tokens", "_top")

    def __init__(self, handle: int, sample_index: int, interval: int, sampling: SamplingParams):
        self._handle, self._sample_index, self._interval = handle, sample_index, interval
        self._first_position = 0
        self._tokens: list[int] = []
        self._logprobs: list[float] | None = None if sampling.logprobs is None else []
        self._top: list[tuple[tuple[int, float], ...]] = []

    def add(self, token: SampledToken) -> bool:
        """Takes a token; whether the sample's tokens are due."""
        tokens = self._tokens
        if not tokens:
            self._first_position = token.position
        tokens.append(token.token_id)
        if self._logprobs is not None:
            self._logprobs.append(token.logprob or 0.0)
            self._top.append(token.top)
        return len(tokens) >= self._interval

    def take(self) -> TokenRecord:
        """What has gathered."""
        tokens, self._tokens = tuple(self._tokens), []
        if self._logprobs is None:
            return TokenRecord(self._handle, self._sample_index, self._first_position, tokens)
        logprobs, self._logprobs = tuple(self._logprobs), []
        top, self._top = tuple(self._top), []
        return TokenRecord(self._handle, self._sample_index, self._first_position, tokens, logprobs, top)


@dataclass
class RunningRequest:
    """Readings of the clock, in seconds: when Commit `arrived`, when it was accepted. `samples` are those that step, `link` is the way
    to their router: when it is lost, the request has ended."""

    request: Request
    link: RouterTokens
    arrived: float
    committed: float
    samples: dict[int, SampleOutput]
    first_step_began: float = 0.0
    last_step: int = 0
    step_times: list[float] = field(default_factory=list)

    def stepped(self, step: Step) -> None:
        """A step made tokens for this request; counted once however many samples it has."""
        if step.number == self.last_step:
            return
        if not self.step_times:
            self.first_step_began = step.began
        self.last_step = step.number
        self.step_times.append(step.ended)

    def stages(self) -> tuple[Stage, ...]:
        """Where the time on this rank went since Commit arrived; the request's trace gets the same."""
        began = max(self.committed, self.first_step_began)
        ended, steps = self.step_times[-1], len(self.step_times)
        if self.request.trace.is_sampled:
            self.request.stage("decode.queue", self.committed, began)
            self.request.stage("decode.generate", began, ended, steps=steps, **self._gaps())
        queue = Stage("decode.queue", self.committed - self.arrived, began - self.committed)
        return queue, Stage("decode.generate", began - self.arrived, ended - began, tokens=steps)

    def _gaps(self) -> dict[str, float]:
        """Mean and 99th percentile of the times between steps, seconds."""
        gaps = sorted(later - earlier for earlier, later in itertools.pairwise(self.step_times)) or [0.0]
        return {"itl_mean_s": sum(gaps) / len(gaps), "itl_p99_s": gaps[math.ceil(0.99 * len(gaps)) - 1]}
