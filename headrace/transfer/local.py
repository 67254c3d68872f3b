"""The `local` transfer: source and target live in one process, a push is a tensor copy.

Aggregated mode and tests. It keeps the promises of a wire: a session that ended is refused, a fence waits for the copy in
progress and lets none begin after it.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.errors import TransferError
from headrace.protocol.common import TransferBackend
from headrace.transfer.base import FAILED, RowRun, TargetDescriptor, check_push, geometry_of, refused

if TYPE_CHECKING:
    import torch

BACKEND = TransferBackend.LOCAL

_targets: dict[str, LocalTarget] = {}
"""Live targets of this process by session. Guarded by each target's own lock for writes under it."""


class LocalTarget:
    """A pool of this process that sources of this process may write."""

    def __init__(self, pool: torch.Tensor):
        self._geometry = geometry_of(pool)
        self._layers = pool.flatten(1, 2)  # [num_layers, rows_per_layer, row_dim], a view
        self._lock = threading.Lock()
        self._session: str | None = None
        self._begin()

    def descriptor(self) -> TargetDescriptor:
        """As TransferTarget. Raises TransferError once closed."""
        if self._session is None:
            raise TransferError("this transfer target is closed", reason=FAILED)
        return self._geometry.describe(BACKEND, self._session)

    def fence(self) -> TargetDescriptor:
        """As TransferTarget: waits for the copy in progress."""
        with self._lock:
            self._end()
            self._begin()
            return self.descriptor()

    def close(self) -> None:
        """As TransferTarget."""
        with self._lock:
            self._end()

    def write(self, session: str, layer: int, source_rows: torch.Tensor, runs: Sequence[RowRun]) -> None:
        """Copy runs of `source_rows [rows_per_layer, row_dim]`. Raises TransferError unless `session` is the present one."""
        with self._lock:
            if session != self._session:
                raise TransferError(f"session {session} has ended", reason=FAILED)
            rows = self._layers[layer]
            if rows.dtype != source_rows.dtype:
                raise refused(f"the target's rows are {rows.dtype}, the source's {source_rows.dtype}")
            for run in runs:
                here = rows[run.target_row : run.target_row + run.num_rows]
                here.copy_(source_rows[run.source_row : run.source_row + run.num_rows])
            if rows.is_cuda:
                _wait_for_copies(rows.device)

    def _begin(self) -> None:
        self._session = f"local-{secrets.token_hex(8)}"
        _targets[self._session] = self

    def _end(self) -> None:
        if self._session is not None:
            _targets.pop(self._session, None)
        self._session = None


class LocalSource:
    """Writes from a pool of this process into targets of this process."""

    def __init__(self, pool: torch.Tensor):
        self._geometry = geometry_of(pool)
        self._layers = pool.flatten(1, 2)
        self._closed = False

    def push(self, target: TargetDescriptor, layer: int, runs: Sequence[RowRun], *, tag: bytes = b"") -> int:
        """As TransferSource."""
        num_bytes = check_push(BACKEND, self._geometry, target, layer, runs)
        if self._closed:
            raise TransferError("this transfer source is closed", reason=FAILED)
        owner = _targets.get(target.session)
        if owner is None:
            raise TransferError(f"no session {target.session} in this process", reason=FAILED)
        owner.write(target.session, layer, self._layers[layer], runs)
        return num_bytes

    def close(self) -> None:
        """As TransferSource."""
        self._closed = True


def _wait_for_copies(device: torch.device) -> None:
    import torch

    torch.cuda.current_stream(device).synchronize()
