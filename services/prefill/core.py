"""The prefill core: which prompts are accepted, which are ended, and what this rank says of itself.

An accepted prompt is one `Attempt`, driven by one task. It belongs to the router link it came over (its `owner`): when that
link is lost, or the router cancels it, it ends. Stops come from the decode rank that promised the room, over the writer link.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from headrace.cache.blocks import BlockPool
from headrace.clock import Clock
from headrace.config import PrefillConfig
from headrace.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    StaleAttempt,
    StaleEpoch,
    Unavailable,
)
from headrace.observe import telemetry
from headrace.process.faults import Faults
from headrace.protocol.common import WorkerIdentity, WorkerInfo, WorkerProgress
from headrace.protocol.decode import StopState
from headrace.protocol.prefill import PrefillCommand, PrefillLedger
from headrace.rpc.promises import MeshKeys
from services.prefill.attempt import Attempt, Rank
from services.prefill.interfaces import Batcher, Pusher, Writers
from services.prefill.leg import Answer, Leg
from services.prefill.promise import read_promise
from services.prefill.report import Report
from services.prefill.room import Room
from services.prefill.sequences import check_command
from services.prefill.tombstones import Tombstones

MAX_STOP_WAIT_S = 30.0
"""Longest wait for running writes on behalf of one Stop."""

queued_tokens = telemetry.gauge("headrace.prefill.queued_tokens")


class Prefiller:
    """All decisions of a prefill rank. Use `async with Prefiller.open(...)`."""

    def __init__(
        self,
        config: PrefillConfig,
        info: WorkerInfo,
        *,
        pool: BlockPool,
        batcher: Batcher,
        pusher: Pusher,
        writers: Writers,
        keys: MeshKeys,
        clock: Clock,
        faults: Faults,
    ):
        self.info = info
        self._config = config
        self._keys = keys
        self._clock = clock
        self._pool = pool
        self._batcher = batcher
        self._room = Room(pool, prefix_cache=config.prefix_cache)
        report = Report(info.identity)
        self._rank = Rank(config, self._room, pool.block_size, batcher, pusher, writers, report, clock, faults)
        self._running: dict[Attempt, object] = {}
        self._promised: dict[str, Leg] = {}
        self._tombstones = Tombstones(clock)
        self._draining = False
        self._tasks: asyncio.TaskGroup

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, *args, **collaborators) -> AsyncIterator[Prefiller]:
        """The core with its background tasks; on leaving, running attempts are ended and their blocks come back."""
        core = cls(*args, **collaborators)
        async with asyncio.TaskGroup() as tasks:
            core._tasks = tasks
            renewing = tasks.create_task(core._keep_renewed())
            try:
                yield core
            finally:
                renewing.cancel()
                for attempt in list(core._running):
                    attempt.leg.fail(Unavailable("this prefill rank stops"))

    # --- from routers ----------------------------------------------------------------------------------------------------

    def prefill(self, command: PrefillCommand, owner: object, answer: Answer) -> None:
        """Starts an attempt; `answer` hears its first tokens and its end. Raises what the caller did wrong, or what is not
        possible now, before anything is held."""
        self._check(command)
        promise = read_promise(command, self.info, self._keys)
        if promise is not None and self._is_used(promise.reservation_id):
            raise StaleAttempt("this reservation has been used or taken back")
        attempt = Attempt(self._rank, Leg(command, promise, self.info.layout.layer_count, self._clock, answer))
        self._running[attempt] = owner
        if promise is not None:
            self._promised[promise.reservation_id] = attempt.leg
        self._tasks.create_task(self._run(attempt))

    def cancel(self, owner: object, request_id: str, attempt: int) -> None:
        """Ends that attempt of that owner, in any state. Nothing happens when there is none."""
        for running in self._owned(owner):
            command = running.leg.command
            if (command.request_id, command.attempt) == (request_id, attempt):
                running.leg.fail(Cancelled("the router cancelled this attempt"))

    def leave(self, owner: object) -> None:
        """Ends everything of that owner: its link is lost."""
        for running in self._owned(owner):
            running.leg.fail(Cancelled("the router's link is lost"))

    # --- from decode ranks -----------------------------------------------------------------------------------------------

    def stop(
        self, reservation_id: str, decode: WorkerIdentity, wait_s: float, tell: Callable[[StopState], None]
    ) -> None:
        """No write of this reservation starts from now on; `tell` hears, at once or when running writes have ended or
        `wait_s` is over, whether all that were started have ended. Raises StaleEpoch when another rank promised it."""
        leg = self._promised.get(reservation_id)
        if leg is None:
            tell(self._tombstones.bury(reservation_id, drained=True))
            return
        if leg.room.decode.epoch != decode.epoch:
            raise StaleEpoch("another decode rank promised that room")
        leg.fail(StaleAttempt("decode took the reservation back"))
        if leg.gate.is_writing:
            self._tasks.create_task(self._tell_when_ended(leg, min(wait_s, MAX_STOP_WAIT_S), tell))
        else:
            tell(self._tombstones.bury(reservation_id, drained=leg.gate.is_drained))

    # --- what this rank says of itself -----------------------------------------------------------------------------------

    def ledger(self) -> PrefillLedger:
        """Who holds what now."""
        waiting = self._waiting_attempts
        running = len(self._running) - waiting
        return PrefillLedger(self._pool.ledger(), waiting, self._queued_tokens, running, self._batcher.batches)

    def progress(self) -> WorkerProgress:
        """Counters for a beat; also sets the gauge of queued tokens."""
        waiting, blocks = self._waiting_attempts, self._pool.ledger()
        queued_tokens.set(self._queued_tokens)
        return WorkerProgress(
            serving=not self._draining,
            completed_steps=self._batcher.batches,
            completed_layers=self._batcher.completed_layers,
            pending_steps=self._batcher.pending_batches,
            queued_requests=waiting,
            queued_tokens=self._queued_tokens,
            running_requests=len(self._running) - waiting,
            available_blocks=blocks.free + blocks.cached,
        )

    async def drain(self, grace_s: float) -> None:
        """Refuses new prompts and waits for running ones."""
        self._draining = True
        end = self._clock.now() + grace_s
        while self._running and self._clock.now() < end:
            await self._clock.wait(0.05)

    @property
    def _queued_tokens(self) -> int:
        return self._batcher.queued_tokens + self._room.waiting_tokens

    @property
    def _waiting_attempts(self) -> int:
        return sum(attempt.leg.moments.started is None for attempt in self._running)

    # --- inside ----------------------------------------------------------------------------------------------------------

    def _check(self, command: PrefillCommand) -> None:
        if self._draining:
            raise Unavailable("this prefill rank drains", reason="DRAINING")
        check_command(command, self.info.vocabulary_size)
        length = len(command.prompt_token_ids) + max((len(x) for x in command.delivered.values()), default=0)
        if length > self.info.max_context_tokens:
            raise InvalidRequest(
                f"prompt_token_ids: {length} tokens, the context holds {self.info.max_context_tokens}",
                field="prompt_token_ids",
            )
        if self._queued_tokens + length > self._config.max_queue_tokens and self._running:
            raise Overloaded("the prefill queue is full", reason="PREFILL_QUEUE_FULL", retry_after_s=0.2)

    def _is_used(self, reservation_id: str) -> bool:
        return reservation_id in self._tombstones or reservation_id in self._promised

    async def _run(self, attempt: Attempt) -> None:
        leg = attempt.leg
        try:
            await attempt.run(leg.command.time_left_s, DeadlineExceeded("the deadline passed during prefill"))
        finally:
            del self._running[attempt]
            if leg.promise is not None:
                self._tombstones.bury(leg.promise.reservation_id, drained=leg.gate.is_drained)
                del self._promised[leg.promise.reservation_id]

    async def _keep_renewed(self) -> None:
        """Puts off the expiry of every promise that is in use."""
        while True:
            await self._clock.wait(self._config.renew_every_s)
            for attempt in list(self._running):
                attempt.renew()

    async def _tell_when_ended(self, leg: Leg, wait_s: float, tell: Callable[[StopState], None]) -> None:
        await leg.writes_ended(wait_s)
        tell(self._tombstones.bury(leg.room.reservation_id, drained=leg.gate.is_drained))

    def _owned(self, owner: object) -> list[Attempt]:
        return [attempt for attempt, its_owner in self._running.items() if its_owner is owner]
