"""What ends by time, with or without traffic."""

from __future__ import annotations

import asyncio

from headrace.cache.blocks import BlockPool
from headrace.clock import Clock
from headrace.observe import logs, telemetry
from services.decode.admission import Admission
from services.decode.ending import Endings
from services.decode.quarantine import Quarantine
from services.decode.reservation import ReservationTable, State

log = logs.get(__name__)

TICK_S = 0.1
"""How finely time-outs are kept. Nobody looks while nothing can time out."""


class Timekeeper:
    """Looks at everything that has a time-out; sleeps for good while nothing has."""

    def __init__(
        self,
        clock: Clock,
        pool: BlockPool,
        table: ReservationTable,
        endings: Endings,
        admission: Admission,
        quarantine: Quarantine,
    ):
        self._clock, self._pool, self._table = clock, pool, table
        self._endings, self._admission, self._quarantine = endings, admission, quarantine
        self._timed, self._settled = asyncio.Event(), asyncio.Event()

    def watch(self) -> None:
        """Something waits for time to pass."""
        self._timed.set()

    def settled(self) -> None:
        """Something has ended; it is remembered for a while."""
        self._settled.set()
        self._timed.set()

    async def wait_settled(self) -> None:
        """Until something has ended."""
        self._settled.clear()
        await self._settled.wait()

    async def run(self) -> None:
        """For good."""
        while True:
            await self._timed.wait()
            await self._clock.wait(TICK_S)
            try:
                self._look(self._clock.now())
            except Exception as error:
                log.error("a time-out could not be handled", error=error)

    def _look(self, now: float) -> None:
        self._endings.expire(now)
        self._admission.look(now)
        self._quarantine.look(now)
        self._table.forget(now)
        self._report()
        if self._table.is_empty:
            self._timed.clear()

    def _report(self) -> None:
        blocks = self._pool.ledger()
        for owner in ("free", "cached", "reserved", "running", "quarantined"):
            telemetry.gauge("headrace.decode.blocks").set(getattr(blocks, owner), owner=owner)
        telemetry.gauge("headrace.decode.running").set(self._table.count(State.COMMITTED, State.RUNNING))
        telemetry.gauge("headrace.decode.waiting").set(len(self._admission))
