"""Write a small DeepSeek-V3 checkpoint with weights drawn from a seed: for tests, golden values and benches.

Numpy only, and from integers only, so that any environment makes the same bytes. Weights are bf16 on disk, the
correction bias fp32, names and layout as Hugging Face's.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

TINY_SHAPE: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 768,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_interleave": True,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
    "hidden_act": "silu",
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def write_random_checkpoint(directory: str | Path, config: Mapping[str, Any] | None = None, *, seed: int = 0) -> Path:
    """Write config.json and model.safetensors for TINY_SHAPE overlaid with `config`; answers the directory."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    full = {**TINY_SHAPE, **(config or {})}
    (directory / "config.json").write_text(json.dumps(full, indent=1), encoding="utf-8")
    write_safetensors(directory / "model.safetensors", random_tensors(full, seed))
    return directory


def random_tensors(config: Mapping[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Checkpoint name -> fp32 values; all but the correction bias are exact in bf16."""
    random = np.random.Generator(np.random.PCG64(seed))

    def uniform(shape: tuple[int, ...], spread: float) -> np.ndarray:
        whole = random.integers(-(1 << 20), 1 << 20, size=shape, dtype=np.int64, endpoint=True)
        return _round_to_bf16((whole * (spread / (1 << 20))).astype(np.float32))

    tensors = {}
    for name, shape in _shapes(config).items():
        if name.endswith("norm.weight"):
            tensors[name] = 1 + uniform(shape, 0.25)
        elif name.endswith("correction_bias"):
            tensors[name] = uniform(shape, 0.1)
        elif name == "model.embed_tokens.weight":
            tensors[name] = uniform(shape, 0.5)
        else:
            tensors[name] = uniform(shape, (3 / shape[-1]) ** 0.5)
    return {name: _round_to_bf16(values) for name, values in tensors.items()}


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads, latent = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        attention = prefix + "self_attn."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        q_lora = config["q_lora_rank"]
        if q_lora is None:
            shapes[attention + "q_proj.weight"] = (heads * (nope + rope), hidden)
        else:
            shapes[attention + "q_a_proj.weight"] = (q_lora, hidden)
            shapes[attention + "q_a_layernorm.weight"] = (q_lora,)
            shapes[attention + "q_b_proj.weight"] = (heads * (nope + rope), q_lora)
        shapes[attention + "kv_a_proj_with_mqa.weight"] = (latent + rope, hidden)
        shapes[attention + "kv_a_layernorm.weight"] = (latent,)
        shapes[attention + "kv_b_proj.weight"] = (heads * (nope + value), latent)
        shapes[attention + "o_proj.weight"] = (hidden, heads * value)
        if layer < config["first_k_dense_replace"]:
            shapes.update(_ffn_shapes(prefix + "mlp", hidden, config["intermediate_size"]))
            continue
        inner = config["moe_intermediate_size"]
        shapes[prefix + "mlp.gate.weight"] = (config["n_routed_experts"], hidden)
        shapes[prefix + "mlp.gate.e_score_correction_bias"] = (config["n_routed_experts"],)
        for expert in range(config["n_routed_experts"]):
            shapes.update(_ffn_shapes(f"{prefix}mlp.experts.{expert}", hidden, inner))
        if config["n_shared_experts"]:
            shapes.update(_ffn_shapes(prefix + "mlp.shared_experts", hidden, inner * config["n_shared_experts"]))
    return shapes


def _ffn_shapes(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }


def _round_to_bf16(values: np.ndarray) -> np.ndarray:
    """Towards zero, which is all a random weight needs."""
    return (values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """fp32 arrays to one safetensors file: BF16, except the correction bias (F32)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    chunks, offset = [], 0
    for name, values in tensors.items():
        wide = name.endswith("correction_bias")
        data = values.tobytes() if wide else (values.view(np.uint32) >> np.uint32(16)).astype("<u2").tobytes()
        header[name] = {
            "dtype": "F32" if wide else "BF16",
            "shape": list(values.shape),
            "data_offsets": [offset, offset + len(data)],
        }
        chunks.append(data)
        offset += len(data)
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + b"".join(chunks))
