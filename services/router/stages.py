"""The stage times of one request, all placed on the router's clock: its own stages, and those the workers report.

A worker's offsets count from its own first contact with the attempt; that moment is known here as the start of the call.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from headrace.clock import Clock
from headrace.observe import telemetry
from headrace.protocol import Stage


class StageLog:
    """Stages of one request; times in seconds since it was accepted."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._zero = clock.now()
        self._wall_zero = time.time()
        self._stages: list[Stage] = []

    def elapsed_s(self) -> float:
        """Seconds since acceptance."""
        return self._clock.now() - self._zero

    @contextlib.contextmanager
    def span(self, name: str, tokens: int = 0, **attributes: Any) -> Iterator[Any]:
        """A stage that is a span of its own, child of the current one."""
        with telemetry.span(name, tokens=tokens, **attributes) as span, self.timed(name, tokens):
            yield span

    @contextlib.contextmanager
    def timed(self, name: str, tokens: int = 0) -> Iterator[None]:
        """A stage whose span is opened elsewhere. A stage that fails is kept too."""
        start = self.elapsed_s()
        try:
            yield
        finally:
            self.add(name, start, self.elapsed_s() - start, tokens)

    def add(self, name: str, start_s: float, duration_s: float, tokens: int = 0) -> None:
        """A stage whose times are known."""
        self._stages.append(Stage(name, start_s, duration_s, tokens))

    def emit(self, name: str, start_s: float, parent: str, tokens: int = 0, **attributes: Any) -> None:
        """A stage and span from `start_s` until now, written down afterwards."""
        now = self.elapsed_s()
        self.add(name, start_s, now - start_s, tokens)
        begin, end = self._wall_zero + start_s, self._wall_zero + now
        telemetry.emit(name, begin, end, parent=parent, tokens=tokens, **attributes)

    def place(self, stages: Sequence[Stage], zero_s: float) -> None:
        """A worker's stages, whose own zero was at `zero_s` here. A stage seen from two sides is kept as its owner saw it."""
        names = {stage.name for stage in stages}
        self._stages = [kept for kept in self._stages if not (kept.name in names and kept.start_s >= zero_s)]
        self._stages += [
            Stage(stage.name, zero_s + stage.start_s, stage.duration_s, stage.tokens, stage.bytes) for stage in stages
        ]

    def start_of(self, name: str) -> float | None:
        """When the latest stage of that name began, None when there was none."""
        return max((stage.start_s for stage in self._stages if stage.name == name), default=None)

    def in_order(self) -> tuple[Stage, ...]:
        """All stages, by start."""
        return tuple(sorted(self._stages, key=lambda stage: stage.start_s))
