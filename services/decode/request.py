"""One attempt that this rank holds room for, and all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.errors import HeadraceError
from headrace.observe.record import Record
from headrace.protocol.decode import CommitAccepted, Reservation, ReserveCommand, TargetSequence
from services.decode.reservation import OVER, ReservationRecord
from services.decode.seats import SeatPlan, Seats

Answer = Callable[[object], None]
"""Takes the one answer to a command: a value or a HeadraceError. Called on the loop; never blocks."""


@dataclass(eq=False)
class Request:
    """One attempt. Times are readings of the clock; `engine_handle` names it in the batch.

    `promise` is the answer to Reserve, once there is one; `answers` are those who wait for it.
    """

    record: ReservationRecord
    plan: SeatPlan
    reserved_at: float
    wait_until: float
    engine_handle: int
    trace: Record
    answers: list[Answer] = field(default_factory=list)
    promise: Reservation | None = None
    owed: tuple[TargetSequence, ...] = ()
    """What the promise says that the writer writes."""
    seats: Seats | None = None
    generation: int = 0
    """Of the transfer target, when the promise was made."""
    commit: asyncio.Future[CommitAccepted | HeadraceError] | None = None
    """While a manifest is being checked."""
    dropped: set[int] = field(default_factory=set)
    """Samples that were released before the others."""

    @property
    def command(self) -> ReserveCommand:
        """What was asked for."""
        return self.record.command

    @property
    def reservation_id(self) -> str:
        """Its name."""
        return self.record.reservation_id

    @property
    def router_epoch(self) -> str:
        """Who asked."""
        return self.record.router.epoch

    @property
    def name(self) -> str:
        """The request id that the client knows; the one in the commands is the router's for its workers."""
        return self.command.display_id or self.command.request_id

    @property
    def is_over(self) -> bool:
        """Nothing more comes of it, though its blocks may not be back yet."""
        return self.record.state in OVER

    def stage(self, name: str, start_s: float, end_s: float, **attributes: object) -> None:
        """A stage of its trace; times are readings of the clock."""
        self.trace.stage(name, start_s, end_s, request_id=self.name, attempt=self.record.attempt, **attributes)

    def answer(self, answer: Reservation | HeadraceError) -> None:
        """Tells everyone who waits for the answer to Reserve."""
        if isinstance(answer, Reservation):
            self.promise = answer
        answers, self.answers = self.answers, []
        for tell in answers:
            tell(answer)


class Requests:
    """All requests whose blocks are not back yet."""

    def __init__(self) -> None:
        self._by_id: dict[str, Request] = {}
        self._by_engine_handle: dict[int, Request] = {}
        self._by_router: dict[str, dict[int, Request]] = {}
        """Router epoch -> the handle it chose -> request."""

    def add(self, request: Request) -> None:
        """A new one."""
        self._by_id[request.reservation_id] = request
        self._by_engine_handle[request.engine_handle] = request
        self._by_router.setdefault(request.router_epoch, {})[request.command.handle] = request

    def remove(self, request: Request) -> None:
        """Its blocks are back."""
        del self._by_id[request.reservation_id], self._by_engine_handle[request.engine_handle]
        handles = self._by_router[request.router_epoch]
        del handles[request.command.handle]
        if not handles:
            del self._by_router[request.router_epoch]

    def of(self, record: ReservationRecord) -> Request:
        """The request of a record that is not FREED."""
        return self._by_id[record.reservation_id]

    def in_engine(self, engine_handle: int) -> Request | None:
        """By its name in the batch; None when its blocks are back."""
        return self._by_engine_handle.get(engine_handle)

    def named(self, router_epoch: str, handle: int) -> Request | None:
        """By the name that its router gave it in frames."""
        return self._by_router.get(router_epoch, {}).get(handle)

    def of_router(self, router_epoch: str) -> list[Request]:
        """Those of one router that are not over."""
        return [request for request in self._by_router.get(router_epoch, {}).values() if not request.is_over]

    def unfinished(self) -> list[Request]:
        """Those that are not over."""
        return [request for request in self._by_id.values() if not request.is_over]
