"""Build and load `cpu.c`: one C file, one shared library, three seconds of the host's own compiler.

`library()` builds on first use into `kernels/build/` (or the temporary directory when that is read-only), named after
the source, the flags and the processor, so a stale or foreign build is never loaded. `why_not()` says what is missing;
without a compiler every op still has its torch back end. Build ahead of time with `python -m kernels.cpu_library`.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("cpu.c")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O2", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC")
BUILD_TIMEOUT_S = 120

_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int, "f": ctypes.c_float, "l": ctypes.c_int64}
_SIGNATURES = {
    "hr_pack": "pllpi",
    "hr_linear": "pllpillllpllii",
    "hr_ffn": "pllllppiplipi",
    "hr_experts": "pllllllppppiplipppi",
    "hr_rms_norm": "plpplllf",
    "hr_rope": "plllllpp",
    "hr_store_rows": "plllpllllpfpppip",
    "hr_gate": "plllplllifppp",
    "hr_attend": "pllllpilplppllfpli",
}


class BuildFailed(RuntimeError):
    """No compiler, or it refused; says which and why."""


def why_not(device: object = None) -> str | None:
    """None when the library is built and loaded, else one sentence."""
    if device is not None and getattr(device, "type", "cpu") != "cpu":
        return "runs on CPUs only"
    try:
        library()
    except BuildFailed as error:
        return str(error)
    return None


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library with argument types set. Raises BuildFailed."""
    name = f"cpu-{_fingerprint()}.so"
    for folder in (SOURCE.parent / "build", Path(tempfile.gettempdir()) / "headrace-kernels"):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / name
            with open(folder / "lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # the processes of a mesh start together: one builds, the rest wait
                if not path.exists():
                    _build(path)
            return _load(path)
        except OSError as error:
            problem = error
    raise BuildFailed(f"the CPU kernels cannot be stored or loaded: {problem}")


def _fingerprint() -> str:
    """Of everything the machine code depends on."""
    processor = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(errors="replace").splitlines()
        processor += "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    digest = hashlib.sha256(SOURCE.read_bytes() + " ".join(FLAGS).encode() + processor.encode())
    return digest.hexdigest()[:16]


def _build(path: Path) -> None:
    compiler = next((found for found in map(shutil.which, COMPILERS) if found), None)
    if compiler is None:
        raise BuildFailed(f"the CPU kernels need a C compiler ({', '.join(COMPILERS)}); install gcc to have them")
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / path.name
        error = ""
        for extra in (["-fopenmp"], []):  # clang may lack its OpenMP runtime: then one thread
            command = [compiler, *FLAGS, *extra, str(SOURCE), "-o", str(made), "-lm"]
            result = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
            if result.returncode == 0:
                made.replace(path)
                return
            error = result.stderr.strip().splitlines()[0] if result.stderr.strip() else f"exit {result.returncode}"
    raise BuildFailed(f"{compiler} cannot build the CPU kernels: {error}")


def _load(path: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(path))
    for name, signature in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes = [_TYPES[letter] for letter in signature]
        function.restype = ctypes.c_int if name == "hr_attend" else None
    return loaded


if __name__ == "__main__":
    reason = why_not()
    raise SystemExit(f"CPU kernels not built: {reason}" if reason else None)
