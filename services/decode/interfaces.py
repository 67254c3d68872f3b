"""What a decode core asks of its surroundings, as small protocols: tests make them in a few lines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headrace.cache.blocks import BlockPool
from headrace.clock import Clock
from headrace.engine.request import DecodeSequence, SampledToken
from headrace.errors import HeadraceError
from headrace.process.faults import Faults
from headrace.protocol.common import WorkerIdentity
from headrace.protocol.decode import Promise, Reservation, StopState, TargetDescriptor, TokenFrame

Checksums = Callable[[Sequence[int], int, int], Sequence[int]]
"""(blocks, first_row, num_rows) -> a signed 64-bit checksum of those token positions for each layer. Called in a worker thread;
waits for what a transfer wrote, not for steps in flight."""
CopyRows = Callable[[int, int, int], None]
"""(source block, target block, rows), in every layer; they are there when it returns. Called in the same worker thread."""
Sign = Callable[[Promise, float], Reservation]
"""(promise, seconds until it expires) -> what a router carries to the writer."""
StopWriter = Callable[[WorkerIdentity, str, float], Awaitable[StopState]]
"""(writer, reservation id, wait_s) -> its answer. Bounded in time; raises HeadraceError when there is none."""


class DecodeEngine(Protocol):
    """The batch that steps."""

    def connect(
        self,
        on_step: Callable[[Sequence[SampledToken]], None],
        on_failure: Callable[[Sequence[DecodeSequence], Exception], None],
    ) -> None:
        """Both are called in the engine thread: after each step, and when a step lost the sequences named. No step touches
        the blocks of a sample whose end or loss is told any more. `tokens` may make its items when they are looked at."""

    def add(self, sequences: Sequence[DecodeSequence]) -> None:
        """They step from now on. Does not block."""

    async def remove(self, handle: int, sample_index: int | None = None) -> None:
        """Takes one sample or all of a handle out; afterwards no forward touches their blocks. Safe to repeat."""

    @property
    def steps(self) -> int:
        """Forwards that have completed since start."""

    @property
    def pending(self) -> int:
        """Forwards whose completion is awaited now; 0 when there is nothing to step."""


class Target(Protocol):
    """The written side of the transfer; see headrace.transfer.base.TransferTarget."""

    def descriptor(self) -> TargetDescriptor: ...

    def fence(self) -> TargetDescriptor: ...


class TokenLink(Protocol):
    """The way to one router; see headrace.rpc.links.Link."""

    peer: WorkerIdentity
    is_open: bool
    is_lost: bool
    unacknowledged_bytes: int
    acknowledged_through: int

    def send(self, body: TokenFrame) -> int: ...

    def lose(self, error: HeadraceError) -> None: ...


@dataclass
class Collaborators:
    """What a Decoder works with."""

    clock: Clock
    pool: BlockPool
    engine: DecodeEngine
    target: Target
    checksums: Checksums
    copy_rows: CopyRows
    sign: Sign
    stop_writer: StopWriter
    faults: Faults = field(default_factory=Faults)
