"""What a router tells its operator, as plain values: `protos/headrace/v1/router.proto`."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.protocol.common import WorkerInfo, WorkerProgress


@dataclass(frozen=True)
class WorkerView:
    """One worker as a router sees it."""

    info: WorkerInfo
    ready: bool
    in_flight: int
    queued_tokens: int
    why_not_ready: str = ""
    progress: WorkerProgress | None = None


@dataclass(frozen=True)
class RouterLedger:
    """Snapshot of a router."""

    queued_requests: int = 0
    queued_tokens: int = 0
    running_requests: int = 0
    open_handles: int = 0
