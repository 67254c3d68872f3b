"""Root-mean-square norm over the last dimension, then a gain.

x       [num_tokens, width]  fp32 or bf16, rows may be strided
weight  [width]              same dtype as x, or fp32
out     like x, or None      where to write; may be x itself
returns [num_tokens, width]  x's dtype; statistics in fp32, cast back, then multiplied by the gain (Hugging Face's order)

Rows do not look at each other. No rows gives no rows; a row with NaN gives NaN in that row only.
Source: Zhang & Sennrich 2019; the order of the cast is transformers' DeepseekV3RMSNorm.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels import cpu_library
from kernels.select import Backend

LANES = 8  # as in cpu.c


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


BACKENDS = (
    Backend("c", _c, why_not=cpu_library.why_not),
    Backend("torch", _torch),
    Backend("reference", reference),
)
