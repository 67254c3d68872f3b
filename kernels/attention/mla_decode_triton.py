"""Absorbed decode attention in Triton: any widths, bf16, fp32 or e4m3 rows, work split evenly whatever the lengths.

Contract: DEVICE_BACKENDS in mla_decode. A context is cut into tiles of `tile` rows. The tiles of all sequences stand in
one line that is cut into as many equal pieces as there are workers, so a worker may end one sequence, hold some whole
ones and begin another. A sequence that lies inside one piece is finished by its worker; the parts of any other are
fp32 rows (normalised, with a base-2 log-sum-exp) that a second kernel merges in order.

    line       | seq 0 ....... | seq 1 ..... | seq 2 ................. |
    workers    | 0        | 1        | 2        | 3        | 4         |

Only `ends`, the running sum of tiles, depends on the lengths: it is made on the device, so `plan` can be captured.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from kernels.toolchain.triton_support import jit, tl, triton

LOG2E = 1.4426950408889634


@jit
def _blocks_of(table, step, context, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Where tile `step` lies: one block, or one a row when tiles straddle blocks; 0 past the context."""
    if BLOCK_SIZE % TILE == 0:
        return tl.load(table + (step * TILE) // BLOCK_SIZE).to(tl.int64)
    else:
        place = step * TILE + tl.arange(0, TILE)
        return tl.load(table + place // BLOCK_SIZE, mask=place < context, other=0).to(tl.int64)


@jit
def _fold(
    q_latent, q_rope, pool, block, step, context, top, total_weight, mixed, scale_log2,
    BLOCK_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr,
    LATENT_PAD: tl.constexpr, ROPE_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    MASKED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Adds one tile of rows. MASKED: some of them lie past the context and must not be read."""
    compute = tl.float32 if WIDE else tl.bfloat16
    index = tl.arange(0, TILE)
    latent, rope = tl.arange(0, LATENT_PAD), tl.arange(0, ROPE_PAD)
    seen = step * TILE + index < context
    if BLOCK_SIZE % TILE == 0:
        row = pool + block * BLOCK_STRIDE + (step * TILE) % BLOCK_SIZE * ROW_STRIDE + index * ROW_STRIDE
    else:
        row = pool + block * BLOCK_STRIDE + (step * TILE + index) % BLOCK_SIZE * ROW_STRIDE
    latent_at, rope_at = row[:, None] + latent[None, :], row[:, None] + LATENT + rope[None, :]
    if MASKED:
        rows = tl.load(latent_at, mask=seen[:, None] & (latent < LATENT)[None, :], other=0.0)
        turned = tl.load(rope_at, mask=seen[:, None] & (rope < ROPE)[None, :], other=0.0)
    else:
        if LATENT == LATENT_PAD:
            rows = tl.load(latent_at)
        else:
            rows = tl.load(latent_at, mask=(latent < LATENT)[None, :], other=0.0)
        if ROPE == ROPE_PAD:
            turned = tl.load(rope_at)
        else:
            turned = tl.load(rope_at, mask=(rope < ROPE)[None, :], other=0.0)
    rows, turned = rows.to(compute), turned.to(compute)
    scores = tl.dot(q_rope, tl.trans(turned), input_precision="ieee")
    scores = tl.dot(q_latent, tl.trans(rows), scores, input_precision="ieee")
    if MASKED:
        scores = tl.where(seen[None, :], scores, -float("inf"))
    higher = tl.maximum(top, tl.max(scores, 1) * scale_log2)
    weights = tl.exp2(scores * scale_log2 - higher[:, None])
    shrink = tl.exp2(top - higher)
    total_weight = total_weight * shrink + tl.sum(weights, 1)
    mixed = tl.dot(weights.to(compute), rows, mixed * shrink[:, None], input_precision="ieee")
    return higher, total_weight, mixed


@jit
def _attend(
    q, pool, tables, lens, ends, out, parts, part_lse,
    scale_log2, batch, heads, q_stride_seq, q_stride_head, table_stride,
    BLOCK_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr,
    LATENT_PAD: tl.constexpr, ROPE_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr,
    TILE: tl.constexpr, BATCH: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (head blocks, workers). WIDE: multiply in fp32 (fp32 pools; the interpreter has no bf16 product), else bf16."""
    worker, workers = tl.program_id(1), tl.num_programs(1)
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    latent, rope = tl.arange(0, LATENT_PAD), tl.arange(0, ROPE_PAD)
    lives = (head < heads)[:, None]
    compute = tl.float32 if WIDE else tl.bfloat16
    total = tl.load(ends + batch - 1)
    first, last = (worker * total) // workers, ((worker + 1) * total) // workers
    index = tl.arange(0, BATCH)
    seq = tl.sum((tl.load(ends + index, mask=index < batch, other=2147483647) <= first).to(tl.int32))
    tile = first
    while tile < last:
        begin = tl.load(ends + seq - 1, mask=seq > 0, other=0)
        end = tl.load(ends + seq)
        stop = tl.minimum(end, last)
        context = tl.load(lens + seq)
        line = q + seq.to(tl.int64) * q_stride_seq + head[:, None] * q_stride_head
        q_latent = tl.load(line + latent[None, :], mask=lives & (latent < LATENT)[None, :], other=0.0).to(compute)
        q_rope = tl.load(line + LATENT + rope[None, :], mask=lives & (rope < ROPE)[None, :], other=0.0).to(compute)
        top = tl.full((HEADS,), -float("inf"), tl.float32)
        total_weight = tl.zeros((HEADS,), tl.float32)
        mixed = tl.zeros((HEADS, LATENT_PAD), tl.float32)
        table = tables + seq.to(tl.int64) * table_stride
        whole = tl.minimum(stop - begin, context // TILE)
        for step in tl.range(tile - begin, whole, num_stages=STAGES):
            block = _blocks_of(table, step, context, BLOCK_SIZE, TILE)
            top, total_weight, mixed = _fold(
                q_latent, q_rope, pool, block, step, context, top, total_weight, mixed, scale_log2,
                BLOCK_STRIDE, ROW_STRIDE, LATENT, ROPE, LATENT_PAD, ROPE_PAD, BLOCK_SIZE, TILE, False, WIDE,
            )  # fmt: skip
        for step in tl.range(tl.maximum(whole, tile - begin), stop - begin, num_stages=1):  # at most one
            block = _blocks_of(table, step, context, BLOCK_SIZE, TILE)
            top, total_weight, mixed = _fold(
                q_latent, q_rope, pool, block, step, context, top, total_weight, mixed, scale_log2,
                BLOCK_STRIDE, ROW_STRIDE, LATENT, ROPE, LATENT_PAD, ROPE_PAD, BLOCK_SIZE, TILE, True, WIDE,
            )  # fmt: skip
        mixed = mixed / total_weight[:, None]
        keep = lives & (latent < LATENT)[None, :]
        if (tile == begin) & (stop == end):
            target = out + (seq.to(tl.int64) * heads + head[:, None]) * LATENT + latent[None, :]
            tl.store(target, mixed.to(out.dtype.element_ty), mask=keep)
        else:
            part = (worker * 2 + (tile == begin).to(tl.int32)).to(tl.int64) * heads + head
            tl.store(parts + part[:, None] * LATENT + latent[None, :], mixed, mask=keep)
            tl.store(part_lse + part, top + tl.log2(total_weight), mask=head < heads)
        tile = stop
        seq += 1


@jit
def _merge(
    ends, out, parts, part_lse, batch, workers, heads,
    LATENT: tl.constexpr, LATENT_PAD: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Grid (sequences, head blocks): adds up the parts of a sequence that several workers share."""
    seq = tl.program_id(0)
    begin = tl.load(ends + seq - 1, mask=seq > 0, other=0)
    end, total = tl.load(ends + seq), tl.load(ends + batch - 1)
    first, last = ((begin + 1) * workers - 1) // total, (end * workers - 1) // total
    if first < last:
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        latent = tl.arange(0, LATENT_PAD)
        keep = (head < heads)[:, None] & (latent < LATENT)[None, :]
        top = tl.full((HEADS,), -float("inf"), tl.float32)
        total_weight = tl.zeros((HEADS,), tl.float32)
        mixed = tl.zeros((HEADS, LATENT_PAD), tl.float32)
        for worker in range(first, last + 1):
            part = (worker * 2 + (worker == first).to(tl.int32)).to(tl.int64) * heads + head
            busy = (worker * total) // workers < (
                (worker + 1) * total
            ) // workers  # fewer tiles than workers: some idle
            lse = tl.load(part_lse + part, mask=busy & (head < heads), other=-float("inf"))
            rows = tl.load(parts + part[:, None] * LATENT + latent[None, :], mask=busy & keep, other=0.0)
            lse = tl.where(head < heads, lse, 0.0)
            higher = tl.maximum(top, lse)
            shrink, weight = tl.exp2(top - higher), tl.exp2(lse - higher)
            total_weight = total_weight * shrink + weight
            mixed = mixed * shrink[:, None] + rows * weight[:, None]
            top = higher
        target = out + (seq.to(tl.int64) * heads + head[:, None]) * LATENT + latent[None, :]
        tl.store(target, (mixed / total_weight[:, None]).to(out.dtype.element_ty), mask=keep)


def batch_bound(batch: int) -> int:
    """What kernels are compiled for: one for all steps of up to 512 sequences."""
    return max(512, triton.next_power_of_2(batch))


def merge_parts(
    ends: torch.Tensor, out: torch.Tensor, parts: torch.Tensor, part_lse: torch.Tensor, workers: int
) -> None:
    """Finishes `out` [b, h, latent] where several workers share a sequence; `ends` as in Plan."""
    batch, heads, latent_dim = out.shape
    block = min(8, triton.next_power_of_2(heads))
    _merge[(batch, -(-heads // block))](
        ends, out, parts, part_lse, batch, workers, heads,
        LATENT=latent_dim, LATENT_PAD=triton.next_power_of_2(latent_dim), HEADS=block, num_warps=4,
    )  # fmt: skip


class Plan(NamedTuple):
    """tables [b, w] int32, last dimension dense; lens, ends [b] int32: contexts, and the running sum of their tiles."""

    tables: torch.Tensor
    lens: torch.Tensor
    ends: torch.Tensor


class Tuning(NamedTuple):
    """heads: of one program (16 or more); tile: rows at a time; warps, stages: Triton's; workers: per head block."""

    heads: int
    tile: int
    warps: int
    stages: int
    workers: int


def tuning_for(heads: int, latent_dim: int, wide: bool, num_sms: int) -> Tuning:
    """One program a multiprocessor where the accumulator is large, several where it is small."""
    block = max(16, min(64, triton.next_power_of_2(heads)))
    head_blocks = -(-heads // block)
    large = block * latent_dim > 64 * 128
    if wide:
        return Tuning(min(block, 16), 16, 4, 1, max(1, 2 * num_sms // -(-heads // min(block, 16))))
    if large:
        return Tuning(block, 64, 8, 2, max(1, num_sms // head_blocks))
    return Tuning(block, 64, 4, 2, max(1, 3 * num_sms // head_blocks))


def out_dtype_for(pool_dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if pool_dtype == torch.float32 else torch.bfloat16


@functools.lru_cache(maxsize=8)
def _room(pieces: int, latent_dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Parts and their log-sum-exps, shared by all ops of these sizes: they run one after another on one stream."""
    parts = torch.empty(pieces, latent_dim, dtype=torch.float32, device=device)
    return parts, torch.empty(pieces, dtype=torch.float32, device=device)


class TritonDecode:
    """One op for one model and device; `plan` and `run` may be captured, together or apart (see mla_decode)."""

    graph_safe = True

    @staticmethod
    def misfit(
        heads: int, row_dim: int, latent_dim: int, block_size: int, q_dtype: torch.dtype, pool_dtype: torch.dtype
    ) -> str | None:
        if pool_dtype not in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
            return f"takes fp32, bf16 or e4m3 rows, not {pool_dtype}"
        return None if latent_dim <= 512 else "holds at most 512 latent values a head"

    def __init__(
        self, heads: int, row_dim: int, latent_dim: int, block_size: int, q_dtype: torch.dtype,
        pool_dtype: torch.dtype, max_batch: int, scale: float, device: torch.device, tuning: Tuning | None = None,
    ):  # fmt: skip
        self.heads, self.row_dim, self.latent_dim, self.block_size = heads, row_dim, latent_dim, block_size
        self.scale, self.pool_dtype = scale, pool_dtype
        self.q_dtype, self.out_dtype = q_dtype, out_dtype_for(pool_dtype)
        self.wide = pool_dtype == torch.float32 or device.type == "cpu"
        sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
        self.tuning = tuning or tuning_for(heads, latent_dim, self.wide, sms)
        pieces = 2 * self.tuning.workers * heads
        self.parts, self.part_lse = _room(pieces, latent_dim, device)

    def plan(self, block_tables: torch.Tensor, context_lens: torch.Tensor, context_lens_host: Any = None) -> Plan:
        assert block_tables.stride(-1) == 1 and block_tables.dtype == context_lens.dtype == torch.int32
        lens = context_lens.clamp_min(1)  # an idle line of a graph reads one row of block 0
        tiles = (lens + (self.tuning.tile - 1)).div(self.tuning.tile, rounding_mode="floor")
        return Plan(block_tables, lens, tiles.cumsum(0, dtype=torch.int32))

    def run(self, q: torch.Tensor, pool: torch.Tensor, plan: Plan, out: torch.Tensor | None = None) -> torch.Tensor:
        batch = len(q)
        made = q.new_empty(batch, self.heads, self.latent_dim, dtype=self.out_dtype) if out is None else out
        if not batch:
            return made
        assert q.stride(-1) == pool.stride(-1) == 1 and pool.dtype == self.pool_dtype and made.is_contiguous()
        block, tile, warps, stages, workers = self.tuning
        widths = dict(LATENT=self.latent_dim, LATENT_PAD=triton.next_power_of_2(self.latent_dim))
        rope = self.row_dim - self.latent_dim
        _attend[(-(-self.heads // block), workers)](
            q, pool, plan.tables, plan.lens, plan.ends, made, self.parts, self.part_lse,
            self.scale * LOG2E, batch, self.heads, q.stride(0), q.stride(1),
            plan.tables.stride(0), BLOCK_STRIDE=pool.stride(0), ROW_STRIDE=pool.stride(1), **widths, ROPE=rope, ROPE_PAD=max(16, triton.next_power_of_2(rope)),
            BLOCK_SIZE=self.block_size, HEADS=block, TILE=tile, BATCH=batch_bound(batch),
            WIDE=self.wide, STAGES=stages, num_warps=warps,
        )  # fmt: skip
        merge_parts(plan.ends, made, self.parts, self.part_lse, workers)
        return made
