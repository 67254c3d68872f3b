"""The FP8 formats: what quantising keeps, and each back end beside its reference."""

from __future__ import annotations

import pytest
import torch

from kernels import fp8


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_quantised_row_is_within_half_a_step_of_the_value():
    x = (draw(5, 256) * torch.logspace(-6, 4, 5)[:, None]).bfloat16()
    rows = fp8.reference(x)
    assert rows.data.dtype == torch.float8_e4m3fn and rows.scale.shape == (5, 2) and rows.scale.stride() == (1, 5)
    half_step = torch.maximum(x.float().abs() / 16, rows.scale.repeat_interleave(128, 1) * 2.0**-10)
    assert ((fp8.dequantise_rows(rows) - x.float()).abs() <= half_step * 1.0001).all()


def test_zeros_stay_zeros_and_nan_stays_in_its_group():
    x = torch.zeros(2, 256)
    x[1, 130] = float("nan")
    back = fp8.dequantise_rows(fp8.reference(x))
    assert (back[0] == 0).all() and (back[1, :128] == 0).all() and back[1, 128:].isnan().any()


@pytest.mark.parametrize("shape", [(576, 256), (2, 3, 130, 200), (128, 128), (2, 0, 128)])
def test_a_weight_survives_in_blocks_even_partial_ones(shape, monkeypatch):
    monkeypatch.setattr(fp8, "CHUNK_ELEMENTS", 1 << 15)  # several pieces
    weight = draw(*shape) * 3
    quantised = fp8.quantise_weight(weight)
    assert quantised.scale.shape == (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    wide = quantised.scale.repeat_interleave(128, -1)[..., : shape[-1]]
    wide = wide.repeat_interleave(128, -2)[..., : shape[-2], :]
    bound = torch.maximum(weight.abs() / 16, wide * 2.0**-10) * 1.0001
    back = fp8.dequantise_weight(quantised)
    assert ((back - weight).abs() <= bound).all()
    torch.testing.assert_close(back, quantised.data.float() * wide, rtol=0, atol=0)


def test_other_widths_are_refused():
    with pytest.raises(ValueError, match="multiple of 128"):
        fp8.reference(draw(2, 100))
