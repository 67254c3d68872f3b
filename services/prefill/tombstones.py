"""Reservations that are over, and whether all their writes are known to have ended."""

from __future__ import annotations

import collections
from dataclasses import dataclass

from headrace.clock import Clock
from headrace.protocol.decode import StopState

REMEMBERED_S = 120.0
"""Far above any reservation's life."""


@dataclass(frozen=True)
class _Tombstone:
    forget_at: float
    drained: bool


class Tombstones:
    """By reservation id, each for REMEMBERED_S since it was named last."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._by_id: collections.OrderedDict[str, _Tombstone] = collections.OrderedDict()

    def __contains__(self, reservation_id: str) -> bool:
        return reservation_id in self._by_id

    def bury(self, reservation_id: str, *, drained: bool) -> StopState:
        """This reservation is over. Once late writes were possible, that is what every later call hears."""
        now = self._clock.now()
        earlier = self._by_id.pop(reservation_id, None)
        tombstone = _Tombstone(now + REMEMBERED_S, drained and (earlier is None or earlier.drained))
        self._by_id[reservation_id] = tombstone
        while next(iter(self._by_id.values())).forget_at < now:
            self._by_id.popitem(last=False)
        return StopState.DRAINED if tombstone.drained else StopState.UNKNOWN
