"""The NVFP4 format: every rounding edge, both writers' conventions, Blackwell's scale order, and the row quantiser."""

from __future__ import annotations

import pytest
import torch

from kernels.formats import nvfp4

EDGES = [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)]


@pytest.mark.parametrize("edge, at_edge", EDGES)
def test_a_value_on_an_edge_takes_the_even_code_and_beside_it_the_nearer(edge, at_edge):
    below, above = sorted(nvfp4.MAGNITUDES, key=lambda m: abs(m - edge))[:2]
    below, above = min(below, above), max(below, above)
    nudge = torch.tensor([edge]).nextafter(torch.tensor([0.0])), torch.tensor([edge]).nextafter(torch.tensor([9.0]))
    values = torch.cat([nudge[0], torch.tensor([edge]), nudge[1]])
    expected = torch.tensor([below, at_edge, above])
    for sign in (1, -1):
        assert nvfp4.decode(nvfp4.encode(sign * values)).tolist() == (sign * expected).tolist()


def test_values_saturate_and_nan_has_a_code():
    codes = nvfp4.encode(torch.tensor([7.0, -1e30, float("inf"), float("-inf"), float("nan"), 0.0]))
    assert codes.tolist() == [7, 15, 7, 15, 7, 0]


def test_every_code_survives_a_round_trip():
    codes = torch.arange(16, dtype=torch.uint8)
    again = nvfp4.encode(nvfp4.decode(codes))
    assert again.tolist() == [0 if code == 8 else code for code in range(16)]  # minus zero is zero
    assert torch.equal(nvfp4.unpack(nvfp4.pack(codes)), codes)


def test_element_2i_is_in_the_low_nibble():
    assert nvfp4.pack(torch.tensor([1, 2, 3, 15], dtype=torch.uint8)).tolist() == [0x21, 0xF3]


def test_quantise_follows_modelopts_rule():
    weight = torch.zeros(2, 32)
    weight[0, 0], weight[0, 16], weight[1, 3] = 2688.0, 6.0, -1.0
    quantised = nvfp4.quantise(weight)
    assert quantised.global_scale.shape == () and quantised.global_scale.item() == 1.0
    # 2688 / 6 = 448 is the largest scale; a block of zeros has 1; 1 / 6 rounds to 0.171875 in e4m3
    assert quantised.block_scale.float().tolist() == [[448.0, 1.0], [0.171875, 1.0]]
    assert nvfp4.unpack(quantised.packed)[1, 3] == 15  # -1 / 0.171875 = -5.8 -> -6
    assert nvfp4.dequantise(quantised)[0, 0] == 2688.0


def test_a_tiny_block_keeps_the_smallest_scale():
    weight = torch.full((1, 32), 2688.0)
    weight[0, 16:] = 1e-3
    scale = nvfp4.quantise(weight).block_scale.float()
    assert scale.tolist() == [[448.0, 2.0**-9]]


def test_quantising_what_was_dequantised_changes_nothing():
    torch.manual_seed(0)
    once = nvfp4.quantise(torch.randn(3, 8, 64))
    assert once.global_scale.shape == (3,)
    again = nvfp4.quantise(nvfp4.dequantise(once), once.global_scale)
    assert torch.equal(nvfp4.dequantise(again), nvfp4.dequantise(once))


def test_the_error_of_a_value_is_at_most_its_blocks_step():
    torch.manual_seed(1)
    weight = torch.randn(16, 256)
    quantised = nvfp4.quantise(weight)
    step = (quantised.block_scale.float() * quantised.global_scale).repeat_interleave(16, 1)
    # half of the widest gap (4 to 6) is one step; the scale's own rounding (1/16) can clip another 6/16
    assert ((nvfp4.dequantise(quantised) - weight).abs() <= 1.4 * step).all()


def test_an_all_zero_matrix_stays_zero():
    quantised = nvfp4.quantise(torch.zeros(4, 32))
    assert quantised.global_scale.item() == 1.0 and not nvfp4.dequantise(quantised).any()


def test_rows_that_are_no_whole_blocks_are_refused():
    with pytest.raises(ValueError, match="multiple of 16"):
        nvfp4.quantise(torch.zeros(4, 24))


def test_compressed_tensors_global_scales_are_reciprocals():
    torch.manual_seed(2)
    ours = nvfp4.quantise(torch.randn(8, 64))
    theirs = nvfp4.from_compressed_tensors(
        ours.packed, ours.block_scale, ours.global_scale.reciprocal().reshape(1), torch.tensor([4.0])
    )
    torch.testing.assert_close(nvfp4.dequantise(theirs), nvfp4.dequantise(ours), rtol=1e-6, atol=0)
    assert theirs.input_scale.item() == 0.25


@pytest.mark.parametrize("rows, columns", [(128, 4), (1, 1), (130, 9), (256, 8)])
def test_swizzle_puts_each_scale_where_the_rule_says_and_back(rows, columns):
    scale = torch.randint(1, 256, (2, rows, columns), dtype=torch.uint8)
    flat = nvfp4.swizzle(scale)
    across = -(-columns // 4)
    assert flat.shape == (2, -(-rows // 128) * across * 512)
    for m, k in {(0, 0), (rows - 1, columns - 1), (rows // 2, columns // 2)}:
        place = ((m // 128) * across + k // 4) * 512 + (m % 32) * 16 + (m % 128) // 32 * 4 + k % 4
        assert torch.equal(flat[:, place], scale[:, m, k])
    assert torch.equal(nvfp4.unswizzle(flat, rows, columns), scale)
    assert int((flat != 0).sum()) == scale.numel()  # padding is zero bytes


@pytest.mark.parametrize("rows, width", [(1, 16), (7, 48), (5, 1040), (0, 64)])
def test_the_triton_quantiser_equals_the_reference(triton_device, rows, width):
    torch.manual_seed(rows)
    x = torch.randn(rows, width + 16, device=triton_device, dtype=torch.bfloat16)[:, :width]
    if rows:
        x[0, :16] = 0
        x[rows // 2, 0] = float("-inf")
        x[-1] *= 1e-4
    global_scale = (x[x.isfinite()].abs().amax() if rows else x.new_ones(())).float().reshape(1) / 2688
    packed, scale = nvfp4._triton(x, global_scale)
    expected_packed, expected_scale = nvfp4.reference(x, global_scale)
    assert torch.equal(scale.view(torch.uint8), expected_scale.view(torch.uint8))
    assert torch.equal(packed, expected_packed)


def test_the_quantisers_edges_are_those_of_the_format(triton_device):
    edges = [edge for edge, _ in EDGES]
    row = torch.tensor(edges + [-edge for edge in edges] + [6.0, 0.1], device=triton_device)[None].bfloat16()
    packed, scale = nvfp4._triton(row, torch.ones(1, device=triton_device))
    assert scale.float().item() == 1.0
    expected = [value for _, value in EDGES]
    values = nvfp4.decode(nvfp4.unpack(packed))[0].tolist()
    assert values == expected + [-value for value in expected] + [6.0, 0.0]


def test_flashinfers_quantiser_is_refused_below_blackwell(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    (backend,) = (backend for backend in nvfp4.QUANTISE_BACKENDS if backend.name == "flashinfer")
    reason = backend.why_not(torch.device("cuda"))
    assert "10.x or newer" in reason and "zeros" in reason
    assert backend.why_not(torch.device("cpu")) is not None
