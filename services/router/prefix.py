"""Which prefill rank holds the beginning of a prompt, from what the ranks report on their links. No call on a request's path."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.cache.blocks import block_keys
from headrace.observe import telemetry
from headrace.protocol.prefill import HeldPrefixes

_refused = telemetry.counter("headrace.router.prefix_keys_refused")


class HeldKeys:
    """The keys of blocks that one rank can use again. Never more than its pool has blocks, whatever it says."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._keys)

    def update(self, held: HeldPrefixes, max_keys: int) -> None:
        """Takes a snapshot or a change. Keys beyond `max_keys` are left out, and counted."""
        if held.is_snapshot:
            self._keys.clear()
        self._keys.difference_update(held.removed)
        room = max_keys - len(self._keys)
        if len(held.added) <= room:
            self._keys.update(held.added)
            return
        for key in held.added:
            if key in self._keys:
                continue
            if len(self._keys) >= max_keys:
                _refused.add(1)
            else:
                self._keys.add(key)

    def clear(self) -> None:
        """Nothing is known; the first item on a new link is the whole list."""
        self._keys.clear()

    def num_held(self, keys: Sequence[bytes]) -> int:
        """How many of a prompt's blocks are held from its beginning on without a gap."""
        held = self._keys
        for index, key in enumerate(keys):
            if key not in held:
                return index
        return len(keys)


class PromptKeys:
    """Keys of one prompt's full blocks, worked out when they are first asked for."""

    def __init__(self, salt: str, token_ids: Sequence[int]):
        self._salt, self._token_ids = salt, token_ids
        self._block_size = 0
        self._keys: Sequence[bytes] = ()

    def of(self, block_size: int) -> Sequence[bytes]:
        """One key for each full block of `block_size` tokens."""
        if self._block_size != block_size:
            self._keys = block_keys(self._salt, self._token_ids, block_size)
            self._block_size = block_size
        return self._keys
