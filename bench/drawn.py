"""One rank of an expert-parallel group without the others: what would arrive is drawn, nothing is sent.

Every rank of the group has as many tokens as this one and each token chooses `top_k` of all experts at random; the rows
that arrive here are those whose choice falls on a local expert. Their data are this rank's own rows, repeated over the
group, so an expert reads and multiplies what a real one would; the time of the wire is not in it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from headrace.parallel.experts import LocalReceipt, Sent
from kernels import grouped_linear
from kernels.expert_dispatch import DevicePlan
from kernels.fp8 import Fp8Rows

DRAW_AT_ONCE = 1 << 18  # tokens whose choices are drawn together


class _Routing(NamedTuple):
    """For one number of tokens: who arrives, and which rows stand in for the results that come back."""

    plan: DevicePlan
    returned: torch.Tensor  # [t, k] int32
    arrived: int


class DrawnExchange:
    """An `ExpertExchange`. `arrived(tokens)`: rows that all ranks together send here when each has so many tokens."""

    def __init__(self, kernels: Any, device: torch.device, *, num_experts: int, ranks: int, top_k: int, seed: int = 0):
        if num_experts % ranks:
            raise ValueError(f"{num_experts} experts cannot be shared by {ranks} ranks")
        self.kernels, self.device = kernels, device
        self.num_experts, self.ranks, self.top_k = num_experts, ranks, top_k
        self.first_expert, self.num_local = 0, num_experts // ranks
        self._draw = torch.Generator(device).manual_seed(seed)
        self._routings: dict[int, _Routing] = {}

    def arrived(self, tokens: int) -> int:
        return self._routing(tokens).arrived

    def dispatch(self, rows: torch.Tensor | Fp8Rows, weights: torch.Tensor, ids: torch.Tensor) -> Sent:
        """The gate's own ids stay unused: with drawn weights they would be far from balanced."""
        routing = self._routing(len(ids))
        plan = routing.plan
        return Sent(self.kernels.permute(rows, plan), plan.starts, LocalReceipt(weights, routing.returned))

    def combine(self, made: torch.Tensor, sent: Sent, shared: torch.Tensor | None) -> torch.Tensor:
        return self.kernels.combine(made, sent.receipt.weights, sent.receipt.rows, shared)

    def _routing(self, tokens: int) -> _Routing:
        """Drawn at the first call with so many tokens, which therefore must not be inside a graph capture."""
        if tokens not in self._routings:
            self._routings[tokens] = self._drawn(tokens)
        return self._routings[tokens]

    def _drawn(self, tokens: int) -> _Routing:
        sources, experts = self._arrivals(tokens)
        multiple = grouped_linear.row_multiple_for(-(-len(sources) // self.num_local))
        counts = torch.bincount(experts, minlength=self.num_local)
        padded = (counts + multiple - 1) // multiple * multiple
        ends = padded.cumsum(0)
        order = experts.sort(stable=True)[1]
        sorted_experts = experts[order]
        first = (ends - padded)[sorted_experts] - (counts.cumsum(0) - counts)[sorted_experts]
        places = torch.arange(len(order), device=self.device) + first
        capacity = int(ends[-1])
        read = torch.full((capacity,), -1, dtype=torch.int32, device=self.device)
        read[places] = (sources[order] % tokens).int()
        starts = torch.cat((ends.new_zeros(1), ends)).int()
        stand_ins = places[torch.randint(len(places), (tokens, self.top_k), generator=self._draw, device=self.device)]
        rows = torch.full((tokens, self.top_k), -1, dtype=torch.int32, device=self.device)
        plan = DevicePlan(tokens=read, rows=rows, starts=starts, counts=counts.int())
        return _Routing(plan, stand_ins.int(), len(order))

    def _arrivals(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Global token and local expert of every row that arrives."""
        sources, experts, total = [], [], tokens * self.ranks
        for start in range(0, total, DRAW_AT_ONCE):
            count = min(DRAW_AT_ONCE, total - start)
            scores = torch.rand(count, self.num_experts, generator=self._draw, device=self.device)
            chosen = scores.topk(self.top_k, -1, sorted=False)[1]
            token, place = (chosen < self.num_local).nonzero(as_tuple=True)
            sources.append(token + start)
            experts.append(chosen[token, place])
        return torch.cat(sources), torch.cat(experts)
