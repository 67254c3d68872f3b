"""What prefixes this rank can use again, told to whoever listens: all of them first, then changes, gathered for a turn of the loop.

Listeners are the links to routers and the publisher to the catalogue. What each was told is exactly what the pool can find,
but for the changes of the turn that is not over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

from headrace.cache.blocks import BlockPool
from headrace.protocol.prefill import HeldPrefixes

KEYS_PER_ITEM = 8192
"""128 KiB of keys: an item stays below 256 KiB."""

Listener = Callable[[Sequence[bytes], Sequence[bytes]], None]
"""(keys held from now on, keys held no longer)."""


class Held:
    """The one ear of a pool. Everything happens on the loop that owns the pool."""

    def __init__(self, pool: BlockPool):
        self._pool = pool
        self._listeners: list[Listener] = []
        self._changed: dict[bytes, bool] = {}
        pool.on_register = self._registered
        pool.on_give_up = self._given_up

    def listen(self, listener: Listener) -> tuple[bytes, ...]:
        """Every key held now; `listener` hears of what changes after that."""
        self._tell()
        self._listeners.append(listener)
        return self._pool.registered_keys()

    def leave(self, listener: Listener) -> None:
        """The listener hears nothing more. Safe to repeat."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    def _registered(self, key: bytes) -> None:
        self._note(key, True)

    def _given_up(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._note(key, False)

    def _note(self, key: bytes, held: bool) -> None:
        if not self._changed:
            asyncio.get_running_loop().call_soon(self._tell)
        if self._changed.get(key, held) is held:
            self._changed[key] = held
        else:
            del self._changed[key]  # there and back within a turn

    def _tell(self) -> None:
        if not self._changed:
            return
        changed, self._changed = self._changed, {}
        added = [key for key, held in changed.items() if held]
        removed = [key for key, held in changed.items() if not held]
        for listener in list(self._listeners):
            listener(added, removed)


def snapshot(keys: Sequence[bytes]) -> Iterator[HeldPrefixes]:
    """The whole list as items: the first makes the receiver forget what it knew."""
    yield HeldPrefixes(is_snapshot=True, added=tuple(keys[:KEYS_PER_ITEM]), removed=())
    yield from changes(keys[KEYS_PER_ITEM:], ())


def changes(added: Sequence[bytes], removed: Sequence[bytes]) -> Iterator[HeldPrefixes]:
    """Changes as items; no key is in both."""
    if len(added) + len(removed) <= KEYS_PER_ITEM:
        if added or removed:
            yield HeldPrefixes(is_snapshot=False, added=tuple(added), removed=tuple(removed))
        return
    for start in range(0, len(removed), KEYS_PER_ITEM):
        yield HeldPrefixes(is_snapshot=False, added=(), removed=tuple(removed[start : start + KEYS_PER_ITEM]))
    for start in range(0, len(added), KEYS_PER_ITEM):
        yield HeldPrefixes(is_snapshot=False, added=tuple(added[start : start + KEYS_PER_ITEM]), removed=())
