"""The random models whose golden values are stored here. Read by make_golden.py and by the tests; plain data only."""

from __future__ import annotations

from typing import Any

PROMPT_TOKENS = 48
GREEDY_TOKENS = 256

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "max_position_embeddings": 512,
}

YARN = {"type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 64}

CASES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "no_q_lora_yarn_tied_no_shared_no_dense": {
        "q_lora_rank": None,
        "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        "tie_word_embeddings": True,
        "n_shared_experts": 0,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "max_position_embeddings": 512,
    },
    "yarn_mscale_ratio_two_shared": {
        "rope_scaling": None,
        "rope_parameters": {
            **{key: value for key, value in YARN.items() if key != "type"},
            "rope_type": "yarn",
            "rope_theta": 50000.0,
            "factor": 8.0,
            "mscale": 0.7,
            "mscale_all_dim": 1.3,
        },
        "n_shared_experts": 2,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
    },
    "odd_heads_no_limits_unnormalised": {
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "q_lora_rank": None,
        "kv_lora_rank": 48,
        "qk_rope_head_dim": 8,
        "v_head_dim": 40,
        "topk_group": 4,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
    "yarn_without_mscale_two_dense": {"rope_scaling": YARN, "first_k_dense_replace": 2, "tie_word_embeddings": True},
}


def config_of(case: str) -> dict[str, Any]:
    return {**SMALL, **CASES[case]}


def seed_of(case: str) -> int:
    """Chosen so that no expert choice of the golden run is nearer to a tie than 1e-5 (a test checks it)."""
    return 200 + list(CASES).index(case)
