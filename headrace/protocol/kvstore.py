"""What the catalogue hears and answers, as plain values: `protos/headrace/v1/kvstore.proto`. Keys are 16 raw bytes."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.protocol.common import CacheTier, WorkerIdentity


@dataclass(frozen=True)
class PublishCommand:
    """Blocks a worker holds now; the entry lapses `time_to_live_s` after it was published last."""

    keys: tuple[bytes, ...]
    time_to_live_s: float
    tier: CacheTier = CacheTier.DEVICE


@dataclass(frozen=True)
class WithdrawCommand:
    """Blocks a worker holds no longer; `all`: everything of its epoch, and no keys."""

    keys: tuple[bytes, ...] = ()
    all: bool = False


@dataclass(frozen=True)
class PrefixHolder:
    """A worker that holds the first `num_blocks` blocks of a prompt."""

    worker: WorkerIdentity
    num_blocks: int
    tier: CacheTier = CacheTier.DEVICE


@dataclass(frozen=True)
class CatalogueChange:
    """What happened to some keys: `kind` is PUBLISHED, WITHDRAWN or LOST. Changes are numbered without a gap."""

    kind: str
    worker: WorkerIdentity
    keys: tuple[bytes, ...] = ()
    all: bool = False
    number: int = 0
    is_snapshot: bool = False
    tier: CacheTier = CacheTier.DEVICE
