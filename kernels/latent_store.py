"""Finish a step's queries and rows, and put each new row into its slot of the paged pool: one op.

q      [num_tokens, num_heads, nope + rope_dim]  the last rope_dim values of each head are rotated in place
rows   [num_tokens, row_dim]                     latent ++ rope, 512 + 64 in R1; the latent is normed and the rope part
                                                 rotated in place, then the row is stored
gain, eps                                        of the latent's RMS norm
cos    [num_tokens, rope_dim // 2] fp32          sin alike
pool   [num_blocks, block_size, row_dim]         fp32 or bf16, written in place, one pool a layer; rows are cast to it
slots  [num_tokens] int64                        block_id * block_size + offset; -1 is padding, skipped

Two tokens never share a slot. No tokens, or only padding: nothing is stored. `plan(slots)` looks at the padding once for
all layers of a step. Source: DeepSeek-V3 report 2.1.1 for the row; the slot rule is ours.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels import cpu_library, rms_norm, rope
from kernels.select import Backend


class Plan(NamedTuple):
    """all_slots, as given; tokens: which rows are real (None when all are); slots: where those go."""

    all_slots: torch.Tensor
    tokens: torch.Tensor | None
    slots: torch.Tensor


def plan(slots: torch.Tensor) -> Plan:
    real = slots >= 0
    if bool(real.all()):
        return Plan(slots, None, slots)
    tokens = real.nonzero().squeeze(1)
    return Plan(slots, tokens, slots[tokens])


def reference(
    q: torch.Tensor,
    rows: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: torch.Tensor,
    store: Plan,
) -> None:
    latent, rope_dim = len(gain), 2 * cos.shape[1]
    rope.reference(q[..., -rope_dim:], cos, sin)
    rope.reference(rows[:, None, latent:], cos, sin)
    rows[:, :latent] = rms_norm.reference(rows[:, :latent], gain, eps)
    for token, slot in enumerate(store.all_slots.tolist()):
        if slot >= 0:
            pool[slot // pool.shape[1], slot % pool.shape[1]] = rows[token].to(pool.dtype)


def _torch(
    q: torch.Tensor,
    rows: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: torch.Tensor,
    store: Plan,
) -> None:
    latent, rope_dim = rows[:, : len(gain)], 2 * cos.shape[1]
    latent.copy_(torch.nn.functional.rms_norm(latent, gain.shape, gain, eps))
    rope.rotate(rows[:, None, len(gain) :], cos, sin)
    rope.rotate(q[..., -rope_dim:], cos, sin)
    if store.tokens is not None:
        rows = rows.index_select(0, store.tokens)
    pool.view(-1, pool.shape[-1]).index_copy_(0, store.slots, rows.to(pool.dtype))


def _c(
    q: torch.Tensor,
    rows: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: torch.Tensor,
    store: Plan,
) -> None:
    tokens, heads, head_dim = q.shape
    cpu_library.library().hr_store_rows(
        q.data_ptr(), q.stride(0), heads, head_dim, rows.data_ptr(), rows.stride(0), tokens, len(gain),
        2 * cos.shape[1], gain.data_ptr(), eps, cos.data_ptr(), sin.data_ptr(), pool.data_ptr(),
        pool.dtype == torch.bfloat16, store.all_slots.data_ptr(),
    )  # fmt: skip


BACKENDS = (
    Backend("c", _c, why_not=cpu_library.why_not),
    Backend("torch", _torch),
    Backend("reference", reference),
)
