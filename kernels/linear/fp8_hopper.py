"""`grouped_fp8.cu`, built and loaded: block-scaled FP8 products of one or many experts on Hopper.

`library()` has `hr_grouped_fp8`; `why_not(device)` is None or a sentence; `check(code)` raises for what it answers. Build ahead of
time, on any host that has nvcc, with `python -m kernels.linear.fp8_hopper`.
"""

from __future__ import annotations

from pathlib import Path

from kernels.toolchain.cuda_library import BuildFailed, Library

SOURCE = Path(__file__).with_name("grouped_fp8.cu")

_library = Library(SOURCE, "CUDA kernels", {"hr_grouped_fp8": "ppllppplpiiiiiiiiiip"})
library, why_not = _library.load, _library.why_not


def check(code: int) -> None:
    """Raises RuntimeError for a failed launch. `code` as grouped_fp8.cu answers it."""
    if code:
        kinds = {-1: "the driver has no tensor maps", -2: "sizes this kernel does not take"}
        raise RuntimeError(f"grouped FP8 product: {kinds.get(code, f'CUDA error {code}')}")


if __name__ == "__main__":
    try:
        library()
    except BuildFailed as error:
        raise SystemExit(f"CUDA kernels not built: {error}") from error
