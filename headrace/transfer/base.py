"""Moving KV rows from a prefill rank's pool into room that a decode rank promised.

A pool is one contiguous tensor `rows [num_layers, num_blocks, block_size, row_dim]`. A *row index* counts rows inside one
layer: `block_id * block_size + offset`. Decode opens a `TransferTarget` over its pool and sends its `TargetDescriptor`
with every reservation; prefill opens a `TransferSource` over its own pool and pushes runs of whole rows, layer by layer.

What a failed push means for who may reuse the target's rows:

    REFUSED   our own check said no before any byte left: nothing was written
    FAILED    the peer is gone, refused the session or broke the connection: some rows may have been written, and
              bytes already in a socket may still be
    TIMEOUT   the peer said nothing for the transfer time-out: as FAILED

A one-sided write cannot be called back by its writer. After FAILED or TIMEOUT only the target's `fence()` makes the rows safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from headrace.errors import TransferError
from headrace.protocol.common import TransferBackend
from headrace.protocol.decode import TargetDescriptor

if TYPE_CHECKING:
    import torch

__all__ = [
    "FAILED",
    "REFUSED",
    "TIMEOUT",
    "PoolGeometry",
    "RowRun",
    "TargetDescriptor",
    "TransferSource",
    "TransferTarget",
    "check_push",
    "geometry_of",
    "is_drained",
    "plan_runs",
    "refused",
]

REFUSED = "TRANSFER_REFUSED"
FAILED = "TRANSFER_FAILED"
TIMEOUT = "TRANSFER_TIMEOUT"


def refused(message: str) -> TransferError:
    """A push that our own checks stopped: nothing was written."""
    return TransferError(message, reason=REFUSED)


def is_drained(error: TransferError) -> bool:
    """True when the failed push can have no write in flight."""
    return error.reason == REFUSED


@dataclass(frozen=True)
class RowRun:
    """`num_rows` rows, consecutive on both sides: [source_row, ...) of the writer's layer to [target_row, ...)."""

    source_row: int
    target_row: int
    num_rows: int


@dataclass(frozen=True)
class PoolGeometry:
    """Where the rows of a pool lie in memory; sizes in bytes, counts in layers and blocks."""

    base_address: int
    num_layers: int
    num_blocks: int
    block_size: int
    row_bytes: int

    @property
    def rows_per_layer(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def layer_bytes(self) -> int:
        return self.rows_per_layer * self.row_bytes

    @property
    def total_bytes(self) -> int:
        return self.num_layers * self.layer_bytes

    def address(self, layer: int, row: int) -> int:
        """First byte of a row."""
        return self.base_address + layer * self.layer_bytes + row * self.row_bytes

    def describe(self, backend: TransferBackend, session: str) -> TargetDescriptor:
        """What a writer must know."""
        return TargetDescriptor(
            backend=backend,
            session=session,
            base_address=self.base_address,
            layer_stride_bytes=self.layer_bytes,
            block_stride_bytes=self.block_size * self.row_bytes,
            row_bytes=self.row_bytes,
            block_size=self.block_size,
            num_layers=self.num_layers,
            num_blocks=self.num_blocks,
        )


class TransferSource(Protocol):
    """The writing side; one per prefill rank."""

    def push(self, target: TargetDescriptor, layer: int, runs: Sequence[RowRun], *, tag: bytes = b"") -> int:
        """Write `runs` of one layer into `target`; bytes written, 0 for no runs.

        Blocks until the target has applied every byte, at most about the transfer time-out; call it from the transfer
        thread. The rows must be final: on a GPU, wait for the layer's event first. `tag` names the push in errors.
        Raises TransferError with a reason as in the module's table.
        """
        ...

    def close(self) -> None:
        """End the engine; a push in progress fails. Safe to repeat."""
        ...


class TransferTarget(Protocol):
    """The written side; one per decode rank."""

    def descriptor(self) -> TargetDescriptor:
        """How to write here, under the present session."""
        ...

    def fence(self) -> TargetDescriptor:
        """Replace the session. Once this returns, no write that began under an earlier session can land.

        Blocks, well under 1 s. Every writer's push in flight fails with it. Returns the new descriptor.
        """
        ...

    def close(self) -> None:
        """End the session for good; as `fence`, without a new one. Safe to repeat."""
        ...


def plan_runs(
    source_blocks: Sequence[int], target_blocks: Sequence[int], first_row: int, num_rows: int, block_size: int
) -> list[RowRun]:
    """Runs that carry token positions [first_row, first_row + num_rows) of one sequence, in order of position.

    source_blocks, target_blocks   the sequence's block tables on both sides, from position 0
    A run ends where either side's next block is not the neighbour of the one before. No rows: no runs.
    Raises TransferError (REFUSED) when a table is too short.
    """
    end = first_row + num_rows
    if first_row < 0 or num_rows < 0:
        raise refused(f"rows [{first_row}, {end}) do not exist")
    if end > min(len(source_blocks), len(target_blocks)) * block_size:
        raise refused(
            f"rows [{first_row}, {end}) need {-(-end // block_size)} blocks; "
            f"the source has {len(source_blocks)}, the target {len(target_blocks)}"
        )
    runs: list[RowRun] = []
    position = first_row
    while position < end:
        index, offset = divmod(position, block_size)
        rows = min(block_size - offset, end - position)
        source, target = source_blocks[index] * block_size + offset, target_blocks[index] * block_size + offset
        last = runs[-1] if runs else None
        if last and last.source_row + last.num_rows == source and last.target_row + last.num_rows == target:
            runs[-1] = RowRun(last.source_row, last.target_row, last.num_rows + rows)
        else:
            runs.append(RowRun(source, target, rows))
        position += rows
    return runs


def geometry_of(pool: torch.Tensor) -> PoolGeometry:
    """Measure `pool [num_layers, num_blocks, block_size, row_dim]`. Raises TransferError unless it is one dense region."""
    if pool.dim() != 4 or not pool.is_contiguous() or pool.numel() == 0:
        raise refused(
            f"a pool is one contiguous, non-empty [layers, blocks, block_size, row_dim], not {tuple(pool.shape)}"
        )
    num_layers, num_blocks, block_size, row_dim = pool.shape
    return PoolGeometry(pool.data_ptr(), num_layers, num_blocks, block_size, row_dim * pool.element_size())


def check_push(
    backend: TransferBackend, source: PoolGeometry, target: TargetDescriptor, layer: int, runs: Sequence[RowRun]
) -> int:
    """Bytes that this push will write. Raises TransferError (REFUSED) for anything a correct pair would never ask.

    The target's bounds are checked here, on the writing side and before any call: a one-sided write has no other guard
    against landing inside the right pool at the wrong place.
    """
    if target.backend != backend:
        raise refused(
            f"the target is written through {TransferBackend(target.backend).name}, this source speaks {backend.name}"
        )
    mine = source.describe(backend, target.session)
    for name in ("row_bytes", "block_size", "num_layers", "block_stride_bytes"):
        if getattr(mine, name) != getattr(target, name):
            raise refused(f"{name} differs: {getattr(mine, name)} here, {getattr(target, name)} on the target")
    if target.num_blocks < 1 or target.layer_stride_bytes != target.num_blocks * target.block_stride_bytes:
        raise refused(
            f"the target's layer stride of {target.layer_stride_bytes} bytes is not its {target.num_blocks} blocks"
        )
    if not target.session:
        raise refused("the target names no session")
    if not 0 <= layer < target.num_layers:
        raise refused(f"layer {layer} of {target.num_layers}")
    target_rows = target.num_blocks * target.block_size
    for run in runs:
        if run.num_rows < 1:
            raise refused(f"{run} is empty")
        if run.source_row < 0 or run.source_row + run.num_rows > source.rows_per_layer:
            raise refused(f"{run} leaves the source's {source.rows_per_layer} rows")
        if run.target_row < 0 or run.target_row + run.num_rows > target_rows:
            raise refused(f"{run} leaves the target's {target_rows} rows")
    return sum(run.num_rows for run in runs) * source.row_bytes
