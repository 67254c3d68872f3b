"""Until when may an ended reservation's blocks still be written? A one-sided write cannot be called back.

The writer is asked to stop: `drained` ends the wait. `unknown`, or silence for too long, replaces the transfer target (the
*fence*): a write begun before can never land. A fence makes every older descriptor useless, so whatever was promised under
an earlier *generation* needs no answer any more.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from headrace.clock import first_of
from headrace.errors import TransferError
from headrace.observe import logs, telemetry
from headrace.protocol.common import WorkerIdentity
from headrace.protocol.decode import StopState, TargetDescriptor
from services.decode.background import Background
from services.decode.interfaces import Collaborators

log = logs.get(__name__)

STOP_RETRY_S = 0.5
"""Pause before a silent writer is asked again."""
FENCE_RETRY_S = 1.0


class Quarantine:
    """Asks writers, counts their silence, fences. `on_fenced()` is called after each fence."""

    def __init__(
        self,
        collaborators: Collaborators,
        background: Background,
        *,
        silence_s: float,
        stop_wait_s: float,
        on_fenced: Callable[[], None],
    ):
        self._clock, self._target = collaborators.clock, collaborators.target
        self._stop_writer, self._faults = collaborators.stop_writer, collaborators.faults
        self._background, self._on_fenced = background, on_fenced
        self._silence_s, self._stop_wait_s = silence_s, stop_wait_s
        self._silent_until: dict[str, float] = {}
        """Reservations whose writer has not answered -> when that becomes a fence."""
        self._fenced = asyncio.Event()
        """Set when the generation that is current now has ended."""
        self.generation = 0
        """How often the target was replaced."""
        self.is_fencing = False
        """The target is being replaced: nothing may be promised meanwhile."""

    def descriptor(self) -> TargetDescriptor:
        """How to write under the current generation. Raises TransferError."""
        assert not self.is_fencing
        return self._target.descriptor()

    async def wait_no_late_writes(self, writer: WorkerIdentity, reservation_id: str, generation: int) -> None:
        """Returns once no write of this reservation, promised under `generation`, can land any more."""
        if generation < self.generation:
            return
        self._silent_until[reservation_id] = self._clock.now() + self._silence_s
        try:
            drained, fenced = asyncio.Event(), self._fenced
            while not drained.is_set() and generation == self.generation:
                await first_of(self._ask(writer, reservation_id, drained), fenced.wait())
        finally:
            self._silent_until.pop(reservation_id, None)

    def look(self, now: float) -> None:
        """Fences when a writer's silence has lasted too long. Called from time to time."""
        if any(until <= now for until in self._silent_until.values()):
            self._start_fence()

    async def _ask(self, writer: WorkerIdentity, reservation_id: str, drained: asyncio.Event) -> None:
        """Sets `drained` when the writer says so; else waits for a fence to end this task."""
        for asked in itertools.count(1):
            try:
                answer = await self._stop_writer(writer, reservation_id, self._stop_wait_s)
            except Exception as error:
                if asked == 1:
                    log.warning("a writer does not say that it stopped", writer=writer.address, reason=repr(error))
                await self._clock.wait(STOP_RETRY_S)
                continue
            if answer is StopState.DRAINED:
                drained.set()
                return
            self._start_fence()
            await self._fenced.wait()
            return

    def _start_fence(self) -> None:
        if not self.is_fencing:
            self.is_fencing = True
            self._background.spawn(self._fence)

    async def _fence(self) -> None:
        while True:
            try:
                await self._replace_target()
                break
            except Exception as error:
                log.error("the transfer target could not be replaced; its quarantined blocks stay held", error=error)
                await self._clock.wait(FENCE_RETRY_S)
        self.generation += 1
        self.is_fencing = False
        self._silent_until.clear()  # all of an earlier generation: their silence asks for no second fence
        over, self._fenced = self._fenced, asyncio.Event()
        over.set()
        telemetry.counter("headrace.decode.fences").add(1)
        log.warning("transfer target replaced", fences=self.generation)
        self._on_fenced()

    async def _replace_target(self) -> None:
        fault = self._faults.fire("transfer.fence")
        if fault is not None and fault.kind == "fail":
            raise TransferError("fault injected at transfer.fence", reason="FAULT_INJECTED")
        if fault is not None:
            await self._clock.wait(fault.seconds)
        await asyncio.to_thread(self._target.fence)
