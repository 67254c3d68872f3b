"""Causal attention of packed prompts in Triton: any head widths, queries that continue a context. Contract: mla_prefill.

Queries are cut into tiles of one sequence; the longest tiles start first, so that the last programs are short ones.
Keys before the first query of a tile are seen by all of it and need no mask: the main loop; the rest is the tail.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from kernels.toolchain.triton_support import jit, tl, triton

LOG2E = 1.4426950408889634
PARTS = 5  # integers a tile: see `tiles_of`


@jit
def _tile(desc, base, row, offset, there, STRIDE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
          PAD: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """[ROWS, PAD] values from row `row` and column `offset` on: through `desc` unless it is None."""
    if desc is not None:
        return desc.load([row, offset])
    else:
        column = tl.arange(0, PAD)
        where = base + row.to(tl.int64) * STRIDE + offset + tl.arange(0, ROWS)[:, None] * STRIDE + column[None, :]
        if MASKED:
            return tl.load(where, mask=there & (column < WIDTH)[None, :], other=0.0)
        elif WIDTH == PAD:
            return tl.load(where)
        else:
            return tl.load(where, mask=(column < WIDTH)[None, :], other=0.0)


@jit
def _fold(
    q_a, q_b, k_a, k_b, v, key, visible, top, total_weight, mixed, scale_log2,
    KEYS: tl.constexpr, TWO: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Adds one tile of keys. `visible` [queries]: keys each query sees."""
    compute = tl.float32 if WIDE else tl.bfloat16
    scores = tl.dot(q_a, tl.trans(k_a.to(compute)), input_precision="ieee")
    if TWO:
        scores = tl.dot(q_b, tl.trans(k_b.to(compute)), scores, input_precision="ieee")
    if MASKED:
        scores = tl.where((key + tl.arange(0, KEYS))[None, :] < visible[:, None], scores, -float("inf"))
    higher = tl.maximum(top, tl.max(scores, 1) * scale_log2)
    weights = tl.exp2(scores * scale_log2 - higher[:, None])
    shrink = tl.exp2(top - higher)
    total_weight = total_weight * shrink + tl.sum(weights, 1)
    mixed = tl.dot(weights.to(compute), v.to(compute), mixed * shrink[:, None], input_precision="ieee")
    return higher, total_weight, mixed


@jit
def _attend(
    q, k, v, out, k_a_desc, k_b_desc, v_desc, tiles, scale_log2, q_stride, q_head, k_head, v_head, out_stride,
    K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, A: tl.constexpr, B: tl.constexpr, B_PAD: tl.constexpr,
    VALUE: tl.constexpr, VALUE_PAD: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (heads, tiles). Keys are A + B wide; the descriptors are all None or all given."""
    compute = tl.float32 if WIDE else tl.bfloat16
    head, tile = tl.program_id(0), tiles + tl.program_id(1) * 5
    query, count = tl.load(tile).to(tl.int64), tl.load(tile + 1)
    first, seen_by_first, last = tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4)
    index, key_index = tl.arange(0, QUERIES), tl.arange(0, KEYS)
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
    k_column, v_column = head * k_head, head * v_head
    whole = seen_by_first // KEYS * KEYS
    for key in tl.range(0, whole, KEYS, num_stages=STAGES):
        row = first + key
        k_a = _tile(k_a_desc, k, row, k_column, None, K_STRIDE, KEYS, A, A, False)
        k_b = k_a
        if B > 0:
            k_b = _tile(k_b_desc, k, row, k_column + A, None, K_STRIDE, KEYS, B, B_PAD, False)
        v_part = _tile(v_desc, v, row, v_column, None, V_STRIDE, KEYS, VALUE, VALUE_PAD, False)
        top, total_weight, mixed = _fold(
            q_a, q_b, k_a, k_b, v_part, key, visible, top, total_weight, mixed, scale_log2, KEYS, B > 0, False, WIDE
        )
    for key in tl.range(whole, last, KEYS, num_stages=1):
        row = first + key
        there = (key + key_index < last)[:, None]
        k_a = _tile(k_a_desc, k, row, k_column, there, K_STRIDE, KEYS, A, A, True)
        k_b = k_a
        if B > 0:
            k_b = _tile(k_b_desc, k, row, k_column + A, there, K_STRIDE, KEYS, B, B_PAD, True)
        v_part = _tile(v_desc, v, row, v_column, there, V_STRIDE, KEYS, VALUE, VALUE_PAD, True)
        if v_desc is not None:
            v_part = tl.where(there, v_part, 0.0)  # a neighbour's infinities stay his
        top, total_weight, mixed = _fold(
            q_a, q_b, k_a, k_b, v_part, key, visible, top, total_weight, mixed, scale_log2, KEYS, B > 0, True, WIDE
        )
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


def _descriptors(k: torch.Tensor, v: torch.Tensor, a: int, rest: int, keys: int) -> tuple[Any, Any, Any]:
    """For bulk copies of `keys` rows: columns [head * stride, + width) of k (both parts) and of v as matrices."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    def matrix(x: torch.Tensor, width: int) -> Any:
        columns = (x.shape[1] - 1) * x.stride(1) + x.shape[2]
        return TensorDescriptor(x, [x.shape[0], columns], [x.stride(0), 1], [keys, width])

    return matrix(k, a), matrix(k, rest) if rest else None, matrix(v, v.shape[-1])


class TritonVarlen:
    """See VARLEN_BACKENDS in mla_prefill. bulk: whether tiles come by Hopper's bulk copies where alignment allows."""

    def __init__(self, tuning: Tuning | None = None, *, bulk: bool = True):
        self._tuning, self._wants_bulk = tuning, bulk

    def _bulk(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: int, rest: int) -> bool:
        """Needs Hopper, widths that are powers of two, and 16-byte alignment."""
        if not self._wants_bulk or (q.is_cuda and torch.cuda.get_device_capability(q.device)[0] < 9):
            return False
        widths_fit = all(width in (0, 16, 32, 64, 128, 256) for width in (a, rest, v.shape[-1]))
        strides = k.stride(0), k.stride(1), v.stride(0), v.stride(1)
        aligned = all(stride * k.element_size() % 16 == 0 for stride in strides)
        return widths_fit and aligned and k.data_ptr() % 16 == 0 and v.data_ptr() % 16 == 0

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
        descriptors = _descriptors(k, v, a, rest, keys) if self._bulk(q, k, v, a, rest) else (None, None, None)
        _attend[(heads, len(plan.tiles))](
            q, k, v, out, *descriptors, plan.tiles, plan.scale * LOG2E, q.stride(0), q.stride(1), k.stride(1), v.stride(1),
            out.stride(0), K_STRIDE=k.stride(0), V_STRIDE=v.stride(0), A=a, B=rest,
            B_PAD=max(16, triton.next_power_of_2(rest)), VALUE=value_dim,
            VALUE_PAD=max(16, triton.next_power_of_2(value_dim)), QUERIES=queries, KEYS=keys, WIDE=wide,
            STAGES=stages, num_warps=warps,
        )  # fmt: skip
        return out
