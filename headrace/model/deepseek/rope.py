"""Rotary angles: plain and YaRN. The rotation itself is `kernels/attention/rope.py`; pairs stay interleaved everywhere."""

from __future__ import annotations

import math

import torch

from headrace.model.deepseek.config import ModelConfig, RopeScaling, yarn_mscale


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """[rope_dim // 2] fp32, radians per position of each pair.

    Source: Peng et al. 2023 (YaRN) for the ramp between interpolated and original frequencies.
    """
    dim = config.qk_rope_head_dim
    original = 1.0 / config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if config.rope_scaling is None:
        return original
    keep = 1 - _ramp(config.rope_scaling, config.rope_theta, dim)
    return original / config.rope_scaling.factor * (1 - keep) + original * keep


def _ramp(scaling: RopeScaling, theta: float, dim: int) -> torch.Tensor:
    """0 where a pair turns often enough to be kept, 1 where it is interpolated in full."""

    def pair_turning(rotations: float) -> float:
        turns = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(theta))

    low, high = pair_turning(scaling.beta_fast), pair_turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    return ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)


def amplitude(config: ModelConfig) -> float:
    """What cos and sin are multiplied by: the ratio of YaRN's two mscales, 1 without YaRN."""
    scaling = config.rope_scaling
    if scaling is None:
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_mscale(scaling.factor, scaling.mscale) / yarn_mscale(scaling.factor, scaling.mscale_all_dim)
    return yarn_mscale(scaling.factor)


def tables(config: ModelConfig, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, sin  [max_position_embeddings, rope_dim // 2] fp32, computed on the CPU so that every device has the same."""
    angles = torch.arange(config.max_position_embeddings, dtype=torch.float32)[:, None] * inverse_frequencies(config)
    scale = amplitude(config)
    return (angles.cos() * scale).to(device), (angles.sin() * scale).to(device)
