"""Between the thread that writes a leg's rows and whoever stops it: no write starts after a stop, and the end of one that runs
is told."""

from __future__ import annotations

import threading
from collections.abc import Callable

from headrace.clock import Clock
from headrace.errors import StaleAttempt


class WriteGate:
    """The transfer thread asks `may_write` before each layer and says `end_write` after it; all else may come from any thread."""

    def __init__(self, clock: Clock, expires_at: float):
        """`expires_at` is a reading of `clock`: when the room may be given to somebody else."""
        self._clock = clock
        self._expires_at = expires_at
        self._lock = threading.Lock()
        self._stopped: BaseException | None = None
        self._writing = False
        self._outcome_unknown = False
        self._waiting: list[Callable[[], None]] = []

    def may_write(self, margin_s: float) -> BaseException | None:
        """Opens the gate for one layer, or says why not. Followed by `end_write` when it opened."""
        with self._lock:
            if self._stopped is not None:
                return self._stopped
            if self._clock.now() + margin_s >= self._expires_at:
                return StaleAttempt("the reservation is about to expire")
            self._writing = True
            return None

    def end_write(self, *, outcome_known: bool) -> None:
        """The write returned. `outcome_known` is False when bytes may still be under way."""
        with self._lock:
            self._writing = False
            self._outcome_unknown |= not outcome_known
            waiting, self._waiting = self._waiting, []
        for tell in waiting:
            tell()

    def stop(self, why: BaseException) -> None:
        """No write starts from now on; one that runs goes on until it returns."""
        with self._lock:
            self._stopped = self._stopped or why

    def when_ended(self, tell: Callable[[], None]) -> bool:
        """False: no write runs, and `tell` is never called. True: it is, in the writing thread, when the write returns."""
        with self._lock:
            if self._writing:
                self._waiting.append(tell)
            return self._writing

    def renewed(self, expires_at: float) -> None:
        """The decode rank put the expiry off to `expires_at`."""
        with self._lock:
            self._expires_at = max(self._expires_at, expires_at)

    @property
    def is_writing(self) -> bool:
        """A write is inside a call now: the rows it reads must stay."""
        with self._lock:
            return self._writing

    @property
    def is_drained(self) -> bool:
        """No write runs, and every one that ran is known to have ended."""
        with self._lock:
            return not self._writing and not self._outcome_unknown
