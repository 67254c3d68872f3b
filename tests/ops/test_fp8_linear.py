"""DeepSeek's block scales: fast dequantisation against one block at a time."""

from __future__ import annotations

import pytest
import torch

from kernels import fp8_linear


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
