"""Devices for op tests: Triton kernels run on the GPU where there is one, else on the CPU through its interpreter."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read by triton when kernels/ is imported, hence here

from kernels.triton_support import triton


@pytest.fixture(scope="session")
def triton_device() -> torch.device:
    """Where a Triton kernel can be called in this process: the GPU, or the CPU (interpreted, so keep shapes small)."""
    if triton is None:
        pytest.skip("needs triton")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    """For vendor kernels and for what the interpreter gets wrong."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda")
