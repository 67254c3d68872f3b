"""What one step of a DeepSeek-class model must move and multiply on one rank, op by op, and how long that takes at best.

The time of an op is the larger of its bytes over the copy rate and its FLOP over the matrix rate of its dtype; a step is
the sum over its ops. Every input is read once and every output written once, weights included; ops are those of the
fused plan in `headrace/model/deepseek/fused.py`. Shapes come from the model's config. Communication is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.model.deepseek.config import ModelConfig
from headrace.planning.ceilings import Ceilings

BF16, FP8, FP32 = 2.0, 1.0 + 4 / 128, 4.0
"""Bytes an element; fp8 with its fp32 scale for each 128."""
FP8_WEIGHT = 1.0
NVFP4_WEIGHT = 0.5 + 1 / 16


@dataclass(frozen=True)
class Op:
    """`count` equal calls in a step, each of `num_bytes` and `flops`; `dtype` names the matrix rate (bf16 or fp8)."""

    name: str
    count: int
    num_bytes: float
    flops: float = 0.0
    dtype: str = "bf16"

    def limit_us(self, ceilings: Ceilings) -> float:
        """All calls together, microseconds."""
        return self.count * ceilings.limit_us(self.num_bytes, self.flops, self.dtype)


@dataclass(frozen=True)
class Share:
    """What one rank of an expert-parallel group holds and gets in a step.

    tokens           of its own
    expert_rows      rows that all ranks together send to its experts
    local_experts    routed experts it holds
    attended         sum over its tokens of the rows each attends to (decode: contexts; prefill: causal pairs)
    context_rows     rows of KV its sequences have, each read once by decode
    logits           tokens whose logits are taken
    kv_bytes         of one value in the pool
    expert_weight_bytes  of one routed weight
    query_dtype      that decode attention multiplies in: bf16, or fp8 where the queries are e4m3 as well
    """

    tokens: int
    expert_rows: int
    local_experts: int
    attended: float
    context_rows: int
    logits: int
    kv_bytes: float = 2.0
    expert_weight_bytes: float = FP8_WEIGHT
    query_dtype: str = "bf16"


def step_ops(config: ModelConfig, share: Share, phase: str) -> list[Op]:
    """Every op of one step; `phase` is `decode` or `prefill`."""
    layers = config.num_hidden_layers
    moe = sum(config.is_moe_layer(layer) for layer in range(layers))
    ops = [*_attention(config, share, phase, layers), *_moe(config, share, moe)]
    if layers > moe:
        ops += list(_ffn("dense", config, share.tokens, config.intermediate_size, layers - moe))
    ops += _ends(config, share)
    return ops


def _linear(name: str, rows: float, n: int, k: int, count: int) -> Op:
    """[rows, k] e4m3 times [n, k] e4m3 to bf16."""
    return Op(name, count, rows * k * FP8 + n * k * FP8_WEIGHT + rows * n * BF16, 2.0 * rows * n * k, "fp8")


def _attention(config: ModelConfig, share: Share, phase: str, layers: int) -> Iterator[Op]:
    t, hidden, heads = share.tokens, config.hidden_size, config.num_attention_heads
    nope, rope, value, latent = (
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.v_head_dim,
        config.kv_lora_rank,
    )
    lora = config.q_lora_rank or 0
    row, qk = config.row_dim, config.qk_head_dim
    yield Op("norm_quantise", layers, t * hidden * (3 * BF16 + FP8))
    yield _linear("qkv_a", t, (lora or heads * qk) + row, hidden, layers)
    if lora:
        yield Op("q_norm_quantise", layers, t * lora * (BF16 + FP8))
        yield _linear("q_b", t, heads * qk, lora, layers)
    if phase == "decode":
        yield Op("latent_store", layers, t * (2 * heads * rope * BF16 + row * (BF16 + share.kv_bytes)))
        yield _per_head("absorb_q", t, heads, latent, nope, layers)
        flops = 2.0 * heads * (row + latent) * share.attended
        moved = share.context_rows * row * share.kv_bytes + t * heads * (row + latent) * BF16
        yield Op("mla_decode", layers, moved, flops, share.query_dtype)
        yield _per_head("absorb_o", t, heads, value, latent, layers)
    else:
        yield Op("latent_store", layers, t * (2 * heads * rope * BF16 + row * (2 * BF16 + share.kv_bytes)))
        yield Op("latent_quantise", layers, t * latent * (BF16 + FP8))
        yield _linear("kv_b", t, heads * (nope + value), latent, layers)
        yield Op("concat_mla_k", layers, t * (heads * nope * BF16 + rope * BF16 + heads * qk * BF16))
        moved = t * heads * (2 * qk + 2 * value) * BF16
        yield Op("mla_prefill", layers, moved, 2.0 * heads * (qk + value) * share.attended)
    yield Op("quantise_o", layers, t * heads * value * (BF16 + FP8))
    yield _linear("o_proj", t, hidden, heads * value, layers)


def _per_head(name: str, t: int, heads: int, n: int, k: int, count: int) -> Op:
    """One bf16 product a head."""
    return Op(name, count, heads * (t * k + n * k + t * n) * BF16, 2.0 * heads * t * n * k)


def _moe(config: ModelConfig, share: Share, layers: int) -> Iterator[Op]:
    if not layers:
        return
    t, hidden, inner, rows = share.tokens, config.hidden_size, config.moe_intermediate_size, share.expert_rows
    experts = config.n_routed_experts
    yield Op("ffn_norm_quantise", layers, t * hidden * (4 * BF16 + FP8))
    yield Op("router", layers, (t + experts) * hidden * BF16 + t * experts * FP32, 2.0 * t * experts * hidden)
    yield Op("gate", layers, t * (experts * FP32 + config.num_experts_per_tok * 8))
    yield Op("permute", layers, 2 * rows * hidden * FP8)
    yield _grouped("experts_gate_up", rows, 2 * inner, hidden, share, layers)
    yield Op("experts_silu_mul", layers, rows * inner * (2 * BF16 + FP8))
    yield _grouped("experts_down", rows, hidden, inner, share, layers)
    yield Op("combine", layers, (t * config.num_experts_per_tok + 2 * t) * hidden * BF16)
    if config.n_shared_experts:
        yield from _ffn("shared", config, t, inner * config.n_shared_experts, layers)


def _grouped(name: str, rows: int, n: int, k: int, share: Share, count: int) -> Op:
    moved = rows * k * FP8 + share.local_experts * n * k * share.expert_weight_bytes + rows * n * BF16
    return Op(name, count, moved, 2.0 * rows * n * k, "fp8")


def _ffn(prefix: str, config: ModelConfig, t: int, inner: int, count: int) -> Iterator[Op]:
    yield _linear(f"{prefix}_gate_up", t, 2 * inner, config.hidden_size, count)
    yield Op(f"{prefix}_silu_mul", count, t * inner * (2 * BF16 + FP8))
    yield _linear(f"{prefix}_down", t, config.hidden_size, inner, count)


def _ends(config: ModelConfig, share: Share) -> list[Op]:
    hidden, vocab = config.hidden_size, config.vocab_size
    head = Op(
        "head",
        1,
        (share.logits + vocab) * hidden * BF16 + share.logits * vocab * FP32,
        2.0 * share.logits * vocab * hidden,
    )
    return [
        Op("embedding", 1, 2 * share.tokens * hidden * BF16),
        head,
        Op("sampling", 1, share.logits * vocab * FP32),
    ]


def total_us(ops: list[Op], ceilings: Ceilings) -> float:
    """The roofline time of a step, microseconds."""
    return sum(op.limit_us(ceilings) for op in ops)
