"""Who owns which block of the paged pool. Counting only: the rows themselves are `cache/latent.py`'s business.

A block is FREE, CACHED (nobody holds it, its rows are good and findable by key), or held by one or more owners in one of
the states RESERVED, RUNNING, QUARANTINED. Every owner holds one reference; owners of a shared block agree on its state,
the last `move` counts. Everything here is deterministic: the same calls give the same block ids.
"""

from __future__ import annotations

import bisect
import enum
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from headrace.cache.seats import blocks_for
from headrace.errors import InternalError, Overloaded
from headrace.protocol.common import BlockLedger


class PoolExhausted(Overloaded):
    """More blocks were asked for than are free or evictable."""

    reason = "POOL_EXHAUSTED"


class BlockState(enum.Enum):
    """Where a block is in its life."""

    FREE = "free"
    CACHED = "cached"
    RESERVED = "reserved"
    RUNNING = "running"
    QUARANTINED = "quarantined"


_HELD = (BlockState.RESERVED, BlockState.RUNNING, BlockState.QUARANTINED)


def block_keys(salt: str, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """16 bytes for each full block: a chained hash of (salt, previous key, the block's token ids).

    Equal keys mean equal salts and equal tokens from position 0 up to the block's end. Engine cache, router index and
    kvstore all use this one function. A trailing partial block has no key.
    """
    key = hashlib.blake2b(salt.encode(), digest_size=16, person=b"headrace-salt").digest()
    words = np.asarray(token_ids, dtype="<i4").tobytes()
    step = 4 * block_size
    keys = []
    for start in range(0, len(words) - step + 1, step):
        key = hashlib.blake2b(key + words[start : start + step], digest_size=16).digest()
        keys.append(key)
    return keys


class _FreeRuns:
    """Free ids as maximal runs of consecutive ids, so that an allocation is contiguous whenever it can be."""

    def __init__(self, num_blocks: int):
        self._length_at = {0: num_blocks}  # first id -> length
        self._first_before = {num_blocks: 0}  # one past the last id -> first id
        self._by_length = [(num_blocks, 0)]
        self.total = num_blocks

    def take(self, count: int) -> list[int]:
        """The shortest run that holds `count` ids, else the longest runs one after another."""
        taken: list[int] = []
        while len(taken) < count:
            wanted = count - len(taken)
            place = bisect.bisect_left(self._by_length, (wanted, -1))
            length, first = self._by_length[min(place, len(self._by_length) - 1)]
            self._remove(first, length)
            used = min(length, wanted)
            if used < length:
                self._insert(first + used, length - used)
            taken.extend(range(first, first + used))
        return taken

    def give(self, block: int) -> None:
        """Puts one id back and joins it with free neighbours."""
        first, end = block, block + 1
        if block in self._first_before:
            first = self._first_before[block]
            self._remove(first, block - first)
        if end in self._length_at:
            length = self._length_at[end]
            self._remove(end, length)
            end += length
        self._insert(first, end - first)

    def _insert(self, first: int, length: int) -> None:
        self._length_at[first] = length
        self._first_before[first + length] = first
        bisect.insort(self._by_length, (length, first))
        self.total += length

    def _remove(self, first: int, length: int) -> None:
        del self._length_at[first]
        del self._first_before[first + length]
        del self._by_length[bisect.bisect_left(self._by_length, (length, first))]
        self.total -= length


class BlockPool:
    """Allocates, shares, caches and frees the blocks of one rank. Not thread-safe: one thread or loop owns it.

    Two functions hear of what `match_prefix` can find, in the order of events: `on_register(key)` of a key that is new,
    `on_give_up(keys)` of keys that are gone, because their blocks were needed or were forgotten.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        on_register: Callable[[bytes], None] | None = None,
        on_give_up: Callable[[list[bytes]], None] | None = None,
    ):
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"empty pool: {num_blocks=} {block_size=}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.on_register = on_register
        self.on_give_up = on_give_up
        self._runs = _FreeRuns(num_blocks)
        self._state = [BlockState.FREE] * num_blocks
        self._references = [0] * num_blocks
        self._counts = dict.fromkeys(_HELD, 0)
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` rows."""
        return blocks_for(num_tokens, self.block_size)

    def can_allocate(self, count: int) -> bool:
        """Whether `allocate(count)` would succeed now."""
        return count <= self._runs.total + len(self._cached)

    def allocate(self, count: int, state: BlockState = BlockState.RUNNING) -> tuple[int, ...]:
        """`count` blocks with one reference each, of consecutive ids where possible.

        Cached blocks are evicted, least recently used first, when too few are free. Raises PoolExhausted, and then
        nothing has changed.
        """
        self._check_held_state(state)
        if not self.can_allocate(count):
            available = self._runs.total + len(self._cached)
            raise PoolExhausted(f"{count} blocks asked for, {available} of {self.num_blocks} are free or cached")
        self._evict(count - self._runs.total)
        blocks = self._runs.take(count)
        for block in blocks:
            self._state[block] = state
            self._references[block] = 1
        self._counts[state] += count
        return tuple(blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """One more owner for blocks that are held."""
        blocks = list(blocks)
        self._check_held(blocks)
        for block in blocks:
            self._references[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """One owner less. A block nobody holds becomes CACHED if it is registered, else FREE.

        Give a sequence's blocks in order: its end is evicted before its beginning.
        """
        blocks = list(blocks)
        self._check_held(blocks)
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._counts[self._state[block]] -= 1
                self._release(block)

    def move(self, blocks: Iterable[int], state: BlockState) -> None:
        """Held blocks change to another held state."""
        blocks = list(blocks)
        self._check_held_state(state)
        self._check_held(blocks)
        for block in blocks:
            self._counts[self._state[block]] -= 1
            self._state[block] = state
            self._counts[state] += 1

    def match_prefix(self, keys: Sequence[bytes], state: BlockState = BlockState.RUNNING) -> tuple[int, ...]:
        """Blocks that hold the longest known prefix of `keys`; the caller becomes an owner of each."""
        self._check_held_state(state)
        found = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
            self._references[block] += 1
            if self._references[block] == 1:
                del self._cached[block]
                self._state[block] = state
                self._counts[state] += 1
        return tuple(found)

    def register(self, key: bytes, block: int) -> bool:
        """Says that a held block's rows are complete and are what `key` names. False if the key has a block already."""
        self._check_held([block])
        if key in self._block_of:
            return self._block_of[key] == block
        if block in self._key_of:
            raise InternalError(f"block {block} already has the key {self._key_of[block]}")
        self._key_of[block] = key
        self._block_of[key] = block
        if self.on_register is not None:
            self.on_register(key)
        return True

    def forget(self, keys: Iterable[bytes]) -> None:
        """Makes keys unfindable; cached blocks among them become FREE. Unknown keys are ignored."""
        gone = []
        for key in keys:
            block = self._block_of.pop(key, None)
            if block is None:
                continue
            del self._key_of[block]
            if block in self._cached:
                del self._cached[block]
                self._release(block)
            gone.append(key)
        self._tell_gone(gone)

    def registered_keys(self) -> tuple[bytes, ...]:
        """Every key that `match_prefix` can find now."""
        return tuple(self._block_of)

    def state(self, block: int) -> BlockState:
        """Where `block` is in its life."""
        return self._state[block]

    def references(self, block: int) -> int:
        """How many owners hold `block`."""
        return self._references[block]

    def ledger(self) -> BlockLedger:
        """Blocks by state; the sum is `num_blocks`."""
        held = {state.value: count for state, count in self._counts.items()}
        return BlockLedger(free=self._runs.total, cached=len(self._cached), **held)

    def _release(self, block: int) -> None:
        if block in self._key_of:
            self._state[block] = BlockState.CACHED
            self._cached[block] = None
        else:
            self._state[block] = BlockState.FREE
            self._runs.give(block)

    def _evict(self, count: int) -> None:
        gone = []
        for _ in range(count):
            block, _ = self._cached.popitem(last=False)
            key = self._key_of.pop(block)
            del self._block_of[key]
            self._release(block)
            gone.append(key)
        self._tell_gone(gone)

    def _tell_gone(self, keys: list[bytes]) -> None:
        if keys and self.on_give_up is not None:
            self.on_give_up(keys)

    def _check_held_state(self, state: BlockState) -> None:
        if state not in self._counts:
            raise InternalError(f"{state} is not a state of a held block")

    def _check_held(self, blocks: list[int]) -> None:
        if len(set(blocks)) != len(blocks):
            raise InternalError(f"a block is named twice: {blocks}")
        for block in blocks:
            if self._references[block] < 1:
                raise InternalError(f"block {block} is {self._state[block].value}, nobody holds it")
