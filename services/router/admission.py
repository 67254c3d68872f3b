"""The queue before the mesh: bounded in prompt tokens, by priority, first come first served within one.

A request leaves it when its `choose` finds a place; until then it holds nothing anywhere else. `pump` must be called
whenever a place may have come free. The first in line is never overtaken by a smaller one of its priority or below.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.clock import Clock
from headrace.errors import Overloaded


@dataclass(order=True)
class Ticket:
    """A request in the queue, larger priorities first. `choose` finds it a place and goes on with it, or says that there is none."""

    order: tuple[int, int]
    num_tokens: int = field(compare=False)
    choose: Callable[[], bool] = field(compare=False)
    is_waiting: bool = field(compare=False, default=True)


class AdmissionQueue:
    """One router's queue. `queued_tokens` and `queued_requests` are its present size."""

    def __init__(self, max_queue_tokens: int, clock: Clock):
        self._max_queue_tokens = max_queue_tokens
        self._clock = clock
        self._tickets: list[Ticket] = []
        self._arrivals = itertools.count()
        self._pumping = self._pump_again = False
        self._tokens_per_s = 0.0
        self._last_admission: float | None = None
        self.queued_tokens = 0
        self.queued_requests = 0

    def enter(self, num_tokens: int, priority: int, choose: Callable[[], bool]) -> Ticket | None:
        """Calls `choose` as soon as it is this request's turn, and again until it says True: it has gone on then.

        None when that happened at once. Raises Overloaded when the queue is full. Deadlines are the caller's business.
        """
        if not self.queued_requests and choose():
            self._count(num_tokens)
            return None
        if self.queued_requests and self.queued_tokens + num_tokens > self._max_queue_tokens:
            raise Overloaded(
                f"{self.queued_tokens} prompt tokens are queued; {num_tokens} more exceed {self._max_queue_tokens}",
                retry_after_s=self.retry_after_s(),
            )
        ticket = Ticket((-priority, next(self._arrivals)), num_tokens, choose)
        heapq.heappush(self._tickets, ticket)
        self.queued_tokens += num_tokens
        self.queued_requests += 1
        self.pump()
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """The request has gone, or nobody waits for it any more. Safe to repeat."""
        if not ticket.is_waiting:
            return
        self._take_out(ticket)
        if len(self._tickets) > 2 * self.queued_requests + 64:
            self._tickets = [x for x in self._tickets if x.is_waiting]
            heapq.heapify(self._tickets)
        self.pump()

    def pump(self) -> None:
        """Admits from the front for as long as places are found. What an admission sets free is looked at as well."""
        self._pump_again = True
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._pump_again:
                self._pump_again = False
                self._admit_front()
        finally:
            self._pumping = False

    def retry_after_s(self) -> float:
        """Seconds after which half of what is queued should be gone, from the recent rate of admission."""
        if self._tokens_per_s <= 0:
            return 1.0
        return min(30.0, max(0.1, self.queued_tokens / 2 / self._tokens_per_s))

    def _admit_front(self) -> None:
        while (ticket := self._front()) is not None and ticket.choose():
            if ticket.is_waiting:  # what `choose` started may have ended the request already
                self._take_out(ticket)
            self._count(ticket.num_tokens)

    def _front(self) -> Ticket | None:
        while self._tickets and not self._tickets[0].is_waiting:
            heapq.heappop(self._tickets)
        return self._tickets[0] if self._tickets else None

    def _take_out(self, ticket: Ticket) -> None:
        ticket.is_waiting = False
        self.queued_tokens -= ticket.num_tokens
        self.queued_requests -= 1

    def _count(self, num_tokens: int) -> None:
        now = self._clock.now()
        if self._last_admission is not None:
            rate = num_tokens / max(now - self._last_admission, 1e-3)
            self._tokens_per_s += 0.1 * (rate - self._tokens_per_s)
        self._last_admission = now
