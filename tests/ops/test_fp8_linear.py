"""DeepSeek's block scales: fast dequantisation against one block at a time."""

from __future__ import annotations

import pytest
import torch
from test_grouped_linear import assert_close, made

from kernels.formats.fp8 import Fp8Weight
from kernels.linear import fp8_linear


@pytest.mark.parametrize("shape", [(128, 128), (576, 128), (160, 300), (1, 129), (130, 1)])
@pytest.mark.parametrize("block", [(128, 128), (64, 32)])
def test_dequantisation_equals_one_block_at_a_time(shape, block):
    draw = torch.Generator().manual_seed(0)
    quantised = torch.randn(*shape, generator=draw).mul(100).to(torch.float8_e4m3fn)
    scales = torch.rand(*(-(-side // size) for side, size in zip(shape, block, strict=True)), generator=draw)
    want = fp8_linear.reference(quantised, scales, block)
    assert want.dtype == torch.float32
    row, column = shape[0] - 1, shape[1] - 1
    by_hand = quantised[row, column].float() * scales[row // block[0], column // block[1]]
    assert want[row, column] == by_hand
    for backend in fp8_linear.BACKENDS:
        assert torch.equal(backend.run(quantised, scales, block), want), backend.name


@pytest.mark.parametrize("tokens,n,k", [(1, 136, 256), (33, 200, 384), (0, 128, 128), (64, 72, 640)])
def test_triton_linear_equals_fp32(triton_device, tokens, n, k):
    rows, weight = made(tokens, 1, n, k, triton_device)
    _check(fp8_linear.TritonLinear, rows, weight)


@pytest.mark.parametrize("name", [backend.name for backend in fp8_linear.LINEAR_BACKENDS])
@pytest.mark.parametrize(
    "tokens,n,k", [(1, 136, 256), (64, 2112, 7168), (37, 2112, 1536), (300, 4096, 640), (4096, 512, 512)]
)
def test_every_linear_back_end_equals_fp32(gpu, name, tokens, n, k):
    backend = next(backend for backend in fp8_linear.LINEAR_BACKENDS if backend.name == name)
    reason = backend.why_not(gpu)
    if reason:
        pytest.skip(reason)
    if name == "flashinfer" and (tokens % 4 or n % 64 or k > 4096):
        pytest.skip("flashinfer wants tokens in multiples of 4, n of 64, and compiles each shape for long")
    rows, weight = made(tokens, 1, n, k, gpu)
    _check(backend.run, rows, weight)


def _check(linear, rows, weight):
    weight = Fp8Weight(weight.data[0], weight.scale[0])
    want = fp8_linear.ReferenceLinear.run(rows, weight)
    prepared = linear.prepare(weight)
    assert_close(linear.run(rows, prepared), want)
    out = torch.full_like(want, float("nan"))
    assert linear.run(rows, prepared, out).data_ptr() == out.data_ptr()
    assert_close(out, want)


def test_tiles_fill_the_multiprocessors():
    assert fp8_linear.tile_for(65536, 4096, 132) == (4, 128, 2)
    assert fp8_linear.tile_for(256, 2112, 132) == (1, 64, 1)
    assert fp8_linear.tile_for(256, 4096, 132) == (1, 128, 1)
    assert fp8_linear.tile_for(256, 7168, 132) == (2, 128, 1)
    assert fp8_linear.tile_for(1, 24576, 132) == (1, 64, 1)
