"""Checkpoints with NVFP4 weights, as ModelOpt and as compressed-tensors write them, and what their configs declare."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.errors import CheckpointError, ConfigError
from headrace.model.deepseek.config import ModelConfig
from headrace.model.deepseek.loading import load_fused_transformer, load_transformer
from headrace.model.deepseek.names import expected_tensors
from headrace.model.weights import precision
from headrace.model.weights.checkpoint import CheckpointFiles
from headrace.model.weights.quantisation import Quantisation, read
from headrace.model.weights.random_checkpoint import TINY_SHAPE, write_random_checkpoint
from headrace.model.weights.random_weights import published_config, random_transformer
from kernels.formats import fp8, nvfp4
from tests.core.model_driver import Driver

SMALL = {"vocab_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 64}
TOKENS = list(range(20, 36))
MODELOPT = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["lm_head"]}
PACKED = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head"]}
CPU = torch.device("cpu")


def quantised(directory: Path, layout: str) -> dict[str, torch.Tensor]:
    """Rewrites the experts and o_proj of a bf16 checkpoint; answers all tensors with those dequantised."""
    config = ModelConfig.load(directory)
    stored, plain = {}, {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        wanted = expected_tensors(config)[name]
        if not wanted.quantisable or not (".mlp." in name or "o_proj" in name):
            stored[name] = plain[name] = tensor
            continue
        weight = nvfp4.quantise(tensor)
        plain[name] = nvfp4.dequantise(weight)
        stored |= layouts()[layout](name, weight)
    save_file(stored, directory / "model.safetensors")
    return plain


def layouts():
    return {"modelopt": as_modelopt, "compressed-tensors": as_compressed_tensors}


def as_modelopt(name: str, weight: nvfp4.Nvfp4Weight) -> dict[str, torch.Tensor]:
    stem = name.removesuffix("weight")
    return {
        name: weight.packed,
        name + "_scale": weight.block_scale,
        name + "_scale_2": weight.global_scale.clone(),
        stem + "input_scale": torch.tensor(0.01),
    }


def as_compressed_tensors(name: str, weight: nvfp4.Nvfp4Weight) -> dict[str, torch.Tensor]:
    stem = name.removesuffix("weight")
    return {
        name + "_packed": weight.packed,
        name + "_scale": weight.block_scale,
        name + "_global_scale": (1 / weight.global_scale).reshape(1),
        stem + "input_global_scale": torch.tensor([100.0]),
    }


def declare(directory: Path, layout: str, *, beside: bool = False) -> None:
    """Writes the declaration where that producer writes it."""
    if beside:
        (directory / "hf_quant_config.json").write_text(
            json.dumps({"producer": {"name": "modelopt"}, "quantization": MODELOPT})
        )
        return
    declared = PACKED if layout == "compressed-tensors" else MODELOPT | {"quant_method": "modelopt"}
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": declared}))


@pytest.fixture
def directory(tmp_path) -> Path:
    return write_random_checkpoint(tmp_path / "model", SMALL, seed=5)


def logits_of(model) -> torch.Tensor:
    return Driver(model, num_blocks=8).run([("a", TOKENS)], "prefill")["a"]


@pytest.mark.parametrize("layout, beside", [("modelopt", False), ("modelopt", True), ("compressed-tensors", False)])
def test_nvfp4_on_a_cpu_gives_the_logits_of_its_dequantised_weights(directory, tmp_path, layout, beside):
    plain = quantised(directory, layout)
    declare(directory, layout, beside=beside)
    twin = write_random_checkpoint(tmp_path / "twin", SMALL, seed=5)
    save_file({name: tensor.contiguous() for name, tensor in plain.items()}, twin / "model.safetensors")
    assert ModelConfig.load(directory).quantisation == Quantisation("nvfp4", layout, (1, 16))
    served = logits_of(load_transformer(directory, exact=True))
    tolerance = 1e-3 if layout == "compressed-tensors" else 0  # the reciprocal of a reciprocal is off by a bit
    assert (served - logits_of(load_transformer(twin, exact=True))).abs().max() <= tolerance


def test_nvfp4_stays_as_on_disk_on_a_gpu(directory):
    quantised(directory, "modelopt")
    declare(directory, "modelopt")
    checkpoint = CheckpointFiles(directory, ModelConfig.load(directory))
    weight = checkpoint.weight("model.layers.1.mlp.experts.3.down_proj.weight")
    assert isinstance(weight, nvfp4.Nvfp4Weight) and weight.packed.dtype == torch.uint8
    assert float(weight.input_scale) == pytest.approx(0.01)
    served = load_fused_transformer(checkpoint, CPU)
    formats = dict(served.precision_table())
    assert (formats["experts"], formats["o_proj"], formats["q_b"]) == ("nvfp4", "nvfp4", "bf16")
    exact = logits_of(load_transformer(directory, exact=True))
    assert ((logits_of(served) - exact).abs().mean(-1) / exact.std()).median() < 0.3


def test_missing_and_misshapen_nvfp4_tensors_are_named_at_once(directory):
    quantised(directory, "modelopt")
    tensors = load_file(directory / "model.safetensors")
    stem = "model.layers.1.mlp.experts.3."
    del tensors[stem + "down_proj.weight_scale_2"]
    tensors[stem + "up_proj.weight_scale"] = tensors[stem + "up_proj.weight_scale"][:, :1].contiguous()
    tensors[stem + "stray.weight_scale"] = torch.ones(1)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_transformer(directory, exact=True)
    for said in (
        f"missing {stem}down_proj.weight_scale_2",
        f"{stem}up_proj.weight_scale is [128, 1], expected [128, 16]",
        f"extra {stem}stray.weight_scale",
    ):
        assert said in str(caught.value)


@pytest.mark.parametrize(
    "declared, expected",
    [
        (MODELOPT | {"kv_cache_quant_algo": "FP8"}, Quantisation("nvfp4", "modelopt", (1, 16), "fp8")),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "NVFP4"}}},
            Quantisation("nvfp4", "modelopt", (1, 16)),
        ),
        (
            PACKED | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}},
            Quantisation("nvfp4", "compressed-tensors", (1, 16), "fp8"),
        ),
    ],
)
def test_declarations_are_read(declared, expected):
    assert read({"quantization_config": declared}) == expected
    assert read({}, {"quantization": declared}) == expected


@pytest.mark.parametrize(
    "declared",
    [
        {"quant_method": "awq"},
        {"quant_algo": "FP8"},
        {"quant_algo": "NVFP4", "group_size": 32},
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
        {
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4"}},
        },
        ["fp8"],
    ],
)
def test_other_schemes_are_refused_by_field(declared):
    with pytest.raises(CheckpointError, match="quantization_config"):
        ModelConfig.from_dict({**TINY_SHAPE, "quantization_config": declared})


def test_joined_matrices_keep_their_values():
    draw = torch.Generator().manual_seed(2)
    upper, lower = (torch.randn(128, 256, generator=draw) * size for size in (1.0, 3.0))
    both = torch.cat((upper, lower))
    joined = precision.joined([fp8.quantise_weight(upper), fp8.quantise_weight(lower)], "fp8")
    assert torch.equal(fp8.dequantise_weight(joined), fp8.dequantise_weight(fp8.quantise_weight(both)))
    joined = precision.joined([nvfp4.quantise(upper), nvfp4.quantise(lower)], "nvfp4")
    assert joined.global_scale == nvfp4.quantise(lower).global_scale
    parts = torch.cat([nvfp4.dequantise(nvfp4.quantise(part)) for part in (upper, lower)])
    assert torch.equal(nvfp4.dequantise(joined)[128:], parts[128:])
    assert (nvfp4.dequantise(joined) - parts).abs().max() <= parts.abs().max() / 16  # a block scale rounded once more


@pytest.mark.parametrize("weight_dtype, kv_dtype, field", [("fp8", "", "weight_dtype"), ("", "fp8", "kv_dtype")])
def test_formats_that_a_cpu_does_not_have_are_refused_by_setting(directory, weight_dtype, kv_dtype, field):
    with pytest.raises(ConfigError) as caught:
        load_transformer(directory, exact=False, weight_dtype=weight_dtype, kv_dtype=kv_dtype)
    assert caught.value.field == f"engine.{field}"


def test_fast_rows_on_a_cpu_can_be_fp32(directory):
    served = load_transformer(directory, exact=False, kv_dtype="fp32")
    assert served.pool_dtype == torch.float32 and dict(served.precision_table())["KV rows"] == "fp32"


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "nvfp4"])
def test_drawn_weights_have_the_recipes_formats_and_differ_by_layer(recipe):
    config = ModelConfig.from_dict({**TINY_SHAPE, **SMALL, "num_hidden_layers": 3})
    model = random_transformer(config, CPU, weight_dtype=recipe, seed=1)
    assert dict(model.precision_table())["experts"] == f"{recipe}, drawn"
    first, second = (block.attention.up_key for block in model.blocks[1:])
    assert not torch.equal(first, second)
    assert float(first.float().std()) == pytest.approx(config.kv_lora_rank**-0.5, rel=0.1)
    assert logits_of(model).isfinite().all()


def test_the_published_config_of_r1_is_packaged():
    config = published_config("deepseek-r1", num_layers=4)
    assert config.quantisation == Quantisation("fp8", "deepseek", (128, 128))
    assert (config.num_hidden_layers, config.row_dim, config.n_routed_experts) == (4, 576, 256)
    assert config.softmax_scale == pytest.approx(0.13523378, abs=1e-8)
