"""The FP8 formats: what quantising keeps, and each back end beside its reference."""

from __future__ import annotations

import pytest
import torch

from kernels.formats import fp8


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


def codes_apart(got: torch.Tensor, want: torch.Tensor) -> int:
    """How many e4m3 codes the two are apart, at most; the interpreter's cast rounds some values to a neighbour."""

    def ordered(codes: torch.Tensor) -> torch.Tensor:
        bits = codes.view(torch.int8).short()
        return torch.where(bits < 0, -(bits & 0x7F), bits)

    return int((ordered(got) - ordered(want)).abs().max()) if got.numel() else 0


def assert_rows_near(got: fp8.Fp8Rows, want: fp8.Fp8Rows) -> None:
    assert got.scale.stride() == want.scale.stride() and got.data.stride() == want.data.stride()
    torch.testing.assert_close(got.scale, want.scale, rtol=2e-7, atol=0)
    assert codes_apart(got.data, want.data) <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows, width", [(0, 128), (1, 128), (5, 384), (19, 640)])
def test_triton_quantises_strided_rows_as_the_reference(triton_device, dtype, rows, width):
    x = draw(rows, width + 64).to(triton_device, dtype)[:, 32 : 32 + width]
    got = fp8._triton(x)
    assert_rows_near(got, fp8.reference(x))
    assert got.data.device == x.device


def test_triton_keeps_nan_and_infinity_in_their_groups(triton_device):
    x = torch.ones(3, 256, device=triton_device)
    x[0, 5], x[2, 200] = float("nan"), float("inf")
    back = fp8.dequantise_rows(fp8._triton(x))
    bad = back.isnan().unflatten(1, (2, 128)).any(-1)
    assert bad.tolist() == [[True, False], [False, False], [False, True]]
    assert (back[1] - 1).abs().max() < 1e-6 and (back[0, 128:] - 1).abs().max() < 1e-6


def test_other_widths_are_refused():
    with pytest.raises(ValueError, match="multiple of 128"):
        fp8.reference(draw(2, 100))
