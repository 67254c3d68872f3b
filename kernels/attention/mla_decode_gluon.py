"""Absorbed decode attention for Hopper in Gluon: R1's rows (512 + 64, bf16) in blocks of 64, heads in groups of 64.

Contract: DEVICE_BACKENDS in mla_decode_device; the work is cut and merged as in mla_decode_triton, by tiles of one block.

One program has 64 heads and two warpgroups. Shared memory holds its queries (72 KiB) and two tiles of rows (72 KiB each),
filled by the copy engine. A row is copied once and is key and value. Each warpgroup scores half of a tile's keys and
holds half of the latent columns. The tensor cores get the scores of the next tile right behind the product with the
weights of this one; what they wait for is the softmax between the two.
Tried and slower on an H200 (408 against 330 us at 128 x 4,096): tiles of 128 rows in one buffer, refilled by quarters.
Source: DeepSeek-V2 report 2.1.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels.attention.mla_decode_triton import LOG2E, Plan, TritonDecode, Tuning, batch_bound, merge_parts
from kernels.toolchain.triton_support import needs_capability, needs_triton

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    jit = gluon.jit
except ImportError:  # CPU hosts, and Triton before 3.6
    gluon = gl = None  # type: ignore[assignment]

    def jit(function: Any) -> Any:
        return function


HEADS, BLOCK, LATENT, ROPE = 64, 64, 512, 64
_on_hopper = needs_capability(9, exactly=True)


def needs_gluon(device: Any) -> str | None:
    if reason := needs_triton(device) or _on_hopper(device):
        return reason
    return "this triton has no Gluon" if gluon is None else None


@jit
def _fetch(latent_at, turned_at, table, step, latent, turned, full):
    """Starts the copies of one block: [64, 512] and [64, 64]; `full` says when they are there."""
    row = gl.load(table + step) * 64
    mbarrier.expect(full, 64 * 576 * 2)
    tma.async_copy_global_to_shared(latent_at, [row, 0], full, latent)
    tma.async_copy_global_to_shared(turned_at, [row, 512], full, turned)


@jit
def _zero_from(latent, left):
    """Rows `left` and on of a tile become 0: they have no weight, but 0 x NaN would be seen."""
    SPREAD: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
    place = gl.arange(0, 64, layout=gl.SliceLayout(1, SPREAD))
    for part in gl.static_range(4):
        rows = latent.slice(part * 128, 128, dim=1)
        kept = gl.where((place < left)[:, None], rows.load(SPREAD), 0.0)
        rows.store(kept)
    fence_async_shared()
    gl.thread_barrier()


@jit
def _attend(
    q_latent_at, q_turned_at, latent_at, turned_at, tables, lens, ends, out, parts, part_lse,
    scale_log2, batch, heads, table_stride, BATCH: gl.constexpr,
):  # fmt: skip
    """Grid (heads / 64, workers). The *_at are tensor maps of queries and pool with boxes of 64 rows x 512 or 64."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    MIXED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, MIXED, 2)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_latent = gl.allocate_shared_memory(gl.bfloat16, [64, 512], SHARED)
    q_turned = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    latent = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 512], SHARED)
    turned = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())  # two tiles, queries
    for i in gl.static_range(3):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()

    worker, workers = gl.program_id(1), gl.num_programs(1)
    first_head = gl.program_id(0) * 64
    total = gl.load(ends + batch - 1)
    first, last = (worker * total) // workers, ((worker + 1) * total) // workers
    index = gl.arange(0, BATCH, layout=gl.BlockedLayout([1], [32], [8], [0]))
    seq = gl.sum((gl.load(ends + index, mask=index < batch, other=2147483647) <= first).to(gl.int32), 0)
    tile = first
    count = 0  # tiles met so far: its last bit is the buffer, the next one the phase of its barrier
    seqs_done = 0
    while tile < last:
        begin = gl.load(ends + seq - 1, mask=seq > 0, other=0)
        end = gl.load(ends + seq)
        stop = gl.minimum(end, last)
        context = gl.load(lens + seq)
        table = tables + seq.to(gl.int64) * table_stride
        now = count & 1
        gl.thread_barrier()
        line = seq * heads + first_head
        mbarrier.expect(full.index(2), 64 * 576 * 2)
        tma.async_copy_global_to_shared(q_latent_at, [line, 0], full.index(2), q_latent)
        tma.async_copy_global_to_shared(q_turned_at, [line, 512], full.index(2), q_turned)
        _fetch(latent_at, turned_at, table, tile - begin, latent.index(now), turned.index(now), full.index(now))
        mbarrier.wait(full.index(2), seqs_done & 1)
        seqs_done += 1

        top = gl.full([64], -float("inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
        sums = gl.full([64, 64], 0.0, gl.float32, layout=SCORES)  # added up across threads once, at the end
        mixed = gl.full([64, 512], 0.0, gl.float32, layout=MIXED)
        zero = gl.full([64, 64], 0.0, gl.float32, layout=SCORES)
        place = gl.arange(0, 64, layout=gl.SliceLayout(0, SCORES))
        mbarrier.wait(full.index(now), (count >> 1) & 1)
        scores = warpgroup_mma(q_turned, turned.index(now).permute((1, 0)), zero, use_acc=False, is_async=True)
        scores = warpgroup_mma(q_latent, latent.index(now).permute((1, 0)), scores, is_async=True)
        if tile + 1 < stop:
            then = 1 - now
            _fetch(
                latent_at, turned_at, table, tile - begin + 1, latent.index(then), turned.index(then), full.index(then)
            )
        scores = warpgroup_mma_wait(0, [scores])
        for step in range(tile - begin, stop - begin):
            now = count & 1
            left = context - step * 64
            if left < 64:
                scores = gl.where((place < left)[None, :], scores, -float("inf"))
                _zero_from(latent.index(now), left)
            higher = gl.maximum(top, gl.max(scores, 1) * scale_log2)
            weights = gl.exp2(scores * scale_log2 - higher[:, None])
            shrink = gl.exp2(top - higher)
            sums = sums * shrink[:, None] + weights
            weights = gl.convert_layout(weights.to(gl.bfloat16), WEIGHTS)
            mixed = mixed * gl.convert_layout(shrink, gl.SliceLayout(1, MIXED))[:, None]
            top = higher
            count += 1
            then = count & 1
            product = warpgroup_mma(weights, latent.index(now), mixed, is_async=True)
            if step + 1 < stop - begin:
                mbarrier.wait(full.index(then), (count >> 1) & 1)
                following = warpgroup_mma(
                    q_turned, turned.index(then).permute((1, 0)), zero, use_acc=False, is_async=True
                )
                following = warpgroup_mma(q_latent, latent.index(then).permute((1, 0)), following, is_async=True)
                mixed = warpgroup_mma_wait(2, [product])
                gl.thread_barrier()  # everyone is through with the tile: its buffer takes the one after the next
                if step + 2 < stop - begin:
                    _fetch(latent_at, turned_at, table, step + 2, latent.index(now), turned.index(now), full.index(now))
                scores = warpgroup_mma_wait(0, [following])
            else:
                mixed = warpgroup_mma_wait(0, [product])
                gl.thread_barrier()

        total_weight = gl.sum(sums, 1)
        mixed = mixed / gl.convert_layout(total_weight, gl.SliceLayout(1, MIXED))[:, None]
        head = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, MIXED))
        column = gl.arange(0, 512, layout=gl.SliceLayout(0, MIXED))
        if (tile == begin) & (stop == end):
            made = (seq.to(gl.int64) * heads + head)[:, None] * 512 + column[None, :]
            gl.store(out + made, mixed.to(gl.bfloat16))
        else:
            slot = (worker * 2 + (tile == begin).to(gl.int32)).to(gl.int64) * heads
            gl.store(parts + (slot + head)[:, None] * 512 + column[None, :], mixed)
            scored = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
            gl.store(part_lse + slot + scored, top + gl.log2(total_weight))
        tile = stop
        seq += 1


class GluonDecode(TritonDecode):
    """One op for one model and device; `plan` and `run` may be captured."""

    @staticmethod
    def misfit(
        heads: int, row_dim: int, latent_dim: int, block_size: int, q_dtype: torch.dtype, pool_dtype: torch.dtype
    ) -> str | None:
        if (row_dim, latent_dim, block_size) != (LATENT + ROPE, LATENT, BLOCK) or heads % HEADS:
            return f"takes rows of {LATENT} + {ROPE} values in blocks of {BLOCK}, and heads in groups of {HEADS}"
        if q_dtype != torch.bfloat16 or pool_dtype != torch.bfloat16:
            return f"takes bf16 queries and rows, not {q_dtype} and {pool_dtype}"
        return None

    def __init__(self, heads: int, *, device: torch.device, **sizes: Any):
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        workers = max(1, sms // (heads // HEADS))
        super().__init__(heads, device=device, tuning=Tuning(HEADS, BLOCK, 8, 1, workers), **sizes)

    def run(self, q: torch.Tensor, pool: torch.Tensor, plan: Plan, out: torch.Tensor | None = None) -> torch.Tensor:
        batch = len(q)
        made = q.new_empty(batch, self.heads, LATENT) if out is None else out
        if not batch:
            return made
        queries, rows = q.view(-1, LATENT + ROPE), pool.view(-1, LATENT + ROPE)  # dense, or this raises
        workers = self.tuning.workers
        _attend[(self.heads // HEADS, workers)](
            _map(queries, LATENT), _map(queries, ROPE), _map(rows, LATENT), _map(rows, ROPE), plan.tables, plan.lens, plan.ends,
            made, self.parts, self.part_lse, self.scale * LOG2E, batch, self.heads, plan.tables.stride(0),
            BATCH=batch_bound(batch), num_warps=self.tuning.warps,
        )  # fmt: skip
        merge_parts(plan.ends, made, self.parts, self.part_lse, workers)
        return made


def _map(x: torch.Tensor, columns: int) -> Any:
    """A tensor map of x with boxes of 64 rows and `columns` columns."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [64, columns], layout)
