"""Rows times NVFP4 weights in plain Triton, for any GPU: weights are read as they are on disk and widened in registers.

multiply(rows, weight, starts, counts, out)
  rows    bf16 [r, width] or Fp8Rows of that; width % 128 == 0
  weight  Nvfp4Weight [e, n, width], global_scale [e]
  starts  [e + 1] int32, expert i owns rows starts[i] .. starts[i + 1]; None: expert i owns rows i * r / e ..
  counts  [e] int32, how many of them are real; None: all
  out     [r, n] bf16; only the real rows are written

The weight is the left operand (out^T = W x^T), so that few rows do not leave the matrix unit's 64 rows empty. A code times
its block scale has at most six significant bits, so the bf16 weight is exact; the global scale is applied to the sum.
"""

from __future__ import annotations

import torch

from kernels.formats.fp8 import Fp8Rows
from kernels.formats.nvfp4 import Nvfp4Weight, e4m3_value
from kernels.toolchain.triton_support import jit, tl, triton


@jit
def _tiny(nibble):
    """Code 0..15 (int32) -> its value times 2^-126 in fp32, whose low bits of exponent are the code's, zero included."""
    return (((nibble & 7) << 22) | ((nibble & 8) << 28)).to(tl.float32, bitcast=True)


@jit
def multiply_kernel(
    x, x_scale, packed, block_scale, global_scale, starts, counts, out, rows, n, width, x_stride, rows_each,
    FP8: tl.constexpr, HAS_STARTS: tl.constexpr, HAS_COUNTS: tl.constexpr,
    TILE_N: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_K: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Grid (column tiles, row tiles, experts). WIDE: multiply in fp32; the interpreter has no bf16 product."""
    operand = tl.float32 if WIDE else tl.bfloat16
    expert = tl.program_id(2)
    begin, end = expert * rows_each, (expert + 1) * rows_each
    if HAS_STARTS:
        begin, end = tl.load(starts + expert), tl.load(starts + expert + 1)
    if HAS_COUNTS:
        end = tl.minimum(end, begin + tl.load(counts + expert))
    first = begin + tl.program_id(1) * TILE_ROWS
    if first >= end:
        return
    row = first + tl.arange(0, TILE_ROWS)
    column = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    half = tl.arange(0, TILE_K // 2)
    all_k = tl.arange(0, TILE_K)
    real_row, real_column = row < end, column < n
    weight_row = expert.to(tl.int64) * n + column
    codes = packed + weight_row[:, None] * (width // 2) + half[None, :]
    scales = block_scale + weight_row[:, None] * (width // 16) + tl.arange(0, TILE_K // 16)[None, :]
    values = x + row.to(tl.int64)[:, None] * x_stride + all_k[None, :]
    sums = tl.zeros((TILE_N, TILE_ROWS), tl.float32)
    for k in range(0, width, TILE_K):
        byte = tl.load(codes + k // 2, real_column[:, None], 0).to(tl.int32)
        scale = e4m3_value(tl.load(scales + k // 16, real_column[:, None], 0).to(tl.int32)) * 3.3230699894622897e35
        scale = tl.broadcast_to(scale[:, :, None], (TILE_N, TILE_K // 16, 8)).reshape(TILE_N, TILE_K // 2)
        tile = tl.load(values + k, real_row[:, None], 0.0)
        if FP8:
            tile_scale = tl.load(x_scale + (k // 128) * rows + row, real_row, 0.0)
            tile = tile.to(tl.float32) * tile_scale[:, None]
        even, odd = tl.split(tile.to(operand).reshape(TILE_ROWS, TILE_K // 2, 2))
        low, high = (_tiny(byte) * scale).to(operand), (_tiny(byte >> 4) * scale).to(operand)
        sums = tl.dot(low, tl.trans(even), sums, input_precision="ieee")
        sums = tl.dot(high, tl.trans(odd), sums, input_precision="ieee")
    sums *= tl.load(global_scale + expert) * 256.0  # scales were multiplied by 2^118, codes by 2^-126
    to = out + row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(to, tl.trans(sums).to(tl.bfloat16), real_row[:, None] & real_column[None, :])


def multiply(
    rows: torch.Tensor | Fp8Rows,
    weight: Nvfp4Weight,
    starts: torch.Tensor | None,
    counts: torch.Tensor | None,
    out: torch.Tensor,
) -> torch.Tensor:
    fp8 = isinstance(rows, Fp8Rows)
    data, scale = rows if fp8 else (rows, rows)
    experts, n, half = weight.packed.shape
    num_rows, width = data.shape
    if 2 * half != width or width % 128 or data.stride(1) != 1:
        raise ValueError(f"rows {tuple(data.shape)} do not fit a weight of {n} x {2 * half}, or width % 128 != 0")
    if fp8 and scale.stride() != (1, num_rows) and num_rows > 1:
        raise ValueError("scales of FP8 rows have tokens as neighbours: strides (1, rows)")
    if not num_rows or not n:
        return out
    most = num_rows if starts is not None else num_rows // experts
    tile_rows = min(128, max(16, triton.next_power_of_2(most)))
    grid = (triton.cdiv(n, 128), triton.cdiv(most, tile_rows), experts)
    multiply_kernel[grid](
        data, scale, weight.packed, weight.block_scale.view(torch.uint8), weight.global_scale,
        data if starts is None else starts, data if counts is None else counts, out,
        num_rows, n, width, data.stride(0), num_rows // experts,
        FP8=fp8, HAS_STARTS=starts is not None, HAS_COUNTS=counts is not None,
        TILE_N=128, TILE_ROWS=tile_rows, TILE_K=128, WIDE=data.device.type == "cpu", num_warps=8, num_stages=3,
    )  # fmt: skip
    return out
