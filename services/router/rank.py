"""One rank as this router sees it: who it is, how it is, what it was sent.

A rank is one epoch at one address. A link's hello makes it known, a canary token through it makes it ready; a fault makes it suspect
until it is known again to serve, and after BREAKER_FAULTS in a row until a canary has gone through again. Its beats say what other
routers load it with; what this router has booked there is fresher than any beat.
"""

from __future__ import annotations

import asyncio
import enum
from typing import Protocol

from headrace.clock import Clock
from headrace.errors import HeadraceError
from headrace.protocol.common import WorkerIdentity, WorkerInfo, WorkerProgress, WorkerRole
from headrace.protocol.prefill import HeldPrefixes
from headrace.protocol.router import WorkerView
from services.router.interfaces import Dialer
from services.router.links import RankLinks
from services.router.prefix import HeldKeys

BREAKER_FAULTS = 3
STALL_AFTER_S = 5.0
"""Work was handed to the engine and nothing has completed for so long, with no pause announced: it is stuck."""
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 1.0


class RankState(enum.Enum):
    """Where a rank is; only READY ones get requests."""

    NEW = "it has not answered yet"
    PROBED = "no canary has gone through yet"
    READY = ""
    SUSPECT = "an error was seen"
    LEAVING = "it announces itself no longer"
    LOST = "its process has ended"


class RankObserver(Protocol):
    """Who keeps all ranks."""

    def on_rank_open(self, rank: RankView, info: WorkerInfo) -> None: ...

    def on_rank_broken(self, rank: RankView) -> None: ...

    def on_rank_progress(self, rank: RankView) -> None: ...

    def on_rank_lost(self, rank: RankView, error: HeadraceError) -> None: ...


class PrefillLeg(Protocol):
    """An attempt that waits for a prefill rank."""

    def on_prefill_broken(self) -> None: ...


class RankView:
    """One epoch of one rank. `queued_tokens`, `booked_blocks` and `in_flight` count this router's requests only."""

    def __init__(self, role: WorkerRole, identity: WorkerIdentity, clock: Clock, observer: RankObserver):
        self.role, self.identity = role, identity
        self._clock, self._observer = clock, observer
        self.links: RankLinks
        self.info: WorkerInfo | None = None
        self.fingerprint = ""
        """Of its KV layout; empty before it has answered, as the next two are 0."""
        self.num_blocks = self.block_size = 0
        self.state = RankState.NEW
        self.why = ""
        self.in_flight = self.queued_tokens = self.booked_blocks = 0
        self.others_tokens = self.others_blocks = 0
        """What the last beat showed beside our own bookings: prompt tokens that wait there, blocks that are taken."""
        self.held = HeldKeys()
        self.legs: set[PrefillLeg] = set()
        self.faults = 0
        self.checking = self.was_open = False
        self.check_at = 0.0
        self.backoff_s = FIRST_BACKOFF_S
        self._moved_at = clock.now()
        self._last_count = (0, 0)

    def open(self, dialer: Dialer, tasks: asyncio.TaskGroup) -> None:
        """Begins a life of its links."""
        self.held.clear()
        self._moved_at = self._clock.now()
        self.links = RankLinks(self.role, self.identity, dialer, tasks, self)

    def learn(self, info: WorkerInfo) -> None:
        """It has answered."""
        self.info, self.was_open = info, True
        self.fingerprint, self.num_blocks, self.block_size = (
            info.layout.fingerprint,
            info.block_count,
            info.layout.block_size,
        )

    # --- how it is -------------------------------------------------------------------------------------------------------

    @property
    def progress(self) -> WorkerProgress | None:
        """Of its last beat; None before the first."""
        return self.links.commands.progress

    @property
    def can_serve(self) -> bool:
        """Whether it may be sent anything at all: connected, taking work, and not stuck."""
        links = self.links
        if not links.is_open:
            return False
        progress = links.commands.progress
        return progress is None or (progress.serving and (not progress.pending_steps or not self.is_stalled))

    @property
    def is_ready(self) -> bool:
        """Whether it gets requests."""
        return self.state is RankState.READY and self.can_serve

    @property
    def is_stalled(self) -> bool:
        """Whether its engine was given work and has completed nothing of it for STALL_AFTER_S."""
        progress = self.progress
        if progress is None or not progress.pending_steps or progress.pause_reason:
            return False
        return self._clock.now() - self._moved_at > STALL_AFTER_S

    @property
    def moved_count(self) -> tuple[int, int]:
        """Steps and layers it has completed: when they have grown, its engine lives."""
        progress = self.progress
        return (progress.completed_steps, progress.completed_layers) if progress is not None else (0, 0)

    def why_not_ready(self) -> str:
        """For people; empty when it is ready."""
        if self.is_ready:
            return ""
        if self.is_stalled and self.links.is_open:
            return f"its engine has completed nothing for {STALL_AFTER_S:.0f} s"
        if self.progress is not None and not self.progress.serving:
            return self.progress.pause_reason or "it takes no new work"
        return self.why or self.state.value or "a link to it is not open"

    def view(self) -> WorkerView | None:
        """For operators; None before it has answered."""
        if self.info is None:
            return None
        return WorkerView(
            self.info, self.is_ready, self.in_flight, self.queued_tokens, self.why_not_ready(), self.progress
        )

    # --- what its links say ------------------------------------------------------------------------------------------------

    def on_open(self, info: WorkerInfo) -> None:
        """Every link is connected."""
        self._moved_at = self._clock.now()
        self._observer.on_rank_open(self, info)

    def on_broken(self) -> None:
        """A link is silent: nothing new goes there, what runs waits."""
        self._observer.on_rank_broken(self)

    def on_progress(self) -> None:
        """A beat."""
        progress = self.progress
        if progress is not None:
            self._take(progress)
        self._observer.on_rank_progress(self)

    def on_held(self, held: HeldPrefixes) -> None:
        """Which prefixes it can use again."""
        self.held.update(held, self.num_blocks)

    def on_lost(self, error: HeadraceError) -> None:
        """A link is gone, and everything that was under way there."""
        self._observer.on_rank_lost(self, error)

    def _take(self, progress: WorkerProgress) -> None:
        count = (progress.completed_steps, progress.completed_layers)
        if count != self._last_count or not progress.pending_steps or progress.pause_reason:
            self._moved_at = self._clock.now()
        self._last_count = count
        self.others_tokens = max(0, progress.queued_tokens - self.queued_tokens)
        self.others_blocks = max(0, self.num_blocks - progress.available_blocks - self.booked_blocks)
