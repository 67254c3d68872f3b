"""One stream that carries a link: its beats, its silence, and when what came over it is acknowledged."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from headrace.clock import Clock, Timer
from headrace.errors import HeadraceError, Unavailable

ACKNOWLEDGE_WITHIN_S = 0.05
ACKNOWLEDGE_BYTES = 64 * 1024
"""What arrived is acknowledged with whatever is sent next, at the latest after this time or so many bytes."""
SILENT_BEATS = 3
RESUME_BEATS = 6


@dataclass(frozen=True)
class LinkSettings:
    """Times in seconds. Both ends must have the same beat."""

    beat_s: float = 1.0
    silent_s: float = SILENT_BEATS * 1.0
    """A connection from which nothing came for so long is broken."""
    resume_s: float = RESUME_BEATS * 1.0
    """A link that is not resumed so long after its connection broke is lost."""
    max_queued_bytes: int = 64 * 1024 * 1024
    """What the other side may leave unacknowledged; more loses the link."""

    @classmethod
    def from_beat(cls, beat_s: float, max_queued_bytes: int = 64 * 1024 * 1024) -> LinkSettings:
        """All times from the one setting."""
        return cls(beat_s, SILENT_BEATS * beat_s, RESUME_BEATS * beat_s, max_queued_bytes)


class Connection:
    """One stream that carries a link, from its first message to its end. Beats, and ends itself when nothing comes."""

    def __init__(self, clock: Clock, settings: LinkSettings):
        self.wake = asyncio.Event()
        """There may be something to send."""
        self.over = asyncio.Event()
        self.error: HeadraceError | None = None
        self.is_greeted = False
        self.beat_is_due = False
        self.acknowledgement_is_due = False
        self.unacknowledged_bytes = 0
        self._clock, self._settings = clock, settings
        self._heard_at = self._beat_at = clock.now()
        self._timer: Timer = clock.call_later(settings.beat_s, self._beat)
        self._acknowledging: Timer | None = None

    @property
    def is_over(self) -> bool:
        """Nothing more goes or comes."""
        return self.over.is_set()

    def end(self, error: HeadraceError | None) -> None:
        """No more messages; the first `error` stays. Safe to repeat."""
        if self.is_over:
            return
        self.error = error
        self._timer.cancel()
        if self._acknowledging is not None:
            self._acknowledging.cancel()
        self.over.set()
        self.wake.set()

    def heard(self, num_bytes: int) -> None:
        """A message came, with items of so many bytes."""
        self._heard_at = self._clock.now()
        if not num_bytes:
            return
        self.unacknowledged_bytes += num_bytes
        if self.unacknowledged_bytes >= ACKNOWLEDGE_BYTES:
            self._acknowledge()
        elif self._acknowledging is None:
            self._acknowledging = self._clock.call_later(ACKNOWLEDGE_WITHIN_S, self._acknowledge)

    def said(self) -> None:
        """A message with the newest acknowledgement was made."""
        self.beat_is_due = self.acknowledgement_is_due = False
        self.unacknowledged_bytes = 0
        if self._acknowledging is not None:
            self._acknowledging.cancel()
            self._acknowledging = None

    def _acknowledge(self) -> None:
        self.acknowledgement_is_due = True
        self.wake.set()

    def _beat(self) -> None:
        now, beat_s = self._clock.now(), self._settings.beat_s
        if now - self._beat_at > 2 * beat_s:
            # This process itself stood still: what came meanwhile has not been read yet.
            self._heard_at = max(self._heard_at, now - self._settings.silent_s + beat_s)
        self._beat_at = now
        if now - self._heard_at >= self._settings.silent_s:
            self.end(Unavailable(f"nothing came for {self._settings.silent_s:g} s", reason="LINK_SILENT"))
            return
        self.beat_is_due = True
        self.wake.set()
        self._timer = self._clock.call_later(beat_s, self._beat)
