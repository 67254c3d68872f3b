"""y = x @ W^T with NVFP4 weights.

prepare(weight)             Nvfp4Weight [n, k], k % 128 == 0 -> what the same back end's `run` wants, made once at load
run(x, w, out=None)         x bf16 [t, k] (dense columns) or Fp8Rows of that -> [t, n] bf16, into `out` when given

Up to Hopper there are no four-bit matrix units: activations stay as they are and weights are widened inside the kernel.
On Blackwell FlashInfer's mm_fp4 multiplies four-bit codes and needs the activations in NVFP4 too: with the weight's
`input_scale`, else with the row tensor's own amax. No rows give no rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.formats.fp8 import Fp8Rows, dequantise_rows
from kernels.formats.nvfp4 import LARGEST_CODE, LARGEST_SCALE, Nvfp4Weight, dequantise, flashinfer_why_not, swizzle
from kernels.linear import nvfp4_hopper, nvfp4_triton
from kernels.select import Backend
from kernels.toolchain.triton_support import needs_triton


def check_weight(weight: Nvfp4Weight) -> None:
    if weight.packed.dim() != 2 or weight.packed.shape[1] % 64 or weight.global_scale.numel() != 1:
        raise ValueError(f"a weight [n, k] with k % 128 == 0, not {tuple(weight.packed.shape)} packed bytes")


def output_for(x: torch.Tensor | Fp8Rows, n: int, out: torch.Tensor | None) -> torch.Tensor:
    data = x.data if isinstance(x, Fp8Rows) else x
    return torch.empty(len(data), n, dtype=torch.bfloat16, device=data.device) if out is None else out


class ReferenceLinear:
    @staticmethod
    def prepare(weight: Nvfp4Weight) -> torch.Tensor:
        check_weight(weight)
        return dequantise(weight)

    @staticmethod
    def run(x: torch.Tensor | Fp8Rows, w: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        wide = dequantise_rows(x) if isinstance(x, Fp8Rows) else x.float()
        return output_for(x, len(w), out).copy_(wide @ w.T)


class TritonLinear:
    """Keeps the disk form."""

    @staticmethod
    def prepare(weight: Nvfp4Weight) -> Nvfp4Weight:
        check_weight(weight)
        scales = weight.block_scale.contiguous()[None], weight.global_scale.float().reshape(1)
        return Nvfp4Weight(weight.packed.contiguous()[None], *scales)

    @staticmethod
    def run(x: torch.Tensor | Fp8Rows, w: Nvfp4Weight, out: torch.Tensor | None = None) -> torch.Tensor:
        return nvfp4_triton.multiply(x, w, None, None, output_for(x, w.packed.shape[1], out))


class HopperLinear:
    """Keeps `nvfp4_hopper.Prepared`."""

    @staticmethod
    def prepare(weight: Nvfp4Weight) -> nvfp4_hopper.Prepared:
        check_weight(weight)
        scales = weight.block_scale[None], weight.global_scale.reshape(1)
        return nvfp4_hopper.prepare(Nvfp4Weight(weight.packed[None], *scales))

    @staticmethod
    def run(x: torch.Tensor | Fp8Rows, w: nvfp4_hopper.Prepared, out: torch.Tensor | None = None) -> torch.Tensor:
        return nvfp4_hopper.multiply(x, w, None, nvfp4_hopper.DENSE, output_for(x, w.n, out))


class FlashInferPrepared(NamedTuple):
    """packed [n, k / 2]; scale [n padded to 128, k / 16] bytes in 128x4 order; both global scales fp32 [1] or None."""

    packed: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor
    input_scale: torch.Tensor | None


class FlashInferLinear:
    """Never run: no Blackwell was at hand."""

    @staticmethod
    def prepare(weight: Nvfp4Weight) -> FlashInferPrepared:
        check_weight(weight)
        scale = swizzle(weight.block_scale.view(torch.uint8)).view(-1, weight.block_scale.shape[1])
        inputs = None if weight.input_scale is None else weight.input_scale.float().reshape(1)
        return FlashInferPrepared(weight.packed.contiguous(), scale, weight.global_scale.float().reshape(1), inputs)

    @staticmethod
    def run(x: torch.Tensor | Fp8Rows, w: FlashInferPrepared, out: torch.Tensor | None = None) -> torch.Tensor:
        from flashinfer import fp4_quantize, mm_fp4

        x = dequantise_rows(x).bfloat16() if isinstance(x, Fp8Rows) else x
        y = output_for(x, len(w.packed), out)
        if not len(x):
            return y
        inputs = w.input_scale
        if inputs is None:
            inputs = (x.abs().amax().float() / (LARGEST_CODE * LARGEST_SCALE)).clamp_min(1e-30).reshape(1)
        codes, scale = fp4_quantize(x.contiguous(), inputs.reciprocal())  # 128x4 scales
        alpha = inputs * w.global_scale
        return mm_fp4(codes, w.packed.T, scale, w.scale.T, alpha, torch.bfloat16, y, backend="cutlass")


LINEAR_BACKENDS: tuple[Backend, ...] = (
    Backend("flashinfer", FlashInferLinear, why_not=flashinfer_why_not),
    Backend("cuda", HopperLinear, why_not=nvfp4_hopper.why_not),
    Backend("triton", TritonLinear, why_not=needs_triton),
    Backend("reference", ReferenceLinear),
)
