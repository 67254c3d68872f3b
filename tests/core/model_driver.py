"""Drives a model over sequences the way an engine would: blocks, slots, batches. Shared by the model tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.cache.latent import LatentPool
from headrace.engine.steps.replayed import RecordedSteps
from headrace.model.base import ForwardBatch, Model


class Driver:
    """Keeps one pool and, per sequence name, its tokens' blocks. Blocks are handed out in a shuffled order."""

    def __init__(
        self,
        model: Model,
        *,
        num_blocks: int = 256,
        block_size: int = 16,
        seed: int = 0,
        recorded: RecordedSteps | None = None,
    ):
        self.model, self.recorded = model, recorded
        (region,) = model.kv_regions
        self.pool = LatentPool(
            region.num_layers, num_blocks, block_size, region.row_width, model.pool_dtype, model.device
        )
        self.pool.rows.fill_(float("nan"))  # nobody may read a row that was not written
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
        self.free = order.tolist()
        self.blocks: dict[str, list[int]] = {}
        self.length: dict[str, int] = {}

    def run(
        self, work: Sequence[tuple[str, Sequence[int]]], phase: str, *, padding: int = 0, on_layer=None
    ) -> dict[str, torch.Tensor]:
        """Append tokens to each named sequence in one forward; answers every new token's logits, per name."""
        token_ids, positions, slots, starts = [], [], [], [0]
        for name, tokens in work:
            start = self.length.get(name, 0)
            self._grow(name, start + len(tokens))
            token_ids += list(tokens)
            places = range(start, start + len(tokens))
            positions += places
            slots += [self._slot(name, place) for place in places]
            starts.append(len(token_ids))
        batch = ForwardBatch(
            token_ids=torch.tensor(token_ids + [0] * padding),
            positions=torch.tensor(positions + [0] * padding),
            slots=torch.tensor(slots + [-1] * padding),
            block_tables=self._tables([name for name, _ in work]),
            query_starts=starts,
            context_lens=[self.length[name] for name, _ in work],
            logit_indices=torch.arange(len(token_ids)),
        )
        if phase == "decode" and self.recorded is not None:
            logits = self.recorded.logits(batch, self.pool)
        else:
            logits = self.model.forward(batch, self.pool, phase=phase, on_layer=on_layer)
        return {name: logits[a:b] for (name, _), a, b in zip(work, starts, starts[1:], strict=False)}

    def rows(self, name: str) -> torch.Tensor:
        """[num_layers, length, row_dim] in sequence order."""
        slots = torch.tensor([self._slot(name, place) for place in range(self.length[name])])
        return self.pool.rows.flatten(1, 2)[:, slots]

    def _grow(self, name: str, length: int) -> None:
        blocks = self.blocks.setdefault(name, [])
        while len(blocks) * self.pool.block_size < length:
            blocks.append(self.free.pop())
        self.length[name] = length

    def _slot(self, name: str, place: int) -> int:
        size = self.pool.block_size
        return self.blocks[name][place // size] * size + place % size

    def _tables(self, names: Sequence[str]) -> torch.Tensor:
        table = torch.zeros(len(names), max(len(self.blocks[name]) for name in names), dtype=torch.int32)
        for row, name in enumerate(names):
            table[row, : len(self.blocks[name])] = torch.tensor(self.blocks[name])
        return table
