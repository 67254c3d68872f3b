"""The stage times of one request, all placed on the router's clock: its own stages, and those the workers report.

A worker's offsets count from its own first contact with the attempt; that moment is known here as the start of the call.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.clock import Clock
from headrace.protocol.common import Stage


class StageLog:
    """Stages of one request; times in seconds since it was accepted."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self.zero = clock.now()
        """When the request was accepted, by the clock."""
        self._stages: list[Stage] = []

    def elapsed_s(self) -> float:
        """Seconds since acceptance."""
        return self._clock.now() - self.zero

    def add(self, name: str, start_s: float, duration_s: float, tokens: int = 0) -> None:
        """A stage whose times are known."""
        self._stages.append(Stage(name, start_s, duration_s, tokens))

    def place(self, stages: Sequence[Stage], zero_s: float) -> None:
        """A worker's stages, whose own zero was at `zero_s` here. A stage seen from two sides is kept as its owner saw it."""
        names = {stage.name for stage in stages}
        self._stages = [kept for kept in self._stages if not (kept.name in names and kept.start_s >= zero_s)]
        self._stages += [
            Stage(stage.name, zero_s + stage.start_s, stage.duration_s, stage.tokens, stage.bytes) for stage in stages
        ]

    def place_after(self, name: str, stages: Sequence[Stage]) -> None:
        """A worker's stages, counted from the start of the stage `name`; such that they end now when that was never told."""
        if stages:
            length_s = max(stage.start_s + stage.duration_s for stage in stages)
            began_s = self.start_of(name)
            self.place(stages, self.elapsed_s() - length_s if began_s is None else began_s)

    def start_of(self, name: str) -> float | None:
        """When the latest stage of that name began, None when there was none."""
        return max((stage.start_s for stage in self._stages if stage.name == name), default=None)

    def in_order(self) -> tuple[Stage, ...]:
        """All stages, by start."""
        return tuple(sorted(self._stages, key=lambda stage: stage.start_s))
