"""The `grpc` transfer: rows travel in messages of `DecodeService.WriteRows` when Mooncake's libraries are missing.

Nothing here imports grpc: the source is given the function that sends, the target's `write` is called by the servicer. A
session is `<address of the decode service>/<random>`, so that a descriptor alone says where to send.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.errors import TransferError
from headrace.protocol.common import TransferBackend
from headrace.transfer.base import FAILED, PoolGeometry, RowRun, TargetDescriptor, check_push, geometry_of, refused

if TYPE_CHECKING:
    import torch

BACKEND = TransferBackend.GRPC
CHUNK_BYTES = 1 << 20
"""Payload of one message at most (one row if a row is longer); gRPC refuses messages above 4 MiB."""


@dataclass(frozen=True)
class RowChunk:
    """One message: whole rows of one layer, in row order."""

    session: str
    layer: int
    target_row: int
    payload: bytes


Send = Callable[[str, Iterable[RowChunk]], int]
"""Carries chunks to the service at an address; answers the bytes it wrote. Raises any exception on failure."""


class GrpcTarget:
    """A pool that the decode servicer writes for its callers."""

    def __init__(self, pool: torch.Tensor, address: str):
        """`address`: `host:port` of this rank's DecodeService, as its writers reach it."""
        import torch

        self._geometry = geometry_of(pool)
        self._bytes = pool.view(torch.uint8).flatten(1, 2)  # [num_layers, rows_per_layer, row_bytes], a view
        self._address = address
        self._lock = threading.Lock()
        self._session: str | None = self._new_session()

    def descriptor(self) -> TargetDescriptor:
        """As TransferTarget. Raises TransferError once closed."""
        if self._session is None:
            raise TransferError("this transfer target is closed", reason=FAILED)
        return self._geometry.describe(BACKEND, self._session)

    def fence(self) -> TargetDescriptor:
        """As TransferTarget: waits for the message being written."""
        with self._lock:
            self._session = self._new_session()
            return self.descriptor()

    def close(self) -> None:
        """As TransferTarget."""
        with self._lock:
            self._session = None

    def write(self, session: str, layer: int, target_row: int, payload: bytes) -> int:
        """Put whole rows into one layer; bytes written. Called by the servicer for each message of WriteRows.

        Raises TransferError: FAILED for a session that is not the present one, REFUSED for rows that do not exist or a
        payload that is not whole rows.
        """
        import torch

        rows, rest = divmod(len(payload), self._geometry.row_bytes)
        if rest or not rows:
            raise refused(f"{len(payload)} bytes are not whole rows of {self._geometry.row_bytes}")
        if not 0 <= layer < self._geometry.num_layers:
            raise refused(f"layer {layer} of {self._geometry.num_layers}")
        if target_row < 0 or target_row + rows > self._geometry.rows_per_layer:
            raise refused(f"rows [{target_row}, {target_row + rows}) of {self._geometry.rows_per_layer}")
        values = torch.frombuffer(bytearray(payload), dtype=torch.uint8).view(rows, -1)
        with self._lock:
            if session != self._session:
                raise TransferError(f"session {session} has ended", reason=FAILED)
            self._bytes[layer, target_row : target_row + rows] = values.to(self._bytes.device)
            if self._bytes.is_cuda:
                torch.cuda.current_stream(self._bytes.device).synchronize()
        return len(payload)

    def _new_session(self) -> str:
        return f"{self._address}/{secrets.token_hex(8)}"


class GrpcSource:
    """Cuts rows into messages and hands them to `send`."""

    def __init__(self, pool: torch.Tensor, send: Send):
        import torch

        self._geometry: PoolGeometry = geometry_of(pool)
        self._bytes = pool.view(torch.uint8).flatten(1, 2)
        self._send = send
        self._closed = False

    def push(self, target: TargetDescriptor, layer: int, runs: Sequence[RowRun], *, tag: bytes = b"") -> int:
        """As TransferSource. Whatever `send` raises becomes TransferError (FAILED)."""
        num_bytes = check_push(BACKEND, self._geometry, target, layer, runs)
        if self._closed:
            raise TransferError("this transfer source is closed", reason=FAILED)
        if not num_bytes:
            return 0
        address = target.session.rsplit("/", 1)[0]
        try:
            written = self._send(address, self._chunks(target.session, layer, runs))
        except Exception as error:  # even the target's own refusal: earlier messages of this push may have been written
            raise TransferError(f"{_label(tag)}sending to {address}: {error}", reason=FAILED) from error
        if written != num_bytes:
            raise TransferError(f"{_label(tag)}{address} wrote {written} of {num_bytes} bytes", reason=FAILED)
        return num_bytes

    def close(self) -> None:
        """As TransferSource."""
        self._closed = True

    def _chunks(self, session: str, layer: int, runs: Sequence[RowRun]) -> Iterator[RowChunk]:
        step = max(1, CHUNK_BYTES // self._geometry.row_bytes)
        for run in runs:
            for done in range(0, run.num_rows, step):
                first, count = run.source_row + done, min(step, run.num_rows - done)
                payload = self._bytes[layer, first : first + count].cpu().numpy().tobytes()
                yield RowChunk(session, layer, run.target_row + done, payload)


def _label(tag: bytes) -> str:
    return f"{tag.decode(errors='replace')}: " if tag else ""
