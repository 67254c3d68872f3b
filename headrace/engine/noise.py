"""Sampling noise: a pure function of (seed, sample, position, token id), the same bits on every device.

`exponential` gives each token an Exp(1) variate; choosing the largest probability / variate is the Gumbel-max rule in
another form. The variate is made from a 64-bit counter hash by integer operations and by additions, products and
quotients that IEEE 754 rounds one way only. No library logarithm is called: they differ in the last bit.

Mixing step: David Stafford's variant 13 as used by SplitMix64. Logarithm: the odd series of atanh.
"""

from __future__ import annotations

import math

import numpy as np
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = 0x7FB5D329728EA185, -0x7E25210B43D22BB3  # odd multipliers, as signed 64-bit
_TOKEN_SALT = np.uint64(0x486561647261636A)
_BITS = 23  # of a variate; v = (h + 1/2) / 2**23 is exact in fp32 and never 0 or 1
_SERIES = tuple(1.0 / odd for odd in (11, 9, 7, 5, 3))


def _mix(x: np.ndarray) -> np.ndarray:
    """A bijection of uint64 that scatters its bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample_keys(seeds: np.ndarray, sample_indices: np.ndarray) -> np.ndarray:
    """[n] uint64 for (seed, sample); arguments are [n] int64, any value."""
    with np.errstate(over="ignore"):
        return _mix(_mix(seeds.astype(np.uint64) + _GOLDEN) + sample_indices.astype(np.uint64) * _GOLDEN)


def position_keys(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """[n] int64 for (seed, sample, position)."""
    with np.errstate(over="ignore"):
        return _mix(keys + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN).view(np.int64)


def token_hashes(vocab_size: int) -> np.ndarray:
    """[vocab_size] int64, made once."""
    with np.errstate(over="ignore"):
        return _mix((np.arange(vocab_size, dtype=np.uint64) + _TOKEN_SALT) * _GOLDEN).view(np.int64)


def exponential(keys: torch.Tensor, hashes: torch.Tensor) -> torch.Tensor:
    """Exp(1) variates, fp32, between 6e-8 and 17; `keys` [n, 1] and `hashes` [vocab] or [n, k], both int64."""
    mixed = (keys ^ hashes).mul_(_FIRST)
    mixed = (mixed ^ (mixed >> 32)).mul_(_SECOND)
    mixed = (mixed >> (64 - _BITS)).bitwise_and_((1 << _BITS) - 1)
    rest = mixed.to(torch.float32).add_(0.5).mul_(-(2.0**-_BITS)).add_(1.0)  # 1 - v, exact
    return _minus_log(rest)


def _minus_log(x: torch.Tensor) -> torch.Tensor:
    """-log of fp32 values in (0, 1), to a relative error of about 1e-6, small results included."""
    bits = x.view(torch.int32)
    halvings = (126 - (bits >> 23)).to(torch.float32)
    mantissa = bits.bitwise_and(0x007FFFFF).bitwise_or_(0x3F000000).view(torch.float32)  # in [1/2, 1)
    s = (1.0 - mantissa).div_(mantissa.add_(1.0))  # -log(mantissa) = 2 atanh(s), s <= 1/3
    square = s * s
    series = torch.full_like(s, _SERIES[0])
    for coefficient in _SERIES[1:]:
        series.mul_(square).add_(coefficient)
    series.mul_(square).add_(1.0).mul_(s).mul_(2.0)
    return series.add_(halvings.mul_(math.log(2.0)))
