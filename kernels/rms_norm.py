"""Root-mean-square norm over the last dimension, then a gain.

x       [..., width]  fp32 or bf16
weight  [width]       same dtype as x, or fp32
returns [..., width]  x's dtype; statistics in fp32, cast back, then multiplied by the gain (Hugging Face's order)

Rows do not look at each other. No rows gives no rows; a row with NaN gives NaN in that row only.
Source: Zhang & Sennrich 2019; the order of the cast is transformers' DeepseekV3RMSNorm.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.select import Backend


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight.to(x.dtype) * normed.to(x.dtype)


def _torch(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps)


BACKENDS = (Backend("torch", _torch), Backend("reference", reference))
