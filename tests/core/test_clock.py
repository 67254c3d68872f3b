"""The two races of the house: whoever loses has ended before anybody goes on."""

from __future__ import annotations

import asyncio

import pytest

from headrace.clock import FakeClock, first_of, within
from headrace.errors import Unavailable


class Work:
    """Waits until told; notes how it ended."""

    def __init__(self, error: BaseException | None = None):
        self.go, self.ended, self._error = asyncio.Event(), "", error

    async def run(self) -> str:
        try:
            await self.go.wait()
            if self._error is not None:
                raise self._error
            self.ended = "well"
            return "made"
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # a clean-up that takes a turn of the loop
            self.ended = "cancelled"
            raise


def test_the_first_that_ends_is_named_and_the_others_have_ended_too():
    async def main():
        one, two = Work(), Work()
        two.go.set()
        assert await first_of(one.run(), two.run()) == 1
        assert (one.ended, two.ended) == ("cancelled", "well")

    asyncio.run(main())


def test_of_two_that_end_together_the_first_named_counts():
    async def main():
        one, two = Work(), Work()
        one.go.set()
        two.go.set()
        assert await first_of(one.run(), two.run()) == 0

    asyncio.run(main())


def test_what_the_first_raises_is_raised_as_it_is():
    async def main():
        one, two = Work(), Work(Unavailable("gone"))
        two.go.set()
        with pytest.raises(Unavailable, match="gone"):
            await first_of(one.run(), two.run())
        assert one.ended == "cancelled"

    asyncio.run(main())


def test_a_cancel_of_the_caller_ends_all():
    async def main():
        works = Work(), Work()
        async with asyncio.TaskGroup() as group:
            race = group.create_task(first_of(*(work.run() for work in works)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            race.cancel()
        assert race.cancelled() and [work.ended for work in works] == ["cancelled"] * 2

    asyncio.run(main())


def test_within_answers_in_time_and_raises_when_the_clock_has_passed():
    async def main():
        clock, quick, slow = FakeClock(), Work(), Work()
        quick.go.set()
        assert await within(clock, 1.0, quick.run()) == "made"
        async with asyncio.TaskGroup() as group:
            late = group.create_task(_timed_out(clock, slow))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await clock.advance(0.9)
            assert not late.done()
            await clock.advance(0.2)
        assert late.result() and slow.ended == "cancelled"

    asyncio.run(main())


async def _timed_out(clock: FakeClock, work: Work) -> bool:
    with pytest.raises(TimeoutError, match="1 s"):
        await within(clock, 1.0, work.run())
    return True
