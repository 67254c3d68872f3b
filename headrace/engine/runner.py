"""Batches to tensors to logits to tokens: the only place where a plan meets the model.

A plan is made of numpy arrays; `to_batch` uploads it. Kept apart from running, so that a plan can be made and uploaded
while the step before it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from headrace.cache.latent import LatentPool
from headrace.engine.request import PrefillSequence
from headrace.engine.sampler import Sampled, Sampler, SamplingTable
from headrace.model.deepseek import ForwardBatch


class Model(Protocol):
    """What the runner needs of a transformer."""

    device: torch.device

    def forward(
        self, batch: ForwardBatch, pool: LatentPool, *, phase: str, on_layer: Callable[[int], None] | None = None
    ) -> torch.Tensor: ...


@dataclass
class BatchPlan:
    """One forward in numpy; fields as in ForwardBatch."""

    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    block_tables: np.ndarray
    query_starts: list[int]
    context_lens: list[int]
    logit_indices: np.ndarray


def plan_prefill(sequences: Sequence[PrefillSequence], block_size: int) -> BatchPlan:
    """Packs the rows that each sequence computes, one sequence after another; logits of each one's last token."""
    width = max(len(sequence.block_table) for sequence in sequences)
    tables = np.zeros((len(sequences), width), np.int32)
    token_ids, positions, slots = [], [], []
    for place, sequence in enumerate(sequences):
        table = np.asarray(sequence.block_table, np.int64)
        tables[place, : len(table)] = table
        at = np.arange(sequence.first_computed, len(sequence.token_ids))
        token_ids.append(np.asarray(sequence.token_ids[sequence.first_computed :], np.int64))
        positions.append(at)
        slots.append(table[at // block_size] * block_size + at % block_size)
    ends = np.cumsum([sequence.num_computed for sequence in sequences])
    return BatchPlan(
        token_ids=np.concatenate(token_ids),
        positions=np.concatenate(positions),
        slots=np.concatenate(slots),
        block_tables=tables,
        query_starts=[0, *ends.tolist()],
        context_lens=[len(sequence.token_ids) for sequence in sequences],
        logit_indices=ends - 1,
    )


class Runner:
    """Owns nothing but references: a model, the pool its rows live in, and a sampler. One thread uses it."""

    def __init__(self, transformer: Model, pool: LatentPool, sampler: Sampler, max_context: int):
        self.transformer, self.pool, self.sampler = transformer, pool, sampler
        self.max_context = max_context
        self.block_size = pool.block_size

    def to_batch(self, plan: BatchPlan) -> ForwardBatch:
        """The plan on the model's device."""
        device = self.transformer.device

        def upload(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)

        return ForwardBatch(
            token_ids=upload(plan.token_ids),
            positions=upload(plan.positions),
            slots=upload(plan.slots),
            block_tables=upload(plan.block_tables),
            query_starts=plan.query_starts,
            context_lens=plan.context_lens,
            logit_indices=upload(plan.logit_indices),
        )

    def forward(self, batch: ForwardBatch, phase: str, on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """[num_logits, vocab] fp32. `phase` is `prefill` or `decode`."""
        with torch.inference_mode():
            return self.transformer.forward(batch, self.pool, phase=phase, on_layer=on_layer)

    def sample(self, logits: torch.Tensor, table: SamplingTable, rows: np.ndarray, positions: np.ndarray) -> Sampled:
        """One token a row of `table`, at these output positions."""
        with torch.inference_mode():
            return self.sampler.sample(logits, table, rows, positions)
