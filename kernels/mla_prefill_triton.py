"""Causal attention of packed prompts in Triton: any head widths, queries that continue a context. Contract: mla_prefill.

Queries are cut into tiles of one sequence; the longest tiles start first, so that the last programs are short ones.
Keys before the first query of a tile are seen by all of it and need no mask: the main loop; the rest is the tail.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from kernels.triton_support import jit, tl, triton

LOG2E = 1.4426950408889634
PARTS = 5  # integers a tile: see `tiles_of`


@jit
def _fold(
    q_a, q_b, k_row, v_row, key, visible, last_key, top, total_weight, mixed, scale_log2,
    K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, A: tl.constexpr, B: tl.constexpr, B_PAD: tl.constexpr,
    VALUE: tl.constexpr, VALUE_PAD: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Adds one tile of keys. `visible` [queries]: keys each query sees."""
    compute = tl.float32 if WIDE else tl.bfloat16
    index = tl.arange(0, KEYS)
    a, b, value = tl.arange(0, A), tl.arange(0, B_PAD), tl.arange(0, VALUE_PAD)
    k_at = k_row + index[:, None] * K_STRIDE
    v_at = v_row + index[:, None] * V_STRIDE + value[None, :]
    if MASKED:
        there = (key + index < last_key)[:, None]
        k_a = tl.load(k_at + a[None, :], mask=there, other=0.0)
        v = tl.load(v_at, mask=there & (value < VALUE)[None, :], other=0.0)
    else:
        k_a = tl.load(k_at + a[None, :])
        v = tl.load(v_at) if VALUE == VALUE_PAD else tl.load(v_at, mask=(value < VALUE)[None, :], other=0.0)
    scores = tl.dot(q_a, tl.trans(k_a.to(compute)), input_precision="ieee")
    if B > 0:
        if MASKED:
            k_b = tl.load(k_at + A + b[None, :], mask=there & (b < B)[None, :], other=0.0)
        elif B == B_PAD:
            k_b = tl.load(k_at + A + b[None, :])
        else:
            k_b = tl.load(k_at + A + b[None, :], mask=(b < B)[None, :], other=0.0)
        scores = tl.dot(q_b, tl.trans(k_b.to(compute)), scores, input_precision="ieee")
    if MASKED:
        scores = tl.where((key + index)[None, :] < visible[:, None], scores, -float("inf"))
    higher = tl.maximum(top, tl.max(scores, 1) * scale_log2)
    weights = tl.exp2(scores * scale_log2 - higher[:, None])
    shrink = tl.exp2(top - higher)
    total_weight = total_weight * shrink + tl.sum(weights, 1)
    mixed = tl.dot(weights.to(compute), v.to(compute), mixed * shrink[:, None], input_precision="ieee")
    return higher, total_weight, mixed


@jit
def _attend(
    q, k, v, out, tiles, scale_log2, q_stride, q_head, k_head, v_head, out_stride,
    K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, A: tl.constexpr, B: tl.constexpr, B_PAD: tl.constexpr,
    VALUE: tl.constexpr, VALUE_PAD: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (heads, tiles)."""
    compute = tl.float32 if WIDE else tl.bfloat16
    head, tile = tl.program_id(0), tiles + tl.program_id(1) * 5
    query, count = tl.load(tile).to(tl.int64), tl.load(tile + 1)
    first_key, seen_by_first, last_key = tl.load(tile + 2).to(tl.int64), tl.load(tile + 3), tl.load(tile + 4)
    index = tl.arange(0, QUERIES)
    a, b, value = tl.arange(0, A), tl.arange(0, B_PAD), tl.arange(0, VALUE_PAD)
    lives = (index < count)[:, None]
    line = q + (query + index[:, None]) * q_stride + head * q_head
    q_a = tl.load(line + a[None, :], mask=lives, other=0.0).to(compute)
    q_b = q_a
    if B > 0:
        q_b = tl.load(line + A + b[None, :], mask=lives & (b < B)[None, :], other=0.0).to(compute)
    visible = seen_by_first + index
    top = tl.full((QUERIES,), -float("inf"), tl.float32)
    total_weight = tl.zeros((QUERIES,), tl.float32)
    mixed = tl.zeros((QUERIES, VALUE_PAD), tl.float32)
    k_row, v_row = k + first_key * K_STRIDE + head * k_head, v + first_key * V_STRIDE + head * v_head
    whole = seen_by_first // KEYS * KEYS
    for key in tl.range(0, whole, KEYS, num_stages=STAGES):
        top, total_weight, mixed = _fold(
            q_a, q_b, k_row, v_row, key, visible, last_key, top, total_weight, mixed, scale_log2,
            K_STRIDE, V_STRIDE, A, B, B_PAD, VALUE, VALUE_PAD, KEYS, False, WIDE,
        )  # fmt: skip
        k_row += KEYS * K_STRIDE
        v_row += KEYS * V_STRIDE
    for key in tl.range(whole, last_key, KEYS, num_stages=1):
        top, total_weight, mixed = _fold(
            q_a, q_b, k_row, v_row, key, visible, last_key, top, total_weight, mixed, scale_log2,
            K_STRIDE, V_STRIDE, A, B, B_PAD, VALUE, VALUE_PAD, KEYS, True, WIDE,
        )  # fmt: skip
        k_row += KEYS * K_STRIDE
        v_row += KEYS * V_STRIDE
    target = out + (query + index[:, None]) * out_stride + head * VALUE + value[None, :]
    made = mixed / total_weight[:, None]
    tl.store(target, made.to(out.dtype.element_ty), mask=lives & (value < VALUE)[None, :])


def tiles_of(query_lens: Sequence[int], context_lens: Sequence[int], size: int) -> np.ndarray:
    """[tiles, 5] int32, most keys first: first query, queries, first key of the sequence, keys the first query sees,
    keys the last query sees."""
    query = np.asarray(query_lens, dtype=np.int64)
    context = np.asarray(context_lens, dtype=np.int64)
    counts = -(-query // size)
    seq = np.repeat(np.arange(len(query)), counts)
    within = (np.arange(len(seq)) - np.repeat(counts.cumsum() - counts, counts)) * size
    queries = np.minimum(size, query[seq] - within)
    seen = context[seq] - query[seq] + within + 1
    first_query, first_key = query.cumsum() - query, context.cumsum() - context
    columns = first_query[seq] + within, queries, first_key[seq], seen, seen + queries - 1
    table = np.stack(columns, 1).astype(np.int32).reshape(-1, PARTS)
    return np.ascontiguousarray(table[np.argsort(-table[:, 4], kind="stable")])


class Tuning(NamedTuple):
    """queries, keys: of one tile; warps, stages: Triton's."""

    queries: int
    keys: int
    warps: int
    stages: int


def tuning_for(qk_dim: int, value_dim: int, longest: int, wide: bool) -> Tuning:
    if wide:
        return Tuning(32, 32, 4, 1)
    if longest <= 64:
        return Tuning(max(16, triton.next_power_of_2(longest)), 64, 4, 2)
    return Tuning(128, 64, 8, 3) if qk_dim + value_dim > 256 else Tuning(128, 64, 4, 3)


class Plan(NamedTuple):
    tiles: torch.Tensor  # [tiles, 5] int32 on the device
    scale: float
    tuning: Tuning


class TritonVarlen:
    """See VARLEN_BACKENDS in mla_prefill."""

    def __init__(self, tuning: Tuning | None = None):
        self._tuning = tuning

    def plan(
        self, query_lens: Sequence[int], context_lens: Sequence[int], heads: int, qk_dim: int, value_dim: int,
        scale: float, device: torch.device, dtype: torch.dtype = torch.bfloat16,
    ) -> Plan:  # fmt: skip
        device = torch.device(device)
        wide = dtype == torch.float32 or device.type == "cpu"
        tuning = self._tuning or tuning_for(qk_dim, value_dim, max(query_lens, default=1), wide)
        tiles = torch.from_numpy(tiles_of(query_lens, context_lens, tuning.queries))
        if device.type == "cuda":
            tiles = tiles.pin_memory().to(device, non_blocking=True)
        return Plan(tiles, scale, tuning)

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan) -> torch.Tensor:
        tokens, heads, qk_dim = q.shape
        value_dim = v.shape[-1]
        out = q.new_empty(tokens, heads, value_dim)
        if not len(plan.tiles):
            return out
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        wide = q.dtype == torch.float32 or q.device.type == "cpu"
        a = 1 << (qk_dim.bit_length() - 1)
        rest = qk_dim - a
        queries, keys, warps, stages = plan.tuning
        _attend[(heads, len(plan.tiles))](
            q, k, v, out, plan.tiles, plan.scale * LOG2E, q.stride(0), q.stride(1), k.stride(1), v.stride(1),
            out.stride(0), K_STRIDE=k.stride(0), V_STRIDE=v.stride(0), A=a, B=rest,
            B_PAD=max(16, triton.next_power_of_2(rest)), VALUE=value_dim,
            VALUE_PAD=max(16, triton.next_power_of_2(value_dim)), QUERIES=queries, KEYS=keys, WIDE=wide,
            STAGES=stages, num_warps=warps,
        )  # fmt: skip
        return out
