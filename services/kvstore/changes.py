"""What watchers are told: the catalogue as it is, then its changes, numbered without a gap unless some were missed."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from dataclasses import dataclass

from headrace.protocol.common import CacheTier, WorkerIdentity

WATCH_BUFFER = 1024
"""Changes a watcher may leave unread; one more drops them all and says LOST."""


@dataclass(frozen=True)
class Change:
    """`kind` is PUBLISHED, WITHDRAWN or LOST. `all` means everything of that worker; `number` counts what one watcher was told."""

    kind: str
    worker: WorkerIdentity
    keys: tuple[bytes, ...] = ()
    all: bool = False
    tier: CacheTier = CacheTier.UNSPECIFIED
    is_snapshot: bool = False
    number: int = 0


LOST = Change("LOST", WorkerIdentity("", ""))


class Watcher:
    """A bounded mailbox. What was dropped leaves a gap in the numbers."""

    def __init__(self) -> None:
        self._changes: collections.deque[Change] = collections.deque()
        self._arrived = asyncio.Event()
        self._number = 0
        self._dropped = 0

    def put(self, change: Change) -> None:
        """A change has happened."""
        if len(self._changes) >= WATCH_BUFFER:
            self._dropped += len(self._changes) + 1
            self._changes.clear()
            change = LOST
        self._changes.append(change)
        self._arrived.set()

    def wake(self) -> None:
        """Ends a `take` that waits."""
        self._arrived.set()

    async def take(self) -> list[Change]:
        """What has happened since, with numbers; waits for something, or for `wake`."""
        await self._arrived.wait()
        self._arrived.clear()
        taken = [self._changes.popleft() for _ in range(len(self._changes))]
        self._number, self._dropped = self._number + self._dropped, 0
        return [self.numbered(change) for change in taken]

    def numbered(self, change: Change) -> Change:
        """The change with the next number: the watcher is told it now."""
        self._number += 1
        return dataclasses.replace(change, number=self._number)
