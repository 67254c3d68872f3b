"""Rows times NVFP4 weights on Hopper: `nvfp4_hopper.cu`, its operands' layouts, and how it is launched.

prepare(weight)                               Nvfp4Weight [e, n, k], k % 128 == 0, n even -> Prepared, once at load
multiply(rows, w, bounds, mode, out)          rows bf16 [r, k] (dense columns) or Fp8Rows; out [r, n] bf16
  mode DENSE       one weight, bounds None
       CONTIGUOUS  bounds starts [e + 1] int32 (multiples of 8 for bf16 rows); rows past starts[e] are left alone
       MASKED      r = e * m; bounds counts [e] int32; expert i owns rows i * m .. i * m + counts[i]

The products are fp16 x fp16 with fp32 sums. FP8 rows are widened inside, each value over the largest of its row's scales:
within 2^-10 of exact, and nothing can overflow. bf16 rows are first brought to fp16 over a power of two, in a launch of
its own: exact but for elements 2^-22 and less of their row's largest. A NaN or infinity spoils its own row only. Weights
are exact; besides the rows', the only rounding is that of the result.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kernels.formats.fp8 import Fp8Rows
from kernels.formats.nvfp4 import Nvfp4Weight
from kernels.toolchain import cuda_library
from kernels.toolchain.cuda_library import BuildFailed

DENSE, CONTIGUOUS, MASKED = 0, 1, 2  # as in nvfp4_hopper.cu
STRIP, STEP, STRIP_BYTES = 64, 128, 4608
TILES = (32, 64, 128)


class Prepared(NamedTuple):
    """data [e, ceil(n / 64), k / 128, 4608] uint8 as nvfp4_hopper.cu describes it; global_scale [e] fp32."""

    data: torch.Tensor
    global_scale: torch.Tensor
    n: int
    k: int


def prepare(weight: Nvfp4Weight) -> Prepared:
    """As many bytes as the disk form. Raises ValueError for sizes the kernel does not take."""
    experts, n, half = weight.packed.shape
    if half % (STEP // 2) or n % 2:
        raise ValueError(f"weights [e, n, k] with k % 128 == 0 and n even, not {experts} x {n} x {2 * half}")
    strips, chunks = -(-n // STRIP), 2 * half // STEP
    data = torch.empty(experts, strips, chunks, STRIP_BYTES, dtype=torch.uint8, device=weight.packed.device)
    for packed, scale, to in zip(weight.packed, weight.block_scale.view(torch.uint8), data, strict=True):
        to[..., :4096] = _codes(F.pad(packed, (0, 0, 0, -n % STRIP)))
        to[..., 4096:] = _scales(F.pad(scale, (0, 0, 0, -n % STRIP)))
    return Prepared(data, weight.global_scale.float().reshape(experts).contiguous(), n, 2 * half)


def _codes(packed: torch.Tensor) -> torch.Tensor:
    """`[rows, k / 2]` bytes -> [strips, chunks, 4096]."""
    # row = strip, warp, upper or lower eight, g; byte = chunk, block t or t + 4, t, half of the pairs, pair
    byte = packed.view(-1, 4, 2, 8, packed.shape[1] // 64, 2, 4, 2, 4).to(torch.int32)
    first = _as_e4m3(byte[..., 0]) | _as_e4m3(byte[..., 1]) << 16
    second = _as_e4m3(byte[..., 2]) | _as_e4m3(byte[..., 3]) << 16
    # -> strip, chunk, half, warp, g, t, block, upper or lower eight
    ordered = _joined(first, second).permute(0, 4, 7, 1, 3, 6, 5, 2).contiguous()
    return ordered.view(torch.uint8).flatten(2)


def _as_e4m3(pair: torch.Tensor) -> torch.Tensor:
    """A byte of two codes -> two bytes, each with the sign in bit 7 and the rest in bits 4 to 2."""
    sides = [((code & 8) << 4) | ((code & 7) << 2) for code in (pair & 15, pair >> 4)]
    return sides[0] | sides[1] << 8


def _joined(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The word w with w & m == first and (w << 2 ^ w >> 2) & m == second, m = 0x9C9C9C9C: bit by bit, upper bytes first."""
    word = first
    above = torch.zeros_like(first)  # bit 1 of the byte above
    for byte in (3, 2, 1, 0):
        a, b = first >> 8 * byte, second >> 8 * byte
        bit5 = (b >> 7 & 1) ^ above
        bit1 = (b >> 3 & 1) ^ bit5
        bit6 = (b >> 4 & 1) ^ (a >> 2 & 1)
        bit0 = (b >> 2 & 1) ^ (a >> 4 & 1)
        word = word | (bit6 << 6 | bit5 << 5 | bit1 << 1 | bit0) << 8 * byte
        above = bit1
    return word


def _scales(scale: torch.Tensor) -> torch.Tensor:
    """`[rows, k / 16]` bytes -> [strips, chunks, 512]."""
    split = scale.view(-1, 4, 2, 8, scale.shape[1] // 8, 2, 4)  # strip, warp, upper or lower eight, g, chunk, block, t
    return split.permute(0, 4, 1, 3, 6, 5, 2).flatten(2)


def multiply(
    rows: torch.Tensor | Fp8Rows,
    w: Prepared,
    bounds: torch.Tensor | None,
    mode: int,
    out: torch.Tensor,
    *,
    tile: int | None = None,
    split: tuple[int, int] | None = None,
    overlap: bool = True,
) -> torch.Tensor:
    """`tile` rows are multiplied at once, `tile_for` by default; `split` as `split_for` says. `overlap`: the launch may begin
    while the one before still runs (it waits for its results)."""
    data, scale = rows if isinstance(rows, Fp8Rows) else (rows, None)
    experts, num_rows, k = len(w.data), data.shape[-2], data.shape[-1]
    _check(data, scale, w, mode, out)
    if not out.numel():
        return out
    if tile is None:
        tile = tile_for(num_rows, experts, mode)
    processors = cuda_library.multiprocessors(data.device)
    most_parts = 1 if mode != DENSE else k // STEP
    each, parts = split or split_for(experts * w.data.shape[1], k // STEP, min(num_rows, tile), most_parts, processors)
    x_rows = -(-num_rows // 8) * 8 * (experts if mode == MASKED else 1)
    row_scale = torch.empty(x_rows, dtype=torch.float32, device=data.device)
    partial = torch.empty(parts, num_rows, w.n, device=data.device) if parts > 1 else None
    stream = torch.cuda.current_stream(data.device).cuda_stream
    x = data if scale is not None else _halves(data, bounds, mode, experts, row_scale, stream)
    steps = (0, 0) if scale is None else (scale.stride(-1), scale.stride(0) if mode == MASKED else 0)
    code = library().hr_nvfp4_multiply(
        w.data.data_ptr(), x.data_ptr(), row_scale.data_ptr(), _pointer(scale), data.stride(-2) * data.element_size(),
        *steps, w.global_scale.data_ptr(), _pointer(bounds), out.data_ptr(), _pointer(partial), out.stride(-2), mode,
        num_rows, x_rows, experts, w.n, k, tile, each, parts, overlap, stream,
    )  # fmt: skip
    _raise(code)
    return out


def _check(data: torch.Tensor, scale: torch.Tensor | None, w: Prepared, mode: int, out: torch.Tensor) -> None:
    experts, alignment = len(w.data), 4 if scale is None else 16
    if data.shape[-1] != w.k or out.shape[-1] != w.n or (mode == MASKED and len(data) != experts):
        raise ValueError(f"rows {tuple(data.shape)} -> {tuple(out.shape)} by weights {experts} x {w.n} x {w.k}")
    if data.stride(-1) != 1 or (data.data_ptr() | data.stride(-2) * data.element_size()) % alignment:
        raise ValueError(f"rows must be dense and begin at multiples of {alignment} bytes")
    if mode == MASKED and not data.is_contiguous():
        raise ValueError("masked rows must be contiguous")
    if scale is not None and data.shape[-2] > 1 and scale.stride(-2) != 1:
        raise ValueError(f"a row's neighbour must be next in memory in the scales, not strides {scale.stride()}")


def _halves(
    data: torch.Tensor, bounds: torch.Tensor | None, mode: int, experts: int, row_scale: torch.Tensor, stream: int
) -> torch.Tensor:
    """bf16 rows as the products read them, [k / 64, rows, 64] fp16; writes their scales."""
    x = torch.empty(data.shape[-1] // 64, len(row_scale), 64, dtype=torch.float16, device=data.device)
    code = library().hr_nvfp4_rows(
        data.data_ptr(), data.stride(-2) * data.element_size(), _pointer(bounds), mode, data.shape[-2], len(row_scale),
        experts, data.shape[-1], x.data_ptr(), row_scale.data_ptr(), stream,
    )  # fmt: skip
    _raise(code)
    return x


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _raise(code: int) -> None:
    if code:
        kinds = {-1: "the driver has no tensor maps", -2: "sizes that it does not take"}
        raise RuntimeError(f"NVFP4 product: {kinds.get(code, f'CUDA error {code}')}")


def tile_for(num_rows: int, experts: int, mode: int) -> int:
    """Rows multiplied at once. Where experts own runs of rows, `num_rows` is room for an uneven share: about twice what
    they get, so that 128 at once pay only from there on."""
    if mode != CONTIGUOUS:
        return next((one for one in TILES if one >= num_rows), TILES[-1])
    num_rows //= experts
    return 32 if num_rows <= 32 else 64 if num_rows <= 128 else 128


@functools.cache
def split_for(strips: int, chunks: int, rows: int, most_parts: int, processors: int) -> tuple[int, int]:
    """(strips, parts of k): how a product is cut into at most one block of threads for each multiprocessor.

    A block of many strips reads its rows of x for all of them once; cutting k keeps every multiprocessor busy then, and
    costs writing and adding partial sums. The rates are round figures of an H200, for choosing only: nanoseconds a byte
    of one multiprocessor's share of memory and of the L2 cache.
    """
    from_memory, from_cache = 1 / 30, 1 / 42

    def cost(each: int, parts: int) -> float:
        weight, x = each * STRIP_BYTES, -(-each // 4) * rows * 2 * STEP
        steps = -(-chunks // parts) * max(weight * from_memory, (weight + x) * from_cache)
        return steps + (0 if parts == 1 else 2500 + parts * rows * strips * STRIP * 8 / 4000)

    least = -(-strips // processors)
    choices = [(least, 1)]
    for each in range(least, 9):
        most = min(most_parts, processors // -(-strips // each))
        choices += [(each, parts) for parts in range(2, most + 1) if (parts - 1) * -(-chunks // parts) < chunks]
    return min(choices, key=lambda choice: cost(*choice))


_library = cuda_library.Library(
    Path(__file__).with_name("nvfp4_hopper.cu"),
    "NVFP4 kernels",
    {"hr_nvfp4_rows": "plpiiiiippp", "hr_nvfp4_multiply": "pppplllppppliiiiiiiiiip"},
)
library, why_not = _library.load, _library.why_not


if __name__ == "__main__":  # ahead of time, on any host that has nvcc
    try:
        library()
    except BuildFailed as failure:
        raise SystemExit(f"NVFP4 kernels not built: {failure}") from failure
