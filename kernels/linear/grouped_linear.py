"""One product for each expert, all experts in one launch: y = x @ w[expert]^T in block-scaled FP8.

CONTIGUOUS_BACKENDS  run(rows, weight, starts) -> [capacity, n] bf16
  rows      Fp8Rows, data [capacity, k], scale [capacity, ceil(k / 128)] with strides (1, any)
  weight    Fp8Weight, data [e, n, k], scale [e, ceil(n / 128), ceil(k / 128)]
  starts    [e + 1] int32 on the device: expert i owns rows starts[i] up to starts[i + 1]; rows from starts[e] on are not
            computed and their output is uninitialised
MASKED_BACKENDS      run(rows, weight, counts) -> [e, m, n] bf16
  rows      Fp8Rows, data [e, m, k], scale [e, m, ceil(k / 128)] with m contiguous
  counts    [e] int32 on the device: of each expert only the first counts[i] rows are computed

The grid depends on static shapes only and the device finds each tile's expert: nothing waits for the host and both can
be captured in a CUDA graph. An expert without rows costs nothing, and its weights are not read. Sums over each 128 of k
are fp32 times their scales, added in fp32 in order of k; `cuda` adds even and odd steps apart where a tile has at most
64 rows, so a row's last bits may depend on how many rows its expert has, never on their values. Row bounds need no
alignment for correctness; ROW_MULTIPLE keeps rows on whole lines of memory. `cuda` is grouped_fp8.cu: Hopper, k a
multiple of 16 and n of 8, at most 128 experts. `triton` takes any sizes.
Source: DeepSeek-V3 report 3.3.2 (fine-grained scales, promotion of partial sums); DeepGEMM for the two forms.
"""

from __future__ import annotations

import torch

from kernels.formats.fp8 import GROUP, Fp8Rows, Fp8Weight, dequantise_rows, dequantise_weight
from kernels.linear import fp8_hopper
from kernels.select import Backend
from kernels.toolchain import cuda_library
from kernels.toolchain.triton_support import jit, needs_triton, tl, triton

ROW_MULTIPLE = 16
DENSE, CONTIGUOUS_MODE, MASKED_MODE = 0, 1, 2  # as in grouped_fp8.cu
ROW_TILES_TOGETHER = 8  # whose columns are walked together, for the L2 cache
FEW_ROWS = 64  # an expert: narrow tiles in Triton
CLUSTER = 2  # blocks that share rows
CUDA_EXPERTS, CUDA_N, CUDA_K = 128, 8, 16  # what grouped_fp8.cu takes: most experts, multiples of n and k


def row_multiple_for(rows_per_expert: int) -> int:
    """What to align `starts` to when an expert has about this many rows."""
    return ROW_MULTIPLE


def cuda_misfit(experts: int, n: int, k: int) -> str | None:
    """None when grouped_fp8.cu takes weights [experts, n, k], else why not."""
    if experts > CUDA_EXPERTS:
        return f"takes at most {CUDA_EXPERTS} experts, not {experts}"
    if n % CUDA_N or k % CUDA_K:
        return f"takes n in multiples of {CUDA_N} and k of {CUDA_K}, not {n} x {k}"
    return None


def reference(rows: Fp8Rows, weight: Fp8Weight, starts: torch.Tensor) -> torch.Tensor:
    x, w = dequantise_rows(rows), dequantise_weight(weight)
    out = torch.zeros(len(x), w.shape[1], device=x.device)
    for expert, (start, end) in enumerate(zip(starts.tolist()[:-1], starts.tolist()[1:], strict=True)):
        out[start:end] = x[start:end] @ w[expert].T
    return out.bfloat16()


def reference_masked(rows: Fp8Rows, weight: Fp8Weight, counts: torch.Tensor) -> torch.Tensor:
    experts, most, _ = rows.data.shape
    out = torch.zeros(experts, most, weight.data.shape[1], device=rows.data.device)
    for expert, count in enumerate(counts.tolist()):
        one = Fp8Rows(rows.data[expert, :count], rows.scale[expert, :count])
        out[expert, :count] = dequantise_rows(one) @ dequantise_weight(_expert(weight, expert)).T
    return out.bfloat16()


def _expert(weight: Fp8Weight, expert: int) -> Fp8Weight:
    return Fp8Weight(weight.data[expert], weight.scale[expert])


class Layout:
    """What a launch needs to know of its operands; checks them. `experts`, `num_rows` (of one expert where masked)."""

    def __init__(self, rows: Fp8Rows, weight: Fp8Weight, mode: int) -> None:
        self.experts, self.n, self.k = weight.data.shape
        self.num_rows, self.mode = rows.data.shape[-2], mode
        self.steps = -(-self.k // GROUP)
        scale = rows.scale
        if not (rows.data.is_contiguous() and weight.data.is_contiguous() and weight.scale.is_contiguous()):
            raise ValueError("rows, weights and the weights' scales must be contiguous")
        if rows.data.shape[-1] != self.k or scale.shape[:-1] != rows.data.shape[:-1] or scale.shape[-1] != self.steps:
            raise ValueError(f"{tuple(rows.data.shape)} rows scaled {tuple(scale.shape)} by a weight of k = {self.k}")
        if weight.scale.shape != (self.experts, -(-self.n // GROUP), self.steps) or weight.scale.dtype != torch.float32:
            raise ValueError(f"weight {tuple(weight.data.shape)} with scales {tuple(weight.scale.shape)}")
        if self.num_rows > 1 and scale.stride(-2) != 1:
            raise ValueError(f"a row's neighbour must be next in memory in the scales, not strides {scale.stride()}")
        self.scale_step = scale.stride(-1)
        self.scale_expert = scale.stride(0) - self.num_rows if mode == MASKED_MODE else 0
        self.all_rows = self.num_rows * (self.experts if mode == MASKED_MODE else 1)

    def empty(self, like: Fp8Rows) -> torch.Tensor:
        return torch.empty(*like.data.shape[:-1], self.n, dtype=torch.bfloat16, device=like.data.device)


def launch_cuda(
    rows: Fp8Rows,
    weight: Fp8Weight,
    bounds: torch.Tensor | None,
    mode: int,
    out: torch.Tensor | None = None,
    *,
    slabs: int = 4,
    columns: int = 128,
    together: int = ROW_TILES_TOGETHER,
    cluster: int = CLUSTER,
) -> torch.Tensor:
    """The kernel of grouped_fp8.cu. Tiles are 64 * `slabs` rows at most (1 to 4) by `columns` (64 or 128). `together` row
    tiles share a walk over the columns; `cluster` blocks (1 or 2; 1 with 64 columns) share a tile's rows."""
    if columns != 128:
        cluster = 1
    layout = Layout(rows, weight, mode)
    out = layout.empty(rows) if out is None else out
    device = out.device
    code = fp8_hopper.library().hr_grouped_fp8(
        rows.data.data_ptr(), rows.scale.data_ptr(), layout.scale_step, layout.scale_expert,
        weight.data.data_ptr(), weight.scale.data_ptr(), out.data_ptr(), out.stride(-2),
        None if bounds is None else bounds.data_ptr(), mode, layout.num_rows, layout.experts, layout.n, layout.k,
        slabs, columns, together, cluster, cuda_library.multiprocessors(device),
        torch.cuda.current_stream(device).cuda_stream,
    )  # fmt: skip
    fp8_hopper.check(code)
    return out


def _cuda(rows: Fp8Rows, weight: Fp8Weight, starts: torch.Tensor) -> torch.Tensor:
    return launch_cuda(rows, weight, starts, CONTIGUOUS_MODE)


def _cuda_masked(rows: Fp8Rows, weight: Fp8Weight, counts: torch.Tensor) -> torch.Tensor:
    return launch_cuda(rows, weight, counts, MASKED_MODE)


@jit
def _bounds(bounds, expert, num_rows, MODE: tl.constexpr):
    """First row and row after the last of an expert."""
    if MODE == 0:
        begin, end = expert * 0, expert * 0 + num_rows
    elif MODE == 1:
        begin, end = tl.load(bounds + expert), tl.minimum(tl.load(bounds + expert + 1), num_rows)
    else:
        begin = expert * num_rows
        end = begin + tl.minimum(tl.load(bounds + expert), num_rows)
    return begin, end


@jit
def _tile_kernel(
    x, x_scale, scale_step, scale_expert, w, w_scale, out, bounds, num_rows, experts, n, k: tl.constexpr,
    MODE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOGETHER: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """One program for each tile of ROWS x COLUMNS. Programs past the last tile leave at once."""
    column_tiles = tl.cdiv(n, COLUMNS)
    tile, expert = tl.program_id(0), 0
    begin, end = _bounds(bounds, expert, num_rows, MODE)
    row_tiles = tl.maximum(tl.cdiv(end - begin, ROWS), 0)
    while (expert < experts - 1) & (tile >= row_tiles * column_tiles):
        tile -= row_tiles * column_tiles
        expert += 1
        begin, end = _bounds(bounds, expert, num_rows, MODE)
        row_tiles = tl.maximum(tl.cdiv(end - begin, ROWS), 0)
    if tile < row_tiles * column_tiles:
        first = tile // (TOGETHER * column_tiles) * TOGETHER
        height = tl.minimum(row_tiles - first, TOGETHER)
        tile -= first * column_tiles
        row = begin + (first + tile % height) * ROWS + tl.arange(0, ROWS)
        column = tile // height * COLUMNS + tl.arange(0, COLUMNS)
        inner = tl.arange(0, 128)
        steps: tl.constexpr = (k + 127) // 128
        wide_row, wide_column = row.to(tl.int64), (expert * n + column).to(tl.int64)
        x_at = x + wide_row[:, None] * k + inner[None, :]
        w_at = w + wide_column[:, None] * k + inner[None, :]
        x_scale_at = x_scale + expert * scale_expert + wide_row
        w_scale_at = w_scale + (expert * tl.cdiv(n, 128) + column // 128) * steps
        row_ok, column_ok = row < end, column < n
        if SWAP:
            total = tl.zeros((COLUMNS, ROWS), tl.float32)
        else:
            total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for step in range(0, steps):
            inside = inner[None, :] < k - step * 128
            a = tl.load(x_at + step * 128, mask=row_ok[:, None] & inside, other=0.0)
            b = tl.load(w_at + step * 128, mask=column_ok[:, None] & inside, other=0.0)
            a_scale = tl.load(x_scale_at + step * scale_step, mask=row_ok, other=0.0)
            b_scale = tl.load(w_scale_at + step, mask=column_ok, other=0.0)
            if SWAP:
                total += tl.dot(b, a.T) * (b_scale[:, None] * a_scale[None, :])
            else:
                total += tl.dot(a, b.T) * (a_scale[:, None] * b_scale[None, :])
        values = tl.trans(total) if SWAP else total
        out_at = out + wide_row[:, None] * n + column[None, :]
        tl.store(out_at, values.to(tl.bfloat16), mask=row_ok[:, None] & column_ok[None, :])


def launch_triton(
    rows: Fp8Rows,
    weight: Fp8Weight,
    bounds: torch.Tensor | None,
    mode: int,
    out: torch.Tensor | None = None,
    *,
    row_tile: int | None = None,
    column_tile: int = 128,
    swap: bool | None = None,
    num_warps: int | None = None,
    num_stages: int = 4,
) -> torch.Tensor:
    """Tile sizes from the rows an expert can have at most (masked, dense) or on average (contiguous). Few rows are the
    narrow side of the product (`swap`), because an instruction takes 64 of the other side and 16 of this."""
    layout = Layout(rows, weight, mode)
    out = layout.empty(rows) if out is None else out
    typical = layout.num_rows // (layout.experts if mode == CONTIGUOUS_MODE else 1)
    if row_tile is None:
        row_tile = max(16, min(128, triton.next_power_of_2(max(typical, 1))))
    swap = row_tile <= FEW_ROWS if swap is None else swap
    num_warps = (4 if row_tile < 128 else 8) if num_warps is None else num_warps
    row_tiles = layout.all_rows // row_tile + layout.experts if mode == CONTIGUOUS_MODE else (
        layout.experts * triton.cdiv(layout.num_rows, row_tile)
    )  # fmt: skip
    grid = (row_tiles * triton.cdiv(layout.n, column_tile),)
    if out.numel():
        _tile_kernel[grid](
            rows.data, rows.scale, layout.scale_step, layout.scale_expert, weight.data, weight.scale, out,
            weight.scale if bounds is None else bounds, layout.num_rows, layout.experts, layout.n, layout.k,
            mode, row_tile, column_tile, ROW_TILES_TOGETHER, swap, num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip
    return out


def _triton(rows: Fp8Rows, weight: Fp8Weight, starts: torch.Tensor) -> torch.Tensor:
    return launch_triton(rows, weight, starts, CONTIGUOUS_MODE)


def _triton_masked(rows: Fp8Rows, weight: Fp8Weight, counts: torch.Tensor) -> torch.Tensor:
    return launch_triton(rows, weight, counts, MASKED_MODE)


CONTIGUOUS_BACKENDS = (
    Backend("cuda", _cuda, why_not=fp8_hopper.why_not),
    Backend("triton", _triton, why_not=needs_triton),
    Backend("reference", reference),
)
MASKED_BACKENDS = (
    Backend("cuda", _cuda_masked, why_not=fp8_hopper.why_not),
    Backend("triton", _triton_masked, why_not=needs_triton),
    Backend("reference", reference_masked),
)
