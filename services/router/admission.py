"""The queue before the mesh: bounded in prompt tokens, by priority, first come first served within one.

A request leaves it when `choose` finds it a place; until then it holds nothing anywhere else. `pump` must be called
whenever a place may have come free. The first in line is never overtaken by a smaller one of its priority or below.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from headrace.clock import Clock
from headrace.errors import Overloaded


class Booking(Protocol):
    """A place that was chosen for a request and can be handed back."""

    def release(self) -> None: ...


Place = TypeVar("Place", bound=Booking)


@dataclass(order=True)
class _Waiter(Generic[Place]):
    order: tuple[int, int]
    num_tokens: int = field(compare=False)
    choose: Callable[[], Place | None] = field(compare=False)
    admitted: asyncio.Future[Place] = field(compare=False)


class Admission(Generic[Place]):
    """One router's queue. `queued_tokens` and `queued_requests` are its present size."""

    def __init__(self, max_queue_tokens: int, clock: Clock):
        self._max_queue_tokens = max_queue_tokens
        self._clock = clock
        self._waiters: list[_Waiter[Place]] = []
        self._arrivals = itertools.count()
        self._tokens_per_s = 0.0
        self._last_admission: float | None = None
        self.queued_tokens = 0

    @property
    def queued_requests(self) -> int:
        """Requests that wait now."""
        return sum(not waiter.admitted.done() for waiter in self._waiters)

    async def wait_admission(self, num_tokens: int, priority: int, choose: Callable[[], Place | None]) -> Place:
        """The place `choose` finds, as soon as it is this request's turn. Raises Overloaded when the queue is full.

        A cancelled wait releases a place that was chosen meanwhile. Deadlines are the caller's business.
        """
        if not self._waiters and (place := choose()) is not None:
            self._count(num_tokens)
            return place
        if self._waiters and self.queued_tokens + num_tokens > self._max_queue_tokens:
            raise Overloaded(
                f"{self.queued_tokens} prompt tokens are queued; {num_tokens} more exceed {self._max_queue_tokens}",
                retry_after_s=self.retry_after_s(),
            )
        admitted: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        waiter = _Waiter((-priority, next(self._arrivals)), num_tokens, choose, admitted)
        heapq.heappush(self._waiters, waiter)
        self.queued_tokens += num_tokens
        self.pump()
        try:
            return await admitted
        except asyncio.CancelledError:
            self._leave(waiter)
            raise

    def pump(self) -> None:
        """Admits from the front for as long as places are found."""
        while self._waiters:
            waiter = self._waiters[0]
            if waiter.admitted.done():
                heapq.heappop(self._waiters)
                continue
            place = waiter.choose()
            if place is None:
                return
            heapq.heappop(self._waiters)
            self.queued_tokens -= waiter.num_tokens
            self._count(waiter.num_tokens)
            waiter.admitted.set_result(place)

    def retry_after_s(self) -> float:
        """Seconds after which half of what is queued should be gone, from the recent rate of admission."""
        if self._tokens_per_s <= 0:
            return 1.0
        return min(30.0, max(0.1, self.queued_tokens / 2 / self._tokens_per_s))

    def _leave(self, waiter: _Waiter[Place]) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)
            heapq.heapify(self._waiters)
            self.queued_tokens -= waiter.num_tokens
        elif not waiter.admitted.cancelled():
            waiter.admitted.result().release()
        self.pump()

    def _count(self, num_tokens: int) -> None:
        now = self._clock.now()
        if self._last_admission is not None:
            rate = num_tokens / max(now - self._last_admission, 1e-3)
            self._tokens_per_s += 0.1 * (rate - self._tokens_per_s)
        self._last_admission = now
