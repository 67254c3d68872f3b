"""What every link carries, as plain values: `protos/headrace/v1/link.proto`. Failures are instances of headrace.errors.HeadraceError."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.protocol.common import WorkerIdentity, WorkerInfo

OLDEST_VERSION = 2
NEWEST_VERSION = 2
"""Protocol versions that this program speaks."""


@dataclass(frozen=True)
class LinkHello:
    """The first thing each side says on a connection."""

    sender: WorkerIdentity
    link_id: str
    beat_interval_s: float
    receiver_epoch: str = ""
    received_through: int = 0
    info: WorkerInfo | None = None
    oldest_version: int = OLDEST_VERSION
    newest_version: int = NEWEST_VERSION
    features: tuple[str, ...] = ()


@dataclass(frozen=True)
class Done:
    """The command was carried out and there is nothing to say."""
