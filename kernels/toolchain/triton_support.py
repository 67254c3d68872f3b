"""Triton where it is installed, and a sentence where it is not: what every file with Triton kernels begins with.

    from kernels.toolchain.triton_support import jit, needs_triton, tl, triton

    @jit
    def _kernel(x, y, BLOCK: tl.constexpr): ...

With `TRITON_INTERPRET=1` set before this module is imported, kernels run on CPU tensors through Triton's interpreter;
tests do that. `needs_triton` says no on a CPU even then, so that no engine ever chooses an interpreted kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU hosts need none of it
    triton = tl = None  # type: ignore[assignment]


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`, or the function untouched (and uncallable as a kernel) on a host without Triton."""
    return function if triton is None else triton.jit(function)


def needs_triton(device: Any) -> str | None:
    """The `why_not` of a Triton back end."""
    if torch.device(device).type != "cuda":
        return "needs a CUDA device"
    if triton is None:
        return "triton is not installed"
    return None


def needs_capability(major: int, *, exactly: bool = False) -> Callable[[Any], str | None]:
    """A `why_not` for back ends tied to a generation of GPUs: 9 is Hopper, 10 is Blackwell."""

    def why_not(device: Any) -> str | None:
        if torch.device(device).type != "cuda":
            return "needs a CUDA device"
        found = torch.cuda.get_device_capability(device)
        if found[0] != major if exactly else found[0] < major:
            return f"needs compute capability {major}.x{'' if exactly else ' or newer'}, this device has {found[0]}.{found[1]}"
        return None

    return why_not


@functools.cache
def overlap(device: torch.device) -> dict[str, bool]:
    """Launch arguments of a kernel that begins with `wait_for_previous(OVERLAP)`.

    From Hopper on such a kernel is put on the GPU while the one before it in the stream still runs, and waits there for
    its end (CUDA's programmatic dependent launch): the launch is hidden, the order of reads and writes is as ever.
    """
    if device.type != "cuda" or triton is None or not hasattr(getattr(tl.extra, "cuda", None), "gdc_wait"):
        return {"OVERLAP": False}
    if torch.cuda.get_device_capability(device)[0] < 9:
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}


@jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """First in a kernel: lets the next one be launched, and waits for the one before."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
