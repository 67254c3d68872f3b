"""Devices for op tests: Triton kernels run on the GPU where there is one, else on the CPU through its interpreter.

`tests/conftest.py` has switched the interpreter on before anything of kernels/ was imported."""

from __future__ import annotations

import exact_casts
import pytest
import torch

from kernels.toolchain.triton_support import triton


def _let_interpreted_loops_have_loaded_bounds() -> None:
    """Triton 3.6's interpreter turns a loaded scalar (an array of one) into an int in a way that numpy 2.4 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


if triton is not None and not torch.cuda.is_available():
    _let_interpreted_loops_have_loaded_bounds()


@pytest.fixture(scope="session")
def triton_device() -> torch.device:
    """Where a Triton kernel can be called in this process: the GPU, or the CPU (interpreted, so keep shapes small)."""
    if triton is None:
        pytest.skip("needs triton")
    if torch.cuda.is_available():
        return torch.device("cuda")
    exact_casts.use()
    return torch.device("cpu")


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    """For vendor kernels and for what the interpreter gets wrong."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda")
