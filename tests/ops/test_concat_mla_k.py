"""concat_mla_k copies bits, so every comparison is exact."""

from __future__ import annotations

import pytest
import torch

from kernels.attention import concat_mla_k
from kernels.toolchain.vendors import needs_flashinfer_modules


def inputs(tokens, heads, nope, value, rope, dtype, device):
    """kv as kv_b makes it and rows as the model holds them; k_nope and k_rope are views of them."""
    generator = torch.Generator().manual_seed(tokens + heads)
    kv = torch.randn(tokens, heads, nope + value, generator=generator).to(device).to(dtype)
    rows = torch.randn(tokens, 24 + rope, generator=generator).to(device).to(dtype)
    return kv[..., :nope], rows[:, 24:]


def bits(x):
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("sizes", [(5, 8, 32, 64, 32), (3, 128, 128, 128, 64), (2, 20, 12, 4, 6), (7, 1, 16, 16, 8)])
def test_triton_copies_each_head_and_the_shared_part(triton_device, sizes, dtype):
    k_nope, k_rope = inputs(*sizes, dtype, triton_device)
    if dtype != torch.float8_e4m3fn:
        k_nope[0, 0, 0] = float("nan")
    got = concat_mla_k._triton(k_nope, k_rope)
    tokens, heads, nope = k_nope.shape
    assert got.shape == (tokens, heads, nope + k_rope.shape[1]) and got.is_contiguous()
    assert torch.equal(bits(got[..., :nope]), bits(k_nope))
    assert torch.equal(bits(got[..., nope:]), bits(k_rope[:, None].expand(-1, heads, -1)))


@pytest.mark.parametrize("group", [1, 4, 16, 64])
def test_any_grouping_of_heads_covers_them_once(triton_device, group):
    k_nope, k_rope = inputs(3, 20, 16, 4, 8, torch.bfloat16, triton_device)
    wider = torch.full((4, 20, 24), 5.0, dtype=torch.bfloat16, device=triton_device)
    concat_mla_k._launch(k_nope, k_rope, wider[:3], group=group, warps=1)
    assert torch.equal(wider[:3], concat_mla_k.reference(k_nope, k_rope)) and (wider[3] == 5).all()


def test_no_tokens_gives_no_keys_and_unlike_inputs_are_refused(triton_device):
    k_nope, k_rope = inputs(2, 8, 32, 64, 32, torch.bfloat16, triton_device)
    assert concat_mla_k._triton(k_nope[:0], k_rope[:0]).shape == (0, 8, 64)
    for bad in (k_rope[:1], k_rope.float(), k_rope.t()):
        with pytest.raises(ValueError, match="must fit"):
            concat_mla_k._triton(k_nope, bad)


def test_more_than_two_to_the_31_elements(gpu):
    """Offsets of a long prefill do not fit in 32 bits."""
    tokens = 100_000
    kv = torch.randn(tokens, 128, 256, device=gpu, dtype=torch.bfloat16)
    k_rope = torch.randn(tokens, 64, device=gpu, dtype=torch.bfloat16)
    got = concat_mla_k._triton(kv[..., :128], k_rope)
    for part in (slice(0, 100), slice(tokens - 100, tokens)):
        assert torch.equal(got[part], concat_mla_k.reference(kv[part, :, :128], k_rope[part]))


def test_flashinfer_copies_the_same_bits_and_refuses_other_shapes(gpu):
    if reason := needs_flashinfer_modules("concat_mla")(gpu):
        pytest.skip(reason)
    k_nope, k_rope = inputs(33, 128, 128, 128, 64, torch.bfloat16, gpu)
    assert torch.equal(concat_mla_k._flashinfer(k_nope, k_rope), concat_mla_k.reference(k_nope, k_rope))
    with pytest.raises(ValueError, match="128 heads"):
        concat_mla_k._flashinfer(k_nope[:, :64], k_rope)
