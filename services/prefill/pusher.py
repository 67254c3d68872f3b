"""The one thread that writes into decode ranks: layer by layer, behind the forward that fills them.

The engine thread posts (leg, layer, ready) when it has queued that layer. This thread waits until the rows stand in the pool,
asks the leg's gate, starts the checksum, pushes beside it, and takes the checksum's value. It waits before it asks: a leg
that is stopped meanwhile has no write to drain. The engine never blocks on it: a leg whose layer finds MAX_QUEUED_LAYERS
before it is lost.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.errors import HeadraceError, InternalError, Overloaded, TransferError
from headrace.process.faults import Fault, Faults
from headrace.protocol.decode import LayerManifest, TargetDescriptor
from headrace.transfer.base import REFUSED, RowRun, is_drained, plan_runs
from services.prefill.leg import Leg

log = logging.getLogger(__name__)

MAX_QUEUED_LAYERS = 65_536
"""Layers that may wait for the thread, about 100 bytes each. A thousand prompts of a 61-layer model."""
FLIP_WAIT_S = 30.0
"""How long a byte that is to be flipped waits for the forward; longer than any."""


class Source(Protocol):
    """Moves rows out of this rank's pool."""

    def push(self, target: TargetDescriptor, layer: int, runs: Sequence[RowRun]) -> int: ...


class Rows(Protocol):
    """This rank's pool as the pusher sees it."""

    def begin_checksum(self, layer: int, blocks: Sequence[int], first_row: int, num_rows: int) -> Callable[[], int]: ...

    def flip_byte(self, layer: int, block: int, offset: int) -> None: ...


class Pusher:
    """Owns the transfer thread. `push_layer` may be called from any thread and never blocks."""

    def __init__(self, source: Source, rows: Rows, block_size: int, num_layers: int, margin_s: float, faults: Faults):
        self._source = source
        self._rows = rows
        self._block_size = block_size
        self._num_layers = num_layers
        self._margin_s = margin_s
        self._faults = faults
        self._queue: queue.SimpleQueue[tuple[Leg, int, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="transfer", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Lets queued work end, within `timeout_s`."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def push_layer(self, leg: Leg, layer: int, ready: Callable[[], None]) -> None:
        """Layer `layer` of all of the leg's sequences stands in the pool once `ready()` returns; called by our thread."""
        if self._queue.qsize() >= MAX_QUEUED_LAYERS:
            leg.fail_soon(Overloaded("too many layers wait to be written", reason="PUSH_QUEUE_FULL"))
            return
        self._queue.put((leg, layer, ready))

    def push_again(self, leg: Leg) -> None:
        """Every layer once more, after a manifest that did not match."""
        for layer in range(self._num_layers):
            self.push_layer(leg, layer, _stands)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            leg, layer, ready = item
            try:
                ready()
                self._push(leg, layer)
            except HeadraceError as error:
                leg.fail_soon(error)
            except Exception as error:
                log.exception("push failed unexpectedly")
                leg.fail_soon(InternalError(f"push: {type(error).__name__}", reason="PUSH_FAILED", retryable=True))

    def _push(self, leg: Leg, layer: int) -> None:
        if leg.moments.push_started is None:
            leg.moments.push_started = leg.now()
        refusal = leg.gate.may_write(self._margin_s)
        if refusal is not None:
            leg.fail_soon(refusal)
            return
        known = False
        try:
            for index in range(len(leg.room.sequences)):
                self._push_sequence(leg, index, layer)
            known = True
        except TransferError as error:
            known = is_drained(error)
            raise
        finally:
            leg.gate.end_write(outcome_known=known)
        if layer == self._num_layers - 1:
            leg.push_ended()

    def _push_sequence(self, leg: Leg, index: int, layer: int) -> None:
        owed = leg.room.sequences[index]
        first_row, num_rows, blocks = owed.first_row, owed.num_rows, leg.sequence_blocks[index]
        if num_rows == 0:
            leg.record(index, layer, LayerManifest(0, 0), 0)
            return
        checksum = self._rows.begin_checksum(layer, blocks, first_row, num_rows)
        runs = plan_runs(blocks, owed.block_ids, first_row, num_rows, self._block_size)
        last_row = first_row + num_rows - 1
        written = self._write(leg, layer, runs, blocks[last_row // self._block_size], last_row % self._block_size)
        leg.record(index, layer, LayerManifest(num_rows, checksum()), written)

    def _write(self, leg: Leg, layer: int, runs: Sequence[RowRun], last_block: int, last_offset: int) -> int:
        def push() -> int:
            return self._source.push(leg.room.target, layer, runs)

        fault = self._faults.fire(
            "prefill.push", layer=layer, attempt=leg.command.attempt, request_id=leg.command.request_id
        )
        if fault is None:
            return push()
        if fault.kind == "flip":
            _wait_computed(leg)
        return _faulty_push(fault, push, lambda: self._rows.flip_byte(layer, last_block, last_offset))


def _stands() -> None:
    """The rows of a leg that has been computed."""


def _wait_computed(leg: Leg) -> None:
    """Until this leg's forward has read its rows for the last time: a byte flipped before would change its tokens, and through
    the later layers' rows those of everyone who finds its prefix here. The last row is in no cached block."""
    end = time.monotonic() + FLIP_WAIT_S
    while not leg.computed.is_set() and time.monotonic() < end:
        time.sleep(0.001)


def _faulty_push(fault: Fault, push: Callable[[], int], flip: Callable[[], None]) -> int:
    """The push as a fault rule wants it: dropped, delayed, doubled, with a byte flipped, or failed."""
    if fault.kind == "drop":
        return 0
    if fault.kind == "fail":
        raise TransferError("fault injection: push fails", reason=REFUSED)
    if fault.kind in ("delay", "hang", "slow"):
        time.sleep(fault.seconds)
        return push()
    if fault.kind == "repeat":
        push()
        return push()
    flip()
    try:
        return push()
    finally:
        flip()
