"""Tells the catalogue which prefixes this rank holds, off every hot path.

Keys are gathered and sent at most every half second; what the pool evicted is withdrawn; everything is published again before
its time to live ends. When no kvstore answers, nothing waits: prefixes are found again once one does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.clock import Clock
from headrace.errors import HeadraceError
from headrace.protocol import WorkerIdentity

log = logging.getLogger(__name__)

FLUSH_EVERY_S = 0.5
MAX_KEYS_PER_CALL = 16384


class Catalogue(Protocol):
    """The part of KvStoreClient used here."""

    async def publish(self, worker: WorkerIdentity, keys: Sequence[str], ttl_s: float, timeout_s: float) -> None: ...

    async def withdraw(self, worker: WorkerIdentity, keys: Sequence[str], timeout_s: float) -> None: ...


class Publisher:
    """`catalogue()` returns a kvstore to talk to now, or None."""

    def __init__(self, identity: WorkerIdentity, catalogue: Callable[[], Catalogue | None], clock: Clock, ttl_s: float):
        self._identity = identity
        self._catalogue = catalogue
        self._clock = clock
        self._ttl_s = ttl_s
        self._held: dict[str, None] = {}
        self._new: dict[str, None] = {}
        self._gone: dict[str, None] = {}
        self._refresh_at = clock.now() + ttl_s / 3

    def publish(self, keys: Sequence[str]) -> None:
        """These blocks are here now."""
        for key in keys:
            self._gone.pop(key, None)
            if key not in self._held:
                self._new[key] = None

    def withdraw(self, keys: Sequence[str]) -> None:
        """These blocks were evicted."""
        for key in keys:
            self._new.pop(key, None)
            if self._held.pop(key, 0) is None:
                self._gone[key] = None

    async def run(self) -> None:
        """Sends what changed, for ever."""
        while True:
            await self._clock.wait(FLUSH_EVERY_S)
            if self._clock.now() >= self._refresh_at:
                self._new = {**self._held, **self._new}
                self._refresh_at = self._clock.now() + self._ttl_s / 3
            if self._new or self._gone:
                await self._flush()

    async def _flush(self) -> None:
        catalogue = self._catalogue()
        if catalogue is None:
            return
        new, gone = list(self._new)[:MAX_KEYS_PER_CALL], list(self._gone)[:MAX_KEYS_PER_CALL]
        try:
            if gone:
                await catalogue.withdraw(self._identity, gone, FLUSH_EVERY_S)
            if new:
                await catalogue.publish(self._identity, new, self._ttl_s, FLUSH_EVERY_S)
        except HeadraceError as error:
            log.debug("catalogue unreachable", extra={"fields": {"reason": error.reason}})
            return
        for key in new:
            if self._new.pop(key, 0) is None:
                self._held[key] = None
            else:  # evicted while the call was under way: the catalogue has it all the same
                self._gone[key] = None
        for key in gone:
            self._gone.pop(key, None)
