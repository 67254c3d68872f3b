"""Choose each token's experts: sigmoid scores, group limits, correction bias.

x        [num_tokens, hidden]       any float dtype; logits are computed in fp32
weight   [num_experts, hidden]      fp32
bias     [num_experts]              fp32, added for the choice only (e_score_correction_bias)
returns  weights [num_tokens, top_k] fp32, ids [num_tokens, top_k] int64, in no promised order within a row

Choice score = sigmoid(logit) + bias. A group scores the sum of its two best choice scores; experts outside the
`topk_group` best groups are out. The weight is the sigmoid without bias, divided by (sum + 1e-20) when `normalise`,
times `scaling`. Rows do not look at each other. Source: DeepSeek-V3 report 2.1.2; transformers for the epsilon.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from kernels.select import Backend


class Limits(NamedTuple):
    """The checkpoint's routing numbers, named as in config.json."""

    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float


def reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, limits: Limits
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.sigmoid(x.float() @ weight.float().T)
    weights, ids = [], []
    size = weight.shape[0] // limits.n_group
    for row in scores:
        choice = (row + bias).tolist()
        groups = [choice[g * size : (g + 1) * size] for g in range(limits.n_group)]
        rank = sorted(range(limits.n_group), key=lambda g: -sum(sorted(groups[g])[-2:]))[: limits.topk_group]
        allowed = [expert for expert in range(len(choice)) if expert // size in rank]
        chosen = sorted(allowed, key=lambda expert: -choice[expert])[: limits.num_experts_per_tok]
        weight_row = row[chosen]
        if limits.norm_topk_prob:
            weight_row = weight_row / (weight_row.sum() + 1e-20)
        weights.append(weight_row * limits.routed_scaling_factor)
        ids.append(torch.tensor(chosen, device=x.device))
    shape = (len(x), limits.num_experts_per_tok)
    if not weights:
        return torch.empty(shape, device=x.device), torch.empty(shape, dtype=torch.int64, device=x.device)
    return torch.stack(weights), torch.stack(ids)


def _torch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, limits: Limits
) -> tuple[torch.Tensor, torch.Tensor]:
    # 1 / (1 + exp(-x)) and not sigmoid: sigmoid's vector and scalar paths round differently, so a row's value would
    # depend on where a thread's share of the batch ends.
    scores = F.linear(x.float(), weight).neg_().exp_().add_(1).reciprocal_()
    choice = scores + bias
    if limits.topk_group < limits.n_group:
        grouped = choice.view(len(choice), limits.n_group, -1)
        group_scores = grouped.topk(2, -1)[0].sum(-1)
        dropped = group_scores.topk(limits.n_group - limits.topk_group, -1, largest=False, sorted=False)[1]
        grouped.scatter_(1, dropped[..., None].expand(-1, -1, grouped.shape[-1]), float("-inf"))
    ids = choice.topk(limits.num_experts_per_tok, -1)[1]
    weights = scores.gather(1, ids)
    if limits.norm_topk_prob:
        weights /= weights.sum(-1, keepdim=True) + 1e-20
    return weights.mul_(limits.routed_scaling_factor), ids


BACKENDS = (Backend("torch", _torch), Backend("reference", reference))
