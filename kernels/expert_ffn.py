"""SwiGLU feed-forward: one for all tokens, or one expert per (token, choice).

swiglu(x, gate_up, down)
  x        [num_tokens, hidden]       gate_up  [2 * inner, hidden], gate rows first     down  [hidden, inner]
  returns  [num_tokens, hidden]       down @ (silu(gate @ x) * (up @ x))

routed: run(x, weights, plan, gate_up, down) -> [num_tokens, hidden]
  x        [num_tokens, hidden]
  weights  [num_tokens, top_k]        fp32, from `gate`
  plan     expert_dispatch.Plan
  gate_up  [num_experts, 2 * inner, hidden]      down  [num_experts, hidden, inner]
  returns  sum over a token's choices, k = 0 first, of weight * expert(x)

No tokens give no rows; an expert without rows is not read. `silu` is g / (1 + exp(-g)) here: torch's own rounds its
vector and scalar paths differently, and a row's value must not depend on where a thread's share ends.
Source: Shazeer 2020 for SwiGLU; DeepSeek-V3 report 2.1.2.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from kernels.expert_dispatch import Plan
from kernels.select import Backend


def silu_mul(gate_up: torch.Tensor, *, exact: bool) -> torch.Tensor:
    """[..., 2 * inner] -> [..., inner]: silu of the first half times the second. `exact`: see the module text."""
    gate, up = gate_up.chunk(2, -1)
    if not exact:
        return F.silu(gate).mul_(up)
    return torch.div(gate, torch.neg(gate).exp_().add_(1)).mul_(up)


def swiglu(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, *, exact: bool) -> torch.Tensor:
    return F.linear(silu_mul(F.linear(x, gate_up), exact=exact), down)


def reference(
    x: torch.Tensor, weights: torch.Tensor, plan: Plan, gate_up: torch.Tensor, down: torch.Tensor, *, exact: bool
) -> torch.Tensor:
    out = torch.zeros_like(x)
    ends = plan.ends.tolist()
    for token in range(len(x)):
        for place, row in enumerate(plan.rows[token].tolist()):
            expert = next(e for e, end in enumerate(ends) if row < end)
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            out[token] += weights[token, place] * (down[expert] @ (gate * torch.sigmoid(gate) * up))
    return out


def _combine(rows: torch.Tensor, weights: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Left to right over a token's choices: a fixed order of additions, whatever else is in the batch."""
    out = rows.index_select(0, plan.rows[:, 0]).mul_(weights[:, :1])
    for place in range(1, weights.shape[1]):
        out.addcmul_(rows.index_select(0, plan.rows[:, place]), weights[:, place : place + 1])
    return out


def _grouped(
    x: torch.Tensor, weights: torch.Tensor, plan: Plan, gate_up: torch.Tensor, down: torch.Tensor, *, exact: bool
) -> torch.Tensor:
    grouped_mm = _grouped_mm()
    inner = grouped_mm(x.index_select(0, plan.tokens), gate_up.transpose(1, 2), offs=plan.ends)
    rows = grouped_mm(silu_mul(inner, exact=exact), down.transpose(1, 2), offs=plan.ends)
    return _combine(rows, weights.to(x.dtype), plan)


def _loop(
    x: torch.Tensor, weights: torch.Tensor, plan: Plan, gate_up: torch.Tensor, down: torch.Tensor, *, exact: bool
) -> torch.Tensor:
    read = x.index_select(0, plan.tokens)
    rows = torch.empty_like(read)
    start = 0
    for expert, end in enumerate(plan.ends.tolist()):
        if end > start:
            rows[start:end] = swiglu(read[start:end], gate_up[expert], down[expert], exact=exact)
        start = end
    return _combine(rows, weights.to(x.dtype), plan)


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


BACKENDS = (
    Backend("grouped", _grouped, why_not=_grouped_why_not),
    Backend("loop", _loop),
    Backend("reference", reference),
)
