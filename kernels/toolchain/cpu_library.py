"""Build and load `cpu.c`: one C file, one shared library, three seconds of the host's own compiler.

`library()` builds on first use into `build/` beside it (or the temporary directory when that is read-only), named after
the source, the flags and the processor, so a stale or foreign build is never loaded. `why_not()` says what is missing;
without a compiler every op still has its torch back end. Build ahead of time with `python -m kernels.toolchain.cpu_library`.

Calls can be recorded instead of made, and made later in one go, without Python between them: `recording`, `Replay`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import platform
import shutil
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
    "hr_add_rows": "plplll",
    "hr_copy_heads": "pllplllll",
    "hr_replay": "pl",
}
_RETURNS_INT = ("hr_attend", "hr_replay")
RECORDED = (
    "hr_linear",
    "hr_ffn",
    "hr_experts",
    "hr_rms_norm",
    "hr_store_rows",
    "hr_gate",
    "hr_attend",
    "hr_add_rows",
    "hr_copy_heads",
)
"""What `recording` records, in the order of hr_replay's cases."""
CALL_WORDS = 20  # as in cpu.c
_one_recording = threading.Lock()


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
        function.restype = ctypes.c_int if name in _RETURNS_INT else None
    return loaded


def add_rows(x: Any, y: Any) -> None:
    """x += y; [n, width] fp32, dense rows."""
    library().hr_add_rows(x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0), *x.shape)


def copy_heads(to: Any, source: Any) -> None:
    """`to` = `source`; [tokens, heads, width] fp32, any strides with a dense last dimension."""
    library().hr_copy_heads(
        source.data_ptr(), source.stride(0), source.stride(1), to.data_ptr(), to.stride(0), to.stride(1), *to.shape
    )


class Call(NamedTuple):
    """One call that was recorded: a name of RECORDED, and its arguments."""

    name: str
    arguments: tuple[Any, ...]


@contextlib.contextmanager
def recording() -> Iterator[list[Call]]:
    """While it is open, this thread's calls of RECORDED functions are noted and not made; other threads' are made."""
    with _one_recording:
        yield from _record()


def _record() -> Iterator[list[Call]]:
    loaded, owner, calls = library(), threading.get_ident(), []
    own = {name: getattr(loaded, name) for name in RECORDED}

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def note(*arguments: Any) -> Any:
            if threading.get_ident() != owner:
                return function(*arguments)
            calls.append(Call(name, arguments))
            return 0

        return note

    try:
        for name, function in own.items():
            setattr(loaded, name, noting(name, function))
        yield calls
    finally:
        for name, function in own.items():
            setattr(loaded, name, function)


class Replay:
    """Recorded calls as hr_replay takes them. Whoever made the calls keeps alive what their arguments point to."""

    def __init__(self, calls: Sequence[Call]):
        words: list[int] = []
        for call in calls:
            words += [RECORDED.index(call.name), *_words(call)]
        self._count = len(calls)
        self._words = (ctypes.c_int64 * len(words))(*words)

    def __call__(self) -> None:
        """Makes all of them, in order. Raises MemoryError."""
        if library().hr_replay(ctypes.addressof(self._words), self._count):
            raise MemoryError("attention scratch")


def _words(call: Call) -> list[int]:
    """A call as CALL_WORDS - 1 integers."""
    pairs = zip(_SIGNATURES[call.name], call.arguments, strict=True)
    words = [
        int.from_bytes(struct.pack("<f", value), "little") if letter == "f" else int(value) for letter, value in pairs
    ]
    return words + [0] * (CALL_WORDS - 1 - len(words))


if __name__ == "__main__":
    reason = why_not()
    raise SystemExit(f"CPU kernels not built: {reason}" if reason else None)
