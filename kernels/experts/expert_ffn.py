"""SwiGLU feed-forward: one for all tokens, or one expert per (token, choice).

Weights, for `prepare(gate_up, down)`:
  gate_up  [..., 2 * inner, hidden], gate rows first      down  [..., hidden, inner]; a leading [num_experts] for routed
run(x, w, add_to=None, row_multiple)
  x        [num_tokens, hidden] -> [num_tokens, hidden]   down @ (silu(gate @ x) * (up @ x))
routed(x, weights, ids, w, row_multiple)
  weights  [num_tokens, top_k] fp32, ids [num_tokens, top_k] int64, from `gate`
  returns  sum over a token's choices, k = 0 first, of weight * expert(x)

`row_multiple` pads each expert's rows in the torch back ends (exact mode; 1 is off). No tokens give no rows; an expert
without rows is not read. Source: Shazeer 2020 for SwiGLU; DeepSeek-V3 report 2.1.2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from kernels.experts import expert_dispatch
from kernels.linear.dense import Packed, PackedLinear, TorchLinear
from kernels.select import Backend
from kernels.toolchain import cpu_library

ROW_BLOCK, LANES = 96, 8  # as in cpu.c


def silu_mul(gate_up: torch.Tensor, *, exact: bool) -> torch.Tensor:
    """[..., 2 * inner] -> [..., inner]: silu of the first half times the second.

    `exact`: g / (1 + exp(-g)), because torch's own silu rounds its vector and scalar paths differently, and a row's
    value must not depend on where a thread's share of the batch ends.
    """
    gate, up = gate_up.chunk(2, -1)
    if not exact:
        return F.silu(gate).mul_(up)
    return torch.div(gate, torch.neg(gate).exp_().add_(1)).mul_(up)


def reference(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = (x @ gate_up.T).chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up) @ down.T


def reference_routed(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    out = torch.zeros_like(x)
    for token in range(len(x)):
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            out[token] += weight * reference(x[token : token + 1], gate_up[expert], down[expert])[0]
    return out


class Swiglu(NamedTuple):
    """Both weights as `linear` wants them."""

    gate_up: Any
    down: Any


class LoopFfn:
    """torch, one expert after another."""

    @staticmethod
    def prepare(gate_up: torch.Tensor, down: torch.Tensor) -> Swiglu:
        return Swiglu(TorchLinear.prepare(gate_up), TorchLinear.prepare(down))

    @staticmethod
    def run(x: torch.Tensor, w: Swiglu, add_to: torch.Tensor | None = None, *, row_multiple: int = 1) -> torch.Tensor:
        return TorchLinear.run(silu_mul(F.linear(x, w.gate_up), exact=row_multiple > 1), w.down, add_to)

    @classmethod
    def routed(
        cls, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, w: Swiglu, *, row_multiple: int = 1
    ) -> torch.Tensor:
        plan = expert_dispatch.run(ids, len(w.down), row_multiple)
        rows = cls._expert_rows(x.index_select(0, plan.tokens), plan, w, row_multiple)
        return _combine(rows, weights.to(x.dtype), plan)

    @classmethod
    def _expert_rows(cls, read: torch.Tensor, plan: expert_dispatch.Plan, w: Swiglu, row_multiple: int) -> torch.Tensor:
        rows, start = torch.empty_like(read), 0
        for expert, end in enumerate(plan.ends.tolist()):
            if end > start:
                one = Swiglu(w.gate_up[expert], w.down[expert])
                rows[start:end] = cls.run(read[start:end], one, row_multiple=row_multiple)
            start = end
        return rows


class GroupedFfn(LoopFfn):
    """torch's grouped matrix product: no loop in Python."""

    @classmethod
    def _expert_rows(cls, read: torch.Tensor, plan: expert_dispatch.Plan, w: Swiglu, row_multiple: int) -> torch.Tensor:
        grouped_mm = _grouped_mm()
        inner = grouped_mm(read, w.gate_up.mT, offs=plan.ends)
        return grouped_mm(silu_mul(inner, exact=row_multiple > 1), w.down.mT, offs=plan.ends)


def _combine(rows: torch.Tensor, weights: torch.Tensor, plan: expert_dispatch.Plan) -> torch.Tensor:
    """Left to right over a token's choices: a fixed order of additions, whatever else is in the batch."""
    out = rows.index_select(0, plan.rows[:, 0]).mul_(weights[:, :1])
    for place in range(1, weights.shape[1]):
        out.addcmul_(rows.index_select(0, plan.rows[:, place]), weights[:, place : place + 1])
    return out


class PackedFfn:
    """Packed panels through cpu.c; inner and hidden must be multiples of 8."""

    @staticmethod
    def prepare(gate_up: torch.Tensor, down: torch.Tensor) -> Swiglu:
        up, below = PackedLinear.prepare(gate_up), PackedLinear.prepare(down)
        if up.bf16 != below.bf16:  # one flag for both in cpu.c
            up, below = (_widened(packed) for packed in (up, below))
        return Swiglu(up, below)

    @staticmethod
    def run(x: torch.Tensor, w: Swiglu, add_to: torch.Tensor | None = None, *, row_multiple: int = 1) -> torch.Tensor:
        hidden, inner = w.down.out_size, w.down.in_size
        y = torch.empty_like(x) if add_to is None else add_to
        scratch = x.new_empty(len(x), 3 * inner)
        cpu_library.library().hr_ffn(
            x.data_ptr(), x.stride(0), len(x), hidden, inner, w.gate_up.data.data_ptr(), w.down.data.data_ptr(),
            w.down.bf16, y.data_ptr(), y.stride(0), add_to is not None, scratch.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return y

    @staticmethod
    def routed(
        x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, w: Swiglu, *, row_multiple: int = 1
    ) -> torch.Tensor:
        hidden, inner, experts, top_k = w.down.out_size, w.down.in_size, w.down.batch, ids.shape[1]
        threads = torch.get_num_threads()
        y, rows = torch.empty_like(x), x.new_empty(len(x) * top_k, hidden)
        order = torch.empty(2 * ids.numel() + experts + 1, dtype=torch.int64)
        scratch = x.new_empty(threads, ROW_BLOCK * (hidden + 3 * inner))
        cpu_library.library().hr_experts(
            x.data_ptr(), x.stride(0), len(x), hidden, inner, experts, top_k, weights.data_ptr(), ids.data_ptr(),
            w.gate_up.data.data_ptr(), w.down.data.data_ptr(), w.down.bf16, y.data_ptr(), y.stride(0), 0,
            rows.data_ptr(), order.data_ptr(), scratch.data_ptr(), threads,
        )  # fmt: skip
        return y


def _widened(packed: Packed) -> Packed:
    """bf16 panels keep columns c and c + 8 side by side (cpu.c), fp32 panels keep them in order."""
    if not packed.bf16:
        return packed
    data = packed.data.float().unflatten(-1, (LANES, 2)).transpose(-1, -2).flatten(-2)
    return packed._replace(data=data, bf16=False)


def _grouped_mm() -> Any:
    return getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


def _grouped_why_not(device: Any) -> str | None:
    """Tried, not looked up: which dtypes and devices it takes changes between torch releases."""
    if _grouped_mm() is None:
        return "this torch has no grouped_mm"
    try:
        ends = torch.tensor([16, 16], dtype=torch.int32, device=device)
        _grouped_mm()(torch.ones(16, 16, device=device), torch.ones(2, 16, 16, device=device), offs=ends)
    except (RuntimeError, TypeError) as error:
        return f"grouped_mm fails here: {str(error).splitlines()[0]}"
    return None


BACKENDS: tuple[Backend, ...] = (
    Backend("c", PackedFfn, why_not=cpu_library.why_not),
    Backend("torch", GroupedFfn, why_not=_grouped_why_not),
    Backend("loop", LoopFfn),
)
