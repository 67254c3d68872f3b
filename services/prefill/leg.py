"""One attempt on this rank: what it was asked, what it holds, what it has written, and the one thing it waits for.

A leg is touched by three threads. The loop owns it; the engine thread fills its rows and tells of its moments through `post`;
the transfer thread writes, behind the leg's gate. Its coroutine waits for one future at a time, in `wait`, and whoever
ends the leg (a cancel, a stop, a deadline, a failed write) does so by `fail`: the wait ends with that error.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.clock import Clock
from headrace.errors import HeadraceError
from headrace.protocol.decode import LayerManifest, Promise, SequenceManifest
from headrace.protocol.prefill import Committed, FirstTokens, PrefillCommand
from services.prefill.gate import WriteGate

Answer = Callable[[FirstTokens | Committed | HeadraceError], None]
"""Hears of a leg: its first tokens, then its end. Called on the loop."""


@dataclass
class Moments:
    """Readings of the clock; None until they have happened."""

    received: float
    started: float | None = None
    computed: float | None = None
    push_started: float | None = None
    push_ended: float | None = None
    committed: float | None = None


class Leg:
    """One attempt. `failure` is the first error met anywhere; `pushed` is done when the last layer is written."""

    def __init__(self, command: PrefillCommand, promise: Promise | None, num_layers: int, clock: Clock, answer: Answer):
        self.command = command
        self.promise = promise
        self.answer = answer
        self.key = f"{command.request_id}/{command.attempt}/{secrets.token_hex(4)}"
        """Names its job in the batcher; a caller that repeats an attempt cannot reach another leg's."""
        self.moments = Moments(clock.now())
        self.sequence_blocks: list[tuple[int, ...]] = []
        self.held_blocks: tuple[int, ...] = ()
        self.prefix_keys: list[bytes] = []
        self.cached_tokens = 0
        """Leading prompt tokens whose rows stood in the pool already."""
        self.was_queued = False
        """The engine knows of it: its blocks are free of the engine once `computed` is set."""
        self.computed = asyncio.Event()
        self.failure: HeadraceError | None = None
        self.pushed_bytes = 0
        expires_in_s = command.reservation.expires_in_s if command.reservation else 0.0
        self.gate = WriteGate(clock, clock.now() + expires_in_s)
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self.pushed: asyncio.Future[None] = self._loop.create_future()
        self._awaited: asyncio.Future[Any] | None = None
        self._num_layers = num_layers
        self._layers: dict[tuple[int, int], LayerManifest] = {}

    def now(self) -> float:
        """The clock's reading, in any thread."""
        return self._clock.now()

    @property
    def room(self) -> Promise:
        """What this leg writes into."""
        assert self.promise is not None, "a leg without a decode leg never writes"
        return self.promise

    # --- waiting, and being ended ------------------------------------------------------------------------------------

    async def wait(self, future: asyncio.Future[Any]) -> Any:
        """The future's result. Raises what the leg failed with, before or meanwhile."""
        if self.failure is not None:
            raise self.failure
        self._awaited = future
        try:
            return await future
        finally:
            self._awaited = None

    def fail(self, error: HeadraceError) -> None:
        """On the loop: the attempt is lost, no write of it starts from now on, and its wait ends. The first error stays."""
        self.failure = self.failure or error
        self.gate.stop(self.failure)
        if self._awaited is not None:
            settle_error(self._awaited, self.failure)

    def fail_soon(self, error: HeadraceError) -> None:
        """`fail`, from any thread."""
        self.gate.stop(error)
        self.post(self.fail, error)

    def post(self, function: Callable[..., object], *args: object) -> None:
        """Runs `function` on the loop soon, from any thread; quietly nothing once the loop has closed."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            return

    async def writes_ended(self, wait_s: float) -> bool:
        """Whether no write runs, once the one that runs has returned or `wait_s` is over."""
        ended = self._loop.create_future()
        if not self.gate.when_ended(lambda: self.post(settle, ended)):
            return True
        timer = self._clock.call_later(wait_s, lambda: settle(ended))
        try:
            await ended
        finally:
            timer.cancel()
        return not self.gate.is_writing

    # --- what was written --------------------------------------------------------------------------------------------

    def record(self, sequence: int, layer: int, manifest: LayerManifest, num_bytes: int) -> None:
        """Transfer thread: one layer of one sequence is written."""
        self._layers[sequence, layer] = manifest
        self.pushed_bytes += num_bytes

    def push_ended(self) -> None:
        """Transfer thread: the last layer is written."""
        self.moments.push_ended = self.now()
        self.post(settle, self.pushed)

    def expect_push_again(self) -> None:
        """On the loop: every layer is to be written once more."""
        self.pushed = self._loop.create_future()

    def manifest(self) -> tuple[SequenceManifest, ...]:
        """Proof of everything owed, complete only once `pushed` is done."""
        return tuple(
            SequenceManifest(
                sequence.sample_index,
                sequence.first_row,
                tuple(self._layers[index, layer] for layer in range(self._num_layers)),
            )
            for index, sequence in enumerate(self.room.sequences)
        )


def settle(future: asyncio.Future[Any], value: Any = None) -> None:
    """Gives a future its result unless it has one."""
    if not future.done():
        future.set_result(value)


def settle_error(future: asyncio.Future[Any], error: BaseException) -> None:
    """Ends a future with an error unless it has ended."""
    if not future.done():
        future.set_exception(error)
