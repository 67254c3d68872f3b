"""How a checkpoint says that its weights are quantised: DeepSeek's FP8, ModelOpt's NVFP4, compressed-tensors' NVFP4.

ModelOpt writes `hf_quant_config.json` beside config.json, newer versions copy it into `quantization_config`; either is
read. Which matrices are quantised is told by their own dtypes, so lists of excluded modules are not needed. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NVFP4_ALGORITHMS = ("NVFP4", "W4A16_NVFP4")
NVFP4_GROUP = 16  # values along a row that share a scale


@dataclass(frozen=True)
class Quantisation:
    """
    format     "fp8" or "nvfp4"
    layout     who named the tensors: "deepseek", "modelopt" or "compressed-tensors"
    block      rows and columns that share a scale
    kv_format  "fp8" when the checkpoint was calibrated for FP8 rows in the cache, else ""
    """

    format: str
    layout: str
    block: tuple[int, int]
    kv_format: str = ""

    def __str__(self) -> str:
        return f"{self.format} {self.block[0]}x{self.block[1]} ({self.layout})"


def read(config: Mapping[str, Any], beside: Mapping[str, Any] | None = None) -> Quantisation | None:
    """What `quantization_config` of config.json, or the content of hf_quant_config.json, declares; None when nothing is.

    Raises ValueError with one sentence for a scheme that is not served.
    """
    declared = config.get("quantization_config") or (beside or {}).get("quantization")
    if not declared:
        return None
    if not isinstance(declared, Mapping):
        raise ValueError("must be an object")
    method = str(declared.get("quant_method") or "modelopt")
    if method == "fp8":
        return _deepseek(declared)
    if method.startswith("modelopt"):
        return _modelopt(declared)
    if method == "compressed-tensors" and declared.get("format") == "nvfp4-pack-quantized":
        return Quantisation("nvfp4", "compressed-tensors", (1, NVFP4_GROUP), _kv(declared))
    raise ValueError(_served())


def _deepseek(declared: Mapping[str, Any]) -> Quantisation:
    block = declared.get("weight_block_size")
    if declared.get("fmt", "e4m3") != "e4m3" or not isinstance(block, list | tuple) or len(block) != 2:
        raise ValueError(_served())
    return Quantisation("fp8", "deepseek", (int(block[0]), int(block[1])))


def _modelopt(declared: Mapping[str, Any]) -> Quantisation:
    algorithm = declared.get("quant_algo")
    if algorithm == "MIXED_PRECISION":
        layers = declared.get("quantized_layers") or {}
        algorithms = {layer.get("quant_algo") for layer in layers.values()}
        algorithm = algorithms.pop() if len(algorithms) == 1 else algorithm
    if algorithm not in NVFP4_ALGORITHMS or declared.get("group_size", NVFP4_GROUP) != NVFP4_GROUP:
        raise ValueError(_served())
    return Quantisation("nvfp4", "modelopt", (1, NVFP4_GROUP), _kv(declared))


def _kv(declared: Mapping[str, Any]) -> str:
    scheme = declared.get("kv_cache_scheme")
    eight_bits = isinstance(scheme, Mapping) and (scheme.get("num_bits"), scheme.get("type")) == (8, "float")
    return "fp8" if eight_bits or declared.get("kv_cache_quant_algo") == "FP8" else ""


def _served() -> str:
    return (
        "served are DeepSeek's fp8 e4m3 with weight_block_size, ModelOpt's NVFP4 in groups of 16, and "
        "compressed-tensors' nvfp4-pack-quantized"
    )
