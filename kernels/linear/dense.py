"""y = x @ W^T, and the same for one W a head.

prepare(weight)              weight [..., out, in] -> what `run` wants, made once at load
run(x, w, add_to=None)       x [num_tokens, in] -> [num_tokens, out]; added to `add_to` in place when given
per_head(x, w, out)          x [num_tokens, num_heads, in], w from [num_heads, out, in], out [num_tokens, num_heads, out]
                             written in place; x and out may be strided views with a dense last dimension

No tokens give no rows. Products are in x's dtype; the `c` back end multiplies in fp32 and keeps weights in bf16 where
that loses nothing, which halves what a small batch has to read.

Bits: with `c` a row's value depends on that row alone. With `torch` that holds on the hosts and row counts that
`headrace.engine.exact` has tried (multiples of 16), and nowhere by promise.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from kernels.select import Backend
from kernels.toolchain import cpu_library

PANEL = 16  # output columns per packed panel, as in cpu.c


def reference(x: torch.Tensor, weight: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
    y = (x[:, None, :] * weight[None]).sum(-1)
    return y if add_to is None else add_to.add_(y)


class TorchLinear:
    """torch's own matrix products."""

    @staticmethod
    def prepare(weight: torch.Tensor) -> torch.Tensor:
        """On a CPU: one input's weights become neighbours in memory, so that the library need not repack them, which
        is what costs at a handful of rows (1.3-2x at 8 rows and 256 x 256; Zen 3, torch 2.13)."""
        return weight.mT.contiguous().mT if weight.device.type == "cpu" else weight

    @staticmethod
    def run(x: torch.Tensor, w: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, w) if add_to is None else add_to.addmm_(x, w.T)

    @staticmethod
    def per_head(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(torch.bmm(x.transpose(0, 1), w.mT).transpose(0, 1))


class Packed(NamedTuple):
    """[batch, ceil(out / 16), in, 16], bf16 or fp32."""

    data: torch.Tensor
    batch: int
    out_size: int
    in_size: int
    bf16: bool


class PackedLinear:
    """Packed panels through cpu.c."""

    @staticmethod
    def prepare(weight: torch.Tensor) -> Packed:
        wide = weight.float().contiguous()
        out_size, in_size = wide.shape[-2:]
        batch = wide.numel() // (out_size * in_size)
        bf16 = bool((wide.bfloat16().float() == wide).all())
        panels = -(-out_size // PANEL)
        data = torch.empty(batch, panels, in_size, PANEL, dtype=torch.bfloat16 if bf16 else torch.float32)
        for one, packed in zip(wide.view(batch, out_size, in_size), data, strict=True):
            cpu_library.library().hr_pack(one.data_ptr(), out_size, in_size, packed.data_ptr(), bf16)
        return Packed(data, batch, out_size, in_size, bf16)

    @staticmethod
    def run(x: torch.Tensor, w: Packed, add_to: torch.Tensor | None = None) -> torch.Tensor:
        y = x.new_empty(len(x), w.out_size) if add_to is None else add_to
        args = (w.data.data_ptr(), w.bf16, 1, len(x), w.out_size, w.in_size, y.data_ptr(), 0, y.stride(0))
        cpu_library.library().hr_linear(
            x.data_ptr(), 0, x.stride(0), *args, add_to is not None, torch.get_num_threads()
        )
        return y

    @staticmethod
    def per_head(x: torch.Tensor, w: Packed, out: torch.Tensor) -> None:
        args = (w.data.data_ptr(), w.bf16, w.batch, len(x), w.out_size, w.in_size)
        cpu_library.library().hr_linear(
            x.data_ptr(), x.stride(1), x.stride(0), *args,
            out.data_ptr(), out.stride(1), out.stride(0), 0, torch.get_num_threads(),
        )  # fmt: skip


BACKENDS: tuple[Backend, ...] = (
    Backend("c", PackedLinear, why_not=cpu_library.why_not),
    Backend("torch", TorchLinear),
)

Prepared = Any  # what the chosen back end's `prepare` answers
