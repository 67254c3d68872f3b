"""One rank of an expert-parallel group without the others: what would arrive is drawn, nothing is sent.

Every rank of the group has as many tokens as this one and each token chooses `top_k` of all experts at random; the rows
that arrive here are those whose choice falls on a local expert. Their data are this rank's own rows, repeated over the
group, so an expert reads and multiplies what a real one would; the time of the wire is not in it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from headrace.parallel.experts import LocalReceipt, Sent
from kernels.experts.expert_dispatch import DevicePlan
from kernels.formats.fp8 import Fp8Rows
from kernels.linear import grouped_linear

DRAW_AT_ONCE = 1 << 18  # tokens whose choices are drawn together


class _Routing(NamedTuple):
    """For one number of tokens: who arrives, and which rows stand in for the results that come back.

    returned  [t, k] int32, k + 1 with the shared expert's row last      arrived  rows that other tokens' choices made
    ones      [t, 1] fp32, the shared expert's weights
    """

    plan: DevicePlan
    returned: torch.Tensor
    arrived: int
    ones: torch.Tensor


class DrawnExchange:
    """An `ExpertExchange`. `arrived(tokens)`: rows that all ranks together send here when each has so many tokens."""

    def __init__(self, kernels: Any, device: torch.device, *, num_experts: int, ranks: int, top_k: int, seed: int = 0):
        if num_experts % ranks:
            raise ValueError(f"{num_experts} experts cannot be shared by {ranks} ranks")
        self.kernels, self.device = kernels, device
        self.num_experts, self.ranks, self.top_k = num_experts, ranks, top_k
        self.first_expert, self.num_local = 0, num_experts // ranks
        self.takes_own = True
        self._draw, self._seed = torch.Generator(device), seed
        self._routings: dict[tuple[int, bool], _Routing] = {}

    def arrived(self, tokens: int) -> int:
        return self._routing(tokens, False).arrived

    def prepare(self, tokens: int) -> None:
        """Draws ahead for so many tokens, so that no profile holds the drawing."""
        for own in (False, True):
            self._routing(tokens, own)

    def dispatch(
        self, rows: torch.Tensor | Fp8Rows, weights: torch.Tensor, ids: torch.Tensor, *, own: bool = False
    ) -> Sent:
        """The gate's own ids stay unused: with drawn weights they would be far from balanced."""
        routing = self._routing(len(ids), own)
        plan = routing.plan
        weights = torch.cat((weights, routing.ones), 1) if own else weights
        return Sent(self.kernels.permute(rows, plan), plan.starts, LocalReceipt(weights, routing.returned))

    def combine(self, made: torch.Tensor, sent: Sent, shared: torch.Tensor | None) -> torch.Tensor:
        return self.kernels.combine(made, sent.receipt.weights, sent.receipt.rows, shared)

    def _routing(self, tokens: int, own: bool) -> _Routing:
        """Drawn at the first call with so many tokens, which therefore must not be inside a graph capture."""
        if (tokens, own) not in self._routings:
            self._draw.manual_seed(self._seed)
            self._routings[tokens, own] = self._drawn(tokens, own)
        return self._routings[tokens, own]

    def _drawn(self, tokens: int, own: bool) -> _Routing:
        """With `own`, every token of this rank is also a row of one more expert, behind the local ones."""
        experts = self._arrivals(tokens)
        arrived, num_experts = len(experts), self.num_local + own
        if own:
            filled = -(-arrived // tokens) * tokens  # so that arrival i reads token i % tokens
            experts = torch.cat((experts, experts.new_full((tokens,), self.num_local)))
            sources = torch.cat(
                (torch.arange(arrived, device=self.device), filled + torch.arange(tokens, device=self.device))
            )
        else:
            sources = torch.arange(arrived, device=self.device)
        multiple = grouped_linear.row_multiple_for(-(-arrived // self.num_local))
        counts = torch.bincount(experts, minlength=num_experts)
        padded = (counts + multiple - 1) // multiple * multiple
        ends = padded.cumsum(0)
        order = experts.sort(stable=True)[1]
        shift = (ends - padded) - (counts.cumsum(0) - counts)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=self.device) + shift[experts[order]]
        read = torch.full((int(ends[-1]),), -1, dtype=torch.int32, device=self.device)
        read[places] = (sources % tokens).int()
        copies = torch.full((-(-int(sources[-1] + 1) // tokens) * tokens,), -1, dtype=torch.int32, device=self.device)
        copies[sources] = places.int()
        plan = DevicePlan(
            tokens=read,
            rows=copies.view(-1, tokens).T.contiguous(),
            starts=torch.cat((ends.new_zeros(1), ends)).int(),
            counts=counts.int(),
        )
        picked = torch.randint(arrived, (tokens, self.top_k), generator=self._draw, device=self.device)
        returned = places[picked]
        if own:
            returned = torch.cat((returned, places[arrived:, None]), 1)
        return _Routing(plan, returned.int(), arrived, torch.ones(tokens, 1, device=self.device))

    def _arrivals(self, tokens: int) -> torch.Tensor:
        """[rows that arrive] int64: the local expert of each, in the order of the tokens that sent it."""
        experts, total = [], tokens * self.ranks
        for start in range(0, total, DRAW_AT_ONCE):
            count = min(DRAW_AT_ONCE, total - start)
            scores = torch.rand(count, self.num_experts, generator=self._draw, device=self.device)
            chosen = scores.topk(self.top_k, -1, sorted=False)[1]
            experts.append(chosen[chosen < self.num_local])
        return torch.cat(experts)
