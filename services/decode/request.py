"""What the core holds for one live reservation, beside its record."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from headrace.errors import HeadraceError
from headrace.protocol import Reservation, ReserveCommand
from services.decode.reservation import ReservationRecord
from services.decode.seats import SeatPlan, Seats


@dataclass(eq=False)
class Request:
    """One attempt. `wait_until` is a reading of the clock; `engine_handle` names it in the batch.

    `name` is the request id that the client knows; the one in the commands is the router's for its workers.
    """

    record: ReservationRecord
    plan: SeatPlan
    name: str
    traceparent: str
    wait_until: float
    engine_handle: int
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with a `promise` or a `refusal`."""
    promise: Reservation | None = None
    refusal: HeadraceError | None = None
    callers: int = 0
    """Reserve calls that wait for the answer."""
    heard: bool = False
    """Somebody got the promise: the writer may know where to write."""
    seats: Seats | None = None
    generation: int = 0
    """Of the transfer target, when the promise was made."""
    commit: asyncio.Future | None = None
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
