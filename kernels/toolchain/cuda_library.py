"""Build and load our CUDA sources for Hopper: one source, one shared library, ten seconds of nvcc.

A library is built on first use into `build/` beside its source (or the temporary directory when that is read-only), named after the
source, what it includes of ours, the flags and the compiler's version, so that a stale build is never loaded. A build that fails is tried
once in a process. Without nvcc every op still has Triton. `linear/fp8_hopper.py` and `linear/nvfp4_hopper.py` have a library each.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from kernels.toolchain.triton_support import needs_capability

TOOLKIT = Path("/usr/local/cuda/bin/nvcc")  # where toolkits live that are not on the PATH
FLAGS = (
    "-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "--shared", "-Xcompiler", "-fPIC", "-cudart", "static",
)  # fmt: skip
BUILD_TIMEOUT_S = 300
VERSION_TIMEOUT_S = 60

_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int, "l": ctypes.c_int64}

_needs_hopper = needs_capability(9, exactly=True)


class BuildFailed(RuntimeError):
    """No nvcc, or it refused or hung; says which and why."""


class Library:
    """The shared library of one source. `signatures`: function -> a letter an argument, as in _TYPES."""

    def __init__(self, source: Path, what: str, signatures: Mapping[str, str]):
        self.source, self.what, self._signatures = source, what, signatures
        self._outcome: ctypes.CDLL | BuildFailed | None = None

    def load(self) -> ctypes.CDLL:
        """The loaded library with argument types set. Raises BuildFailed."""
        if self._outcome is None:
            try:
                self._outcome = self._built()
            except BuildFailed as error:
                self._outcome = error
        if isinstance(self._outcome, BuildFailed):
            raise self._outcome
        return self._outcome

    def why_not(self, device: object) -> str | None:
        """None when the library is built and loaded and `device` can run it, else one sentence."""
        if reason := _needs_hopper(device):
            return reason
        try:
            self.load()
        except BuildFailed as error:
            return str(error)
        return None

    def _built(self) -> ctypes.CDLL:
        compiler = find_compiler()
        if compiler is None:
            raise BuildFailed(f"the {self.what} need nvcc 12.3 or newer; install a CUDA toolkit to have them")
        name = f"{self.source.stem}-{self.fingerprint(compiler)}.so"
        problem: object = None
        for folder in (self.source.parent / "build", Path(tempfile.gettempdir()) / "headrace-kernels"):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with open(folder / f"{self.source.stem}-lock", "w") as lock:
                    fcntl.flock(
                        lock, fcntl.LOCK_EX
                    )  # the processes of a mesh start together: one builds, the rest wait
                    if not (folder / name).exists():
                        self._build(compiler, folder / name)
                return self._load(folder / name)
            except OSError as error:
                problem = error
        raise BuildFailed(f"the {self.what} cannot be stored or loaded: {problem}")

    def fingerprint(self, compiler: str) -> str:
        """Of everything the machine code depends on. Raises BuildFailed."""
        version = self._run([compiler, "--version"], VERSION_TIMEOUT_S).stdout
        text = b"".join(path.read_bytes() for path in sources_of(self.source))
        return hashlib.sha256(text + " ".join((*FLAGS, version)).encode()).hexdigest()[:16]

    def _build(self, compiler: str, path: Path) -> None:
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            made = Path(scratch) / path.name
            result = self._run([compiler, *FLAGS, str(self.source), "-o", str(made), "-ldl"], BUILD_TIMEOUT_S)
            if result.returncode:
                error = (result.stderr or result.stdout).strip().splitlines()
                why = error[0] if error else result.returncode
                raise BuildFailed(f"{compiler} cannot build the {self.what}: {why}")
            made.replace(path)

    def _run(self, command: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired as error:
            text = f"{command[0]} did not finish within {timeout_s} s: without it there are no {self.what}"
            raise BuildFailed(text) from error
        except OSError as error:
            raise BuildFailed(f"{command[0]} cannot be run for the {self.what}: {error}") from error

    def _load(self, path: Path) -> ctypes.CDLL:
        loaded = ctypes.CDLL(str(path))
        for name, signature in self._signatures.items():
            function = getattr(loaded, name)
            function.argtypes = [_TYPES[letter] for letter in signature]
            function.restype = ctypes.c_int
        return loaded


def find_compiler() -> str | None:
    """The path of nvcc, or None."""
    return shutil.which("nvcc") or (str(TOOLKIT) if TOOLKIT.exists() else None)


def sources_of(source: Path) -> list[Path]:
    """The file and all files of ours that it includes, by way of others too."""
    found = [source]
    for path in found:
        names = re.findall(r'^\s*#\s*include\s*"([^"]+)"', path.read_text(), re.MULTILINE)
        found += [other for name in names if (other := path.parent / name).exists() and other not in found]
    return found


def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
