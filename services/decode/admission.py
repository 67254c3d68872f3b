"""Who gets room, in which order. What can never fit is refused, what does not fit now waits in a bounded queue."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable

from headrace.cache.blocks import BlockState
from headrace.errors import HeadraceError, InvalidRequest, Overloaded
from headrace.protocol.common import WorkerInfo
from headrace.protocol.decode import Promise, ReserveCommand, TargetDescriptor
from services.decode.interfaces import Collaborators
from services.decode.quarantine import Quarantine
from services.decode.request import Request
from services.decode.reservation import Name, ReservationTable
from services.decode.seats import SeatPlan, Seats, plan_seats

RETRY_AFTER_S = 1.0
"""The hint given with RESOURCE_EXHAUSTED."""

_Place = tuple[int, bool, int]
"""Order in the queue: larger priority first, then requests that another rank lost, then arrival."""


class Admission:
    """The queue for blocks of one pool. `on_refused(request)` is called when one that waited has ended; its record is FREED."""

    def __init__(
        self,
        info: WorkerInfo,
        collaborators: Collaborators,
        table: ReservationTable,
        quarantine: Quarantine,
        *,
        max_waiting: int,
        expiry_s: float,
    ):
        self._clock, self._info, self._pool = collaborators.clock, info, collaborators.pool
        self._sign, self._table, self._quarantine = collaborators.sign, table, quarantine
        self._max_waiting, self._expiry_s = max_waiting, expiry_s
        self._fingerprint = info.layout.fingerprint
        self._queue: list[tuple[_Place, Request]] = []
        self._arrivals = itertools.count()
        self.on_refused: Callable[[Request], None] = lambda request: None

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of those who wait."""
        return sum(request.command.prompt_tokens for _, request in self._queue)

    def plan(self, command: ReserveCommand) -> SeatPlan:
        """The blocks a command needs. Raises InvalidRequest, with the numbers, when this rank can never have them."""
        plan = plan_seats(command, self._pool.block_size, self._info.max_context_tokens)
        if plan.num_blocks > self._pool.num_blocks:
            raise InvalidRequest(
                f"sampling.max_tokens: {command.prompt_tokens} prompt + {command.sampling.max_tokens} output tokens for "
                f"{len(command.sample_indices)} samples need {plan.num_blocks} blocks of {plan.block_size}; this rank "
                f"has {self._pool.num_blocks}",
                field="sampling.max_tokens",
            )
        return plan

    def check_bound(self, name: Name) -> None:
        """Raises Overloaded when the queue is full; a request that was here before keeps its place."""
        if len(self._queue) >= self._max_waiting and not self._table.keeps_place(name):
            raise Overloaded(
                f"{len(self._queue)} requests wait for room, the most allowed", retry_after_s=RETRY_AFTER_S
            )

    def enqueue(self, request: Request) -> None:
        """Lets a request wait; `admit` answers it."""
        command = request.command
        place = (-command.priority, command.attempt == 1, next(self._arrivals))
        bisect.insort(self._queue, (place, request), key=lambda entry: entry[0])

    def admit(self) -> None:
        """Gives room to those who wait, in order, as far as it goes. Not while the target is being replaced."""
        while self._queue and not self._quarantine.is_fencing:
            if not self._pool.can_allocate(self._queue[0][1].plan.num_blocks):
                return
            _, request = self._queue.pop(0)
            try:
                self._grant(request)
            except HeadraceError as error:
                self._refuse(request, error)

    def drop(self, request: Request, error: HeadraceError) -> None:
        """Takes one out; those behind it may fit now."""
        self._queue = [entry for entry in self._queue if entry[1] is not request]
        self._refuse(request, error)
        self.admit()

    def look(self, now: float) -> None:
        """Refuses those whose time is over."""
        for request in [request for _, request in self._queue if request.wait_until <= now]:
            if not request.is_over and request.seats is None:
                error = Overloaded("no room within the deadline", reason="NO_ROOM", retry_after_s=RETRY_AFTER_S)
                self.drop(request, error)

    def close(self, error: HeadraceError) -> None:
        """Refuses everyone."""
        while self._queue:
            self._refuse(self._queue.pop(0)[1], error)

    def _grant(self, request: Request) -> None:
        target = self._quarantine.descriptor()
        blocks = self._pool.allocate(request.plan.num_blocks, BlockState.RESERVED)
        request.seats, request.generation = Seats(request.plan, blocks), self._quarantine.generation
        request.owed = request.seats.sequences()
        now = self._clock.now()
        self._table.grant(request.record, now)
        request.stage("decode.reserve", request.reserved_at, now, blocks=request.plan.num_blocks)
        request.answer(self._sign(self._promise(request, target), self._expiry_s))

    def _promise(self, request: Request, target: TargetDescriptor) -> Promise:
        return Promise(
            reservation_id=request.reservation_id,
            request_id=request.command.request_id,
            attempt=request.command.attempt,
            decode=self._info.identity,
            writer=request.command.writer,
            target=target,
            sequences=request.owed,
            layout_fingerprint=self._fingerprint,
        )

    def _refuse(self, request: Request, error: HeadraceError) -> None:
        self._table.free(request.record, self._clock.now())
        request.stage("decode.reserve", request.reserved_at, self._clock.now(), reason=error.reason)
        request.answer(error)
        self.on_refused(request)
