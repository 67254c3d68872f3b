"""One tree of settings, one loader, and the only place that reads the environment.

Order: defaults < TOML file < environment (`HEADRACE__ENGINE__MAX_BATCH_SIZE=64`) < flags (`engine.max_batch_size=64`).
An unknown key or a bad value raises ConfigError with the key's path. Settings are never written to after loading; what is
worked out from them has names of its own. Lengths in tokens, times in seconds (`_s`), sizes in bytes (`_bytes`).
"""

from __future__ import annotations

import dataclasses
import math
import os
import sysconfig
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError

THREAD_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""For every process that computes on a CPU, before torch loads. With libgomp's default of spinning, two workers on two cores
slow each other down more than tenfold."""


@dataclass(frozen=True)
class MeshConfig:
    """What all processes of one mesh share."""

    name: str = "headrace"
    """Prefix of every key in Redis: two meshes on one Redis never meet."""
    host: str = "127.0.0.1"
    """Address servers bind to and are dialled at."""
    base_port: int = 20600
    """First port the plan hands out; below the ephemeral range."""
    prefill_ranks: int = 1
    decode_ranks: int = 1
    run_directory: str = ""
    """State of a running mesh: plan, logs, traces. Empty: `$XDG_STATE_HOME/headrace/<name>`."""
    start_timeout_s: float = 60.0
    drain_grace_s: float = 20.0
    """How long SIGTERM lets running requests finish."""


@dataclass(frozen=True)
class ModelSettings:
    """Which checkpoint."""

    directory: str = "models/tiny"
    max_context_tokens: int = 0
    """0: what the checkpoint's config.json says."""


@dataclass(frozen=True)
class EngineConfig:
    """How a worker computes."""

    device: str = "cpu"
    exact: bool | None = None
    """None: on for CPUs, off elsewhere."""
    block_size: int = 0
    """Tokens in a KV block. 0: 16 on CPUs, 64 elsewhere."""
    num_blocks: int = 4096
    """Blocks in this rank's pool."""
    max_batch_tokens: int = 8192
    """Most prompt tokens in one prefill batch; a longer prompt runs alone."""
    max_batch_size: int = 64
    """Most samples that step together on decode."""
    num_threads: int = 0
    """Threads that compute. 0: torch's own choice; in a mesh of one host, its cores shared between the workers."""
    weight_dtype: str = ""
    """What matrices are kept in on an accelerator: `bf16`, `fp8`, `nvfp4` (experts; small projections then FP8). Empty: as
    they are on disk. Only empty in exact mode and on CPUs."""
    kv_dtype: str = ""
    """What rows of the pool are kept in: `fp32`, `bf16`, `fp8` (e4m3, accelerators only). Empty: fp32 in exact mode, else
    bf16. Prefill and decode workers must agree."""
    async_scheduling: bool | None = None
    """Whether decode launches a step before it has read the tokens of the one in flight. None: on for accelerators."""
    decode_graphs: bool | None = None
    """Whether decode steps are captured into CUDA graphs, one for each batch size. None: on for accelerators. On a CPU with
    our C kernels, where there is nothing to capture, false is what turns their replay off (model/recorded.py)."""
    decode_graph_sizes: tuple[int, ...] = ()
    """Batch sizes, in samples, that steps are padded to and graphs are captured for; `max_batch_size` is always one. Empty:
    1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512."""
    moe_dp_chunk_tokens: int = 0
    moe_activation_chunk_tokens: int = 0
    output_chunk: int = 128
    """Requests whose outputs are processed between two looks at the event loop."""


@dataclass(frozen=True)
class TransferConfig:
    """How rows move from prefill to decode."""

    backend: str = "mooncake"
    """`mooncake`, `local` (same process) or `grpc`."""
    link: str = "tcp"
    """What Mooncake moves bytes over: `tcp`, or `nvlink_intra` between GPU processes of one host (CUDA IPC). Over the latter a
    decode process that must fence a silent writer off ends itself: docs/performance.md."""
    min_port: int = 21000
    max_port: int = 22999
    """Mooncake's own listening ports."""
    timeout_s: int = 5
    """One push at most; Mooncake's minimum is 5."""


@dataclass(frozen=True)
class PrefillConfig:
    """One prefill rank."""

    max_queue_tokens: int = 131072
    """Prompt tokens that may wait; one more is RESOURCE_EXHAUSTED."""
    renew_every_s: float = 3.0
    expiry_margin_s: float = 6.0
    """No write starts when the reservation has less left; above the transfer time-out."""
    commit_retries: int = 1
    """Pushes repeated when the manifest did not match."""
    prefix_cache: bool = True


@dataclass(frozen=True)
class DecodeConfig:
    """One decode rank."""

    reserve_expiry_s: float = 10.0
    quarantine_max_s: float = 20.0
    """Silence of a writer for so long replaces the transfer engine."""
    request_credit_bytes: int = 1 << 20
    """Tokens of one request that its router may leave unacknowledged; above it that request ends with READER_STALLED."""
    max_waiting_requests: int = 256
    """Reserve calls that may wait for room; one more is RESOURCE_EXHAUSTED."""


@dataclass(frozen=True)
class RouterConfig:
    """One router process."""

    port: int = 0
    """0: from the plan."""
    default_deadline_s: float = 120.0
    """For requests whose client set none."""
    max_deadline_s: float = 3600.0
    max_queue_tokens: int = 262144
    """Prompt tokens that may wait for admission; one more is RESOURCE_EXHAUSTED."""
    reserve_ahead_tokens: int = 16384
    """Prompt tokens a prefill rank may have been sent and not prefilled before others wait in the router."""
    stream_interval: int = 1
    default_max_tokens: int = 256
    max_attempts: int = 4
    reader_buffer_messages: int = 4096
    """Messages a stalled reader may leave unread before its request is cancelled."""
    canary: bool = True
    """Whether a worker pair must answer a canary before it gets requests."""


@dataclass(frozen=True)
class KvStoreConfig:
    """One kvstore process."""

    publish_ttl_s: float = 30.0


@dataclass(frozen=True)
class RegistryConfig:
    """Who is alive, in Redis."""

    url: str = ""
    """`redis://host:port/db`. Empty: `headrace up` starts the bundled server and fills this in."""
    heartbeat_s: float = 1.0
    lease_s: float = 5.0


@dataclass(frozen=True)
class TelemetryConfig:
    """Where spans and metrics go."""

    otlp_endpoint: str = ""
    """`http://host:4317`. Empty: spans go to the local ring file only."""
    ring_directory: str = ""
    """Empty: `<run directory>/traces`."""
    ring_bytes: int = 16 * 1024 * 1024
    """Size of one process's ring; the oldest half is dropped when it is full."""
    log_level: str = "INFO"


@dataclass(frozen=True)
class Config:
    """The whole tree. Each part of the system gets its own leaf of it."""

    mesh: MeshConfig = field(default_factory=MeshConfig)
    model: ModelSettings = field(default_factory=ModelSettings)
    engine: EngineConfig = field(default_factory=EngineConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    prefill: PrefillConfig = field(default_factory=PrefillConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    kvstore: KvStoreConfig = field(default_factory=KvStoreConfig)
    registry: RegistryConfig = field(default_factory=RegistryConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    faults: tuple[str, ...] = ()
    """Fault injection rules, see headrace/process/faults.py, such as `prefill.push:drop layer=3 times=1`."""


def load(
    path: str | Path | None = None, flags: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Config:
    """The settings of this process.

    `path` names a TOML file; absent, the file named by `HEADRACE_CONFIG` if that is set. `flags` are `part.key=value`.
    Raises ConfigError naming the key's path for unknown keys, bad values and settings that cannot work together.
    """
    environment = os.environ if environment is None else environment
    tree: dict[str, Any] = {}
    path = path or environment.get("HEADRACE_CONFIG") or None
    if path is not None:
        _merge(tree, _read_toml(Path(path)))
    for name, text in environment.items():
        if name.startswith("HEADRACE__"):
            _assign(tree, name.removeprefix("HEADRACE__").lower().split("__"), text)
    for flag in flags:
        key, separator, text = flag.partition("=")
        if not separator:
            raise ConfigError(f"flag {flag!r} is not of the form part.key=value", field=key)
        _assign(tree, key.split("."), text)
    config = _build(Config, tree, "")
    check(config)
    return config


def check(config: Config) -> None:
    """Refuses settings that cannot work together, with the numbers."""
    _check_times(config)
    _check_transfer(config)
    for path, value in (
        ("engine.num_blocks", config.engine.num_blocks),
        ("engine.max_batch_tokens", config.engine.max_batch_tokens),
        ("engine.max_batch_size", config.engine.max_batch_size),
        ("mesh.prefill_ranks", config.mesh.prefill_ranks),
        ("mesh.decode_ranks", config.mesh.decode_ranks),
        ("router.stream_interval", config.router.stream_interval),
        ("router.max_attempts", config.router.max_attempts),
        ("decode.request_credit_bytes", config.decode.request_credit_bytes),
    ):
        if value < 1:
            raise ConfigError(f"{path} = {value} must be at least 1", field=path)
    _check_formats(config.engine)
    _check_graphs(config.engine)


def _check_times(config: Config) -> None:
    margin_s, expiry_s = config.prefill.expiry_margin_s, config.decode.reserve_expiry_s
    if margin_s <= config.transfer.timeout_s:
        raise ConfigError(
            f"prefill.expiry_margin_s = {margin_s} must be above transfer.timeout_s = {config.transfer.timeout_s}: a write "
            "could still run when its reservation has expired",
            field="prefill.expiry_margin_s",
        )
    if margin_s >= expiry_s:
        raise ConfigError(
            f"prefill.expiry_margin_s = {margin_s} leaves nothing of decode.reserve_expiry_s = {expiry_s}",
            field="prefill.expiry_margin_s",
        )
    if config.prefill.renew_every_s > expiry_s - margin_s:
        raise ConfigError(
            f"prefill.renew_every_s = {config.prefill.renew_every_s} is longer than what a reservation has left above the "
            f"margin, {expiry_s - margin_s} s",
            field="prefill.renew_every_s",
        )
    if config.registry.lease_s <= 2 * config.registry.heartbeat_s:
        raise ConfigError(
            f"registry.lease_s = {config.registry.lease_s} must be more than two heartbeats of {config.registry.heartbeat_s} s",
            field="registry.lease_s",
        )


def _check_transfer(config: Config) -> None:
    transfer = config.transfer
    if transfer.timeout_s < 5:
        raise ConfigError(
            f"transfer.timeout_s = {transfer.timeout_s} is below Mooncake's minimum of 5", field="transfer.timeout_s"
        )
    if transfer.backend not in ("mooncake", "local", "grpc"):
        raise ConfigError(f"transfer.backend = {transfer.backend!r}", field="transfer.backend")
    if transfer.link not in ("tcp", "nvlink_intra"):
        raise ConfigError(f"transfer.link = {transfer.link!r} is neither tcp nor nvlink_intra", field="transfer.link")
    if transfer.link == "nvlink_intra" and transfer.backend != "mooncake":
        raise ConfigError(
            f"transfer.link = 'nvlink_intra' is a link of Mooncake, and transfer.backend is {transfer.backend!r}",
            field="transfer.link",
        )
    if transfer.link == "nvlink_intra" and _on_cpu(config.engine):
        raise ConfigError(
            f"transfer.link = 'nvlink_intra' moves GPU memory only, and engine.device is {config.engine.device!r}",
            field="transfer.link",
        )


def _on_cpu(engine: EngineConfig) -> bool:
    return engine.device.partition(":")[0] == "cpu"


def _check_formats(engine: EngineConfig) -> None:
    """What one look at the settings tells; what the device and the checkpoint have is told when the model is loaded."""
    on_cpu = _on_cpu(engine)
    exact = on_cpu if engine.exact is None else engine.exact
    where = "in exact mode" if exact else "on a CPU" if on_cpu else "on an accelerator"
    weights = ("",) if exact or on_cpu else ("", "bf16", "fp8", "nvfp4")
    rows = ("", "fp32") if exact else ("", "fp32", "bf16") if on_cpu else ("", "bf16", "fp8")
    for path, value, known in (
        ("engine.weight_dtype", engine.weight_dtype, weights),
        ("engine.kv_dtype", engine.kv_dtype, rows),
    ):
        if value not in known:
            choice = ", ".join(name or "empty" for name in known)
            raise ConfigError(f"{path} = {value!r}: {where} it is one of {choice}", field=path)


def _check_graphs(engine: EngineConfig) -> None:
    on_cpu, sizes = _on_cpu(engine), engine.decode_graph_sizes
    if on_cpu and engine.decode_graphs:
        raise ConfigError(
            f"engine.decode_graphs = true, engine.device = {engine.device!r} has no graphs",
            field="engine.decode_graphs",
        )
    if on_cpu and sizes:
        raise ConfigError(
            f"engine.decode_graph_sizes = {list(sizes)}, engine.device = {engine.device!r} has no graphs",
            field="engine.decode_graph_sizes",
        )
    if engine.decode_graphs and engine.exact:
        raise ConfigError(
            "engine.decode_graphs = true, engine.exact = true runs kernel by kernel", field="engine.decode_graphs"
        )
    if sizes and engine.decode_graphs is False:
        raise ConfigError(
            "engine.decode_graph_sizes are given, engine.decode_graphs = false", field="engine.decode_graph_sizes"
        )
    if any(not 1 <= size <= engine.max_batch_size for size in sizes):
        raise ConfigError(
            f"engine.decode_graph_sizes = {list(sizes)} must lie in 1 .. engine.max_batch_size = {engine.max_batch_size}",
            field="engine.decode_graph_sizes",
        )


def check_separate(config: Config) -> None:
    """Refuses settings that only one process for prefill and decode could have."""
    if config.transfer.backend == "local":
        raise ConfigError(
            "transfer.backend = 'local' moves rows within one process: use it with `headrace up --aggregated`, or choose mooncake or grpc",
            field="transfer.backend",
        )


def run_directory(config: Config, environment: Mapping[str, str] | None = None) -> Path:
    """Where this mesh keeps its plan, logs and traces."""
    environment = os.environ if environment is None else environment
    if config.mesh.run_directory:
        return Path(config.mesh.run_directory).expanduser().absolute()
    state = environment.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "headrace" / config.mesh.name


def model_directory(config: Config) -> Path:
    """The checkpoint, absolute: as given, seen from where we stand or else from the checkout."""
    given = Path(config.model.directory).expanduser()
    if given.is_absolute() or given.exists():
        return given.absolute()
    return Path(__file__).resolve().parent.parent / given


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process we start: ours plus `extra`."""
    return {**os.environ, **extra}


def apply_environment(values: Mapping[str, str]) -> None:
    """Sets variables that a library reads when it loads; called by process starts before they import it."""
    os.environ.update(values)


def find_own_programs() -> None:
    """Puts the programs installed beside this Python last on PATH: FlashInfer calls `ninja` by its name alone, and nobody need
    have activated the environment."""
    own = sysconfig.get_path("scripts")
    path = os.environ.get("PATH", os.defpath)
    if own not in path.split(os.pathsep):
        apply_environment({"PATH": f"{path}{os.pathsep}{own}"})


def environment_value(name: str) -> str | None:
    """One variable, for checks that a library will see what it needs."""
    return os.environ.get(name)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", field=str(path)) from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise ConfigError(f"{path} is not TOML: {error}", field=str(path)) from error


def _merge(tree: dict[str, Any], other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, dict):
            _merge(tree.setdefault(key, {}), value)
        else:
            tree[key] = value


def _assign(tree: dict[str, Any], keys: Sequence[str], text: str) -> None:
    node = tree
    for key in keys[:-1]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise ConfigError(f"{'.'.join(keys)} is below a value", field=".".join(keys))
    node[keys[-1]] = _Text(text)


class _Text(str):
    """A value that came as text and takes the type of its field."""


def _build(kind: type, tree: Mapping[str, Any], path: str) -> Any:
    hints = typing.get_type_hints(kind)
    names = {entry.name for entry in dataclasses.fields(kind)}
    for key in tree:
        if key not in names:
            known = ", ".join(sorted(names))
            raise ConfigError(f"unknown setting {path}{key}; known here: {known}", field=f"{path}{key}")
    values = {key: _convert(hints[key], value, f"{path}{key}") for key, value in tree.items()}
    return kind(**values)


def _convert(kind: Any, value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path} must be a table", field=path)
        return _build(typing.cast(type, kind), value, path + ".")
    if typing.get_origin(kind) is types.UnionType:
        if isinstance(value, _Text) and value.lower() in ("", "none", "auto"):
            return None
        return _convert(next(arm for arm in typing.get_args(kind) if arm is not types.NoneType), value, path)
    if typing.get_origin(kind) is tuple:
        arm = typing.get_args(kind)[0]
        return tuple(_convert(arm, item, path) for item in _items(arm, value, path))
    try:
        return _scalar(kind, value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path} = {value!r} is not a valid {kind.__name__}", field=path) from error


def _items(kind: type, value: Any, path: str) -> list[Any]:
    """The items of a list, or of a text that names them: numbers with `,` or `;` between, texts with `;`."""
    if isinstance(value, str):
        text = str(value) if kind is str else value.replace(",", ";")
        return [_Text(part.strip()) for part in text.split(";") if part.strip()]
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{path} = {value!r} is not a list", field=path)
    return list(value)


def _scalar(kind: type, value: Any) -> Any:
    if kind is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, _Text) and value.lower() in ("true", "1", "yes", "on"):
            return True
        if isinstance(value, _Text) and value.lower() in ("false", "0", "no", "off"):
            return False
        raise ValueError(value)
    if kind is str:
        if not isinstance(value, str):
            raise TypeError(value)
        return str(value)
    if isinstance(value, bool) or (isinstance(value, str) and not isinstance(value, _Text)):
        raise TypeError(value)
    if kind is int and isinstance(value, float):
        raise ValueError(value)
    number = kind(value)
    if not 0 <= number < math.inf:  # no setting is negative; NaN would pass every later check
        raise ValueError(value)
    return number
