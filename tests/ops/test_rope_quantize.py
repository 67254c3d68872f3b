"""rope_quantize: on a CPU with values whose roundings are exact (the interpreter's e4m3 cast is not), on a GPU with any."""

from __future__ import annotations

import pytest
import torch

from kernels.attention import rope_quantize
from kernels.toolchain.vendors import needs_flashinfer_modules

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
SHAPES = [(8, 32, 32, 128), (3, 12, 8, 24), (20, 512, 64, 512)]  # heads, width of q's plain part, rope, latent


def halves(*shape, seed=0):
    """Multiples of 1/2 up to 7: e4m3 holds them exactly."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(-14, 15, shape, generator=generator) / 2


def quarter_turns(tokens, pairs):
    angle = torch.randint(0, 4, (tokens, pairs), generator=torch.Generator().manual_seed(tokens)) * (torch.pi / 2)
    return angle.cos().round(), angle.sin().round()


def inputs(shape, tokens, device):
    """Views into wider tensors, as in the model."""
    heads, width, rope, latent = shape
    q = halves(tokens, heads, width + rope).to(device, BF16)
    ones = torch.where(halves(tokens, latent) < 0, -1.0, 1.0)  # their norm is 1
    rows = torch.cat((ones, halves(tokens, rope + 8)), 1)
    cos, sin = (one.to(device) for one in quarter_turns(tokens, rope // 2))
    return q, rows.to(device, BF16)[:, : latent + rope], cos, sin


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("out_dtype", [E4M3, BF16])
def test_queries_and_rows_are_rotated_and_rounded(triton_device, shape, out_dtype):
    q, rows, cos, sin = inputs(shape, 3, triton_device)
    kept = q.clone(), rows.clone()
    got = rope_quantize._triton(q, rows, cos, sin, out_dtype)
    want = rope_quantize.reference(q, rows, cos, sin, out_dtype)
    assert torch.equal(q, kept[0]) and torch.equal(rows, kept[1])
    for one, other in zip(got, want, strict=True):
        assert one.dtype == out_dtype and one.is_contiguous() and torch.equal(one.float(), other.float())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("slots", [[4], [-1, -1], [-1, 7, 0, 13]])
def test_the_decode_form_also_stores_rows_and_skips_padding(triton_device, shape, normed, slots):
    _, width, rope, latent = shape
    q, rows, cos, sin = inputs(shape, len(slots), triton_device)
    gain = None if normed else (2.0 ** halves(latent).clamp(-2, 2).round()).to(triton_device)
    results = []
    for one in (rope_quantize._store_triton, rope_quantize.store_reference):
        pool = torch.full((5, 3, latent + rope), 9.0, device=triton_device).to(E4M3)
        out = torch.zeros(q.shape, device=triton_device).to(E4M3)
        slot_ids = torch.tensor(slots, device=triton_device)
        one(q[..., :width], q[..., width:], rows, gain, 0.0, cos, sin, pool, slot_ids, out)
        results.append((out.float(), pool.float()))
    assert all(torch.equal(got, want) for got, want in zip(*results, strict=True))
    untouched = [slot for slot in range(15) if slot not in slots]
    assert (results[0][1].view(15, -1)[untouched] == 9).all() and (results[0][0] != 0).any()


def test_no_tokens_and_unlike_shapes(triton_device):
    q, rows, cos, sin = inputs(SHAPES[0], 2, triton_device)
    made, made_rows = rope_quantize._triton(q[:0], rows[:0], cos[:0], sin[:0], E4M3)
    assert made.shape == (0, 8, 64) and made_rows.shape == (0, 160)
    with pytest.raises(ValueError, match="must fit"):
        rope_quantize._store_triton(
            q[..., :32], q[..., 32:], rows, None, 0.0, cos[:, 1:], sin[:, 1:], rows, rows, torch.empty_like(q)
        )


def codes_apart(got, want):
    """The largest distance on the scale of e4m3 numbers."""
    got, want = (one.view(torch.int8).int() for one in (got, want))
    ordered = [torch.where(one < 0, -(one & 127), one) for one in (got, want)]
    return int((ordered[0] - ordered[1]).abs().max())


@pytest.mark.parametrize("shape", [(128, 512, 64, 512), (128, 128, 64, 512), (8, 32, 32, 128)])
def test_any_values_on_a_gpu(gpu, shape):
    heads, width, rope, latent = shape
    q = (
        torch.randn(77, heads, width + rope, device=gpu)
        .mul(torch.logspace(-4, 3, 77, device=gpu)[:, None, None])
        .to(BF16)
    )
    rows = torch.randn(77, latent + rope, device=gpu).mul(torch.logspace(3, -4, 77, device=gpu)[:, None]).to(BF16)
    q[0, 0, 0], rows[1, 1], q[2, 1, width] = float("nan"), float("inf"), 1e30
    angle = torch.rand(77, rope // 2, device=gpu) * 7
    got = rope_quantize._triton(q, rows, angle.cos(), angle.sin(), E4M3)
    want = rope_quantize.reference(q, rows, angle.cos(), angle.sin(), E4M3)
    for one, other, plain in zip(got, want, (width, latent), strict=True):
        assert torch.equal(one[..., :plain].view(torch.uint8), other[..., :plain].view(torch.uint8))
        assert codes_apart(one[..., plain:], other[..., plain:]) <= 1
    gain, slots = 1 + 0.1 * torch.randn(latent, device=gpu), torch.randperm(128, device=gpu)[:77]
    rows[1, 1], results = 1.0, []
    for one in (rope_quantize._store_triton, rope_quantize.store_reference):
        pool, out = torch.zeros(2, 64, latent + rope, device=gpu).to(E4M3), torch.zeros(q.shape, device=gpu).to(E4M3)
        one(q[..., :width], q[..., width:], rows, gain, 1e-6, angle.cos(), angle.sin(), pool, slots, out)
        results.append((out, pool))
    assert all(codes_apart(one, other) <= 1 for one, other in zip(*results, strict=True))


def test_flashinfer_makes_the_same_values(gpu):
    if reason := needs_flashinfer_modules("rope")(gpu):
        pytest.skip(reason)
    q, rows = torch.randn(77, 128, 576, device=gpu).to(BF16), torch.randn(77, 576, device=gpu).to(BF16)
    angle = torch.rand(77, 32, device=gpu) * 7
    got = rope_quantize._flashinfer(q, rows, angle.cos(), angle.sin(), E4M3)
    want = rope_quantize.reference(q, rows, angle.cos(), angle.sin(), E4M3)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one[..., :512].view(torch.uint8), other[..., :512].view(torch.uint8))
        assert codes_apart(one[..., 512:], other[..., 512:]) <= 1
