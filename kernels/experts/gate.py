"""Choose each token's experts from their logits: sigmoid scores, group limits, correction bias.

logits   [num_tokens, num_experts]  fp32, x @ router^T; may be overwritten
bias     [num_experts]              fp32, added for the choice only (e_score_correction_bias)
returns  weights [num_tokens, top_k] fp32, ids [num_tokens, top_k] int64 (`triton`: int32), best choice first

Choice score = sigmoid(logit) + bias. A group scores the sum of its two best choice scores; experts outside the
`topk_group` best groups are out. The weight is the sigmoid without bias, divided by (sum + 1e-20) when `norm_topk_prob`,
times `routed_scaling_factor`. Rows do not look at each other; an exact tie goes to the lower id in `c`, `triton` and
`reference`. `triton` ranks NaN last, so that even then the ids of a row are distinct and in range (its weights are NaN).
Source: DeepSeek-V3 report 2.1.2; transformers for the epsilon.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.select import Backend
from kernels.toolchain import cpu_library
from kernels.toolchain.triton_support import jit, needs_triton, overlap, tl, triton, wait_for_previous

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


@jit
def _sigmoid(logits):
    return 1.0 / (1.0 + tl.exp(-logits))


@jit
def _best_two(best, second, other_best, other_second):
    return tl.maximum(best, other_best), tl.maximum(tl.minimum(best, other_best), tl.maximum(second, other_second))


@jit
def _gate_kernel(
    logits, row_stride, bias, weights, ids, num_tokens, n_group, size, factor,
    KEPT: tl.constexpr, TOP_K: tl.constexpr, NORM: tl.constexpr,
    TOKENS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, CHOICES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """TOKENS rows a program. Maxima are of integers in the order of the scores: a warp has an instruction for those."""
    wait_for_previous(OVERLAP)
    row = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    lane = tl.arange(0, GROUPS * SIZE)
    group, member = lane // SIZE, lane % SIZE
    expert, exists = group * size + member, (group < n_group) & (member < size)
    here = (row < num_tokens)[:, None] & exists[None, :]
    seen = tl.load(logits + row[:, None] * row_stride + expert[None, :], mask=here, other=0.0)
    choice = _sigmoid(seen) + tl.load(bias + expert, mask=exists, other=0.0)[None, :]
    choice = tl.where(choice == choice, choice, -1e30)
    bits = choice.to(tl.int32, bitcast=True)
    key = tl.where(exists[None, :], tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), -0x80000000)
    if KEPT < GROUPS:
        grouped = tl.reshape(tl.where(exists[None, :], choice, float("-inf")), (TOKENS, GROUPS, SIZE))
        best, second = tl.reduce((grouped, tl.full(grouped.shape, float("-inf"), tl.float32)), 2, _best_two)
        score = best + second if SIZE > 1 else best
        index = tl.arange(0, GROUPS)
        one, other = score[:, :, None], score[:, None, :]
        better = (other > one) | ((other == one) & (index[None, None, :] < index[None, :, None]))
        kept = tl.sum(better.to(tl.int32), 2) < KEPT
        kept = tl.reshape(tl.broadcast_to(kept[:, :, None], (TOKENS, GROUPS, SIZE)), (TOKENS, GROUPS * SIZE))
        key = tl.where(kept, key, -0x80000000)
    column = tl.arange(0, CHOICES)
    chosen = tl.zeros((TOKENS, CHOICES), tl.int32)
    for k in tl.static_range(TOP_K):
        top = tl.max(key, 1)
        winner = tl.min(tl.where(key == top[:, None], expert[None, :], 1 << 30), 1)
        chosen = tl.where((column == k)[None, :], winner[:, None], chosen)
        key = tl.where(expert[None, :] == winner[:, None], -0x80000000, key)
    here = (row < num_tokens)[:, None] & (column < TOP_K)[None, :]
    weight = _sigmoid(tl.load(logits + row[:, None] * row_stride + chosen, mask=here, other=0.0))
    weight = tl.where((column < TOP_K)[None, :], weight, 0.0)
    if NORM:
        weight = weight / (tl.sum(weight, 1) + 1e-20)[:, None]
    to = row[:, None] * TOP_K + column[None, :]
    tl.store(weights + to, weight * factor, mask=here)
    tl.store(ids + to, chosen, mask=here)


def _triton(
    logits: torch.Tensor, bias: torch.Tensor, limits: Limits, per_program: int = 1, num_warps: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, experts = logits.shape
    top_k, size = limits.num_experts_per_tok, experts // limits.n_group
    if top_k > limits.topk_group * size or logits.stride(1) != 1:
        raise ValueError(f"top {top_k} of {limits.topk_group} groups of {size} experts; logits {tuple(logits.shape)}")
    weights = torch.empty(tokens, top_k, device=logits.device)
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    groups = triton.next_power_of_2(limits.n_group)
    if tokens:
        _gate_kernel[(triton.cdiv(tokens, per_program),)](
            logits, logits.stride(0), bias, weights, ids, tokens, limits.n_group, size, limits.routed_scaling_factor,
            limits.topk_group, top_k, limits.norm_topk_prob,
            per_program, groups, triton.next_power_of_2(size), triton.next_power_of_2(top_k),
            num_warps=num_warps, **overlap(logits.device),
        )  # fmt: skip
    return weights, ids


BACKENDS = (
    Backend("triton", _triton, why_not=needs_triton),
    Backend("c", _c, why_not=cpu_library.why_not),
    Backend("torch", _torch),
    Backend("reference", reference),
)
