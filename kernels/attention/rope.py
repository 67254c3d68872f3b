"""Rotate interleaved pairs in place: (x[2i], x[2i + 1]) turns by the angle of pair i.

x    [num_tokens, num_heads, rope_dim]  fp32 or bf16, any strides with a dense last dimension; written in place
cos  [num_tokens, rope_dim // 2]        fp32
sin  [num_tokens, rope_dim // 2]        fp32

The pair order is the checkpoint's and stays as it is in memory ("interleaved"), so a cached row has one meaning in the
whole mesh. No tokens: nothing happens. Source: Su et al. 2021; DeepSeek-V3's own inference code for the pair order.
"""

from __future__ import annotations

import torch

from kernels.select import Backend
from kernels.toolchain import cpu_library


def reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    cos, sin = cos[:, None], sin[:, None]
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1)
    x.copy_(rotated.flatten(-2))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """One complex multiplication: an eager step is paid by the op on small batches."""
    if x.dtype != torch.float32 or any(stride % 2 for stride in x.stride()[:-1]) or x.storage_offset() % 2:
        return reference(x, cos, sin)
    torch.view_as_complex(x.unflatten(-1, (-1, 2))).mul_(torch.complex(cos, sin)[:, None])


def _c(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    if x.dtype != torch.float32:
        return reference(x, cos, sin)
    tokens, heads, dim = x.shape
    cpu_library.library().hr_rope(
        x.data_ptr(), x.stride(0), x.stride(1), tokens, heads, dim, cos.data_ptr(), sin.data_ptr()
    )


BACKENDS = (
    Backend("c", _c, why_not=cpu_library.why_not),
    Backend("torch", rotate),
    Backend("reference", reference),
)
