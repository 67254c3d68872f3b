"""First come, first served for blocks of a pool."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from headrace.cache.blocks import BlockPool


class Room:
    """First come, first served for blocks of a pool; woken when blocks are freed."""

    def __init__(self, pool: BlockPool):
        self._pool = pool
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    def freed(self) -> None:
        """Blocks came back."""
        self._freed.set()

    @contextlib.asynccontextmanager
    async def wait_turn(self, count: int) -> AsyncIterator[None]:
        """Inside, `count` blocks can be allocated."""
        async with self._turn:
            while not self._pool.can_allocate(count):
                self._freed.clear()
                await self._freed.wait()
            yield
