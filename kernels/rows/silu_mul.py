"""SwiGLU's middle: silu(gate) * up, plain or quantised for the next FP8 product.

gate_up  [num_rows, 2 * inner]  bf16 (fp32 allowed), gate columns first; rows may be strided
limit    [1] int32 or None      on the device; rows at and after it need not be computed (their output is undefined)
returns  [num_rows, inner]      gate_up's dtype; or Fp8Rows of it (inner % 128 == 0) as `kernels/formats/fp8.py` says

Arithmetic is fp32, rounded once to gate_up's dtype; the quantised form quantises after that rounding. Rows do not look
at each other; NaN stays in its column (quantised: in its 128 columns). Source: Shazeer 2020; DeepSeek-V3 report 3.3.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.formats import fp8
from kernels.select import Backend
from kernels.toolchain.triton_support import jit, needs_triton, overlap, tl, triton, wait_for_previous

PROGRAMS = 132 * 64  # with a limit, rows are shared out among at most about this many programs


def reference(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, -1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def reference_quantise(gate_up: torch.Tensor, limit: torch.Tensor | None = None) -> fp8.Fp8Rows:
    return fp8.reference(reference(gate_up))


def _torch(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


@jit
def _tile(
    gate_up, row_stride, made, scale, scale_stride, tile, last, inner,
    QUANTISE: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Rows [tile * ROWS, last) at most ROWS of them, and this program's GROUPS * 128 columns."""
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    here = (row < last)[:, None, None] & (column < inner)[None]
    at = gate_up + row[:, None, None] * row_stride + column[None]
    gate = tl.load(at, mask=here, other=0.0)
    up = tl.load(at + inner, mask=here, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    values = (wide / (1.0 + tl.exp(-wide)) * up).to(gate.dtype)
    to = row[:, None, None] * inner + column[None]
    if QUANTISE:
        codes, scales = fp8.quantise_tile(values.to(tl.float32))
        tl.store(made + to, codes, mask=here)
        valid = (row < last)[:, None] & (group * 128 < inner)[None, :]
        tl.store(scale + group[None, :] * scale_stride + row[:, None], scales, mask=valid)
    else:
        tl.store(made + to, values, mask=here)


@jit
def _silu_mul_kernel(
    gate_up, row_stride, made, scale, scale_stride, limit, num_rows, inner,
    QUANTISE: tl.constexpr, LIMITED: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One tile a program; with a limit, the programs of axis 0 share out the tiles before it."""
    wait_for_previous(OVERLAP)
    if LIMITED:
        last = tl.minimum(tl.load(limit), num_rows)
        for tile in range(tl.program_id(0), tl.cdiv(last, ROWS), tl.num_programs(0)):
            _tile(gate_up, row_stride, made, scale, scale_stride, tile, last, inner, QUANTISE, ROWS, GROUPS)
    else:
        tile = tl.program_id(0)
        _tile(gate_up, row_stride, made, scale, scale_stride, tile, num_rows, inner, QUANTISE, ROWS, GROUPS)


def _launch(
    gate_up: torch.Tensor, made: torch.Tensor, scale: torch.Tensor | None, limit: torch.Tensor | None,
    rows: int = 0, groups: int = 16, num_warps: int = 8, programs: int = PROGRAMS,
) -> None:  # fmt: skip
    num_rows, inner = made.shape
    if not made.numel():
        return
    across = triton.cdiv(inner, groups * fp8.GROUP)
    rows = rows or (1 if scale is None else 2)
    down = triton.cdiv(num_rows, rows)
    if limit is not None:
        down = min(down, max(1, programs // across))
    _silu_mul_kernel[(down, across)](
        gate_up, gate_up.stride(0), made, made if scale is None else scale, 0 if scale is None else scale.stride(1),
        made if limit is None else limit, num_rows, inner, scale is not None, limit is not None,
        rows, groups, num_warps=num_warps, **overlap(made.device),
    )  # fmt: skip


def _triton(gate_up: torch.Tensor) -> torch.Tensor:
    made = torch.empty(len(gate_up), gate_up.shape[1] // 2, dtype=gate_up.dtype, device=gate_up.device)
    _launch(gate_up, made, None, None)
    return made


def _triton_quantise(gate_up: torch.Tensor, limit: torch.Tensor | None = None) -> fp8.Fp8Rows:
    inner = gate_up.shape[1] // 2
    fp8.check_width(gate_up[:, :inner])
    made = fp8.empty_rows(len(gate_up), inner, gate_up.device)
    _launch(gate_up, made.data, made.scale, limit)
    return made


BACKENDS = (
    Backend("triton", _triton, why_not=needs_triton),
    Backend("torch", _torch),
    Backend("reference", reference),
)
QUANTISE_BACKENDS = (
    Backend("triton", _triton_quantise, why_not=needs_triton),
    Backend("reference", reference_quantise),
)
