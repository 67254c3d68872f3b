"""How requests end, in every state, and when their blocks come back.

What was never begun is freed at once: its promise is refused from now on. What was begun is asked to stop. Each live reservation has
one `Request`, and only `_freed` gives its last blocks back: after a commit's worker, the step that runs and the writer have all let
go of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from headrace.cache.blocks import BlockState
from headrace.errors import Cancelled, HeadraceError, StaleAttempt
from headrace.observe import logs
from headrace.protocol.common import WorkerIdentity
from headrace.protocol.decode import ReleaseCommand
from services.decode.admission import Admission
from services.decode.background import Background
from services.decode.interfaces import Collaborators
from services.decode.outputs import Outputs
from services.decode.quarantine import Quarantine
from services.decode.request import Request, Requests
from services.decode.reservation import ReservationRecord, ReservationTable, State

log = logs.get(__name__)


class Endings:
    """Ends requests. `on_settled()` is called when one has ended for good, or when something now waits for time to pass."""

    def __init__(
        self,
        collaborators: Collaborators,
        table: ReservationTable,
        requests: Requests,
        admission: Admission,
        outputs: Outputs,
        quarantine: Quarantine,
        background: Background,
        on_settled: Callable[[], None],
    ):
        self._clock, self._pool, self._engine = collaborators.clock, collaborators.pool, collaborators.engine
        self._table, self._requests, self._admission = table, requests, admission
        self._outputs, self._quarantine, self._background = outputs, quarantine, background
        self._on_settled = on_settled

    # --- asked for ---------------------------------------------------------------------------------------------------

    def release(self, router: WorkerIdentity, command: ReleaseCommand) -> None:
        """Ends a router's attempts up to one, or only some of their samples, in any state. Safe to repeat.

        Returns at once; blocks come back when nobody can touch them any more.
        """
        name, chosen = (router.epoch, command.request_id), set(command.sample_indices)
        over = not chosen
        for record in self._table.live(name, command.attempt):
            request = self._requests.of(record)
            going_on = self._outputs.samples(request.engine_handle) or set(request.command.sample_indices)
            going_on -= request.dropped
            if chosen and going_on - chosen:
                for sample in going_on & chosen:
                    self._drop_sample(request, sample)
            else:
                self.end(request, Cancelled("released"))
                over = True
        if over:
            self._table.bury(name, command.attempt, self._clock.now())
            self._on_settled()

    def supersede(self, older: Iterable[ReservationRecord], attempt: int) -> None:
        """A new attempt of the request is here."""
        for record in older:
            self.end(self._requests.of(record), StaleAttempt(f"superseded by attempt {attempt}"))

    def _drop_sample(self, request: Request, sample: int) -> None:
        """One of several samples ends early; before the commit it just will not start."""
        request.dropped.add(sample)
        if self._outputs.drop(request.engine_handle, sample) and request.seats is not None:
            self._pool.move(request.seats.own(sample), BlockState.QUARANTINED)
            self._background.spawn(self._remove_sample, request, sample)

    async def _remove_sample(self, request: Request, sample: int) -> None:
        await self._engine.remove(request.engine_handle, sample)
        self.leave(request, (sample,))

    # --- lost --------------------------------------------------------------------------------------------------------

    def lose(self, request: Request, reason: str, error: HeadraceError) -> None:
        """The attempt is lost here; its router is told at once, with the tokens that wait for their interval."""
        self._outputs.report_loss(request, reason)
        self._release(request, error)

    def requests_lost(self, engine_handles: Iterable[int], reason: str, error: HeadraceError) -> None:
        """As `lose`, by their names in the batch."""
        for handle in engine_handles:
            request = self._requests.in_engine(handle)
            if request is not None and not request.is_over:
                self.lose(request, reason, error)

    def lose_named(self, router_epoch: str, handle: int, reason: str, error: HeadraceError) -> None:
        """As `lose`, by the name that its router gave it in frames."""
        request = self._requests.named(router_epoch, handle)
        if request is not None and not request.is_over:
            self.lose(request, reason, error)

    def router_lost(self, router_epoch: str, error: HeadraceError) -> None:
        """Nobody can be told any more: everything of that router ends, what waits first, so that it gets no room on the way."""
        lost = self._requests.of_router(router_epoch)
        for request in sorted(lost, key=lambda request: request.record.state is not State.WAITING):
            self._release(request, error)

    def expire(self, now: float) -> None:
        """Promises whose writer has not renewed them."""
        for record in self._table.expired(now):
            request = self._requests.of(record)
            if request.commit is None:  # else it is being checked, and a check always ends
                log.info("reservation expired", reservation_id=request.reservation_id)
                self.lose(request, "RESERVATION_EXPIRED", StaleAttempt("the reservation has expired"))

    def _release(self, request: Request, error: HeadraceError) -> None:
        self._table.bury(request.record.name, request.record.attempt, self._clock.now())
        self.end(request, error)

    # --- by themselves -----------------------------------------------------------------------------------------------

    def sample_ended(self, engine_handle: int, sample_index: int) -> None:
        """A sample ended by itself and has left the batch."""
        request = self._requests.in_engine(engine_handle)
        if request is not None:
            self.leave(request, (sample_index,))

    def leave(self, request: Request, samples: Iterable[int]) -> None:
        """Seats of these samples are free, and the request's with the last one."""
        assert request.seats is not None
        for sample in samples:
            self._give_back(request.seats.leave(sample))
        if not request.seats.open_samples() and request.record.state is State.RUNNING:
            self._freed(request)
        else:
            self._admission.admit()

    # --- blocks ------------------------------------------------------------------------------------------------------

    def end(self, request: Request, error: HeadraceError) -> None:
        """The request is over before its own end. Its blocks are freed here, or by the task that this starts."""
        record, was = request.record, request.record.state
        if was is State.WAITING:
            self._admission.drop(request, error)
            return
        self._table.quarantine(record)
        self._outputs.drop(request.engine_handle)
        assert request.seats is not None
        self._pool.move(request.seats.held(), BlockState.QUARANTINED)
        if was is State.RESERVED:
            self._freed(request)
        else:
            self._on_settled()
            self._background.spawn(self._settle, request, was)

    async def _settle(self, request: Request, was: State) -> None:
        """Waits until nobody can touch the blocks any more: a commit's worker, a step, the writer."""
        if request.commit is not None:
            await asyncio.wait([request.commit])
        if was is State.RUNNING:
            await self._engine.remove(request.engine_handle, None)
        if was is State.WRITING:
            await self._quarantine.wait_no_late_writes(
                request.command.writer, request.reservation_id, request.generation
            )
        self._freed(request)

    def _freed(self, request: Request) -> None:
        assert request.seats is not None
        self._table.free(request.record, self._clock.now())
        self._give_back(request.seats.leave_all())
        self.forget(request)
        self._admission.admit()

    def forget(self, request: Request) -> None:
        """The record is FREED."""
        self._requests.remove(request)
        request.trace.emit()
        self._on_settled()

    def _give_back(self, blocks: Sequence[int]) -> None:
        if blocks:
            self._pool.free(blocks)
