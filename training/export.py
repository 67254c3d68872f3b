"""Write the trained model as a Hugging Face DeepSeek-V3 directory: bf16 shards, index, config, generation config."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from training.model import Attention, DenseLayer, ExpertLayer, TinyModel
from training.settings import ModelShape

SHARD_BYTES = 15_500_000
BEGIN_ID, END_ID, PAD_ID = 0, 1, 2


def config(shape: ModelShape) -> dict:
    """`config.json` as `DeepseekV3ForCausalLM` reads it."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": BEGIN_ID,
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
        "first_k_dense_replace": shape.num_dense_layers,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "kv_lora_rank": shape.kv_lora_rank,
        "max_position_embeddings": shape.max_context,
        "moe_intermediate_size": shape.expert_size,
        "moe_layer_freq": 1,
        "n_group": shape.num_groups,
        "n_routed_experts": shape.num_experts,
        "n_shared_experts": shape.num_shared_experts,
        "norm_topk_prob": True,
        "num_attention_heads": shape.num_heads,
        "num_experts_per_tok": shape.experts_per_token,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_heads,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": shape.q_lora_rank,
        "qk_nope_head_dim": shape.nope_dim,
        "qk_rope_head_dim": shape.rope_dim,
        "rms_norm_eps": shape.norm_epsilon,
        "rope_interleave": True,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "routed_scaling_factor": shape.routed_scaling_factor,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": shape.groups_kept,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "v_head_dim": shape.v_dim,
        "vocab_size": shape.vocab_size,
    }


GENERATION_CONFIG = {
    "bos_token_id": BEGIN_ID,
    "eos_token_id": END_ID,
    "pad_token_id": PAD_ID,
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.9,
    "repetition_penalty": 1.1,
}


def named_tensors(model: TinyModel) -> dict[str, Tensor]:
    """Every tensor under its checkpoint name: bf16, correction biases fp32. The MTP layer's copies of embedding and
    vocabulary projection are left out; readers take the trunk's."""
    tensors = {
        "model.embed_tokens.weight": model.embedding,
        "model.norm.weight": model.head.norm,
        "lm_head.weight": model.projection,
    }
    for index, layer in enumerate(model.layers):
        tensors |= _layer(f"model.layers.{index}.", layer)
    prefix = f"model.layers.{model.shape.num_layers}."
    tensors |= _layer(prefix, model.mtp.layer)
    tensors[prefix + "enorm.weight"] = model.mtp.enorm
    tensors[prefix + "hnorm.weight"] = model.mtp.hnorm
    tensors[prefix + "eh_proj.weight"] = model.mtp.eh_proj
    tensors[prefix + "shared_head.norm.weight"] = model.mtp.head.norm
    return {name: _stored(name, tensor) for name, tensor in tensors.items()}


def _stored(name: str, tensor: Tensor) -> Tensor:
    dtype = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
    return tensor.detach().to("cpu", dtype).contiguous().clone()


def _layer(prefix: str, layer: DenseLayer | ExpertLayer) -> dict[str, Tensor]:
    named = _attention(prefix, layer.attention)
    if isinstance(layer, DenseLayer):
        return named | _feed_forward(prefix + "mlp.", layer.gate, layer.up, layer.down)
    named[prefix + "mlp.gate.weight"] = layer.router
    named[prefix + "mlp.gate.e_score_correction_bias"] = layer.correction_bias
    routed = len(layer.router)
    for index in range(len(layer.gate)):
        name = f"mlp.experts.{index}." if index < routed else "mlp.shared_experts."
        named |= _feed_forward(prefix + name, layer.gate[index], layer.up[index], layer.down[index].T)
    return named


def _feed_forward(prefix: str, gate: Tensor, up: Tensor, down: Tensor) -> dict[str, Tensor]:
    return {
        prefix + "gate_proj.weight": gate,
        prefix + "up_proj.weight": up,
        prefix + "down_proj.weight": down,
    }


def _attention(prefix: str, attention: Attention) -> dict[str, Tensor]:
    return {
        prefix + "input_layernorm.weight": attention.input_norm,
        prefix + "post_attention_layernorm.weight": attention.post_norm,
        prefix + "self_attn.q_a_proj.weight": attention.q_a,
        prefix + "self_attn.q_a_layernorm.weight": attention.q_a_norm,
        prefix + "self_attn.q_b_proj.weight": attention.q_b,
        prefix + "self_attn.kv_a_proj_with_mqa.weight": attention.kv_a,
        prefix + "self_attn.kv_a_layernorm.weight": attention.kv_a_norm,
        prefix + "self_attn.kv_b_proj.weight": attention.kv_b,
        prefix + "self_attn.o_proj.weight": attention.o,
    }


def write_checkpoint(model: TinyModel, folder: Path) -> int:
    """Write shards, index, config and generation config; returns the bytes of the shards."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = _shards(named_tensors(model))
    weight_map = {}
    for index, shard in enumerate(shards):
        name = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    index_json = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / "model.safetensors.index.json", index_json)
    write_json(folder / "config.json", config(model.shape))
    write_json(folder / "generation_config.json", GENERATION_CONFIG)
    return total


def _shards(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Tensors in order, as few shards as SHARD_BYTES allows."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
