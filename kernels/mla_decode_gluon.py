"""Absorbed decode attention for Hopper in Gluon: R1's rows (512 + 64, bf16) in blocks of 64, heads in groups of 64.

Contract: DEVICE_BACKENDS in mla_decode_device; the work is cut and merged as in mla_decode_triton, by tiles of 128 rows.

One program has 64 heads and two warpgroups. Shared memory holds its queries (72 KiB) and one tile of rows (144 KiB), so
there is no second buffer. Instead the tile is recycled in pieces: the latent part is four pieces of 128 columns, and as
soon as the product with the weights is through with one, the copy engine refills it for the next tile, while the other
products run. The next scores take the pieces in the same order.

    scores   [64, 128]   each warpgroup has the keys of one block
    mixed    4 x [64, 128]   one accumulator a piece, each warpgroup half of its columns

Between the scores and the next tile the rotated part's place holds the weights, in which form both warpgroups read them.
Source: DeepSeek-V2 report 2.1 for the arithmetic; the recycling is ours.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels.mla_decode_triton import LOG2E, Plan, TritonDecode, Tuning, merge_parts
from kernels.triton_support import needs_capability, needs_triton, triton

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


HEADS, TILE, BLOCK, LATENT, ROPE = 64, 128, 64, 512, 64
_on_hopper = needs_capability(9, exactly=True)


def needs_gluon(device: Any) -> str | None:
    if reason := needs_triton(device) or _on_hopper(device):
        return reason
    return "this triton has no Gluon" if gluon is None else None


@jit
def _blocks_of(table, step, context):
    """First pool rows of the tile's two blocks; those of block 0 where the context has ended."""
    first = gl.load(table + step * 2)
    second = gl.load(table + step * 2 + 1, mask=step * 128 + 64 < context, other=0)
    return first * 64, second * 64


@jit
def _fetch_piece(pool, first, second, latent, full, part: gl.constexpr):
    mbarrier.expect(full, 128 * 128 * 2)
    tma.async_copy_global_to_shared(pool, [first, part * 128], full, latent.index(part).slice(0, 64, dim=0))
    tma.async_copy_global_to_shared(pool, [second, part * 128], full, latent.index(part).slice(64, 64, dim=0))


@jit
def _fetch_turned(pool, first, second, turned, full):
    mbarrier.expect(full, 128 * 64 * 2)
    tma.async_copy_global_to_shared(pool, [first, 512], full, turned.slice(0, 64, dim=0))
    tma.async_copy_global_to_shared(pool, [second, 512], full, turned.slice(64, 64, dim=0))


@jit
def _zero_from(latent, left):
    """Rows `left` and on of a tile become 0: they have no weight, but 0 x NaN would be seen."""
    SPREAD: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
    place = gl.arange(0, 64, layout=gl.SliceLayout(1, SPREAD))
    for part in gl.static_range(4):
        for half in gl.static_range(2):
            rows = latent.index(part).slice(half * 64, 64, dim=0)
            kept = gl.where((place + half * 64 < left)[:, None], rows.load(SPREAD), 0.0)
            rows.store(kept)
    fence_async_shared()
    gl.thread_barrier()


@jit
def _attend(
    q_latent_at, q_turned_at, latent_at, turned_at, tables, lens, ends, out, parts, part_lse,
    scale_log2, batch, heads, table_stride, BATCH: gl.constexpr,
):  # fmt: skip
    """Grid (heads / 64, workers). The *_at are tensor maps of queries and pool with boxes of 64 rows x 128 or 64."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 64, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_latent = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 128], SHARED)
    q_turned = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    latent = gl.allocate_shared_memory(gl.bfloat16, [4, 128, 128], SHARED)
    turned = gl.allocate_shared_memory(gl.bfloat16, [128, 64], SHARED)
    weights_at = turned._reinterpret(gl.bfloat16, [64, 128], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [6, 1], mbarrier.MBarrierLayout())  # pieces, turned, queries
    for i in gl.static_range(6):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()

    worker, workers = gl.program_id(1), gl.num_programs(1)
    first_head = gl.program_id(0) * 64
    total = gl.load(ends + batch - 1)
    tile, last = (worker * total) // workers, ((worker + 1) * total) // workers
    index = gl.arange(0, BATCH, layout=gl.BlockedLayout([1], [32], [8], [0]))
    seq = gl.sum((gl.load(ends + index, mask=index < batch, other=2147483647) <= tile).to(gl.int32), 0)
    tiles_done = 0
    seqs_done = 0
    while tile < last:
        begin = gl.load(ends + seq - 1, mask=seq > 0, other=0)
        end = gl.load(ends + seq)
        stop = gl.minimum(end, last)
        context = gl.load(lens + seq)
        table = tables + seq.to(gl.int64) * table_stride
        gl.thread_barrier()
        line = seq * heads + first_head
        mbarrier.expect(full.index(5), 64 * 576 * 2)
        for part in gl.static_range(4):
            tma.async_copy_global_to_shared(q_latent_at, [line, part * 128], full.index(5), q_latent.index(part))
        tma.async_copy_global_to_shared(q_turned_at, [line, 512], full.index(5), q_turned)
        first, second = _blocks_of(table, tile - begin, context)
        _fetch_turned(turned_at, first, second, turned, full.index(4))
        for part in gl.static_range(4):
            _fetch_piece(latent_at, first, second, latent, full.index(part), part)
        mbarrier.wait(full.index(5), seqs_done & 1)
        seqs_done += 1

        top = gl.full([64], -float("inf"), gl.float32, layout=gl.SliceLayout(1, ACC))
        total_weight = gl.full([64], 0.0, gl.float32, layout=gl.SliceLayout(1, ACC))
        zero = gl.full([64, 128], 0.0, gl.float32, layout=ACC)
        mixed_0, mixed_1, mixed_2, mixed_3 = zero, zero, zero, zero
        place = gl.arange(0, 128, layout=gl.SliceLayout(0, ACC))
        for step in range(tile - begin, stop - begin):
            turn = tiles_done & 1
            tiles_done += 1
            more = step + 1 < stop - begin
            mbarrier.wait(full.index(4), turn)
            scores = warpgroup_mma(q_turned, turned.permute((1, 0)), zero, use_acc=False, is_async=True)
            for part in gl.static_range(4):
                mbarrier.wait(full.index(part), turn)
                keys = latent.index(part).permute((1, 0))
                scores = warpgroup_mma(q_latent.index(part), keys, scores, is_async=True)
            first, second = _blocks_of(table, gl.minimum(step + 1, stop - begin - 1), context)
            scores = warpgroup_mma_wait(0, [scores])
            left = context - step * 128
            if left < 128:
                scores = gl.where((place < left)[None, :], scores, -float("inf"))
                _zero_from(latent, left)
            higher = gl.maximum(top, gl.max(scores, 1) * scale_log2)  # all warps meet here: `turned` is free
            weights = gl.exp2(scores * scale_log2 - higher[:, None])
            shrink = gl.exp2(top - higher)
            total_weight = total_weight * shrink + gl.sum(weights, 1)
            top = higher
            weights_at.store(weights.to(gl.bfloat16))
            gl.thread_barrier()
            weights = weights_at.load(LEFT)
            fence_async_shared()
            if more:
                _fetch_turned(turned_at, first, second, turned, full.index(4))
            product_0 = warpgroup_mma(weights, latent.index(0), mixed_0 * shrink[:, None], is_async=True)
            product_1 = warpgroup_mma(weights, latent.index(1), mixed_1 * shrink[:, None], is_async=True)
            product_2 = warpgroup_mma(weights, latent.index(2), mixed_2 * shrink[:, None], is_async=True)
            product_3 = warpgroup_mma(weights, latent.index(3), mixed_3 * shrink[:, None], is_async=True)
            mixed_0 = warpgroup_mma_wait(3, [product_0])
            if more:  # each copy begins with a barrier: all warps are through with the piece
                _fetch_piece(latent_at, first, second, latent, full.index(0), 0)
            mixed_1 = warpgroup_mma_wait(2, [product_1])
            if more:
                _fetch_piece(latent_at, first, second, latent, full.index(1), 1)
            mixed_2 = warpgroup_mma_wait(1, [product_2])
            if more:
                _fetch_piece(latent_at, first, second, latent, full.index(2), 2)
            mixed_3 = warpgroup_mma_wait(0, [product_3])
            if more:
                _fetch_piece(latent_at, first, second, latent, full.index(3), 3)

        head = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, ACC))
        part = (worker * 2 + (tile == begin).to(gl.int32)).to(gl.int64) * heads + head
        whole = (tile == begin) & (stop == end)
        made = (seq.to(gl.int64) * heads + head)[:, None] * 512 + place[None, :]
        kept = part[:, None] * 512 + place[None, :]
        share = 1.0 / total_weight[:, None]
        if whole:
            gl.store(out + made, (mixed_0 * share).to(gl.bfloat16))
            gl.store(out + made + 128, (mixed_1 * share).to(gl.bfloat16))
            gl.store(out + made + 256, (mixed_2 * share).to(gl.bfloat16))
            gl.store(out + made + 384, (mixed_3 * share).to(gl.bfloat16))
        else:
            gl.store(parts + kept, mixed_0 * share)
            gl.store(parts + kept + 128, mixed_1 * share)
            gl.store(parts + kept + 256, mixed_2 * share)
            gl.store(parts + kept + 384, mixed_3 * share)
            gl.store(part_lse + part, top + gl.log2(total_weight))
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
        super().__init__(heads, device=device, tuning=Tuning(HEADS, TILE, 8, 1, workers), **sizes)

    def run(self, q: torch.Tensor, pool: torch.Tensor, plan: Plan, out: torch.Tensor | None = None) -> torch.Tensor:
        batch = len(q)
        made = q.new_empty(batch, self.heads, LATENT) if out is None else out
        if not batch:
            return made
        queries, rows = q.view(-1, LATENT + ROPE), pool.view(-1, LATENT + ROPE)  # dense, or this raises
        workers = self.tuning.workers
        _attend[(self.heads // HEADS, workers)](
            _map(queries, 128), _map(queries, 64), _map(rows, 128), _map(rows, 64), plan.tables, plan.lens, plan.ends,
            made, self.parts, self.part_lse, self.scale * LOG2E, batch, self.heads, plan.tables.stride(0),
            BATCH=triton.next_power_of_2(batch), num_warps=self.tuning.warps,
        )  # fmt: skip
        merge_parts(plan.ends, made, self.parts, self.part_lse, workers)
        return made


def _map(x: torch.Tensor, columns: int) -> Any:
    """A tensor map of x with boxes of 64 rows and `columns` columns."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [64, columns], layout)
