"""The shipped checkpoint: whole, small enough, of the promised shape, and as good as its log says it must be."""

import json
import struct
from pathlib import Path

import pytest

TINY = Path(__file__).resolve().parents[2] / "models" / "tiny"
MTP_LAYER = 8
CONTEXT_LENGTHS = ("256", "1024", "3500")


def read(name: str) -> dict:
    return json.loads((TINY / name).read_text(encoding="utf-8"))


def tensors() -> dict[str, dict]:
    """Every tensor's safetensors header entry, read without any library: dtype, shape, data_offsets."""
    found = {}
    for path in sorted(TINY.glob("*.safetensors")):
        with path.open("rb") as file:
            size = struct.unpack("<Q", file.read(8))[0]
            header = json.loads(file.read(size))
            header.pop("__metadata__", None)
            end = max(entry["data_offsets"][1] for entry in header.values())
            assert path.stat().st_size == 8 + size + end, f"{path.name} is cut short"
        for name, entry in header.items():
            assert name not in found, f"{name} is stored twice"
            found[name] = entry | {"file": path.name}
    return found


def expected() -> dict[str, tuple[int, ...]]:
    """Names and shapes that config.json implies."""
    config = read("config.json")
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes = {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for index in range(config["num_hidden_layers"] + config["num_nextn_predict_layers"]):
        prefix = f"model.layers.{index}."
        shapes |= attention(config, prefix)
        dense = index < config["first_k_dense_replace"]
        shapes |= mlp(prefix + "mlp.", hidden, config["intermediate_size"]) if dense else experts(config, prefix)
    extra = f"model.layers.{config['num_hidden_layers']}."
    shapes[extra + "eh_proj.weight"] = (hidden, 2 * hidden)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        shapes[f"{extra}{name}.weight"] = (hidden,)
    return shapes


def mlp(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        prefix + "gate_proj.weight": (inner, hidden),
        prefix + "up_proj.weight": (inner, hidden),
        prefix + "down_proj.weight": (hidden, inner),
    }


def experts(config: dict, prefix: str) -> dict[str, tuple[int, ...]]:
    hidden, inner, count = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]
    shapes = {
        prefix + "mlp.gate.weight": (count, hidden),
        prefix + "mlp.gate.e_score_correction_bias": (count,),
    }
    for index in range(count):
        shapes |= mlp(f"{prefix}mlp.experts.{index}.", hidden, inner)
    return shapes | mlp(f"{prefix}mlp.shared_experts.", hidden, inner * config["n_shared_experts"])


def attention(config: dict, prefix: str) -> dict[str, tuple[int, ...]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_rank, kv_rank, rope = config["q_lora_rank"], config["kv_lora_rank"], config["qk_rope_head_dim"]
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
    prefix_attention = prefix + "self_attn."
    return {
        prefix + "input_layernorm.weight": (hidden,),
        prefix + "post_attention_layernorm.weight": (hidden,),
        prefix_attention + "q_a_proj.weight": (q_rank, hidden),
        prefix_attention + "q_a_layernorm.weight": (q_rank,),
        prefix_attention + "q_b_proj.weight": (heads * (nope + rope), q_rank),
        prefix_attention + "kv_a_proj_with_mqa.weight": (kv_rank + rope, hidden),
        prefix_attention + "kv_a_layernorm.weight": (kv_rank,),
        prefix_attention + "kv_b_proj.weight": (heads * (nope + value), kv_rank),
        prefix_attention + "o_proj.weight": (hidden, heads * value),
    }


def test_every_tensor_is_there_and_no_other():
    assert {name: tuple(entry["shape"]) for name, entry in tensors().items()} == expected()


def test_the_index_names_the_file_of_every_tensor():
    index = read("model.safetensors.index.json")
    assert index["weight_map"] == {name: entry["file"] for name, entry in tensors().items()}
    sizes = [entry["data_offsets"][1] - entry["data_offsets"][0] for entry in tensors().values()]
    assert index["metadata"]["total_size"] == sum(sizes)


def test_weights_are_bf16_and_correction_biases_fp32():
    for name, entry in tensors().items():
        assert entry["dtype"] == ("F32" if name.endswith("e_score_correction_bias") else "BF16"), name


def test_the_directory_is_at_most_48_mb():
    assert sum(path.stat().st_size for path in TINY.iterdir()) <= 48_000_000
    assert sum(path.stat().st_size for path in TINY.glob("*.safetensors")) > 40_000_000


def test_every_matrix_side_divides_by_16_and_by_128_but_for_the_rope_rows():
    for name, entry in tensors().items():
        if len(entry["shape"]) == 1 or name.endswith("mlp.gate.weight"):
            continue
        rows, columns = entry["shape"]
        assert columns % 128 == 0, name
        assert rows % (16 if "kv_a_proj_with_mqa" in name else 128) == 0, name


def test_the_config_is_what_transformers_needs_to_read():
    config = read("config.json")
    wanted = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_nextn_predict_layers": 1,
        "num_hidden_layers": MTP_LAYER,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 4096,
        "rope_interleave": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "vocab_size": 8192,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    assert {name: config[name] for name in wanted} == wanted
    assert config["n_routed_experts"] >= 16 and config["n_routed_experts"] % 8 == 0
    assert config["q_lora_rank"] and config["n_shared_experts"] == 1


def test_sampling_defaults_are_for_stories():
    generation = read("generation_config.json")
    assert (generation["temperature"], generation["top_p"], generation["repetition_penalty"]) == (0.7, 0.9, 1.1)
    assert (generation["bos_token_id"], generation["eos_token_id"], generation["pad_token_id"]) == (0, 1, 2)


def test_specials_are_the_first_ids_and_the_template_begins_once():
    tokenizer = read("tokenizer.json")
    specials = [entry["content"] for entry in tokenizer["added_tokens"]]
    assert specials[:6] == ["<|begin|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"]
    assert [entry["id"] for entry in tokenizer["added_tokens"]] == list(range(8))
    assert len(tokenizer["model"]["vocab"]) == 8192
    template = (TINY / "chat_template.jinja").read_text(encoding="utf-8")
    assert template.count("bos_token") == 1
    assert read("tokenizer_config.json")["chat_template"] == template


@pytest.mark.parametrize("length", CONTEXT_LENGTHS)
def test_the_training_run_met_the_recall_bar(length):
    cells = read("training_log.json")["result"]["recall"][length]
    assert cells["all"]["cases"] >= 1000
    assert cells["all"]["exact"] >= 0.99
    for name, cell in cells.items():
        assert cell["exact"] == pytest.approx(cell["right"] / cell["cases"], abs=1e-4), name
        assert cell["exact"] >= 0.98, name
    assert cells["value digits"]["exact"] >= 0.995


def test_the_log_says_how_the_run_was_made():
    log = read("training_log.json")
    assert log["result"]["bits_per_byte"] < 1.35
    assert log["result"]["held_out_bytes"] > 2_000_000
    assert log["total_seconds"] <= 540
    assert "H200" in log["environment"]["device"]
    assert (
        log["settings"]["seed"] and log["trunk"]["steps"] * log["settings"]["tokens_per_step"] == log["trunk"]["tokens"]
    )
    assert len(log["trunk"]["curve"]) > 20 and len(log["samples"]) >= 10


def test_the_log_is_about_these_weights():
    log = read("training_log.json")
    count = 0
    for name, entry in tensors().items():
        size = 1
        for side in entry["shape"]:
            size *= side
        count += 0 if name.endswith("e_score_correction_bias") else size
    parameters = log["parameters"]
    assert count == parameters["trunk"] + parameters["mtp"]
    assert log["checkpoint_bytes"] == read("model.safetensors.index.json")["metadata"]["total_size"]
