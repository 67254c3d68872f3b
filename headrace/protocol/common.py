"""What two or more services share, as plain values: `protos/headrace/v1/common.proto`.

Field meanings and limits stand in the protos; units are suffixes here (`_s`, `_bytes`). Token ids are tuples of int, block keys are
16 raw bytes. Nothing in this package imports torch, grpc or protobuf.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from dataclasses import dataclass, field

MAX_SAMPLES = 16
"""Most samples of one prompt."""


class FinishReason(enum.IntEnum):
    """Why a sample ended; NONE while it runs. Values of all enums here are those of the proto enums."""

    NONE = 0
    EOS = 1
    STOP = 2
    LENGTH = 3
    CANCELLED = 4


class NumberFormat(enum.IntEnum):
    """Number format of stored values."""

    UNSPECIFIED = 0
    FP32 = 1
    BF16 = 2
    FP8 = 3
    NVFP4 = 4


class RopeOrder(enum.IntEnum):
    """Where rotated pairs stand in a row."""

    UNSPECIFIED = 0
    INTERLEAVED = 1
    HALVES = 2


class TransferBackend(enum.IntEnum):
    """What moves rows from prefill to decode."""

    UNSPECIFIED = 0
    MOONCAKE = 1
    LOCAL = 2
    GRPC = 3


class WorkerRole(enum.IntEnum):
    """What a worker does."""

    UNSPECIFIED = 0
    PREFILL = 1
    DECODE = 2


class CacheTier(enum.IntEnum):
    """Where a stored block lies."""

    UNSPECIFIED = 0
    DEVICE = 1
    HOST = 2
    DISK = 3


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen, with every default filled in (the router does that)."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    n: int = 1
    max_tokens: int = 256
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def has_penalties(self) -> bool:
        """Whether choosing a token needs to know the earlier ones."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True)
class WorkerIdentity:
    """An address (`host:port`) and the random epoch of the process behind it."""

    address: str
    epoch: str


@dataclass(frozen=True)
class KvRegion:
    """One kind of rows: `layer_count` layers that store rows of `row_width` values. `window_tokens` 0: all tokens are read."""

    name: str
    layer_count: int
    row_width: int
    format: NumberFormat
    window_tokens: int = 0


@dataclass(frozen=True)
class KvLayout:
    """What both ends of a KV transfer must agree on."""

    regions: tuple[KvRegion, ...]
    block_size: int
    rope_order: RopeOrder
    model_fingerprint: str
    numeric_profile: str = ""

    @property
    def layer_count(self) -> int:
        """Layers of all regions."""
        return sum(region.layer_count for region in self.regions)

    @property
    def fingerprint(self) -> str:
        """64 hexadecimal digits over all fields, in the byte form that the comment of the proto message specifies."""
        parts = [b"headrace-kv-layout-1", _number(len(self.regions))]
        for region in self.regions:
            parts.append(_text(region.name))
            parts += map(_number, (region.layer_count, region.row_width, region.format, region.window_tokens))
        parts += [_number(self.block_size), _number(self.rope_order)]
        parts += [_text(self.model_fingerprint), _text(self.numeric_profile)]
        return hashlib.sha256(b"".join(parts)).hexdigest()


def _number(value: int) -> bytes:
    return struct.pack("<q", value)


def _text(value: str) -> bytes:
    data = value.encode()
    return _number(len(data)) + data


@dataclass(frozen=True)
class EpGroup:
    """An expert-parallel group, and this rank's place in it. A rank alone is a group of one."""

    id: str = ""
    epoch: str = ""
    rank: int = 0
    size: int = 1


@dataclass(frozen=True)
class WorkerInfo:
    """What a worker says about itself; the same during the life of its epoch."""

    identity: WorkerIdentity
    role: WorkerRole
    model: str
    layout: KvLayout
    block_count: int
    max_context_tokens: int
    max_batch_tokens: int = 0
    max_batch_size: int = 0
    exact: bool = True
    transfer: TransferBackend = TransferBackend.MOONCAKE
    group: EpGroup = field(default_factory=EpGroup)
    vocabulary_size: int = 0


@dataclass(frozen=True)
class WorkerProgress:
    """How a worker is: counters since its start and its load now. `pause_reason` is empty when progress is expected."""

    serving: bool = True
    completed_steps: int = 0
    completed_layers: int = 0
    pending_steps: int = 0
    pause_reason: str = ""
    queued_requests: int = 0
    queued_tokens: int = 0
    running_requests: int = 0
    available_blocks: int = 0


@dataclass(frozen=True)
class BlockLedger:
    """Blocks of one pool by owner state; the sum is the pool."""

    free: int
    cached: int = 0
    reserved: int = 0
    running: int = 0
    quarantined: int = 0

    @property
    def held(self) -> int:
        """Blocks that must come back once nothing runs."""
        return self.reserved + self.running + self.quarantined


@dataclass(frozen=True)
class Stage:
    """One stage of a request: span name, offset and duration in seconds, tokens, bytes."""

    name: str
    start_s: float
    duration_s: float
    tokens: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Usage:
    """Token counts of one request, each counted once."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    attempts: int = 1
    stored_tokens: int = 0
