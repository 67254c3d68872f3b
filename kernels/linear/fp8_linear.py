"""DeepSeek's block-scaled FP8 weights: W = q * s, one scale for each 128 x 128 block; dequantised, or multiplied as they are.

BACKENDS  run(quantised, scale_inv, block) -> [out, in] fp32, for hosts without FP8 tensor cores: once, at load
  quantised  [out, in]                            float8_e4m3fn
  scale_inv  [ceil(out / 128), ceil(in / 128)]    fp32, the *multiplier* in spite of its name (`weight_scale_inv`)

LINEAR_BACKENDS  y = x @ W^T on FP8 tensor cores, objects with
  prepare(weight)             Fp8Weight, data [n, k] -> what `run` wants, made once at load
  run(rows, prepared, out)    Fp8Rows, data [num_tokens, k], scale strides (1, num_tokens) -> [num_tokens, n] bf16, into
                              `out` when given (dense rows)
  Sums over each 128 of k are scaled in fp32. No tokens give no rows. n and k need be no multiples of 128.

The last block of a side may be partial (kv_a_proj_with_mqa has 576 rows). `cuda` is grouped_fp8.cu with one expert and
takes k in multiples of 16 and n in multiples of 8; `cublas` wants n in multiples of 16, k of 512 and tokens of 4, and
pads what is not (weights at `prepare`, rows at every call); `flashinfer` wants n in multiples of 64 and k of 128.
Source: DeepSeek-V3 report 3.3, its inference/kernel.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from kernels.formats.fp8 import GROUP, Fp8Rows, Fp8Weight, dequantise_rows, dequantise_weight
from kernels.linear import fp8_hopper, grouped_linear
from kernels.select import Backend
from kernels.toolchain import cuda_library
from kernels.toolchain.triton_support import needs_capability, needs_triton
from kernels.toolchain.vendors import needs_flashinfer_modules

CUBLAS_N, CUBLAS_K, CUBLAS_TOKENS = 16, 4 * GROUP, 4


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


class ReferenceLinear:
    """fp32 products of dequantised operands."""

    @staticmethod
    def prepare(weight: Fp8Weight) -> Fp8Weight:
        return weight

    @staticmethod
    def run(rows: Fp8Rows, w: Fp8Weight, out: torch.Tensor | None = None) -> torch.Tensor:
        made = (dequantise_rows(rows) @ dequantise_weight(w).T).bfloat16()
        return made if out is None else out.copy_(made)


class OneExpert:
    """Weights as the grouped kernels want them."""

    @staticmethod
    def prepare(weight: Fp8Weight) -> Fp8Weight:
        return Fp8Weight(weight.data.contiguous()[None], weight.scale.float().contiguous()[None])


class TritonLinear(OneExpert):
    @staticmethod
    def run(rows: Fp8Rows, w: Fp8Weight, out: torch.Tensor | None = None) -> torch.Tensor:
        return grouped_linear.launch_triton(rows, w, None, grouped_linear.DENSE, out)


class CudaLinear(OneExpert):
    @staticmethod
    def run(rows: Fp8Rows, w: Fp8Weight, out: torch.Tensor | None = None) -> torch.Tensor:
        blocks = cuda_library.multiprocessors(rows.data.device)
        slabs, columns, cluster = tile_for(len(rows.data), w.data.shape[1], blocks)
        return grouped_linear.launch_cuda(
            rows, w, None, grouped_linear.DENSE, out, slabs=slabs, columns=columns, cluster=cluster
        )


def tile_for(num_tokens: int, n: int, blocks: int) -> tuple[int, int, int]:
    """Slabs of 64 rows and columns of a tile, and blocks that share its rows: the smallest tile that gives each of `blocks`
    multiprocessors at most one, for then a weight is read by as many as can; beyond that the largest tile."""
    slabs = -(-num_tokens // 64)
    for height, columns in ((1, 64), (1, 128), (2, 64), (2, 128)):
        if -(-slabs // height) * -(-n // columns) <= blocks:
            return height, columns, 1
    return (1, 64, 1) if slabs <= 1 else (4, 128, 1 if slabs <= 16 else 2)


class CublasWeight(NamedTuple):
    data: torch.Tensor  # [k, n] view of [n, k], both padded
    scale: torch.Tensor  # [k / 128, ceil(n / 128)] view with strides (1, k / 128)
    n: int
    k: int


class CublasLinear:
    """torch._scaled_mm with 1 x 128 and 128 x 128 scales, which is cuBLASLt's own kernel on Hopper (CUDA 12.9)."""

    @staticmethod
    def prepare(weight: Fp8Weight) -> CublasWeight:
        n, k = weight.data.shape
        data = _padded(weight.data, -n % CUBLAS_N, -k % CUBLAS_K)
        steps = data.shape[1] // GROUP
        scale = torch.zeros(-(-data.shape[0] // GROUP), steps, device=data.device)
        scale[: weight.scale.shape[0], : weight.scale.shape[1]] = weight.scale
        return CublasWeight(data.T, scale.T, n, k)

    @staticmethod
    def run(rows: Fp8Rows, w: CublasWeight, out: torch.Tensor | None = None) -> torch.Tensor:
        tokens = len(rows.data)
        data, scale = rows
        if tokens % CUBLAS_TOKENS or w.data.shape[0] != w.k:
            data, scale = _padded_rows(rows, -tokens % CUBLAS_TOKENS, w.data.shape[0])
        direct = out is not None and len(data) == tokens and w.data.shape[1] == w.n and out.is_contiguous()
        made = torch._scaled_mm(data, w.data, scale, w.scale, out_dtype=torch.bfloat16, out=out if direct else None)
        if direct:
            return made
        made = made[:tokens, : w.n]
        return made if out is None else out.copy_(made)


def _padded(data: torch.Tensor, more_rows: int, more_columns: int) -> torch.Tensor:
    """Zeros appended; FP8 has no arithmetic of its own, hence the bytes."""
    if not more_rows and not more_columns:
        return data.contiguous()
    return F.pad(data.view(torch.uint8), (0, more_columns, 0, more_rows)).view(torch.float8_e4m3fn)


def _padded_rows(rows: Fp8Rows, more_tokens: int, width: int) -> Fp8Rows:
    data = _padded(rows.data, more_tokens, width - rows.data.shape[1])
    scale = F.pad(rows.scale.T, (0, more_tokens, 0, width // GROUP - rows.scale.shape[1])).T
    return Fp8Rows(data, scale)


class FlashInferLinear:
    """FlashInfer's Hopper kernel (DeepGEMM inside, compiled at first use of a shape)."""

    @staticmethod
    def prepare(weight: Fp8Weight) -> Fp8Weight:
        n, k = weight.data.shape
        if n % 64 or k % GROUP:
            raise ValueError(f"flashinfer's fp8 product needs n % 64 == 0 and k % 128 == 0, not {n} x {k}")
        return Fp8Weight(weight.data.contiguous(), weight.scale.float().contiguous())

    @staticmethod
    def run(rows: Fp8Rows, w: Fp8Weight, out: torch.Tensor | None = None) -> torch.Tensor:
        from flashinfer.gemm import fp8_blockscale_gemm_sm90

        if len(rows.data) % CUBLAS_TOKENS:
            raise ValueError(f"flashinfer's fp8 product needs tokens in multiples of 4, not {len(rows.data)}")
        return fp8_blockscale_gemm_sm90(rows.data, w.data, rows.scale, w.scale, out=out)


def _cublas_why_not(device: Any) -> str | None:
    """Tried, not looked up: torch 2.11 and 2.13 differ in what they check, and older CUDA has no such kernel."""
    reason = needs_capability(9, exactly=True)(device)
    if reason is not None:
        return reason
    try:
        scale = torch.ones(4, CUBLAS_N, device=device).T
        rows = Fp8Rows(torch.zeros(CUBLAS_N, CUBLAS_K, dtype=torch.float8_e4m3fn, device=device), scale)
        weight = Fp8Weight(torch.zeros(GROUP, CUBLAS_K, dtype=torch.float8_e4m3fn, device=device), scale[:1])
        CublasLinear.run(rows, CublasLinear.prepare(weight))
    except (RuntimeError, TypeError, ValueError) as error:
        return f"torch._scaled_mm refuses block scales here: {str(error).splitlines()[0]}"
    return None


def _flashinfer_why_not(device: Any) -> str | None:
    reason = needs_flashinfer_modules("fp8_blockscale_gemm_90")(device)
    if reason is not None:
        return reason
    try:
        from flashinfer.gemm import fp8_blockscale_gemm_sm90  # noqa: F401
    except (ImportError, OSError) as error:
        return f"flashinfer has no Hopper block-scaled product here: {error}"
    return None


LINEAR_BACKENDS = (
    Backend("cuda", CudaLinear, why_not=fp8_hopper.why_not),
    Backend("cublas", CublasLinear, why_not=_cublas_why_not),
    Backend("flashinfer", FlashInferLinear, why_not=_flashinfer_why_not),
    Backend("triton", TritonLinear, why_not=needs_triton),
    Backend("reference", ReferenceLinear),
)
