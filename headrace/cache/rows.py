"""A rank's pool as transfer code sees it: checksums, copies and flipped bytes by block table, nothing about owners.

On a GPU everything here runs on a stream of its own, at a high priority: it waits for no forward, and no forward waits for
it. Hence the caller's duty: rows that are read must be there (a source waits for the layer's `ready` first). What Mooncake
wrote is there: it copies on the device's default stream, which a target's reading waits for, and on which no engine works.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence

import torch

from headrace.cache.latent import LatentPool
from kernels.rows.block_checksum import BACKENDS, checksum
from kernels.select import choose

HIGH_PRIORITY = -1


class Rows:
    """One thread uses it; `Rows(pool)` is cheap, each thread takes its own."""

    def __init__(self, latent: LatentPool):
        self._latent = latent
        self._device = latent.rows.device
        self._slots = functools.lru_cache(maxsize=16)(self._upload_slots)
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device, priority=HIGH_PRIORITY)
            self._backend = choose(BACKENDS, self._device, op="block_checksum")

    def checksum(self, layer: int, blocks: Sequence[int], first_row: int, num_rows: int) -> int:
        """The checksum of token positions [first_row, first_row + num_rows) of the sequence in `blocks`."""
        return self.begin_checksum(layer, blocks, first_row, num_rows)()

    def begin_checksum(self, layer: int, blocks: Sequence[int], first_row: int, num_rows: int) -> Callable[[], int]:
        """Starts it; what it returns waits for the value. The rows must stay until then. On a CPU it is computed here."""
        rows = self._latent.layer(layer)
        if self._stream is None:
            value = checksum(rows, self._slots(tuple(blocks), first_row, num_rows), first_row)
            return lambda: value
        with self._beside():
            total = self._backend.run(rows, self._slots(tuple(blocks), first_row, num_rows), first_row)
        return lambda: self._read([total])[0]

    def layer_checksums(self, blocks: Sequence[int], first_row: int, num_rows: int) -> list[int]:
        """The checksum of every layer of rows that a transfer wrote: all are started, then waited for once."""
        layers = range(self._latent.num_layers)
        if self._stream is None:
            return [self.checksum(layer, blocks, first_row, num_rows) for layer in layers]
        self._stream.wait_stream(torch.cuda.default_stream(self._device))
        with self._beside():
            slots = self._slots(tuple(blocks), first_row, num_rows)
            totals = [self._backend.run(self._latent.layer(layer), slots, first_row) for layer in layers]
        return self._read(totals)

    def copy_rows(self, source_block: int, target_block: int, num_rows: int) -> None:
        """As `LatentPool.copy_rows`; the rows are there when it returns, for every stream."""
        with self._beside():
            self._latent.copy_rows(source_block, target_block, num_rows)
        self._wait()

    def flip_byte(self, layer: int, block: int, offset: int) -> None:
        """Inverts the first byte of a row; fault injection only."""
        with self._beside():
            self._latent.rows[layer, block, offset].view(torch.uint8)[0] ^= 0xFF
        self._wait()

    def _upload_slots(self, blocks: tuple[int, ...], first_row: int, num_rows: int) -> torch.Tensor:
        """[num_rows] int64: kept, because every layer of a sequence asks for the same."""
        size = self._latent.block_size
        positions = torch.arange(first_row, first_row + num_rows)
        slots = torch.tensor(blocks, dtype=torch.int64)[positions // size] * size + positions % size
        return slots.to(self._device)

    def _read(self, totals: Sequence[torch.Tensor]) -> list[int]:
        with self._beside():
            return torch.stack(list(totals)).tolist()

    def _beside(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
