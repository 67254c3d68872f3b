"""Rows in expert order times each expert's NVFP4 weight.

prepare(weight)                  Nvfp4Weight [e, n, k], k % 128 == 0 -> what the same back end's `run` wants, once at load
CONTIGUOUS run(rows, w, starts)  rows Fp8Rows [capacity, k] or bf16 of that; starts [e + 1] int32, multiples of
                                 `grouped_linear`'s row multiple -> [capacity, n] bf16
MASKED     run(rows, w, counts)  Fp8Rows with data [e, m, k] and scale [e, m, k / 128] (m contiguous), or bf16 [e, m, k];
                                 counts [e] int32, counts[i] <= m -> [e, m, n] bf16
value of a row: x @ (code * block_scale * global_scale).T, sums in fp32

Rows past starts[-1] or counts[i] hold nothing afterwards and may hold anything before; an expert without rows is not
read. Nothing waits for the device, except in `reference`. `cuda` is nvfp4_hopper.cu: Hopper, n even.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels.formats.fp8 import Fp8Rows, dequantise_rows
from kernels.formats.nvfp4 import Nvfp4Weight, dequantise
from kernels.linear import nvfp4_hopper, nvfp4_triton
from kernels.select import Backend
from kernels.toolchain.triton_support import needs_triton

ROWS = "fp8"
"""What the expert path should hand over: its rows are permuted, and a permuted FP8 row costs half the traffic."""


def flattened(rows: torch.Tensor | Fp8Rows) -> torch.Tensor | Fp8Rows:
    """`[e, m, k]` -> `[e * m, k]`; FP8 scales are copied to the layout of `kernels.formats.fp8` (few bytes)."""
    if not isinstance(rows, Fp8Rows):
        return rows.flatten(0, 1)
    return Fp8Rows(rows.data.flatten(0, 1), rows.scale.flatten(0, 1).T.contiguous().T)


def check_weight(weight: Nvfp4Weight) -> None:
    if weight.packed.dim() != 3 or weight.packed.shape[2] % 64 or weight.global_scale.shape != weight.packed.shape[:1]:
        raise ValueError(
            f"weights [e, n, k] with k % 128 == 0 and one global scale each, not {tuple(weight.packed.shape)} "
            f"packed bytes and {tuple(weight.global_scale.shape)} scales"
        )


class ReferenceGrouped:
    """fp32 weights, one expert after another; reads starts and counts on the host."""

    @staticmethod
    def prepare(weight: Nvfp4Weight) -> torch.Tensor:
        check_weight(weight)
        return dequantise(weight)

    @staticmethod
    def contiguous(rows: torch.Tensor | Fp8Rows, w: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        x = dequantise_rows(rows) if isinstance(rows, Fp8Rows) else rows.float()
        out = torch.zeros(len(x), w.shape[1], dtype=torch.bfloat16, device=x.device)
        ends = starts.tolist()
        for one, first, end in zip(w, ends, ends[1:], strict=False):
            out[first:end] = (x[first:end] @ one.T).bfloat16()
        return out

    @classmethod
    def masked(cls, rows: torch.Tensor | Fp8Rows, w: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        flat = flattened(rows)
        x = dequantise_rows(flat) if isinstance(flat, Fp8Rows) else flat.float()
        x = x.unflatten(0, (len(w), -1))
        out = torch.zeros(*x.shape[:2], w.shape[1], dtype=torch.bfloat16, device=x.device)
        for expert, count in enumerate(counts.tolist()):
            out[expert, :count] = (x[expert, :count] @ w[expert].T).bfloat16()
        return out


class TritonGrouped:
    """Keeps the disk form."""

    @staticmethod
    def prepare(weight: Nvfp4Weight) -> Nvfp4Weight:
        check_weight(weight)
        return Nvfp4Weight(weight.packed.contiguous(), weight.block_scale.contiguous(), weight.global_scale.float())

    @staticmethod
    def contiguous(rows: torch.Tensor | Fp8Rows, w: Nvfp4Weight, starts: torch.Tensor) -> torch.Tensor:
        data = rows.data if isinstance(rows, Fp8Rows) else rows
        out = torch.empty(len(data), w.packed.shape[1], dtype=torch.bfloat16, device=data.device)
        return nvfp4_triton.multiply(rows, w, starts, None, out)

    @staticmethod
    def masked(rows: torch.Tensor | Fp8Rows, w: Nvfp4Weight, counts: torch.Tensor) -> torch.Tensor:
        data = rows.data if isinstance(rows, Fp8Rows) else rows
        out = torch.empty(*data.shape[:2], w.packed.shape[1], dtype=torch.bfloat16, device=data.device)
        nvfp4_triton.multiply(flattened(rows), w, None, counts, out.flatten(0, 1))
        return out


class HopperGrouped:
    """Keeps `nvfp4_hopper.Prepared`; starts must be multiples of 8."""

    @staticmethod
    def prepare(weight: Nvfp4Weight) -> nvfp4_hopper.Prepared:
        check_weight(weight)
        return nvfp4_hopper.prepare(weight)

    @staticmethod
    def contiguous(rows: torch.Tensor | Fp8Rows, w: nvfp4_hopper.Prepared, starts: torch.Tensor) -> torch.Tensor:
        data = rows.data if isinstance(rows, Fp8Rows) else rows
        out = torch.empty(len(data), w.n, dtype=torch.bfloat16, device=data.device)
        return nvfp4_hopper.multiply(rows, w, starts, nvfp4_hopper.CONTIGUOUS, out)

    @staticmethod
    def masked(rows: torch.Tensor | Fp8Rows, w: nvfp4_hopper.Prepared, counts: torch.Tensor) -> torch.Tensor:
        data = rows.data if isinstance(rows, Fp8Rows) else rows
        out = torch.empty(*data.shape[:2], w.n, dtype=torch.bfloat16, device=data.device)
        return nvfp4_hopper.multiply(rows, w, counts, nvfp4_hopper.MASKED, out)


class Contiguous:
    """prepare and the contiguous form of one of the classes above."""

    def __init__(self, form: Any):
        self.prepare, self.run = form.prepare, form.contiguous


class Masked:
    def __init__(self, form: Any):
        self.prepare, self.run = form.prepare, form.masked


CONTIGUOUS_BACKENDS: tuple[Backend, ...] = (
    Backend("cuda", Contiguous(HopperGrouped), why_not=nvfp4_hopper.why_not),
    Backend("triton", Contiguous(TritonGrouped), why_not=needs_triton),
    Backend("reference", Contiguous(ReferenceGrouped)),
)
MASKED_BACKENDS: tuple[Backend, ...] = (
    Backend("cuda", Masked(HopperGrouped), why_not=nvfp4_hopper.why_not),
    Backend("triton", Masked(TritonGrouped), why_not=needs_triton),
    Backend("reference", Masked(ReferenceGrouped)),
)
