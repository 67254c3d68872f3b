"""`headrace doctor`: what runs on this host, and why the rest does not."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import pkgutil
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

import kernels
from headrace import config as configuration
from headrace.bundled_redis import server_binary
from headrace.cli import options
from headrace.config import Config
from headrace.errors import ConfigError, HeadraceError
from headrace.transfer.mooncake import why_not_mooncake

NEVER_RUN = (
    ("Blackwell kernels (sm_100)", "never run: no such device has been available"),
    ("several GPUs, DeepEP, NVLink transfer", "never run: needs at least two GPUs of one host"),
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
    yield Finding("mooncake transfer", why_not is None, why_not or "TCP; RDMA where the host has it")
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
    for module in pkgutil.iter_modules(kernels.__path__):
        for backend in getattr(importlib.import_module(f"kernels.{module.name}"), "BACKENDS", ()):
            reason = backend.why_not(torch.device(config.engine.device))
            yield Finding(f"op {module.name}: {backend.name}", reason is None, reason or "")


def _exact_mode(config: Config) -> str:
    from headrace.model.exact import exact_self_test
    from headrace.model.weights import load_transformer

    model = load_transformer(configuration.model_directory(config), exact=True)
    reason = exact_self_test(model)
    if reason is not None:
        raise ConfigError(reason, field="engine.exact")
    return "the same request gives the same bits alone, in a crowd and token by token"


def _device_note(torch) -> str:
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none is visible to torch"


def _tokenizer(config: Config) -> str:
    from headrace.model.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(configuration.model_directory(config))
    return f"{tokenizer.vocab_size} entries"


def _guarded(what: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(what, True, look())
    except (HeadraceError, ImportError, OSError, ValueError) as error:
        return Finding(what, False, str(error))
