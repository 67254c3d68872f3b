"""Root-mean-square norm over the last dimension, then a gain.

x       [num_tokens, width]  fp32 or bf16, rows may be strided
weight  [width]              same dtype as x, or fp32
out     like x, or None      where to write; may be x itself
returns [num_tokens, width]  x's dtype; statistics in fp32, cast back, then multiplied by the gain (Hugging Face's order)

Rows do not look at each other. No rows gives no rows; a row with NaN gives NaN in that row only.

`ADD_NORM_BACKENDS` holds the fused form between two layers of a model that computes in bf16:
x        [num_tokens, width]  bf16   the residual; x += delta in place, rounded to bf16. Rows may be strided.
delta    like x, or None      bf16   what the last layer adds; None: x is only read
gain     [width]              bf16 or fp32
returns  (h, Fp8Rows): h [num_tokens, width] bf16 = norm(x) * gain when `keep`, else None; the same h (after its rounding
         to bf16) quantised as `kernels/formats/fp8.py` says when `quantise`, else None. Quantising needs width % 128 == 0.
Source: Zhang & Sennrich 2019; the order of the cast is transformers' DeepseekV3RMSNorm.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.formats import fp8
from kernels.select import Backend
from kernels.toolchain import cpu_library
from kernels.toolchain.triton_support import jit, needs_triton, overlap, tl, triton, wait_for_previous

LANES = 8  # as in cpu.c
BATCH = 2048  # tokens; up to here latency counts, above it bytes


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    made = weight.to(x.dtype) * normed.to(x.dtype)
    return made if out is None else out.copy_(made)


def _torch(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
    made = F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps)
    return made if out is None else out.copy_(made)


def _c(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
    if x.shape[-1] % LANES or x.dtype != torch.float32 or weight.dtype != torch.float32:
        return _torch(x, weight, eps, out)
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    cpu_library.library().hr_rms_norm(
        x.data_ptr(), x.stride(0), weight.data_ptr(), out.data_ptr(), out.stride(0), len(x), x.shape[-1], eps
    )
    return out


@jit
def _add_norm_kernel(
    x, x_stride, delta, delta_stride, gain, h, h_stride, data, scale, scale_stride, num_rows, width, eps,
    ADD: tl.constexpr, KEEP: tl.constexpr, QUANTISE: tl.constexpr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Each program does ROWS whole rows, seen as [ROWS, GROUPS, SIZE] columns; SIZE is 128 when it quantises."""
    wait_for_previous(OVERLAP)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    group = tl.arange(0, GROUPS)
    column = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    here = (row < num_rows)[:, None, None] & (column < width)[None]
    at = x + row[:, None, None] * x_stride + column[None]
    wide = tl.load(at, mask=here, other=0.0)
    if ADD:
        more = tl.load(delta + row[:, None, None] * delta_stride + column[None], mask=here, other=0.0)
        total = (wide.to(tl.float32) + more.to(tl.float32)).to(wide.dtype)
        tl.store(at, total, mask=here)
        wide = total
    weight = tl.load(gain + column, mask=column < width, other=0.0).to(wide.dtype)
    values = wide.to(tl.float32)
    mean = tl.sum(tl.reshape(values * values, (ROWS, GROUPS * SIZE)), 1) / width
    normed = (values * tl.rsqrt(mean + eps)[:, None, None]).to(wide.dtype)
    made = (normed.to(tl.float32) * weight.to(tl.float32)[None]).to(wide.dtype)
    if KEEP:
        tl.store(h + row[:, None, None] * h_stride + column[None], made, mask=here)
    if QUANTISE:
        codes, scales = fp8.quantise_tile(made.to(tl.float32))
        if ADD or KEEP:
            # 0, but for all the compiler knows an odd 8: so it stores 8 codes a thread, as many as that has of x and h,
            # and does not first shuffle them through shared memory
            data += tl.where(eps < 0, 8, 0)
        tl.store(data + row[:, None, None] * width + column[None], codes, mask=here)
        valid = (row < num_rows)[:, None] & (group * SIZE < width)[None, :]
        tl.store(scale + group[None, :] * scale_stride + row[:, None], scales, mask=valid)


def _launch(
    x: torch.Tensor, delta: torch.Tensor | None, gain: torch.Tensor, eps: float, h: torch.Tensor | None, rows: fp8.Fp8Rows | None,
    rows_per_program: int = 0, num_warps: int = 0,
) -> None:  # fmt: skip
    num_tokens, width = x.shape
    if not x.numel():
        return
    size = fp8.GROUP
    groups = triton.next_power_of_2(triton.cdiv(width, size))
    per_program = rows_per_program or max(1, min(4, 2048 // (groups * size)))
    _add_norm_kernel[(triton.cdiv(num_tokens, per_program),)](
        x, x.stride(0), x if delta is None else delta, 0 if delta is None else delta.stride(0), gain,
        x if h is None else h, 0 if h is None else h.stride(0),
        x if rows is None else rows.data, x if rows is None else rows.scale, 0 if rows is None else rows.scale.stride(1),
        num_tokens, width, eps, delta is not None, h is not None, rows is not None,
        per_program, groups, size,
        num_warps=num_warps or warps_for(num_tokens, per_program * groups * size), **overlap(x.device),
    )  # fmt: skip


def warps_for(num_tokens: int, elements: int) -> int:
    """Of a program: as measured on an H200, twice as many for a decode batch as for a prefill."""
    return max(1, min(16, elements // 512) if num_tokens <= BATCH else min(8, elements // 1024))


def _triton(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
    rows = x.flatten(0, -2)  # [num_tokens, width]
    made = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    _launch(rows, None, weight, eps, made.view(rows.shape), None)
    return made


def _triton_add_norm(
    x: torch.Tensor, delta: torch.Tensor | None, gain: torch.Tensor, eps: float, *, keep: bool, quantise: bool
) -> tuple[torch.Tensor | None, fp8.Fp8Rows | None]:
    h = torch.empty(x.shape, dtype=x.dtype, device=x.device) if keep else None
    rows = None
    if quantise:
        fp8.check_width(x)
        rows = fp8.empty_rows(*x.shape, x.device)
    _launch(x, delta, gain, eps, h, rows)
    return h, rows


def _reference_add_norm(
    x: torch.Tensor, delta: torch.Tensor | None, gain: torch.Tensor, eps: float, *, keep: bool, quantise: bool
) -> tuple[torch.Tensor | None, fp8.Fp8Rows | None]:
    if delta is not None:
        x.copy_(x.float() + delta.float())
    h = reference(x, gain, eps)
    return h if keep else None, fp8.reference(h) if quantise else None


BACKENDS = (
    Backend("triton", _triton, why_not=needs_triton),
    Backend("c", _c, why_not=cpu_library.why_not),
    Backend("torch", _torch),
    Backend("reference", reference),
)
ADD_NORM_BACKENDS = (
    Backend("triton", _triton_add_norm, why_not=needs_triton),
    Backend("reference", _reference_add_norm),
)
