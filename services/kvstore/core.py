"""The catalogue core: which stored blocks exist, who holds them, who pinned them.

Stateless but for its watchers and for what workers have sent and Redis has not taken yet: the catalogue is in the index
(Redis), so any number of these processes answer alike. What is said here is a hint to whoever routes; a block that is listed
and gone costs a recomputation, nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from headrace.errors import HeadraceError, InvalidRequest, Unavailable
from headrace.protocol.common import CacheTier, WorkerIdentity
from headrace.protocol.kvstore import PrefixHolder, PublishCommand, WithdrawCommand
from services.kvstore.changes import Change, Watcher

MAX_KEYS = 65_536
"""Keys in one call."""
MAX_COMMAND_KEYS = 8192
"""Keys in one command."""
KEY_BYTES = 16
MIN_TTL_S = 1.0
MAX_LEASE_S = 600.0
MAX_ENTRY_S = 86_400.0
_LEASE = re.compile(r"[0-9a-f]{32}")


class Index(Protocol):
    """The catalogue itself (services.kvstore.redis_index.RedisIndex). Every method may raise Unavailable."""

    async def lookup(self, keys: Sequence[bytes]) -> tuple[PrefixHolder, ...]: ...

    async def apply(
        self, worker: WorkerIdentity, commands: Sequence[PublishCommand | WithdrawCommand]
    ) -> list[HeadraceError | None]: ...

    async def acquire(self, keys: Sequence[bytes], ttl_s: float) -> tuple[str, int]: ...

    async def release(self, lease_id: str) -> None: ...

    async def replace_epoch(self, worker: WorkerIdentity) -> None: ...

    def snapshot(self) -> AsyncIterator[Change]: ...

    async def listen(self, on_change: Callable[[Change], None]) -> None: ...


class KvStore:
    """All decisions of a kvstore process. Use `async with KvStore.open(index)`."""

    def __init__(self, index: Index):
        self._index = index
        self._watchers: set[Watcher] = set()
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

    async def lookup(self, keys: Sequence[bytes]) -> tuple[PrefixHolder, ...]:
        """Who holds how many leading blocks of `keys`, longest first."""
        _check_keys(keys, MAX_KEYS)
        holders = await self._index.lookup(keys)
        return tuple(sorted(holders, key=lambda holder: (-holder.num_blocks, holder.worker.address)))

    def check(self, worker: WorkerIdentity, command: PublishCommand | WithdrawCommand) -> None:
        """Raises InvalidRequest, naming the field, for a command that means nothing."""
        _check_worker(worker, "worker")
        _check_keys(command.keys, MAX_COMMAND_KEYS)
        if isinstance(command, WithdrawCommand):
            if command.all and command.keys:
                raise InvalidRequest("keys: must be empty with `all`", field="keys")
            return
        _check_ttl(command.time_to_live_s, MAX_ENTRY_S)
        if command.tier is CacheTier.UNSPECIFIED:
            raise InvalidRequest("tier: must be said", field="tier")

    async def apply(
        self, worker: WorkerIdentity, commands: Sequence[PublishCommand | WithdrawCommand]
    ) -> list[HeadraceError | None]:
        """Carries out checked commands in order, in one round trip to Redis; what became of each, None when it went well."""
        try:
            return await self._index.apply(worker, commands)
        except HeadraceError as error:
            return [error] * len(commands)

    async def acquire(self, holder: WorkerIdentity, keys: Sequence[bytes], ttl_s: float) -> tuple[str, int]:
        """A lease id and how many leading keys it pins: their entries do not lapse before the lease does."""
        _check_worker(holder, "holder")
        _check_keys(keys, MAX_KEYS)
        _check_ttl(ttl_s, MAX_LEASE_S)
        return await self._index.acquire(keys, ttl_s)

    async def release(self, lease_id: str) -> None:
        """Ends a lease early; a lease that is not there has ended."""
        if not _LEASE.fullmatch(lease_id):
            raise InvalidRequest("lease_id: not a lease id", field="lease_id")
        await self._index.release(lease_id)

    async def watch(self) -> AsyncIterator[Change]:
        """Everything that is published now, then changes, numbered. Ends with Unavailable when this process drains.

        What changes while the snapshot is read comes after it, also when the snapshot has it already.
        """
        watcher = Watcher()
        self._watchers.add(watcher)
        try:
            async with contextlib.aclosing(self._index.snapshot()) as parts:
                async for part in parts:
                    yield watcher.numbered(part)
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


def _check_keys(keys: Sequence[bytes], most: int) -> None:
    if len(keys) > most:
        raise InvalidRequest(f"keys: {len(keys)} of them, at most {most}", field="keys")
    if any(len(key) != KEY_BYTES for key in keys):
        raise InvalidRequest(f"keys: a key is {KEY_BYTES} bytes", field="keys")


def _check_worker(worker: WorkerIdentity, field: str) -> None:
    if not worker.address or not worker.epoch or " " in worker.address + worker.epoch:
        raise InvalidRequest(f"{field}: address and epoch must be given, without blanks", field=field)


def _check_ttl(ttl_s: float, most_s: float) -> None:
    if not MIN_TTL_S <= ttl_s <= most_s:
        raise InvalidRequest(
            f"time_to_live: {ttl_s:g} s; at least {MIN_TTL_S:g} s, at most {most_s:g} s", field="time_to_live"
        )
