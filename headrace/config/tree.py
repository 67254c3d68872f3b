"""The settings of a mesh as one tree of frozen dataclasses.

Lengths in tokens, times in seconds (`_s`), sizes in bytes (`_bytes`). Settings are never written to after loading; what is worked out
from them has names of its own.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field


@dataclass(frozen=True)
class MeshConfig:
    """What all processes of one mesh share."""

    name: str = "headrace"
    """Prefix of every key in Redis: two meshes on one Redis never meet."""
    host: str = "127.0.0.1"
    """Address servers bind to and are dialled at."""
    base_port: int = 20600
    """First port the plan hands out; below the ephemeral range."""
    key_file: str = ""
    """Keys that promises are signed with, one or two hexadecimal lines, the newest first; readable by its owner only. Empty: `headrace up`
    makes one; processes started by hand then sign nothing."""
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
    our C kernels, where there is nothing to capture, false is what turns their replay off (engine/steps/replayed.py)."""
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
    """The prefill ranks."""

    groups: int = 1
    """Expert-parallel groups of prefill ranks."""
    ranks_per_group: int = 1
    """Ranks that share the experts of one model. Expert parallelism is not built yet: only 1 is accepted."""
    devices: tuple[str, ...] = ()
    """One device for each rank, group after group. Empty: `engine.device` for all."""
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
    """The decode ranks."""

    groups: int = 1
    """Expert-parallel groups of decode ranks."""
    ranks_per_group: int = 1
    """Ranks that share the experts of one model. Expert parallelism is not built yet: only 1 is accepted."""
    devices: tuple[str, ...] = ()
    """One device for each rank, group after group. Empty: `engine.device` for all."""
    reserve_expiry_s: float = 10.0
    quarantine_max_s: float = 20.0
    """Silence of a writer for so long replaces the transfer engine."""
    request_credit_bytes: int = 1 << 20
    """Tokens of one request that its router may leave unacknowledged; above it that request ends with READER_STALLED."""
    max_waiting_requests: int = 256
    """Reserve calls that may wait for room; one more is RESOURCE_EXHAUSTED."""


@dataclass(frozen=True)
class RouterConfig:
    """The routers."""

    processes: int = 1
    """Router processes that share one port (SO_REUSEPORT): Python computes on one core a process. Each has its own queue and links."""
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
    reader_buffer_bytes: int = 1 << 20
    """What a stalled reader may leave unread before its request is cancelled."""
    canary: bool = True
    """Whether a worker pair must answer a canary before it gets requests."""


@dataclass(frozen=True)
class LinksConfig:
    """Links between the processes of a mesh; the same for all of them."""

    beat_s: float = 1.0
    """How often each side speaks at least. Three beats of silence break a connection, six end a link that did not come back."""
    max_queued_bytes: int = 64 * 1024 * 1024
    """What one link may owe its other side; beyond it the link is lost with READER_STALLED."""


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
    links: LinksConfig = field(default_factory=LinksConfig)
    kvstore: KvStoreConfig = field(default_factory=KvStoreConfig)
    registry: RegistryConfig = field(default_factory=RegistryConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    faults: tuple[str, ...] = ()
    """Fault injection rules, see headrace/process/faults.py, such as `prefill.push:drop layer=3 times=1`."""


def num_ranks(part: PrefillConfig | DecodeConfig) -> int:
    """Ranks of a role in all its groups."""
    return part.groups * part.ranks_per_group


def engine_of(config: Config, role: str, rank: int) -> EngineConfig:
    """How one rank of `prefill` or `decode` computes: `engine`, on the rank's own device."""
    devices = getattr(config, role).devices
    return dataclasses.replace(config.engine, device=devices[rank]) if devices else config.engine
