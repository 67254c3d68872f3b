"""DeepSeek's block-scaled FP8 weights: W = q * s, one scale for each 128 x 128 block.

quantised  [out, in]                            float8_e4m3fn
scale_inv  [ceil(out / 128), ceil(in / 128)]    fp32, the *multiplier* in spite of its name (`weight_scale_inv`)
returns    [out, in]                            fp32

The last block of a side may be partial (kv_a_proj_with_mqa has 576 rows). Without FP8 tensor cores the weight is
dequantised once at load and served by an ordinary linear. Source: DeepSeek-V3 report 3.3, its inference/kernel.py.
"""

from __future__ import annotations

import torch

from kernels.select import Backend


def reference(quantised: torch.Tensor, scale_inv: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    out = quantised.to(torch.float32)
    for row in range(scale_inv.shape[0]):
        for column in range(scale_inv.shape[1]):
            rows = slice(row * block[0], (row + 1) * block[0])
            columns = slice(column * block[1], (column + 1) * block[1])
            out[rows, columns] *= scale_inv[row, column]
    return out


def _repeat(quantised: torch.Tensor, scale_inv: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    rows, columns = quantised.shape
    wide = scale_inv.float().repeat_interleave(block[1], 1)[:, :columns]
    return quantised.to(torch.float32).mul_(wide.repeat_interleave(block[0], 0)[:rows])


BACKENDS = (Backend("torch", _repeat), Backend("reference", reference))
