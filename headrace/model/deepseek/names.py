"""The one table of checkpoint names: every tensor of an architecture, its shape, and whether it may be quantised.

Names are those of Hugging Face's DeepSeek-V3 directories. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.model.deepseek.config import ModelConfig


@dataclass(frozen=True)
class Wanted:
    """A tensor the checkpoint should hold. `quantisable`: may be FP8 or NVFP4. `optional`: a copy we can do without."""

    shape: tuple[int, ...]
    quantisable: bool = False
    optional: bool = False


def expected_tensors(config: ModelConfig) -> dict[str, Wanted]:
    """Every tensor name of this architecture without its MTP layers, by checkpoint name."""
    table = {
        "model.embed_tokens.weight": Wanted((config.vocab_size, config.hidden_size)),
        "model.norm.weight": Wanted((config.hidden_size,)),
        "lm_head.weight": Wanted((config.vocab_size, config.hidden_size), optional=config.tie_word_embeddings),
    }
    for layer in range(config.num_hidden_layers):
        table.update(_layer_tensors(config, layer))
    return table


def expected_mtp_tensors(config: ModelConfig) -> dict[str, Wanted]:
    """The next-token layers: one decoder layer each, its norms, its projection, and optional embedding copies."""
    hidden, table = config.hidden_size, {}
    for layer in range(config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers):
        table.update(_layer_tensors(config, layer))
        copy = Wanted((config.vocab_size, hidden), optional=True)
        own = {
            "enorm.weight": Wanted((hidden,)),
            "hnorm.weight": Wanted((hidden,)),
            "eh_proj.weight": Wanted((hidden, 2 * hidden)),
            "shared_head.norm.weight": Wanted((hidden,)),
            "shared_head.head.weight": copy,
            "embed_tokens.weight": copy,
        }
        table.update({f"model.layers.{layer}.{name}": wanted for name, wanted in own.items()})
    return table


def _layer_tensors(config: ModelConfig, layer: int) -> dict[str, Wanted]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    q_rows = heads * config.qk_head_dim
    table = {
        "input_layernorm.weight": Wanted((hidden,)),
        "post_attention_layernorm.weight": Wanted((hidden,)),
        "self_attn.kv_a_proj_with_mqa.weight": Wanted((config.row_dim, hidden), True),
        "self_attn.kv_a_layernorm.weight": Wanted((config.kv_lora_rank,)),
        "self_attn.kv_b_proj.weight": Wanted(
            (heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank), True
        ),
        "self_attn.o_proj.weight": Wanted((hidden, heads * config.v_head_dim), True),
    }
    if config.q_lora_rank is None:
        table["self_attn.q_proj.weight"] = Wanted((q_rows, hidden), True)
    else:
        table["self_attn.q_a_proj.weight"] = Wanted((config.q_lora_rank, hidden), True)
        table["self_attn.q_a_layernorm.weight"] = Wanted((config.q_lora_rank,))
        table["self_attn.q_b_proj.weight"] = Wanted((q_rows, config.q_lora_rank), True)
    if not config.is_moe_layer(layer):
        table.update(_ffn_tensors("mlp", hidden, config.intermediate_size))
    else:
        table["mlp.gate.weight"] = Wanted((config.n_routed_experts, hidden))
        table["mlp.gate.e_score_correction_bias"] = Wanted((config.n_routed_experts,))
        for expert in range(config.n_routed_experts):
            table.update(_ffn_tensors(f"mlp.experts.{expert}", hidden, config.moe_intermediate_size))
        if config.n_shared_experts:
            inner = config.moe_intermediate_size * config.n_shared_experts
            table.update(_ffn_tensors("mlp.shared_experts", hidden, inner))
    return {f"model.layers.{layer}.{name}": wanted for name, wanted in table.items()}


def _ffn_tensors(prefix: str, hidden: int, inner: int) -> dict[str, Wanted]:
    return {
        f"{prefix}.gate_proj.weight": Wanted((inner, hidden), True),
        f"{prefix}.up_proj.weight": Wanted((inner, hidden), True),
        f"{prefix}.down_proj.weight": Wanted((hidden, inner), True),
    }
