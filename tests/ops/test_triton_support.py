"""Where kernels overlap with the one before them, and that the interpreter is never asked to."""

from __future__ import annotations

import torch

from kernels.toolchain import triton_support


def test_a_cpu_launch_does_not_overlap():
    assert triton_support.overlap(torch.device("cpu")) == {"OVERLAP": False}


def test_a_hopper_launch_overlaps(gpu):
    able = torch.cuda.get_device_capability(gpu)[0] >= 9
    assert triton_support.overlap(gpu) == ({"OVERLAP": True, "launch_pdl": True} if able else {"OVERLAP": False})


def test_dependent_overlapping_kernels_keep_their_order(gpu):
    """Each step reads what the one before wrote; the same chain without overlap gives the same bits."""
    from kernels.formats import fp8
    from kernels.rows import rms_norm

    def chain() -> torch.Tensor:
        generator = torch.Generator(gpu).manual_seed(0)
        x, delta = (torch.randn(300, 1024, device=gpu, generator=generator).bfloat16() for _ in range(2))
        gain = torch.ones(1024, device=gpu)
        for _ in range(40):
            delta, rows = rms_norm._triton_add_norm(x, delta, gain, 1e-6, keep=True, quantise=True)
            delta = delta + fp8.dequantise_rows(rows).bfloat16()
        return x

    with_overlap = chain()
    original = rms_norm.overlap
    try:
        rms_norm.overlap = lambda device: {"OVERLAP": False}
        assert torch.equal(with_overlap, chain())
    finally:
        rms_norm.overlap = original
