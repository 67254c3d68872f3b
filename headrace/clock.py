"""Time as a collaborator, so that tests own it.

`Clock.now()` is monotonic seconds; `wait(seconds)` suspends a coroutine, `call_later(seconds, function)` calls one. `Deadline` is a
point on such a clock. `first_of` and `within` are the two races that everyone runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from headrace.errors import DeadlineExceeded, unwrap

T = TypeVar("T")


class Timer(Protocol):
    """A call that is due later."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """What a core needs of time."""

    def now(self) -> float: ...

    async def wait(self, seconds: float) -> None: ...

    def call_later(self, seconds: float, function: Callable[[], None]) -> Timer: ...


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    async def wait(self, seconds: float) -> None:
        """Suspends the calling task for `seconds`."""
        await asyncio.sleep(seconds)

    def call_later(self, seconds: float, function: Callable[[], None]) -> Timer:
        """Calls `function` on the running loop after `seconds`, unless cancelled."""
        return asyncio.get_running_loop().call_later(seconds, function)


class FakeTimer:
    """A call that FakeClock owes."""

    def __init__(self, function: Callable[[], None]):
        self._function: Callable[[], None] | None = function

    def cancel(self) -> None:
        """It is not called."""
        self._function = None

    def done(self) -> bool:
        """Whether it was called or cancelled."""
        return self._function is None

    def set_result(self, _: None) -> None:
        """Calls it."""
        function, self._function = self._function, None
        if function is not None:
            function()


class FakeClock:
    """A clock that moves only when a test says so."""

    def __init__(self, start: float = 1000.0):
        self._now = start
        self._sleepers: list[tuple[float, asyncio.Future[None] | FakeTimer]] = []

    def now(self) -> float:
        """The time that `advance` has reached."""
        return self._now

    async def wait(self, seconds: float) -> None:
        """Suspends until `advance` passes the wake-up time."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future = asyncio.get_running_loop().create_future()
        self._sleepers.append((self._now + seconds, future))
        await future

    def call_later(self, seconds: float, function: Callable[[], None]) -> Timer:
        """Calls `function` when `advance` passes its time, unless cancelled."""
        timer = FakeTimer(function)
        self._sleepers.append((self._now + seconds, timer))
        return timer

    async def advance(self, seconds: float) -> None:
        """Moves time forward and lets everyone who was due run."""
        self._now += seconds
        due = [entry for entry in self._sleepers if entry[0] <= self._now]
        self._sleepers = [entry for entry in self._sleepers if entry[0] > self._now]
        for _, future in sorted(due, key=lambda entry: entry[0]):
            if not future.done():
                future.set_result(None)
        for _ in range(10):
            await asyncio.sleep(0)


@dataclass(frozen=True)
class Deadline:
    """The one deadline of a request: `at` is a reading of `clock`, in monotonic seconds."""

    clock: Clock
    at: float

    @classmethod
    def after(cls, clock: Clock, seconds: float) -> Deadline:
        """A deadline `seconds` from now."""
        return cls(clock, clock.now() + seconds)

    def left_s(self) -> float:
        """Seconds left; zero once it has passed."""
        return max(0.0, self.at - self.clock.now())

    def check(self, what: str) -> None:
        """Raises DeadlineExceeded, naming `what` was being waited for, once the deadline has passed."""
        if self.clock.now() >= self.at:
            raise DeadlineExceeded(f"deadline passed while waiting for {what}")


async def first_of(*works: Coroutine[Any, Any, Any]) -> int:
    """Runs all of them until one has ended, cancels the others and waits for their end. Returns the place of the one that ended; raises
    what it raised. A cancel of the caller cancels all."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            ended = next(place for place, task in enumerate(tasks) if task.done())
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as group_error:
        raise unwrap(group_error) from group_error
    return ended


async def within(clock: Clock, seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns. Raises TimeoutError, once `work` has been cancelled and has ended, after `seconds` of `clock`."""
    results: list[T] = []

    async def run() -> None:
        results.append(await work)

    await first_of(run(), clock.wait(seconds))
    if not results:
        raise TimeoutError(f"not within {seconds:g} s")
    return results[0]
