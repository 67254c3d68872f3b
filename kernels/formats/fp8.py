"""DeepSeek's two FP8 formats, activations by rows and weights by blocks, and the quantiser of rows.

x        [num_tokens, width]  bf16 (fp32 allowed); width % 128 == 0, rows may be strided, columns may not
returns  Fp8Rows              one scale for each row and 128 columns: scale = max(amax, 1e-4) / 448, data = cast(x / scale)

`scale` is always the multiplier that gives numbers back: value = data * scale. The floor keeps rows of zeros at zero.
Rounding is to nearest even; `triton` multiplies by the rounded 1 / scale, so that a value within 2e-7 of a tie may take
the neighbouring code. A NaN or an infinity gives at least one NaN among its own 128 columns and touches nothing else.
No rows give no rows. Source: DeepSeek-V3 report 3.3 and its inference/kernel.py; DeepGEMM for the floor.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from kernels.select import Backend
from kernels.toolchain.triton_support import jit, needs_triton, overlap, tl, triton, wait_for_previous

GROUP = 128  # columns of a row, or rows and columns of a weight's block, that share a scale
LARGEST = 448.0  # of float8_e4m3fn
SMALLEST_AMAX = 1e-4
CHUNK_ELEMENTS = 1 << 26  # a weight is handled in pieces of about this many elements


class Fp8Rows(NamedTuple):
    """Activations.

    data   [num_tokens, width]              float8_e4m3fn, dense rows
    scale  [num_tokens, ceil(width / 128)]  fp32; strides (1, num_tokens): tokens are neighbours, as cuBLASLt wants
    """

    data: torch.Tensor
    scale: torch.Tensor


class Fp8Weight(NamedTuple):
    """A weight, or several of one shape with leading dimensions.

    data   [..., out, in]                            float8_e4m3fn
    scale  [..., ceil(out / 128), ceil(in / 128)]    fp32 (`weight_scale_inv` of a checkpoint)
    """

    data: torch.Tensor
    scale: torch.Tensor


def empty_rows(num_tokens: int, width: int, device: torch.device) -> Fp8Rows:
    """Uninitialised rows in the layout that every back end here writes and reads."""
    data = torch.empty(num_tokens, width, dtype=torch.float8_e4m3fn, device=device)
    return Fp8Rows(data, torch.empty(-(-width // GROUP), num_tokens, device=device).T)


def reference(x: torch.Tensor) -> Fp8Rows:
    check_width(x)
    rows = empty_rows(*x.shape, x.device)
    groups = x.float().unflatten(1, (-1, GROUP))
    rows.scale.copy_(groups.abs().amax(-1).clamp_min(SMALLEST_AMAX) / LARGEST)
    rows.data.copy_((groups / rows.scale[..., None]).flatten(1))
    return rows


def dequantise_rows(rows: Fp8Rows) -> torch.Tensor:
    """`[num_tokens, width]` fp32."""
    wide = rows.scale.repeat_interleave(GROUP, 1)[:, : rows.data.shape[1]]
    return rows.data.float().mul_(wide)


def quantise_weight(weight: torch.Tensor) -> Fp8Weight:
    """`[..., out, in]` of any float dtype to blocks of 128 x 128; partial blocks at the ends have their own scale."""
    *leading, out, width = weight.shape
    data = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scale = torch.empty(*leading, -(-out // GROUP), -(-width // GROUP), device=weight.device)
    for one, to, its_scale in _pieces(weight, data, scale):
        blocks = F.pad(one.float(), (0, -width % GROUP, 0, -one.shape[0] % GROUP))
        blocks = blocks.unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP))  # [rows / 128, 128, columns / 128, 128]
        its_scale.copy_(blocks.abs().amax((1, 3)).clamp_min(SMALLEST_AMAX) / LARGEST)
        blocks = blocks / its_scale[:, None, :, None]
        to.copy_(blocks.flatten(0, 1).flatten(1)[: one.shape[0], :width])
    return Fp8Weight(data, scale)


def dequantise_weight(weight: Fp8Weight) -> torch.Tensor:
    """`[..., out, in]` fp32."""
    made = torch.empty(weight.data.shape, device=weight.data.device)
    for one, to, its_scale in _pieces(weight.data, made, weight.scale):
        wide = its_scale.float().repeat_interleave(GROUP, 1)[:, : one.shape[1]]
        to.copy_(one).mul_(wide.repeat_interleave(GROUP, 0)[: len(one)])
    return made


def _pieces(weight: torch.Tensor, other: torch.Tensor, scale: torch.Tensor):
    """Matching parts of the three, each at most some whole rows of blocks of one matrix, so that copies stay small."""
    out, width = weight.shape[-2:]
    blocks = max(1, CHUNK_ELEMENTS // max(GROUP * width, 1))
    matrices = (t[None].flatten(0, -3) for t in (weight, other, scale))
    for one, its_other, its_scale in zip(*matrices, strict=True):
        for first in range(0, -(-out // GROUP), blocks):
            rows = slice(first * GROUP, (first + blocks) * GROUP)
            yield one[rows], its_other[rows], its_scale[first : first + blocks]


def check_width(x: torch.Tensor) -> None:
    """Raises ValueError unless `x` is [num_tokens, width] with dense columns and whole groups of 128 of them."""
    if x.dim() != 2 or x.shape[1] % GROUP or (x.shape[1] and x.stride(1) != 1):
        raise ValueError(f"rows of a multiple of {GROUP} dense columns, not {tuple(x.shape)} strides {x.stride()}")


@jit
def quantise_tile(values):
    """For use in kernels: `[rows, groups, 128]` fp32 to (e4m3 of that shape, fp32 scales `[rows, groups]`)."""
    amax = tl.maximum(tl.max(tl.abs(values), 2), 1e-4)
    scale = tl.div_rn(amax, 448.0)
    inverse = tl.div_rn(1.0, scale)
    return (values * inverse[:, :, None]).to(tl.float8e4nv), scale


@jit
def _quantise_kernel(
    x, row_stride, data, scale, scale_stride, num_rows, num_groups,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_previous(OVERLAP)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    here = (row < num_rows)[:, None] & (group < num_groups)[None, :]
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    row = row.to(tl.int64)
    values = tl.load(x + row[:, None, None] * row_stride + column[None], mask=here[:, :, None], other=0.0)
    codes, scales = quantise_tile(values.to(tl.float32))
    tl.store(data + row[:, None, None] * num_groups * 128 + column[None], codes, mask=here[:, :, None])
    tl.store(scale + group[None, :] * scale_stride + row[:, None], scales, mask=here)


def _triton(x: torch.Tensor, rows: int = 8, groups: int = 4, num_warps: int = 4) -> Fp8Rows:
    check_width(x)
    made = empty_rows(*x.shape, x.device)
    num_groups = made.scale.shape[1]
    grid = (triton.cdiv(len(x), rows), triton.cdiv(num_groups, groups))
    if x.numel():
        _quantise_kernel[grid](
            x, x.stride(0), *made, made.scale.stride(1), *made.scale.shape, rows, groups,
            num_warps=num_warps, **overlap(x.device),
        )  # fmt: skip
    return made


QUANTISE_BACKENDS = (Backend("triton", _triton, why_not=needs_triton), Backend("reference", reference))
