"""The token-bounded queue, and the scores that choose ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.clock import FakeClock
from headrace.errors import Overloaded
from headrace.protocol.common import WorkerIdentity
from services.router.admission import AdmissionQueue
from services.router.placing import (
    DecodeCandidate,
    PrefillCandidate,
    choose_decode,
    choose_prefill,
    has_room,
)


class Seats:
    """A fixed number of places, given to whoever asks when one is free."""

    def __init__(self, free: int):
        self.free = free
        self.given: list[str] = []

    def chooser(self, name: str) -> Callable[[], bool]:
        def choose() -> bool:
            if not self.free:
                return False
            self.free -= 1
            self.given.append(name)
            return True

        return choose


def test_an_empty_queue_is_passed_at_once_and_a_full_one_refuses():
    queue, seats = AdmissionQueue(100, FakeClock()), Seats(1)
    assert queue.enter(1000, 0, seats.chooser("a")) is None
    for name in "bc":
        assert queue.enter(50, 0, seats.chooser(name)) is not None
    assert (queue.queued_tokens, queue.queued_requests) == (100, 2)
    with pytest.raises(Overloaded) as caught:
        queue.enter(1, 0, seats.chooser("d"))
    assert caught.value.retry_after_s > 0
    seats.free = 2
    queue.pump()
    assert seats.given == ["a", "b", "c"] and queue.queued_tokens == queue.queued_requests == 0


def test_a_larger_priority_goes_first_and_equals_in_order_of_arrival():
    queue, seats = AdmissionQueue(100, FakeClock()), Seats(0)
    for name, priority in [("low", -1), ("first", 0), ("second", 0), ("high", 5)]:
        queue.enter(1, priority, seats.chooser(name))
    for _ in range(4):
        seats.free = 1
        queue.pump()
    assert seats.given == ["high", "first", "second", "low"]


def test_a_prompt_larger_than_the_queue_may_wait_alone():
    queue, seats = AdmissionQueue(10, FakeClock()), Seats(0)
    queue.enter(1000, 0, seats.chooser("a"))
    seats.free = 1
    queue.pump()
    assert seats.given == ["a"]


def test_whoever_leaves_lets_the_next_one_forward_and_may_leave_twice():
    queue, seats = AdmissionQueue(100, FakeClock()), Seats(0)
    gone = queue.enter(5, 0, seats.chooser("a"))
    assert gone is not None and queue.enter(6, 0, seats.chooser("b")) is not None
    seats.free = 1
    queue.leave(gone)
    queue.leave(gone)
    assert seats.given == ["b"]
    assert (queue.queued_tokens, queue.queued_requests) == (0, 0)


def test_thousands_who_leave_behind_one_who_waits_leave_nothing():
    queue, seats = AdmissionQueue(100, FakeClock()), Seats(0)
    first = queue.enter(1, 0, seats.chooser("a"))
    for _ in range(5000):
        ticket = queue.enter(1, 0, seats.chooser("b"))
        assert ticket is not None
        queue.leave(ticket)
    assert (queue.queued_tokens, queue.queued_requests) == (1, 1) and len(queue._tickets) < 100
    assert first is not None and first.is_waiting


def test_an_admission_that_ends_at_once_and_frees_a_place_lets_the_next_one_go():
    queue, given = AdmissionQueue(100, FakeClock()), []
    free = 0

    def chooser(name: str) -> Callable[[], bool]:
        def choose() -> bool:
            nonlocal free
            if not free:
                return False
            free -= 1
            given.append(name)
            free += 1  # it failed at once and gives its place back
            queue.pump()
            return True

        return choose

    for name in "abc":
        queue.enter(1, 0, chooser(name))
    free = 1
    queue.pump()
    assert given == ["a", "b", "c"] and queue.queued_requests == 0


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


def test_what_other_routers_send_counts_but_shuts_no_prompt_out():
    ours, theirs = PrefillCandidate(worker("a"), 100), PrefillCandidate(worker("b"), 0, others_tokens=200)
    assert choose_prefill([ours, theirs], 10, None) == worker("a")
    assert not has_room(PrefillCandidate(worker("a"), 10, others_tokens=60), 60, 100)
    assert has_room(PrefillCandidate(worker("a"), 0, others_tokens=10_000), 60, 100)
