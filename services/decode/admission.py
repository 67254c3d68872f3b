"""Who gets room, in which order. What can never fit is refused, what does not fit now waits in a bounded queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from headrace.cache.blocks import BlockPool, BlockState
from headrace.clock import Clock
from headrace.errors import HeadraceError, InvalidRequest, Overloaded
from headrace.protocol import Reservation, ReserveCommand, WorkerInfo
from services.decode.quarantine import Quarantine
from services.decode.request import Request
from services.decode.reservation import ReservationTable
from services.decode.seats import SeatPlan, Seats, plan_seats

RETRY_AFTER_S = 1.0
"""The hint given with RESOURCE_EXHAUSTED."""


class Admission:
    """The queue for blocks of one pool. `on_refused(request)` is called when one that waited has ended."""

    def __init__(
        self,
        clock: Clock,
        info: WorkerInfo,
        pool: BlockPool,
        table: ReservationTable,
        quarantine: Quarantine,
        *,
        max_waiting: int,
        expiry_s: float,
        on_refused: Callable[[Request], None],
    ):
        self._clock, self._info, self._pool, self._table = clock, info, pool, table
        self._quarantine, self._on_refused = quarantine, on_refused
        self._max_waiting, self._expiry_s = max_waiting, expiry_s
        self._queue: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._queue)

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

    def check_bound(self, request_id: str) -> None:
        """Raises Overloaded when the queue is full; a request that was here before keeps its place."""
        if len(self._queue) >= self._max_waiting and not self._table.keeps_place(request_id):
            raise Overloaded(
                f"{len(self._queue)} requests wait for room, the most allowed", retry_after_s=RETRY_AFTER_S
            )

    def enqueue(self, request: Request) -> None:
        """Lets a request wait; `admit` answers it."""
        (self._queue.appendleft if request.record.keeps_place else self._queue.append)(request)

    def admit(self) -> None:
        """Gives room to those who wait, in order, as far as it goes. Not while the target is being replaced."""
        while self._queue and not self._quarantine.is_fencing:
            if not self._pool.can_allocate(self._queue[0].plan.num_blocks):
                return
            request = self._queue.popleft()
            try:
                self._grant(request)
            except HeadraceError as error:
                self._refuse(request, error)

    def drop(self, request: Request, error: HeadraceError) -> None:
        """Takes one out; those behind it may fit now."""
        self._queue.remove(request)
        self._refuse(request, error)
        self.admit()

    def look(self, now: float) -> None:
        """Refuses those whose time is over."""
        for request in [request for request in self._queue if request.wait_until <= now]:
            if request in self._queue:
                error = Overloaded("no room within the deadline", reason="NO_ROOM", retry_after_s=RETRY_AFTER_S)
                self.drop(request, error)

    def close(self, error: HeadraceError) -> None:
        """Refuses everyone."""
        while self._queue:
            self._refuse(self._queue.popleft(), error)

    def _grant(self, request: Request) -> None:
        target = self._quarantine.descriptor()
        blocks = self._pool.allocate(request.plan.num_blocks, BlockState.RESERVED)
        request.seats, request.generation = Seats(request.plan, blocks), self._quarantine.generation
        self._table.grant(request.record, self._clock.now())
        request.promise = Reservation(
            reservation_id=request.reservation_id,
            decode=self._info.identity,
            target=target,
            sequences=request.seats.sequences(),
            layout_fingerprint=self._info.layout.fingerprint,
            held_prefix_tokens=0,
            expires_in_s=self._expiry_s,
        )
        request.answered.set()

    def _refuse(self, request: Request, error: HeadraceError) -> None:
        request.refusal = error
        request.answered.set()
        self._table.free(request.record, self._clock.now())
        self._on_refused(request)
