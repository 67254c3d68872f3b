"""This rank's blocks as its legs see them: taken together, first come, first served among equals; given back, their prefixes kept."""

from __future__ import annotations

import asyncio
import bisect
import itertools
from dataclasses import dataclass, field

from headrace.cache.blocks import BlockPool, BlockState, block_keys
from headrace.cache.seats import blocks_for, blocks_needed, shared_blocks
from headrace.errors import InvalidRequest
from services.prefill.leg import Leg, settle
from services.prefill.sequences import sequence_lengths


@dataclass(order=True)
class _Waiting:
    """A leg that waits for blocks; larger priorities stand before smaller ones."""

    place: tuple[int, int]
    leg: Leg = field(compare=False)
    needed: int = field(compare=False)
    tokens: int = field(compare=False)
    seated: asyncio.Future[None] = field(compare=False)


class Room:
    """Blocks of one pool, for whole legs."""

    def __init__(self, pool: BlockPool, *, prefix_cache: bool):
        self._pool = pool
        self._prefix_cache = prefix_cache
        self._waiting: list[_Waiting] = []
        self._order = itertools.count()
        self.waiting_tokens = 0
        """Tokens of the legs that wait."""

    async def take(self, leg: Leg) -> None:
        """Gives the leg its blocks and says how many of its tokens stand in them already. Waits until there are enough.

        Raises InvalidRequest for more than the pool has, and what the leg fails with while it waits.
        """
        lengths = sequence_lengths(leg.command)
        needed = blocks_needed(len(leg.command.prompt_token_ids), lengths, self._pool.block_size)
        if needed > self._pool.num_blocks:
            raise InvalidRequest(
                f"prompt_token_ids: needs {needed} blocks of {self._pool.block_size} tokens, this rank has "
                f"{self._pool.num_blocks}",
                field="prompt_token_ids",
            )
        if not self._waiting and self._pool.can_allocate(needed):
            self._allocate(leg)
            return
        seated = asyncio.get_running_loop().create_future()
        waiting = _Waiting((-leg.command.priority, next(self._order)), leg, needed, sum(lengths), seated)
        bisect.insort(self._waiting, waiting)
        self.waiting_tokens += waiting.tokens
        try:
            await leg.wait(seated)
        finally:
            if waiting in self._waiting:
                self._leave(waiting)
                self._seat()

    def give_back(self, leg: Leg) -> None:
        """The leg's blocks are free again; those of its prompt stay findable. Whoever waits may be seated."""
        if self._prefix_cache and leg.moments.computed is not None and leg.sequence_blocks:
            for key, block in zip(leg.prefix_keys, leg.sequence_blocks[0], strict=False):
                self._pool.register(key, block)
        if leg.held_blocks:
            self._pool.free(leg.held_blocks)
            leg.held_blocks = ()
        self._seat()

    def _seat(self) -> None:
        while self._waiting and self._pool.can_allocate(self._waiting[0].needed):
            waiting = self._waiting[0]
            self._leave(waiting)
            if not waiting.seated.done():
                self._allocate(waiting.leg)
                settle(waiting.seated)

    def _leave(self, waiting: _Waiting) -> None:
        self._waiting.remove(waiting)
        self.waiting_tokens -= waiting.tokens

    def _allocate(self, leg: Leg) -> None:
        command, size = leg.command, self._pool.block_size
        lengths = sequence_lengths(command)
        shared = shared_blocks(len(command.prompt_token_ids), size)
        held: tuple[int, ...] = ()
        if self._prefix_cache:
            leg.prefix_keys = block_keys(command.cache_salt, command.prompt_token_ids, size)
            held = self._pool.match_prefix(leg.prefix_keys[: (len(command.prompt_token_ids) - 1) // size])
        leg.held_blocks = held
        leg.cached_tokens = len(held) * size
        own = self._pool.allocate(blocks_for(lengths[0], size) - len(held), BlockState.RUNNING)
        leg.held_blocks += own
        leg.sequence_blocks = [(*held, *own)]
        for length in lengths[1:]:
            tail = self._pool.allocate(blocks_for(length, size) - shared, BlockState.RUNNING)
            leg.held_blocks += tail
            leg.sequence_blocks.append((*leg.sequence_blocks[0][:shared], *tail))
