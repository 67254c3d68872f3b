"""Weights of any config drawn on the device, in the formats a recipe asks for: for benches of sizes nobody downloads.

No two layers share a byte, so that a step reads from memory what a real model's step would. Values are normal with a
variance of 1 / width (NVFP4: every code equally often, at the same variance), so activations keep their size through the
layers, and the data are as random as a power meter could wish.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from headrace.model.deepseek.config import ModelConfig
from headrace.model.deepseek.fused import FusedTransformer
from headrace.model.deepseek.fused_builder import FusedBuilder
from headrace.model.deepseek.fused_kernels import FusedKernels
from headrace.model.deepseek.names import expected_tensors
from headrace.model.weights import precision
from headrace.model.weights.precision import Weight
from headrace.parallel.experts import ExpertExchange
from kernels.formats import fp8, nvfp4
from kernels.formats.fp8 import Fp8Weight
from kernels.formats.nvfp4 import Nvfp4Weight

PUBLISHED = {"deepseek-r1": Path(__file__).parents[1] / "deepseek" / "deepseek_r1.json"}
LARGEST_SIGMAS = 6.0  # of a normal value, beyond which FP8 codes saturate
MEAN_SQUARE_CODE = sum(value * value for value in nvfp4.MAGNITUDES) / len(nvfp4.MAGNITUDES)


def published_config(name: str, *, num_layers: int | None = None) -> ModelConfig:
    """A model's published config by name; with fewer layers when asked (the dense ones come first). Raises KeyError."""
    config = ModelConfig.from_dict(json.loads(PUBLISHED[name].read_text(encoding="utf-8")), where=name)
    return config if num_layers is None else dataclasses.replace(config, num_hidden_layers=num_layers)


def random_transformer(
    config: ModelConfig,
    device: torch.device,
    *,
    weight_dtype: str = "fp8",
    kv_dtype: torch.dtype = torch.bfloat16,
    kernels: FusedKernels | None = None,
    exchange: ExpertExchange | None = None,
    seed: int = 0,
) -> FusedTransformer:
    """A model with drawn weights, of the experts only those that `exchange` calls local (None: all of them)."""
    kernels = kernels or FusedKernels(device)
    source = RandomSource(config, device, weight_dtype, seed)
    made = FusedBuilder(config, source, kernels, pool_dtype=kv_dtype, exchange=exchange).transformer()
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # other streams will use it
    return made


class RandomSource:
    """A `fused_builder.WeightSource` that draws every tensor when it is asked for, in order, from one seed."""

    def __init__(self, config: ModelConfig, device: torch.device, weight_dtype: str, seed: int = 0):
        self.device, self.recipe = device, precision.RECIPES[weight_dtype]
        self.formats: dict[str, set[str]] = {}
        self._shapes = {name: wanted.shape for name, wanted in expected_tensors(config).items()}
        self._draw = torch.Generator(device).manual_seed(seed)

    def plain(self, name: str) -> torch.Tensor:
        """Norms near 1, a correction bias near 0, else normal with a variance of 1 / width (embedding: 1)."""
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return 1 + 0.1 * self._normal(shape)
        if name.endswith("correction_bias"):
            return 0.02 * self._normal(shape)
        return (self._normal(shape) * (1 if "embed_tokens" in name else shape[-1] ** -0.5)).bfloat16()

    def part(self, part: str, names: Sequence[str]) -> Weight:
        return self._weight(part, *self._joined_shape(names))

    def experts(self, prefix: str, names: Sequence[str], ids: range) -> Weight:
        shape = self._joined_shape([f"{prefix}{ids.start}.{name}" for name in names])
        return precision.stacked([self._weight("experts", *shape) for _ in ids])

    def _joined_shape(self, names: Sequence[str]) -> tuple[int, int]:
        return sum(self._shapes[name][0] for name in names), self._shapes[names[0]][1]

    def _weight(self, part: str, out: int, width: int) -> Weight:
        reason = precision.why_not(self.recipe[part], part, out, width)
        used = "bf16" if reason else self.recipe[part]
        self.formats.setdefault(part, set()).add(f"{used}, drawn" + (f" ({reason})" if reason else ""))
        return {"bf16": self._bf16, "fp8": self._fp8, "nvfp4": self._nvfp4}[used](out, width)

    def _bf16(self, out: int, width: int) -> torch.Tensor:
        return (self._normal((out, width)) * width**-0.5).bfloat16()

    def _fp8(self, out: int, width: int) -> Fp8Weight:
        step = width**-0.5 * LARGEST_SIGMAS / fp8.LARGEST
        data = (self._normal((out, width)) * (fp8.LARGEST / LARGEST_SIGMAS)).clamp_(-fp8.LARGEST, fp8.LARGEST)
        blocks = -(-out // fp8.GROUP), -(-width // fp8.GROUP)
        return Fp8Weight(data.to(torch.float8_e4m3fn), step * (0.9 + 0.2 * self._uniform(blocks)))

    def _nvfp4(self, out: int, width: int) -> Nvfp4Weight:
        packed = torch.randint(256, (out, width // 2), dtype=torch.uint8, device=self.device, generator=self._draw)
        scale = (256 * (0.5 + self._uniform((out, width // nvfp4.BLOCK)))).to(torch.float8_e4m3fn)
        step = (width * MEAN_SQUARE_CODE) ** -0.5 / 256
        return Nvfp4Weight(packed, scale, torch.tensor(step, device=self.device))

    def _normal(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, device=self.device, generator=self._draw)

    def _uniform(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.rand(shape, device=self.device, generator=self._draw)
