"""The token-bounded queue and the scores that choose workers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from headrace.clock import FakeClock
from headrace.errors import Overloaded
from headrace.protocol import PrefixHolder, WorkerIdentity
from services.router.admission import Admission
from services.router.policy import (
    DecodeCandidate,
    PrefillCandidate,
    cached_tokens,
    choose_decode,
    choose_prefill,
    has_room,
)


@dataclass
class Seats:
    """A fixed number of places."""

    free: int
    given: list[str] = field(default_factory=list)

    def chooser(self, name: str):
        def choose():
            if not self.free:
                return None
            self.free -= 1
            self.given.append(name)
            return Seat(self)

        return choose


@dataclass
class Seat:
    seats: Seats

    def release(self) -> None:
        self.seats.free += 1


def test_an_empty_queue_is_passed_at_once_and_a_full_one_refuses():
    async def scenario():
        queue, seats = Admission(100, FakeClock()), Seats(1)
        await queue.wait_admission(1000, 0, seats.chooser("a"))
        waiting = [asyncio.ensure_future(queue.wait_admission(50, 0, seats.chooser(name))) for name in "bc"]
        await asyncio.sleep(0)
        assert (queue.queued_tokens, queue.queued_requests) == (100, 2)
        with pytest.raises(Overloaded) as caught:
            await queue.wait_admission(1, 0, seats.chooser("d"))
        assert caught.value.retry_after_s > 0
        seats.free = 2
        queue.pump()
        await asyncio.gather(*waiting)
        assert seats.given == ["a", "b", "c"] and queue.queued_tokens == 0

    asyncio.run(scenario())


def test_a_larger_priority_goes_first_and_equals_in_order_of_arrival():
    async def scenario():
        queue, seats = Admission(100, FakeClock()), Seats(0)
        order = [("low", -1), ("first", 0), ("second", 0), ("high", 5)]
        waiting = [asyncio.ensure_future(queue.wait_admission(1, rank, seats.chooser(name))) for name, rank in order]
        await asyncio.sleep(0)
        for _ in order:
            seats.free = 1
            queue.pump()
        await asyncio.gather(*waiting)
        assert seats.given == ["high", "first", "second", "low"]

    asyncio.run(scenario())


def test_a_prompt_larger_than_the_queue_may_wait_alone():
    async def scenario():
        queue, seats = Admission(10, FakeClock()), Seats(0)
        waiting = asyncio.ensure_future(queue.wait_admission(1000, 0, seats.chooser("a")))
        await asyncio.sleep(0)
        seats.free = 1
        queue.pump()
        await waiting

    asyncio.run(scenario())


def test_a_cancelled_waiter_leaves_and_gives_back_a_place_it_had_just_got():
    async def scenario():
        queue, seats = Admission(100, FakeClock()), Seats(0)
        gone, next_one = (asyncio.ensure_future(queue.wait_admission(5, 0, seats.chooser(name))) for name in "ab")
        await asyncio.sleep(0)
        seats.free = 1
        queue.pump()
        gone.cancel()  # it was admitted and has not run since
        await asyncio.gather(gone, return_exceptions=True)
        await next_one
        assert seats.given == ["a", "b"] and seats.free == 0
        assert (queue.queued_tokens, queue.queued_requests) == (0, 0)

    asyncio.run(scenario())


def worker(name: str) -> WorkerIdentity:
    return WorkerIdentity(name, "e")


def test_prefill_goes_where_the_fewest_tokens_come_first():
    idle, cached, full = (PrefillCandidate(worker(name), queued) for name, queued in (("a", 50), ("b", 80), ("c", 400)))
    assert choose_prefill([idle, cached, full], 100, None) == worker("a")
    cached = PrefillCandidate(worker("b"), 80, cached_tokens=64)
    assert choose_prefill([idle, cached, full], 100, None) == worker("b")
    assert choose_prefill([full], 100, 450) is None
    assert choose_prefill([], 100, None) is None
    avoided = PrefillCandidate(worker("a"), 0, avoid=True)
    assert choose_prefill([avoided, full], 100, None) == worker("c")
    assert choose_prefill([avoided], 100, None) == worker("a"), "better than nowhere"


def test_an_idle_rank_takes_any_prompt_and_a_busy_one_up_to_its_bound():
    assert has_room(PrefillCandidate(worker("a"), 0), 10_000, 100)
    assert has_room(PrefillCandidate(worker("a"), 40), 60, 100)
    assert not has_room(PrefillCandidate(worker("a"), 41), 60, 100)


def test_decode_goes_where_most_of_the_pool_stays_free():
    small, large = DecodeCandidate(worker("a"), 100, 50), DecodeCandidate(worker("b"), 1000, 400)
    assert choose_decode([small, large], 10) == worker("b")
    assert choose_decode([small], 101) is None, "it could never fit"
    assert choose_decode([small], 60) == worker("a"), "it may wait there"
    busy = DecodeCandidate(worker("b"), 1000, 500, in_flight=3)
    assert choose_decode([busy, DecodeCandidate(worker("c"), 1000, 500)], 10) == worker("c")


def test_prefixes_are_counted_in_tokens_by_worker():
    assert cached_tokens((PrefixHolder(worker("a"), 3),), 16) == {worker("a"): 48}
