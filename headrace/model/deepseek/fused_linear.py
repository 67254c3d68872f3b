"""Matrix products of the GPU model over weights in any format, for all tokens or for each expert's rows.

Activations come as `Rows`: in bf16, in FP8, or both, made once by whoever produced them. Each product says in `wants`
which it reads, so that a norm writes only what somebody needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from headrace.model.weights.precision import Weight
from kernels.formats.fp8 import Fp8Rows

PLAIN, FP8 = "plain", "fp8"
GROUPED_MM = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)  # named differently by torch's age


class Rows(NamedTuple):
    """The same activations in one or both formats: plain [t, width] bf16, fp8 one scale for each row and 128 columns."""

    plain: torch.Tensor | None = None
    fp8: Fp8Rows | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.plain if self.plain is not None else self.fp8.data)

    def part(self, tokens: slice) -> Rows:
        """Some of the tokens. FP8 scales are copied: their layout depends on how many rows there are."""
        plain = None if self.plain is None else self.plain[tokens]
        if self.fp8 is None:
            return Rows(plain)
        return Rows(plain, Fp8Rows(self.fp8.data[tokens], self.fp8.scale[tokens].T.contiguous().T))

    def chosen(self, wants: str) -> torch.Tensor | Fp8Rows:
        return self.plain if wants == PLAIN else self.fp8


def needs(*wants: str) -> dict[str, bool]:
    """keep and quantise of `kernels.rows.rms_norm`'s add-and-norm for these readers."""
    return {"keep": PLAIN in wants, "quantise": FP8 in wants}


class Linear(Protocol):
    """[t, in] -> [t, out] bf16; reads the activations in the format it `wants`."""

    wants: str

    def __call__(self, rows: Rows) -> torch.Tensor: ...


class PlainLinear:
    """bf16 x bf16."""

    wants = PLAIN

    def __init__(self, weight: torch.Tensor):
        self.weight = weight

    def __call__(self, rows: Rows) -> torch.Tensor:
        return F.linear(rows.plain, self.weight)


class PreparedLinear:
    """A back end of `fp8_linear` or `nvfp4_linear` over what it prepared."""

    def __init__(self, backend: Any, weight: Weight, wants: str):
        self.backend, self.prepared, self.wants = backend, backend.prepare(weight), wants

    def __call__(self, rows: Rows) -> torch.Tensor:
        return self.backend.run(rows.chosen(self.wants), self.prepared)


class ByRows:
    """Two ways to multiply by the same weight: `few` below `limit` rows, `many` from there on."""

    def __init__(self, few: PreparedLinear, many: PreparedLinear, limit: int):
        self.few, self.many, self.limit, self.wants = few, many, limit, few.wants

    def __call__(self, rows: Rows) -> torch.Tensor:
        return (self.few if rows.num_tokens < self.limit else self.many)(rows)


class PlainGroups:
    """bf16 rows of each expert with that expert's weight [e, out, in]; rows past the last start stay unwritten."""

    wants = PLAIN

    def __init__(self, weight: torch.Tensor):
        self.weight = weight

    def __call__(self, rows: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        if rows.device.type == "cuda":
            return GROUPED_MM(rows, self.weight.mT, offs=starts[1:])
        out = rows.new_zeros(len(rows), self.weight.shape[1])
        ends = starts.tolist()
        for expert, (first, end) in enumerate(zip(ends, ends[1:], strict=False)):
            torch.mm(rows[first:end], self.weight[expert].T, out=out[first:end])
        return out


class PreparedGroups:
    """A contiguous back end of `grouped_linear` (FP8) or `grouped_nvfp4` over weights as it wants them."""

    def __init__(self, run: Callable[..., torch.Tensor], prepared: Any, wants: str):
        self.run, self.prepared, self.wants = run, prepared, wants

    def __call__(self, rows: torch.Tensor | Fp8Rows, starts: torch.Tensor) -> torch.Tensor:
        return self.run(rows, self.prepared, starts)


class Swiglu:
    """down(silu(gate) * up) for all tokens: a dense layer or the shared expert."""

    def __init__(self, kernels: Any, gate_up: Weight, down: Weight):
        self.kernels = kernels
        self.gate_up, self.down = kernels.linear(gate_up), kernels.linear(down)
        self.wants = self.gate_up.wants

    def __call__(self, rows: Rows) -> torch.Tensor:
        """[t, hidden] -> [t, hidden] bf16."""
        return self.down(activated(self.kernels, self.gate_up(rows), self.down.wants))


class ExpertSwiglu:
    """The same for rows in expert order: starts [e + 1] int32 says where each expert's begin."""

    def __init__(self, kernels: Any, gate_up: Weight, down: Weight):
        self.kernels = kernels
        self.gate_up, self.down = kernels.groups(gate_up), kernels.groups(down)
        self.wants = self.gate_up.wants

    def __call__(self, rows: torch.Tensor | Fp8Rows, starts: torch.Tensor) -> torch.Tensor:
        """[capacity, hidden] -> [capacity, hidden] bf16; rows past starts[-1] hold nothing."""
        inner = activated(self.kernels, self.gate_up(rows, starts), self.down.wants, starts[-1:])
        return self.down(inner.chosen(self.down.wants), starts)


def activated(kernels: Any, gate_up: torch.Tensor, wants: str, limit: torch.Tensor | None = None) -> Rows:
    """silu(first half) * second half, in the format that the next product reads."""
    if wants == FP8:
        return Rows(fp8=kernels.silu_mul_quantise(gate_up, limit))
    return Rows(kernels.silu_mul(gate_up))
