"""Build and load `grouped_fp8.cu` for Hopper: one source, one shared library, ten seconds of nvcc.

`library()` builds on first use into `kernels/build/` (or the temporary directory when that is read-only), named after the
source, the flags and the compiler's version, so that a stale build is never loaded. `why_not(device)` says what is
missing; without nvcc every op still has Triton. Build ahead of time, on any host that has nvcc, with
`python -m kernels.cuda_library`.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from kernels.triton_support import needs_capability

SOURCE = Path(__file__).with_name("grouped_fp8.cu")
HEADER = Path(__file__).with_name("hopper.cuh")
TOOLKIT = Path("/usr/local/cuda/bin/nvcc")  # where toolkits live that are not on the PATH
FLAGS = (
    "-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "--shared", "-Xcompiler", "-fPIC", "-cudart", "static",
)  # fmt: skip
BUILD_TIMEOUT_S = 300

_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int, "l": ctypes.c_int64}
_SIGNATURES = {"hr_grouped_fp8": "ppllppplpiiiiiiiiiip"}

_needs_hopper = needs_capability(9, exactly=True)


class BuildFailed(RuntimeError):
    """No nvcc, or it refused; says which and why."""


def why_not(device: object) -> str | None:
    """None when the library is built and loaded and `device` can run it, else one sentence."""
    reason = _needs_hopper(device)
    if reason is not None:
        return reason
    try:
        library()
    except BuildFailed as error:
        return str(error)
    return None


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library with argument types set. Raises BuildFailed."""
    compiler = shutil.which("nvcc") or (str(TOOLKIT) if TOOLKIT.exists() else None)
    if compiler is None:
        raise BuildFailed("the CUDA kernels need nvcc 12.3 or newer; install a CUDA toolkit to have them")
    problem: object = None
    for folder in (SOURCE.parent / "build", Path(tempfile.gettempdir()) / "headrace-kernels"):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"cuda-{_fingerprint(compiler)}.so"
            with open(folder / "cuda-lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # the processes of a mesh start together: one builds, the rest wait
                if not path.exists():
                    _build(compiler, path)
            return _load(path)
        except OSError as error:
            problem = error
    raise BuildFailed(f"the CUDA kernels cannot be stored or loaded: {problem}")


def check(code: int) -> None:
    """Raises RuntimeError for a failed launch. `code` as grouped_fp8.cu answers it."""
    if code:
        kinds = {-1: "the driver has no tensor maps", -2: "sizes this kernel does not take"}
        raise RuntimeError(f"grouped FP8 product: {kinds.get(code, f'CUDA error {code}')}")


def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _fingerprint(compiler: str) -> str:
    """Of everything the machine code depends on."""
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=BUILD_TIMEOUT_S, check=False).stdout
    return hashlib.sha256(SOURCE.read_bytes() + HEADER.read_bytes() + " ".join(FLAGS).encode() + version).hexdigest()[:16]


def _build(compiler: str, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / path.name
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(made), "-ldl"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
        if result.returncode:
            error = (result.stderr or result.stdout).strip().splitlines()
            raise BuildFailed(f"{compiler} cannot build the CUDA kernels: {error[0] if error else result.returncode}")
        made.replace(path)


def _load(path: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(path))
    for name, signature in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes = [_TYPES[letter] for letter in signature]
        function.restype = ctypes.c_int
    return loaded


if __name__ == "__main__":
    try:
        library()
    except BuildFailed as error:
        raise SystemExit(f"CUDA kernels not built: {error}") from error
