"""Put each new token's row into its slot of the paged pool.

rows   [num_tokens, row_dim]              fp32 or bf16  latent (normed) ++ rope (rotated); 512 + 64 in R1
slots  [num_tokens]                       int64         block_id * block_size + offset; -1 is padding, skipped
pool   [num_blocks, block_size, row_dim]  fp32 or bf16  written in place, one pool a layer; rows are cast to its dtype

Two tokens never share a slot. No tokens, or only padding: nothing happens.
`plan(slots)` finds the padding once for all layers of a step; `run` then has no decision left.
Source: DeepSeek-V3 report 2.1.1 for the row; the slot rule is ours.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.select import Backend


class Plan(NamedTuple):
    """tokens: which rows are real (None when all are); slots: where those go."""

    tokens: torch.Tensor | None
    slots: torch.Tensor


def plan(slots: torch.Tensor) -> Plan:
    real = slots >= 0
    if bool(real.all()):
        return Plan(None, slots)
    tokens = real.nonzero().squeeze(1)
    return Plan(tokens, slots[tokens])


def reference(pool: torch.Tensor, rows: torch.Tensor, store: Plan) -> None:
    tokens = range(len(rows)) if store.tokens is None else store.tokens.tolist()
    for token, slot in zip(tokens, store.slots.tolist(), strict=True):
        pool[slot // pool.shape[1], slot % pool.shape[1]] = rows[token].to(pool.dtype)


def _index_copy(pool: torch.Tensor, rows: torch.Tensor, store: Plan) -> None:
    if store.tokens is not None:
        rows = rows.index_select(0, store.tokens)
    pool.view(-1, pool.shape[-1]).index_copy_(0, store.slots, rows.to(pool.dtype))


BACKENDS = (Backend("torch", _index_copy), Backend("reference", reference))
