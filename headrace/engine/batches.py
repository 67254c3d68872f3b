"""What one forward reads, planned in numpy and put on the model's device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.engine.request import PrefillSequence
from headrace.engine.step import StepPlan
from headrace.model.base import ForwardBatch
from headrace.model.upload import upload


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


def plan_step(plan: StepPlan, block_size: int) -> BatchPlan:
    """One new token a sample."""
    return BatchPlan(
        token_ids=plan.token_ids,
        positions=plan.context_lens - 1,
        slots=plan.slots,
        block_tables=plan.tables.of(plan.rows, -(-int(plan.context_lens.max()) // block_size)),
        query_starts=list(range(len(plan.rows) + 1)),
        context_lens=plan.context_lens.tolist(),
        logit_indices=np.arange(len(plan.rows)),
    )


def to_batch(plan: BatchPlan, device: torch.device) -> ForwardBatch:
    """The plan on the device."""
    return ForwardBatch(
        token_ids=upload(plan.token_ids, device),
        positions=upload(plan.positions, device),
        slots=upload(plan.slots, device),
        block_tables=upload(plan.block_tables, device),
        query_starts=plan.query_starts,
        context_lens=plan.context_lens,
        logit_indices=upload(plan.logit_indices, device),
        last_token_logits=np.array_equal(plan.logit_indices, np.asarray(plan.query_starts[1:]) - 1),
    )
