"""NVFP4: four-bit values in blocks of 16 along a row, one e4m3 scale a block, one fp32 scale a tensor.

value = code * block_scale * global_scale; codes 0..7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6 and bit 3 is the sign (E2M1).
  packed       [..., rows, width / 2]   uint8   element 2i in the low nibble, 2i + 1 in the high one
  block_scale  [..., rows, width / 16]  float8_e4m3fn, linear (nothing on disk is swizzled)
  global_scale []  or [...]             fp32, one a matrix: amax / (6 * 448) (`weight_scale_2`)
width % 16 == 0. Codes round to nearest, ties to the even code, and saturate at 6; NaN becomes 6 with a plus sign.

`quantise` follows NVIDIA ModelOpt: block scale e4m3(clamp(block amax / (6 * global), 2^-9, 448)), 1 for a block of zeros.
compressed-tensors stores reciprocal global scales: `from_compressed_tensors` is the only place that knows.
Source: ModelOpt's NVFP4 tensor type and compressed-tensors' `nvfp4-pack-quantized` format; PTX ISA for E2M1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from kernels.select import Backend
from kernels.toolchain.triton_support import jit, needs_capability, needs_triton, tl, triton

BLOCK = 16
LARGEST_CODE, LARGEST_SCALE, SMALLEST_SCALE = 6.0, 448.0, 2.0**-9
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
TIES_DOWN, TIES_UP = (0.25, 1.25, 2.5, 5.0), (0.75, 1.75, 3.5)
"""Edges between neighbouring codes, by where a value exactly on the edge goes (to the even code)."""
CHUNK_ELEMENTS = 1 << 24
SWIZZLE_ROWS, SWIZZLE_COLUMNS = 128, 4


class Nvfp4Weight(NamedTuple):
    """A weight, or several of one shape with leading dimensions; see the top of the file.

    input_scale  the activations' global scale where a checkpoint was calibrated (fp32, any shape), else None
    """

    packed: torch.Tensor
    block_scale: torch.Tensor
    global_scale: torch.Tensor
    input_scale: torch.Tensor | None = None


def encode(values: torch.Tensor) -> torch.Tensor:
    """The nearest E2M1 code (uint8, 0..15) of each value."""
    magnitude = values.abs().nan_to_num(nan=LARGEST_CODE)
    code = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    for edge in TIES_DOWN:
        code += magnitude > edge
    for edge in TIES_UP:
        code += magnitude >= edge
    return code + (values < 0).to(torch.uint8) * 8


def decode(codes: torch.Tensor) -> torch.Tensor:
    """fp32 values of codes 0..15."""
    table = torch.tensor(MAGNITUDES + tuple(-x for x in MAGNITUDES), device=codes.device)
    return table[codes.long()]


def pack(codes: torch.Tensor) -> torch.Tensor:
    """`[..., width]` codes -> `[..., width / 2]` bytes."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """`[..., width / 2]` bytes -> `[..., width]` codes."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def quantise(weight: torch.Tensor, global_scale: torch.Tensor | None = None) -> Nvfp4Weight:
    """`[..., rows, width]` of any float dtype; one global scale a matrix, `global_scale` when given (fp32, [...]).

    An all-zero matrix gets global scale 1. Raises ValueError unless width % 16 == 0.
    """
    if weight.shape[-1] % BLOCK:
        raise ValueError(f"rows of a multiple of {BLOCK} columns, not {weight.shape[-1]}")
    if global_scale is None:
        amax = torch.stack([one.abs().amax().float() for one in weight[None].flatten(0, -3)])
        global_scale = torch.where(amax > 0, amax / (LARGEST_CODE * LARGEST_SCALE), 1.0).view(weight.shape[:-2])
    packed = torch.empty(*weight.shape[:-1], weight.shape[-1] // 2, dtype=torch.uint8, device=weight.device)
    scale = torch.empty(*weight.shape[:-1], weight.shape[-1] // BLOCK, dtype=torch.float8_e4m3fn, device=weight.device)
    matrices = zip(weight[None].flatten(0, -3), packed[None].flatten(0, -3), scale[None].flatten(0, -3), strict=True)
    for (one, its_packed, its_scale), its_global in zip(matrices, global_scale.reshape(-1), strict=True):
        step = max(1, CHUNK_ELEMENTS // one.shape[1])
        for first in range(0, len(one), step):
            rows = slice(first, first + step)
            reference(one[rows], its_global, its_packed[rows], its_scale[rows])
    return Nvfp4Weight(packed, scale, global_scale)


def reference(
    x: torch.Tensor,
    global_scale: torch.Tensor,
    packed: torch.Tensor | None = None,
    block_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`[rows, width]` with a known global scale -> (packed, block_scale), into the given tensors if any."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(-1)
    scale = (amax / (LARGEST_CODE * global_scale)).clamp(SMALLEST_SCALE, LARGEST_SCALE)
    scale = torch.where(amax > 0, scale, 1.0).to(torch.float8_e4m3fn)
    codes = encode((blocks / (scale.float() * global_scale)[..., None]).flatten(-2))
    made = pack(codes)
    if packed is None or block_scale is None:
        return made, scale
    packed.copy_(made)
    block_scale.copy_(scale)
    return packed, block_scale


def dequantise(weight: Nvfp4Weight) -> torch.Tensor:
    """`[..., rows, width]` fp32."""
    made = torch.empty(
        *weight.packed.shape[:-1], 2 * weight.packed.shape[-1], dtype=torch.float32, device=weight.packed.device
    )
    flat = (t[None].flatten(0, -3) for t in (weight.packed, weight.block_scale, made))
    for packed, scale, to, its_global in zip(*flat, weight.global_scale.reshape(-1), strict=True):
        step = max(1, CHUNK_ELEMENTS // to.shape[1])
        for first in range(0, len(to), step):
            rows = slice(first, first + step)
            wide = (scale[rows].float() * its_global).repeat_interleave(BLOCK, -1)
            to[rows] = decode(unpack(packed[rows])).mul_(wide)
    return made


def from_compressed_tensors(
    packed: torch.Tensor,
    block_scale: torch.Tensor,
    weight_global_scale: torch.Tensor,
    input_global_scale: torch.Tensor | None = None,
) -> Nvfp4Weight:
    """The tensors `weight_packed`, `weight_scale`, `weight_global_scale`, `input_global_scale` of one matrix.

    Their global scales are 6 * 448 / amax, the reciprocals of ours; everything else is the same bytes.
    """
    inverse = weight_global_scale.float().reciprocal().reshape(packed.shape[:-2])
    inputs = None if input_global_scale is None else input_global_scale.float().reciprocal()
    return Nvfp4Weight(packed, block_scale, inverse, inputs)


def swizzle(scale: torch.Tensor) -> torch.Tensor:
    """`[..., rows, columns]` block scales, one byte each, in the 128x4 order of Blackwell's matrix units.

    Returns [..., padded rows * padded columns]: rows padded to 128 and columns to 4 with zero bytes; scale (m, k) at
    ((m // 128) * (columns / 4) + k // 4) * 512 + (m % 32) * 16 + (m % 128) // 32 * 4 + k % 4.
    """
    rows, columns = scale.shape[-2:]
    padded = F.pad(scale.view(torch.uint8), (0, -columns % SWIZZLE_COLUMNS, 0, -rows % SWIZZLE_ROWS))
    tiles = padded.unflatten(-1, (-1, SWIZZLE_COLUMNS)).unflatten(-3, (-1, 4, 32))  # [..., R, 4, 32, C, 4]
    return tiles.movedim(-2, -4).transpose(-2, -3).flatten(-5).view(scale.dtype)


def unswizzle(flat: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The inverse of `swizzle`: `[..., rows, columns]` without the padding."""
    tiles_down, tiles_across = -(-rows // SWIZZLE_ROWS), -(-columns // SWIZZLE_COLUMNS)
    tiles = flat.view(torch.uint8).unflatten(-1, (tiles_down, tiles_across, 32, 4, SWIZZLE_COLUMNS))
    linear = tiles.transpose(-2, -3).movedim(-4, -2).flatten(-5, -3).flatten(-2)
    return linear[..., :rows, :columns].contiguous().view(flat.dtype)


@jit
def _e4m3(value):
    """Non-negative fp32 up to 448 -> its e4m3 code by integers: the interpreter's own cast loses a carry."""
    bits = value.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = ((value * 512.0 + 8388608.0) - 8388608.0).to(tl.int32)  # steps of 2^-9 below 2^-6, ties to even
    return tl.where(value >= 0.015625, normal, small)


@jit
def e4m3_value(code):
    """A non-negative e4m3 code (int32) -> fp32."""
    normal = (((code >> 3) + 120) << 23) | ((code & 7) << 20)
    return tl.where(code >= 8, normal.to(tl.float32, bitcast=True), code.to(tl.float32) * 0.001953125)


@jit
def _e2m1(value):
    """fp32 -> code 0..7 (int32) of its magnitude, nearest, ties to the even code; NaN gives 7.

    2^-126 times a magnitude below 1 has no exponent in fp32, as it has none here, so that one rounding serves all.
    """
    bits = (tl.abs(value) * 1.1754943508222875e-38).to(tl.int32, bitcast=True)
    bits = tl.minimum(bits, 0x7F800000)  # a NaN's may be the largest integer
    return tl.minimum((bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 22, 7)


@jit
def _quantise_kernel(
    x, global_scale, packed, block_scale, rows, width, row_stride,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * BLOCKS * 16 + tl.arange(0, BLOCKS * 16)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    values = tl.load(x + row[:, None] * row_stride + column[None, :], mask, 0.0).to(tl.float32)
    blocks = values.reshape(ROWS, BLOCKS, 16)
    its_global = tl.load(global_scale)
    amax = tl.max(tl.abs(blocks), 2)
    wanted = tl.div_rn(amax, 6.0 * its_global)
    scale = _e4m3(tl.where(amax > 0.0, tl.minimum(tl.maximum(wanted, 0.001953125), 448.0), 1.0))
    divisor = e4m3_value(scale) * its_global
    if FUSED:  # the rounded quotient, in three steps of which the second is exact
        inverse = tl.div_rn(1.0, divisor)[:, :, None]
        quotient = blocks * inverse
        rest = tl.fma(-quotient, tl.broadcast_to(divisor[:, :, None], (ROWS, BLOCKS, 16)), blocks)
        quotient += rest * inverse
    else:  # the interpreter rounds within a fused product and sum
        quotient = tl.div_rn(blocks, tl.broadcast_to(divisor[:, :, None], (ROWS, BLOCKS, 16)))
    codes = _e2m1(quotient) | tl.where(blocks < 0.0, 8, 0)
    low, high = tl.split(codes.reshape(ROWS, BLOCKS * 8, 2))
    byte = tl.program_id(1) * BLOCKS * 8 + tl.arange(0, BLOCKS * 8)
    inside = (row < rows)[:, None]
    tl.store(
        packed + row[:, None] * (width // 2) + byte[None, :],
        (low | (high << 4)).to(tl.uint8),
        inside & (byte < width // 2)[None, :],
    )
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    tl.store(
        block_scale + row[:, None] * (width // 16) + block[None, :],
        scale.to(tl.uint8),
        inside & (block < width // 16)[None, :],
    )


def _triton(x: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if x.dim() != 2 or x.shape[1] % BLOCK or (x.shape[1] and x.stride(1) != 1):
        raise ValueError(f"rows of a multiple of {BLOCK} dense columns, not {tuple(x.shape)} strides {x.stride()}")
    rows, width = x.shape
    packed = torch.empty(rows, width // 2, dtype=torch.uint8, device=x.device)
    scale = torch.empty(rows, width // BLOCK, dtype=torch.uint8, device=x.device)
    if rows and width:
        tile, blocks = 2, 64
        grid = (triton.cdiv(rows, tile), triton.cdiv(width, blocks * BLOCK))
        fused = x.device.type == "cuda"
        _quantise_kernel[grid](
            x, global_scale, packed, scale, rows, width, x.stride(0), tile, blocks, fused, num_warps=4
        )  # fmt: skip
    return packed, scale.view(torch.float8_e4m3fn)


def _flashinfer(x: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Never run: no Blackwell was at hand. Approximate reciprocals inside: a code may differ by one from ours."""
    from flashinfer import fp4_quantize

    inverse = global_scale.float().reciprocal().reshape(1)  # theirs is 6 * 448 / amax
    packed, scale = fp4_quantize(x, inverse, sf_vec_size=BLOCK, is_sf_swizzled_layout=False)
    return packed, scale.view(torch.float8_e4m3fn).reshape(len(x), -1)


def flashinfer_why_not(device: object) -> str | None:
    """FlashInfer 0.6 has no guard of its own: below sm_100 its fp4_quantize hands back zeros as if they were the answer."""
    if reason := needs_capability(10)(device):
        return f"flashinfer's fp4_quantize {reason} (0.6 writes zeros on a Hopper and reports nothing)"
    try:
        import flashinfer  # noqa: F401
    except ImportError as error:
        return f"flashinfer cannot be imported: {error}"
    return None


QUANTISE_BACKENDS: tuple[Backend, ...] = (
    Backend("triton", _triton, why_not=needs_triton),
    Backend("flashinfer", _flashinfer, why_not=flashinfer_why_not),
    Backend("reference", reference),
)
"""run(x [rows, width] bf16 (rows may be strided), global_scale fp32 of one element) -> (packed, block_scale)."""
