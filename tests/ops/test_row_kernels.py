"""The kernels that work on rows of activations: add + norm, SwiGLU, each with its quantising form, beside references."""

from __future__ import annotations

import pytest
import torch

from kernels.formats import fp8
from kernels.rows import rms_norm, silu_mul

BF16_STEP = 2.0**-7  # of a value, relative: fp32 sums in another order may fall on the other side of a tie


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_quantised(got: fp8.Fp8Rows, h: torch.Tensor) -> None:
    """`got` is h in the promised layout, within half an e4m3 step and a few bf16 roundings of h."""
    want = fp8.reference(h)
    assert got.scale.stride() == want.scale.stride() and got.data.stride() == want.data.stride()
    assert_close_rows(got, h)


def assert_close_rows(got: fp8.Fp8Rows, h: torch.Tensor) -> None:
    want = fp8.reference(h)
    torch.testing.assert_close(got.scale, want.scale, rtol=2 * BF16_STEP, atol=0)
    bound = h.float().abs() * (1 / 16 + 3 * BF16_STEP) + want.scale.repeat_interleave(128, 1) * 2.0**-9
    assert ((fp8.dequantise_rows(got) - h.float()).abs() <= bound).all()


@pytest.mark.parametrize("keep, quantise", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("rows, width", [(0, 128), (1, 128), (3, 384), (9, 896)])
def test_add_norm_equals_its_reference(triton_device, rows, width, keep, quantise):
    x, delta = (draw(rows, width, seed=i).to(triton_device, torch.bfloat16) for i in (0, 1))
    gain = (1 + 0.1 * draw(width, seed=2)).to(triton_device)
    for one_gain in (gain, gain.bfloat16()):
        mine, theirs = x.clone(), x.clone()
        h, quantised = rms_norm._triton_add_norm(mine, delta, one_gain, 1e-6, keep=keep, quantise=quantise)
        want, _ = rms_norm._reference_add_norm(theirs, delta, one_gain, 1e-6, keep=True, quantise=True)
        assert torch.equal(mine, theirs)
        assert (h is None) == (not keep) and (quantised is None) == (not quantise)
        if keep:
            torch.testing.assert_close(h, want, rtol=2 * BF16_STEP, atol=0)
        if quantise:
            assert_quantised(quantised, want)


def test_add_norm_reads_part_of_a_wider_row_and_leaves_it(triton_device):
    wide = draw(5, 400).to(triton_device, torch.bfloat16)
    before, part, gain = wide.clone(), wide[:, 16 : 16 + 256], torch.ones(256, device=triton_device)
    h, quantised = rms_norm._triton_add_norm(part, None, gain, 1e-6, keep=True, quantise=True)
    want = rms_norm.reference(part, gain, 1e-6)
    torch.testing.assert_close(h, want, rtol=2 * BF16_STEP, atol=0)
    assert_quantised(quantised, want)
    assert torch.equal(wide, before)


def test_add_norm_keeps_nan_in_its_row(triton_device):
    x = draw(3, 256).to(triton_device, torch.bfloat16)
    x[1, 7] = float("nan")
    gain = torch.ones(256, device=triton_device)
    h, quantised = rms_norm._triton_add_norm(x, x.clone(), gain, 1e-6, keep=True, quantise=True)
    assert h[1].isnan().all() and not h[[0, 2]].isnan().any()
    back = fp8.dequantise_rows(quantised)
    assert back[1].isnan().any() and not back[[0, 2]].isnan().any()


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-6), (torch.bfloat16, 2 * BF16_STEP)])
@pytest.mark.parametrize("rows, width", [(0, 8), (1, 8), (3, 24), (17, 256), (5, 10)])
def test_triton_norms_any_width_and_in_place(triton_device, dtype, bound, rows, width):
    x = draw(rows, width + 3).to(triton_device, dtype)[:, 1 : 1 + width]
    gain = (1 + 0.1 * draw(width, seed=1)).to(triton_device, dtype)
    want = rms_norm.reference(x, gain, 1e-6)
    torch.testing.assert_close(rms_norm._triton(x, gain, 1e-6), want, rtol=bound, atol=bound)
    in_place = x.clone()
    assert rms_norm._triton(in_place, gain, 1e-6, out=in_place) is in_place
    torch.testing.assert_close(in_place, want, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows, inner", [(0, 128), (1, 8), (3, 200), (21, 640)])
def test_silu_mul_equals_its_reference(triton_device, dtype, rows, inner):
    gate_up = (3 * draw(rows, 2 * inner + 16)).to(triton_device, dtype)[:, 8 : 8 + 2 * inner]
    want = silu_mul.reference(gate_up)
    bound = BF16_STEP if dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(silu_mul._triton(gate_up), want, rtol=bound, atol=1e-6)
    torch.testing.assert_close(silu_mul._torch(gate_up), want, rtol=3 * bound, atol=1e-6)


def test_silu_mul_of_huge_and_nan(triton_device):
    gate_up = torch.tensor([[-200.0, 200.0, float("nan"), 0.0] * 2], device=triton_device)
    got = silu_mul._triton(gate_up)
    assert got[0, :2].tolist() == [0.0, 40000.0] and got[0, 2].isnan() and got[0, 3] == 0


@pytest.mark.parametrize("limit", [None, 0, 5, 13, 100])
def test_silu_mul_quantises_the_rows_before_the_limit(triton_device, limit):
    gate_up = draw(13, 2 * 640).to(triton_device, torch.bfloat16)
    on_device = None if limit is None else torch.tensor([limit], dtype=torch.int32, device=triton_device)
    got = silu_mul._triton_quantise(gate_up, on_device)
    want = silu_mul.reference(gate_up)
    assert got.scale.stride() == (1, 13)
    valid = 13 if limit is None else min(limit, 13)
    assert_close_rows(fp8.Fp8Rows(got.data[:valid], got.scale[:valid]), want[:valid])


def test_silu_mul_leaves_rows_past_the_limit_unwritten(triton_device):
    gate_up, made = draw(20, 256).to(triton_device), torch.full((20, 128), 7.0, device=triton_device)
    silu_mul._launch(gate_up, made, None, torch.tensor([11], dtype=torch.int32, device=triton_device))
    assert (made[11:] == 7).all() and not (made[:11] == 7).any()
