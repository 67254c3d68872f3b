"""Choose each token's experts from their logits: sigmoid scores, group limits, correction bias.

logits   [num_tokens, num_experts]  fp32, x @ router^T; may be overwritten
bias     [num_experts]              fp32, added for the choice only (e_score_correction_bias)
returns  weights [num_tokens, top_k] fp32, ids [num_tokens, top_k] int64, best choice first

Choice score = sigmoid(logit) + bias. A group scores the sum of its two best choice scores; experts outside the
`topk_group` best groups are out. The weight is the sigmoid without bias, divided by (sum + 1e-20) when `norm_topk_prob`,
times `routed_scaling_factor`. Rows do not look at each other; an exact tie goes to the lower id in `c` and `reference`.
Source: DeepSeek-V3 report 2.1.2; transformers for the epsilon.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels import cpu_library
from kernels.select import Backend

LANES = 8  # as in cpu.c


class Limits(NamedTuple):
    """The checkpoint's routing numbers, named as in config.json."""

    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float


def reference(logits: torch.Tensor, bias: torch.Tensor, limits: Limits) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (len(logits), limits.num_experts_per_tok)
    weights = torch.empty(shape, device=logits.device)
    ids = torch.empty(shape, dtype=torch.int64, device=logits.device)
    size = logits.shape[1] // limits.n_group
    for token, scores in enumerate(torch.sigmoid(logits)):
        choice = (scores + bias).tolist()
        groups = [choice[g * size : (g + 1) * size] for g in range(limits.n_group)]
        kept = sorted(range(limits.n_group), key=lambda g: -sum(sorted(groups[g])[-2:]))[: limits.topk_group]
        allowed = [expert for expert in range(len(choice)) if expert // size in kept]
        chosen = sorted(allowed, key=lambda expert: -choice[expert])[: limits.num_experts_per_tok]
        ids[token] = torch.tensor(chosen)
        weights[token] = scores[chosen]
    if limits.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * limits.routed_scaling_factor, ids


def _torch(logits: torch.Tensor, bias: torch.Tensor, limits: Limits) -> tuple[torch.Tensor, torch.Tensor]:
    # 1 / (1 + exp(-x)) and not sigmoid: sigmoid's vector and scalar paths round differently, so a row's value would
    # depend on where a thread's share of the batch ends.
    scores = logits.neg_().exp_().add_(1).reciprocal_()
    choice = scores + bias
    if limits.topk_group < limits.n_group:
        grouped = choice.view(len(choice), limits.n_group, choice.shape[1] // limits.n_group)
        group_scores = grouped.topk(2, -1)[0].sum(-1)
        dropped = group_scores.topk(limits.n_group - limits.topk_group, -1, largest=False, sorted=False)[1]
        grouped.scatter_(1, dropped[..., None].expand(-1, -1, grouped.shape[-1]), float("-inf"))
    ids = choice.topk(limits.num_experts_per_tok, -1)[1]
    weights = scores.gather(1, ids)
    if limits.norm_topk_prob:
        weights /= weights.sum(-1, keepdim=True) + 1e-20
    return weights.mul_(limits.routed_scaling_factor), ids


def _c(logits: torch.Tensor, bias: torch.Tensor, limits: Limits) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, experts = logits.shape
    if experts % LANES:
        logits = torch.nn.functional.pad(logits, (0, -experts % LANES))
    weights = logits.new_empty(tokens, limits.num_experts_per_tok)
    ids = torch.empty(weights.shape, dtype=torch.int64)
    scratch = logits.new_empty(logits.shape[1])
    cpu_library.library().hr_gate(
        logits.data_ptr(), logits.shape[1], tokens, experts, bias.data_ptr(), limits.n_group, limits.topk_group,
        limits.num_experts_per_tok, limits.norm_topk_prob, limits.routed_scaling_factor,
        weights.data_ptr(), ids.data_ptr(), scratch.data_ptr(),
    )  # fmt: skip
    return weights, ids


BACKENDS = (
    Backend("c", _c, why_not=cpu_library.why_not),
    Backend("torch", _torch),
    Backend("reference", reference),
)
