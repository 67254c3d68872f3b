"""Tokens to the ranks that hold their experts, results back.

`dispatch` and `combine` are one pair, tied by the receipt that the first returns and the second takes. Between them the
rows of all tokens that chose an expert of this rank lie in expert order, each expert's first row at a multiple that the
grouped products want. A back end that talks to other ranks sends in `dispatch`, after it has counted how many rows each rank
gets, and again in `combine`, where results travel back in bf16; nothing else in the model knows about ranks. The shared
expert needs no other rank: either its results are added in `combine`, so that one pass writes each token once, or, where
the exchange `takes_own` tokens, it is one more expert behind the local ones, and shares their launches.

Nothing here waits for the device, and shapes depend on the number of tokens only, so that a step can be captured.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from kernels.formats.fp8 import Fp8Rows

MOST_KEPT = 512
"""Columns for up to so many tokens are kept: decode steps, which come in few sizes and whose graphs should not fill them anew."""


class Sent(NamedTuple):
    """What `dispatch` left on this rank.

    rows     [capacity, hidden] bf16, or Fp8Rows of it: rows in expert order; between experts anything finite
    starts   [num_local + 1] int32   first row of each local expert; the last one is the number of rows in use
    receipt  what the same back end's `combine` needs
    """

    rows: torch.Tensor | Fp8Rows
    starts: torch.Tensor
    receipt: Any


class ExpertExchange(Protocol):
    """One MoE layer's way to the experts and back.

    first_expert, num_local: the experts whose weights this rank holds are first_expert .. first_expert + num_local - 1.
    takes_own: whether `dispatch` can be asked for this rank's own tokens as rows of one more expert; it need not be there
    """

    first_expert: int
    num_local: int
    takes_own: bool

    def dispatch(
        self, rows: torch.Tensor | Fp8Rows, weights: torch.Tensor, ids: torch.Tensor, *, own: bool = False
    ) -> Sent:
        """rows [t, hidden] of this rank's tokens; weights [t, k] fp32 and ids [t, k] as the gate made them.

        own: each of these tokens is also a row of expert `num_local`, counted with weight 1; `starts` has one more entry.
        """
        ...

    def combine(self, made: torch.Tensor, sent: Sent, shared: torch.Tensor | None) -> torch.Tensor:
        """made [capacity, hidden] bf16 -> [t, hidden] bf16: each token's weighted results, plus shared [t, hidden]."""
        ...


class LocalReceipt(NamedTuple):
    """weights [t, k] fp32; rows [t, k] int32, -1 where the expert is not on this rank; k counts the shared one if asked."""

    weights: torch.Tensor
    rows: torch.Tensor


class LocalExchange:
    """No other rank: choices of experts that are not held here count for nothing.

    Nothing is sent. With every expert on this rank (`num_local` = all) it is the whole layer; with fewer, the share of
    the layer's output that this rank would send back.
    """

    def __init__(self, kernels: Any, num_experts: int, *, first_expert: int = 0, num_local: int | None = None):
        self.kernels, self.num_experts = kernels, num_experts
        self.first_expert, self.num_local = first_expert, num_experts if num_local is None else num_local
        self.takes_own = self.num_local == num_experts  # else the id behind the local ones is another rank's
        self._own: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def dispatch(
        self, rows: torch.Tensor | Fp8Rows, weights: torch.Tensor, ids: torch.Tensor, *, own: bool = False
    ) -> Sent:
        first, num_local = self.first_expert, self.num_local
        if own:
            weights, ids = self._with_own(weights, ids)
            num_local += 1
        capacity, multiple = self.kernels.room_for_experts(ids.numel(), self.num_experts, num_local)
        plan = self.kernels.expert_plan(ids, first, num_local, multiple, capacity)
        return Sent(self.kernels.permute(rows, plan), plan.starts, LocalReceipt(weights, plan.rows))

    def _with_own(self, weights: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One more choice for every token: the expert behind all others, with weight 1."""
        tokens = len(ids)
        own = self._own.get(tokens)
        if own is None:
            own = weights.new_ones(tokens, 1), ids.new_full((tokens, 1), self.num_experts)
            if tokens <= MOST_KEPT:
                self._own[tokens] = own
        return torch.cat((weights, own[0]), 1), torch.cat((ids, own[1]), 1)

    def combine(self, made: torch.Tensor, sent: Sent, shared: torch.Tensor | None) -> torch.Tensor:
        return self.kernels.combine(made, sent.receipt.weights, sent.receipt.rows, shared)
