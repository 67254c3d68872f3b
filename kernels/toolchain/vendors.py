"""FlashMLA and FlashInfer where they are installed and can run, and a sentence where not: the `why_not`s of vendors' kernels."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kernels.toolchain.triton_support import needs_capability

_on_hopper = needs_capability(9, exactly=True)


def _needs(package: str, has_kernels: Callable[[Any], bool]) -> Callable[[Any], str | None]:
    """A why_not that imports the package, on Hopper only: a wheel for another torch or CUDA is found out here."""

    def why_not(device: Any) -> str | None:
        if reason := _on_hopper(device):
            return reason
        try:
            found = importlib.import_module(package)
        except ModuleNotFoundError as error:
            return f"{error.name} is not installed"
        except (ImportError, OSError, RuntimeError) as error:
            return f"{package} does not load: {error}"
        return None if has_kernels(found) else f"this {package} was built without the kernels for Hopper"

    return why_not


needs_flash_mla = _needs("flash_mla", lambda package: getattr(package, "has_legacy", lambda: False)())
needs_flashinfer = _needs("flashinfer", lambda package: hasattr(package, "BatchPrefillWithRaggedKVCacheWrapper"))


def needs_flashinfer_modules(*names: str) -> Callable[[Any], str | None]:
    """A why_not for functions of FlashInfer that live in these modules, as it calls them: each comes prebuilt, or is
    compiled at its first use by an nvcc that FlashInfer finds and a `ninja` on the PATH."""

    def why_not(device: Any) -> str | None:
        if reason := needs_flashinfer(device):
            return reason
        env = importlib.import_module("flashinfer.jit.env")
        if all((Path(env.FLASHINFER_AOT_DIR) / name / f"{name}.so").exists() for name in names):
            return None
        missing = [
            tool for tool, found in (("nvcc", _flashinfer_nvcc()), ("ninja", shutil.which("ninja"))) if not found
        ]
        return f"flashinfer must compile this and has no {' and no '.join(missing)}" if missing else None

    return why_not


def _flashinfer_nvcc() -> bool:
    try:
        toolkit = importlib.import_module("flashinfer.jit.cpp_ext").get_cuda_path()
    except RuntimeError:
        return False
    return (Path(toolkit) / "bin" / "nvcc").exists()
