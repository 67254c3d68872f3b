"""Loading: what a checkpoint may hold, and what is said when it holds something else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.errors import CheckpointError
from headrace.model.deepseek.config import ModelConfig
from headrace.model.deepseek.loading import expected_mtp_tensors, load_transformer
from headrace.model.weights.random_checkpoint import TINY_SHAPE, write_random_checkpoint
from kernels.select import BackendUnavailable
from tests.core.model_driver import Driver

SMALL = {
    "vocab_size": 64,
    "hidden_size": 160,
    "intermediate_size": 136,
    "moe_intermediate_size": 144,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "q_lora_rank": 40,
    "kv_lora_rank": 136,  # with rope: 144 rows of kv_a_proj, no multiple of 128
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "max_position_embeddings": 64,
}
TOKENS = list(range(20, 44))


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    return write_random_checkpoint(tmp_path / "model", SMALL, seed=3)


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def rewrite(directory: Path, tensors: dict[str, torch.Tensor], **config) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    full = json.loads((directory / "config.json").read_text()) | config
    (directory / "config.json").write_text(json.dumps(full))
    return directory


def logits_of(directory: Path, **options) -> torch.Tensor:
    model = load_transformer(directory, exact=True, **options)
    return Driver(model, num_blocks=8).run([("a", TOKENS)], "prefill")["a"]


def shard(directory: Path, count: int = 3) -> None:
    tensors = tensors_of(directory)
    (directory / "model.safetensors").unlink()
    places = {}
    for number in range(count):
        name = f"model-{number + 1:05}-of-{count:05}.safetensors"
        part = dict(list(tensors.items())[number::count])
        save_file(part, directory / name)
        places.update(dict.fromkeys(part, name))
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def quantise(directory: Path) -> dict[str, torch.Tensor]:
    """Rewrite every projection as FP8 with 128 x 128 scales; answers the same tensors dequantised by plain loops."""
    quantised, plain = {}, {}
    for name, tensor in tensors_of(directory).items():
        if "proj" not in name:
            quantised[name] = plain[name] = tensor
            continue
        wide = tensor.float()
        scales = torch.empty(-(-wide.shape[0] // 128), -(-wide.shape[1] // 128))
        codes, back = torch.empty_like(wide, dtype=torch.float8_e4m3fn), torch.empty_like(wide)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                block = (slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1)))
                scales[i, j] = wide[block].abs().max() / 448 * (1 + 0.01 * (i + 2 * j))
                codes[block] = (wide[block] / scales[i, j]).to(torch.float8_e4m3fn)
                back[block] = codes[block].float() * scales[i, j]
        quantised |= {name: codes, f"{name}_scale_inv": scales}
        plain[name] = back
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    rewrite(directory, quantised, quantization_config=fp8)
    return plain


@pytest.mark.parametrize("kernels", [None, "torch"])
def test_fp8_blocks_give_the_logits_of_their_dequantised_weights(checkpoint, tmp_path, kernels):
    other = write_random_checkpoint(tmp_path / "other", SMALL, seed=3)
    original = logits_of(other, kernels=kernels)
    rewrite(other, quantise(checkpoint))
    fp8 = logits_of(checkpoint, kernels=kernels)
    assert torch.equal(fp8, logits_of(other, kernels=kernels))
    assert 1e-3 < (fp8 - original).abs().max() < 1, "quantised weights should differ a little from the original"
    assert ("attention projections", "fp8") in [
        (part, dtype[:3]) for part, dtype in load_transformer(checkpoint, exact=True).precision_table()
    ]


def test_an_fp8_tensor_without_its_scale_or_with_a_misshapen_one_is_named(checkpoint):
    quantise(checkpoint)
    tensors = tensors_of(checkpoint)
    del tensors["model.layers.0.self_attn.o_proj.weight_scale_inv"]
    tensors["model.layers.1.self_attn.kv_a_proj_with_mqa.weight_scale_inv"] = torch.ones(1, 2)
    rewrite(checkpoint, tensors)
    with pytest.raises(CheckpointError) as caught:
        load_transformer(checkpoint, exact=True)
    assert "missing model.layers.0.self_attn.o_proj.weight_scale_inv" in str(caught.value)
    assert "kv_a_proj_with_mqa.weight_scale_inv is [1, 2], expected [2, 2]" in str(caught.value)


def test_a_sharded_checkpoint_equals_the_whole_one(checkpoint):
    whole = logits_of(checkpoint)
    shard(checkpoint)
    assert torch.equal(logits_of(checkpoint), whole)


def test_fp16_and_fp32_tensors_are_taken_too(checkpoint):
    whole = logits_of(checkpoint)
    rewrite(checkpoint, {name: tensor.float() for name, tensor in tensors_of(checkpoint).items()})
    assert torch.equal(logits_of(checkpoint), whole)
    rewrite(checkpoint, {name: tensor.half() for name, tensor in tensors_of(checkpoint).items()})
    assert (logits_of(checkpoint) - whole).abs().max() < 0.05


def test_all_missing_extra_and_misshapen_tensors_are_named_at_once(checkpoint):
    tensors = tensors_of(checkpoint)
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"], tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.q_b_proj.weight"] = torch.zeros(48, 41)
    tensors["model.layers.7.input_layernorm.weight"] = torch.zeros(160)
    tensors["lm_head.weight"] = torch.zeros(64, 160, dtype=torch.int32)
    with pytest.raises(CheckpointError) as caught:
        load_transformer(rewrite(checkpoint, tensors), exact=True)
    for said in (
        "missing model.layers.1.mlp.experts.2.up_proj.weight",
        "missing model.norm.weight",
        "q_b_proj.weight is [48, 41], expected [48, 40]",
        "extra model.layers.7.input_layernorm.weight",
        "lm_head.weight has dtype I32",
    ):
        assert said in str(caught.value)


def test_mtp_tensors_are_kept_aside_and_change_nothing(checkpoint):
    whole = logits_of(checkpoint)
    config = ModelConfig.from_dict({**TINY_SHAPE, **SMALL, "num_nextn_predict_layers": 1})
    mtp = {name: torch.zeros(want.shape) for name, want in expected_mtp_tensors(config).items() if not want.optional}
    rewrite(checkpoint, tensors_of(checkpoint) | mtp, num_nextn_predict_layers=1)
    assert set(load_transformer(checkpoint, exact=True).mtp_tensors) == set(mtp)
    assert torch.equal(logits_of(checkpoint), whole)
    copies = {"model.layers.2.embed_tokens.weight": torch.zeros(64, 160)}
    rewrite(checkpoint, tensors_of(checkpoint) | copies)
    assert torch.equal(logits_of(checkpoint), whole)
    incomplete = tensors_of(checkpoint)
    del incomplete["model.layers.2.eh_proj.weight"]
    with pytest.raises(CheckpointError, match=r"missing model\.layers\.2\.eh_proj\.weight"):
        load_transformer(rewrite(checkpoint, incomplete), exact=True)


@pytest.mark.parametrize(
    "content, said",
    [(None, "holds no safetensors file"), (b"not safetensors", "cannot be read"), (b"", "cannot be read")],
)
def test_a_directory_without_readable_weights_says_so(checkpoint, content, said):
    path = checkpoint / "model.safetensors"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(CheckpointError, match=said):
        load_transformer(checkpoint, exact=True)


def test_an_index_that_names_a_lost_shard_says_which(checkpoint):
    shard(checkpoint)
    (checkpoint / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00003"):
        load_transformer(checkpoint, exact=True)


def test_kernels_that_do_not_fit_the_model_are_refused_by_name_and_avoided_by_default(tmp_path):
    odd = write_random_checkpoint(tmp_path, {**SMALL, "kv_lora_rank": 20, "qk_rope_head_dim": 6}, seed=1)
    assert load_transformer(odd, exact=True).kernels.family == "torch"
    with pytest.raises(BackendUnavailable, match="multiple of 8"):
        load_transformer(odd, exact=True, kernels="c")


def test_exact_mode_is_fp32_whatever_is_asked(checkpoint):
    exact = load_transformer(checkpoint, exact=True, dtype=torch.bfloat16)
    assert (exact.dtype, exact.pool_dtype) == (torch.float32, torch.float32)


def test_fast_mode_in_bf16_stays_near_fp32(checkpoint):
    fast = load_transformer(checkpoint, exact=False, dtype=torch.bfloat16)
    driver = Driver(fast, num_blocks=8)
    got = [driver.run([("a", TOKENS[:20])], "prefill")["a"]]
    got += [driver.run([("a", [token])], "decode")["a"] for token in TOKENS[20:]]
    assert got[0].dtype == torch.float32
    assert (torch.cat(got) - logits_of(checkpoint)).abs().mean() < 0.1


@pytest.mark.parametrize(
    "change, named",
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"kv_lora_rank": None}, "kv_lora_rank"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"hidden_size": "256"}, "hidden_size"),
        ({"n_group": 3}, "n_group"),
        ({"topk_group": 9}, "topk_group"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_by_field(change, named):
    with pytest.raises(CheckpointError, match=named):
        ModelConfig.from_dict({**TINY_SHAPE, **change})


def test_old_and_new_rope_keys_mean_the_same():
    yarn = {"factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
    yarn["original_max_position_embeddings"] = 4096
    sizes = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "kv_lora_rank": 512}
    old = ModelConfig.from_dict({**TINY_SHAPE, **sizes, "rope_scaling": {"type": "yarn", **yarn}})
    new_keys = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, **yarn}, "rope_scaling": None}
    assert ModelConfig.from_dict({**TINY_SHAPE, **sizes, **new_keys}) == old
    assert old.softmax_scale == pytest.approx(0.13523378, abs=1e-8)  # R1's published numbers
    assert old.row_dim == 576


def test_the_config_is_read_without_torch(checkpoint):
    code = f"""
import sys
from headrace.model.deepseek.config import ModelConfig
assert ModelConfig.load({str(checkpoint)!r}).row_dim == 144
assert not {{"torch", "numpy", "safetensors"}} & set(sys.modules), "router would load torch"
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], timeout=60)
