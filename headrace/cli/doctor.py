"""`headrace doctor`: what runs on this host, and why the rest does not."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import json
import pkgutil
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

import kernels
from headrace import config as configuration
from headrace.cli import options
from headrace.config import Config
from headrace.errors import ConfigError, HeadraceError
from headrace.launch.redis_server import server_binary
from headrace.transfer.mooncake import why_not_link, why_not_mooncake
from kernels.select import Backend

NEVER_RUN = (
    ("Blackwell kernels (sm_100)", "never run: no such device has been available"),
    ("several GPUs, DeepEP", "never run: needs at least two GPUs of one host"),
    ("transfer over RDMA", "never run: no such network has been available; a push never takes it unasked"),
    (
        "transfer over cross-node NVLink (GB200, MNNVL)",
        "never run: in no public Mooncake wheel; a source build with -DUSE_MNNVL=ON has it",
    ),
)


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, whether it runs here, a version or the reason."""

    what: str
    runs: bool
    note: str


def doctor(config_file: options.ConfigFile = None, flags: options.Flags = None, as_json: options.Json = False) -> None:
    """Say what runs on this host and why the rest does not."""
    config = options.load(config_file, flags)
    findings = list(examine(config))
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings]))
        return
    table = Table(show_header=False, box=None)
    for finding in findings:
        table.add_row("[green]runs[/green]" if finding.runs else "[yellow]no[/yellow]", finding.what, finding.note)
    Console().print(table)


def examine(config: Config) -> Iterator[Finding]:
    """Every finding, cheap ones first."""
    yield Finding("Python", True, f"{platform.python_version()} on {platform.machine()}")
    for package in ("grpcio", "protobuf", "redis", "opentelemetry-sdk"):
        yield _guarded(package, lambda package=package: importlib.metadata.version(package))
    yield _guarded("bundled Redis (valkey-server)", lambda: server_binary().name)
    why_not = why_not_mooncake()
    yield Finding("mooncake transfer over tcp", why_not is None, why_not or "rows in host memory, and in a GPU's")
    why_not = why_not or why_not_link("nvlink_intra")
    yield Finding(
        "mooncake transfer over nvlink_intra", why_not is None, why_not or "CUDA IPC between processes of one host"
    )
    yield Finding("grpc transfer", True, "the fallback, slower")
    yield _guarded("tokenizer (C++ extension)", lambda: _tokenizer(config))
    yield from _engine(config)
    for what, note in NEVER_RUN:
        yield Finding(what, False, note)


def _engine(config: Config) -> Iterator[Finding]:
    import torch

    yield Finding("torch", True, f"{torch.__version__}, {torch.get_num_threads()} threads")
    yield Finding("CUDA device", torch.cuda.is_available(), _device_note(torch))
    yield _guarded("exact mode", lambda: _exact_mode(config))
    device = torch.device("cuda" if torch.cuda.is_available() else config.engine.device)
    yield Finding("ops are looked at on", True, str(device))
    for op, backend in ops():
        yield _look(op, backend, device)


def ops() -> Iterator[tuple[str, Backend]]:
    """Every back end of every list in `kernels/`, best first: `gate`, or `mla_decode, device` for DEVICE_BACKENDS there."""
    seen: list[object] = []
    for entry in pkgutil.walk_packages(kernels.__path__, "kernels."):
        op = entry.name.rpartition(".")[2]
        for name, value in vars(importlib.import_module(entry.name)).items():
            if _is_backends(value) and not any(value is other for other in seen):
                seen.append(value)
                form = name.lower().removesuffix("backends").strip("_").replace("_", " ")
                yield from ((f"{op}, {form}" if form else op, backend) for backend in value)


def _is_backends(value: object) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(item, Backend) for item in value)


def _look(op: str, backend: Backend, device) -> Finding:
    """Whether it runs here; and, for one that says so of itself, that nobody has run it anywhere."""
    try:
        reason = backend.why_not(device)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    told = [reason] if reason else []
    if "never run" in (inspect.getdoc(backend.run) or "").lower():
        told.append("never run on such a device")
    return Finding(f"op {op}: {backend.name}", reason is None, "; ".join(told))


def _exact_mode(config: Config) -> str:
    import torch

    from headrace.engine.exact import exact_self_test
    from headrace.model.base import ModelOptions
    from headrace.model.families import family_of

    directory = configuration.model_directory(config)
    model = family_of(directory).load(directory, torch.device("cpu"), ModelOptions(exact=True))
    reason = exact_self_test(model)
    if reason is not None:
        raise ConfigError(reason, field="engine.exact")
    return "the same request gives the same bits alone, in a crowd and token by token"


def _device_note(torch) -> str:
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none is visible to torch"


def _tokenizer(config: Config) -> str:
    from headrace.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(configuration.model_directory(config))
    return f"{tokenizer.vocab_size} entries"


def _guarded(what: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(what, True, look())
    except (HeadraceError, ImportError, OSError, ValueError) as error:
        return Finding(what, False, str(error))
