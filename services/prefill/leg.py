"""One attempt on this rank: what it holds, what it has written, and whether it may write on.

A leg is touched by three threads. The loop owns `blocks` and everything about events; the engine thread fills the rows;
the transfer thread alone writes. `may_write` and `end_write` are the gate between a writer and whoever stops it.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from dataclasses import dataclass, field

from headrace.clock import Clock
from headrace.errors import StaleAttempt
from headrace.protocol import LayerManifest, PrefillCommand, Reservation, SequenceManifest


@dataclass
class StageClock:
    """Wall-clock seconds of one leg's moments; None until they have happened."""

    received: float = field(default_factory=time.time)
    started: float | None = None
    computed: float | None = None
    push_started: float | None = None
    push_ended: float | None = None
    committed: float | None = None


class Leg:
    """One attempt. `failure` holds the first error met anywhere; `pushed` is set when the last layer is written."""

    def __init__(self, command: PrefillCommand, clock: Clock, num_layers: int):
        self.command = command
        self.key = f"{command.request_id}/{command.attempt}/{secrets.token_hex(4)}"
        """Names its job in the batcher; a caller that repeats an attempt cannot reach another leg's."""
        self.was_queued = False
        """The engine knows of it: its blocks are free of the engine once `computed` is set."""
        self.times = StageClock()
        self.sequence_blocks: list[tuple[int, ...]] = []
        self.held_blocks: tuple[int, ...] = ()
        self.pushed_bytes = 0
        self.pushed = asyncio.Event()
        self.computed = asyncio.Event()
        self.failure: BaseException | None = None
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._gate = threading.Condition()
        self._stopped: BaseException | None = None
        self._writing = False
        self._outcome_unknown = False
        self._num_layers = num_layers
        self._layers: dict[tuple[int, int], LayerManifest] = {}
        self._expires_at = clock.now() + (command.reservation.expires_in_s if command.reservation else 0.0)

    @property
    def reservation(self) -> Reservation:
        """The room this leg writes into."""
        assert self.command.reservation is not None, "a leg without a decode leg never writes"
        return self.command.reservation

    # --- the gate: transfer thread on one side, loop on the other -----------------------------------------------------

    def may_write(self, margin_s: float) -> BaseException | None:
        """Transfer thread: opens the gate for one layer, or says why not. Followed by `end_write` when it opened."""
        with self._gate:
            if self._stopped is not None:
                return self._stopped
            if self._clock.now() + margin_s >= self._expires_at:
                return StaleAttempt("the reservation is about to expire")
            self._writing = True
            return None

    def end_write(self, *, outcome_known: bool) -> None:
        """Transfer thread: the write returned. `outcome_known` is False when bytes may still be under way."""
        with self._gate:
            self._writing = False
            self._outcome_unknown |= not outcome_known
            self._gate.notify_all()

    def stop(self, why: BaseException) -> None:
        """No write starts from now on; one that runs goes on until it returns."""
        with self._gate:
            self._stopped = self._stopped or why

    @property
    def is_writing(self) -> bool:
        """A write is inside a call now: the rows it reads must stay."""
        with self._gate:
            return self._writing

    @property
    def is_drained(self) -> bool:
        """No write runs, and every one that ran is known to have ended."""
        with self._gate:
            return not self._writing and not self._outcome_unknown

    def wait_drained(self, wait_s: float) -> bool:
        """Any thread but the loop: True when no write runs and the outcome of every one is known, within `wait_s`."""
        with self._gate:
            ended = self._gate.wait_for(lambda: not self._writing, timeout=wait_s)
            return ended and not self._outcome_unknown

    def renewed(self, expires_at: float) -> None:
        """The decode rank put the expiry off to `expires_at` (a reading of the clock)."""
        with self._gate:
            self._expires_at = max(self._expires_at, expires_at)

    # --- what was written ----------------------------------------------------------------------------------------------

    def record(self, sequence: int, layer: int, manifest: LayerManifest, num_bytes: int) -> None:
        """Transfer thread: one layer of one sequence is written."""
        self._layers[sequence, layer] = manifest
        self.pushed_bytes += num_bytes

    def manifest(self) -> tuple[SequenceManifest, ...]:
        """Proof of everything owed, complete only once `pushed` is set."""
        return tuple(
            SequenceManifest(
                sequence.sample_index,
                sequence.first_row,
                tuple(self._layers[index, layer] for layer in range(self._num_layers)),
            )
            for index, sequence in enumerate(self.reservation.sequences)
        )

    # --- events, set from any thread ---------------------------------------------------------------------------------

    def post(self, function, *args) -> None:
        """Runs `function` on the loop soon; quietly nothing once the loop has closed."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            return

    def fail(self, error: BaseException) -> None:
        """Any thread: the attempt is lost; everyone who waits for it wakes up."""
        self.post(self._fail_on_loop, error)

    def _fail_on_loop(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self.stop(error)
        self.pushed.set()
