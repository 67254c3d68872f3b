"""The catalogue core: which stored blocks exist, who holds them, who pinned them.

Stateless but for its watchers: the catalogue is in the index (Redis), so any number of these processes answer alike. What
is said here is a hint to whoever routes; a block that is listed and gone costs a recomputation, nothing else.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.errors import InvalidRequest, Unavailable
from headrace.protocol import PrefixHolder, WorkerIdentity

MAX_KEYS = 65536
"""Keys in one call."""
MIN_TTL_S = 1.0
MAX_LEASE_S = 600.0
MAX_ENTRY_S = 86_400.0
WATCH_BUFFER = 1024
"""Changes a watcher may leave unread; one more drops them all and says LOST."""
_KEY = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Change:
    """`kind` is PUBLISHED, WITHDRAWN or LOST. Empty `keys` means all of that worker."""

    kind: str
    worker: WorkerIdentity
    keys: tuple[str, ...] = ()


LOST = Change("LOST", WorkerIdentity("", ""))


class Index(Protocol):
    """The catalogue itself (services.kvstore.redis_index.RedisIndex). Every method may raise Unavailable."""

    async def lookup(self, keys: Sequence[str]) -> tuple[PrefixHolder, ...]: ...

    async def publish(self, worker: WorkerIdentity, keys: Sequence[str], ttl_s: float) -> None: ...

    async def withdraw(self, worker: WorkerIdentity, keys: Sequence[str]) -> None: ...

    async def acquire(self, keys: Sequence[str], ttl_s: float) -> tuple[str, int]: ...

    async def release(self, lease_id: str) -> None: ...

    async def replace_epoch(self, worker: WorkerIdentity) -> None: ...

    async def listen(self, on_change: Callable[[Change], None]) -> None: ...


class KvStore:
    """All decisions of a kvstore process. Use `async with KvStore.open(index)`."""

    def __init__(self, index: Index):
        self._index = index
        self._watchers: set[_Watcher] = set()
        self._draining = False

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, index: Index) -> AsyncIterator[KvStore]:
        """The core with the task that hears of changes."""
        core = cls(index)
        async with asyncio.TaskGroup() as tasks:
            listening = tasks.create_task(index.listen(core._on_change))
            try:
                yield core
            finally:
                listening.cancel()

    async def lookup(self, keys: Sequence[str]) -> tuple[PrefixHolder, ...]:
        """Who holds how many leading blocks of `keys`, longest first."""
        _check_keys(keys)
        holders = await self._index.lookup(keys)
        return tuple(sorted(holders, key=lambda holder: (-holder.num_blocks, holder.worker.address)))

    async def publish(self, worker: WorkerIdentity, keys: Sequence[str], ttl_s: float) -> None:
        """Registers blocks for `ttl_s`. Raises StaleEpoch when a later process at that address is known."""
        _check_worker(worker, "worker")
        _check_keys(keys)
        _check_ttl(ttl_s, MAX_ENTRY_S)
        await self._index.publish(worker, keys, ttl_s)

    async def withdraw(self, worker: WorkerIdentity, keys: Sequence[str]) -> None:
        """Takes blocks out; empty `keys` takes out all of that address and epoch. Leases do not hold them: they are gone."""
        _check_worker(worker, "worker")
        _check_keys(keys)
        await self._index.withdraw(worker, keys)

    async def acquire(self, holder: WorkerIdentity, keys: Sequence[str], ttl_s: float) -> tuple[str, int]:
        """A lease id and how many leading keys it pins: their entries do not lapse before the lease does."""
        _check_worker(holder, "holder")
        _check_keys(keys)
        _check_ttl(ttl_s, MAX_LEASE_S)
        return await self._index.acquire(keys, ttl_s)

    async def release(self, lease_id: str) -> None:
        """Ends a lease early; a lease that is not there has ended."""
        if not _KEY.fullmatch(lease_id):
            raise InvalidRequest("lease_id: not a lease id", field="lease_id")
        await self._index.release(lease_id)

    async def watch(self) -> AsyncIterator[Change]:
        """Changes from now on. Ends with Unavailable when this process drains."""
        watcher = _Watcher()
        self._watchers.add(watcher)
        try:
            while not self._draining:
                for change in await watcher.take():
                    yield change
            raise Unavailable("this kvstore drains", reason="DRAINING")
        finally:
            self._watchers.discard(watcher)

    async def worker_seen(self, worker: WorkerIdentity) -> None:
        """The registry knows this process at its address: entries of earlier epochs are gone."""
        await self._index.replace_epoch(worker)

    async def drain(self, grace_s: float) -> None:
        """Sends watchers elsewhere; other calls are short."""
        self._draining = True
        for watcher in self._watchers:
            watcher.wake()

    def _on_change(self, change: Change) -> None:
        for watcher in self._watchers:
            watcher.put(change)


class _Watcher:
    """A bounded mailbox."""

    def __init__(self) -> None:
        self._changes: collections.deque[Change] = collections.deque()
        self._arrived = asyncio.Event()

    def put(self, change: Change) -> None:
        if len(self._changes) >= WATCH_BUFFER:
            self._changes.clear()
            change = LOST
        self._changes.append(change)
        self._arrived.set()

    def wake(self) -> None:
        self._arrived.set()

    async def take(self) -> list[Change]:
        await self._arrived.wait()
        self._arrived.clear()
        taken = list(self._changes)
        self._changes.clear()
        return taken


def _check_keys(keys: Sequence[str]) -> None:
    if len(keys) > MAX_KEYS:
        raise InvalidRequest(f"keys: {len(keys)} of them, at most {MAX_KEYS}", field="keys")
    for key in keys:
        if not _KEY.fullmatch(key):
            raise InvalidRequest("keys: a key is 32 lower-case hexadecimal digits", field="keys")


def _check_worker(worker: WorkerIdentity, field: str) -> None:
    if not worker.address or not worker.epoch or " " in worker.address + worker.epoch:
        raise InvalidRequest(f"{field}: address and epoch must be given, without blanks", field=field)


def _check_ttl(ttl_s: float, most_s: float) -> None:
    if not MIN_TTL_S <= ttl_s <= most_s:
        raise InvalidRequest(
            f"time_to_live: {ttl_s:g} s; at least {MIN_TTL_S:g} s, at most {most_s:g} s", field="time_to_live"
        )
