"""The two links of a prefill rank as its handlers see them: the writer links it opens, the prefill links that routers open."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from prefill_fakes import DECODE, Bench, command

from headrace.clock import FakeClock
from headrace.errors import Cancelled, HeadraceError, InvalidRequest, Overloaded, StaleAttempt, Unavailable
from headrace.protocol.common import WorkerIdentity
from headrace.protocol.decode import BeginCommand, CommitCommand, Renewed, StopCommand, Stopped, StopState
from headrace.protocol.prefill import CancelPrefillCommand, Committed, FirstTokens, HeldPrefixes
from services.prefill import writers as writer_links
from services.prefill.held import Held
from services.prefill.links import RouterLink
from services.prefill.writers import IDLE_S, Writers

BEGIN = BeginCommand("r1")


class OneEnd:
    """One end of a link, and its opener: remembers what is sent, answers when told."""

    def __init__(self, peer: WorkerIdentity, handler=None):
        self.link, self.peer, self.handler = self, peer, handler
        self.sent, self.answers, self.is_lost = [], [], False
        self._asked: dict[int, object] = {}
        self._over = asyncio.Event()

    async def run(self):
        await self._over.wait()

    def send(self, body, *, deadline=None, on_answer=None):
        if self.is_lost:
            raise Unavailable("lost", reason="LINK_LOST")
        self.sent.append(body)
        if on_answer is not None:
            self._asked[len(self.sent)] = on_answer
        return len(self.sent)

    def answer(self, number, body):
        assert not self.is_lost
        self.answers.append((number, body))

    def peer_answers(self, number, body):
        self._asked.pop(number)(body)

    def lose(self, error):
        if self.is_lost:
            return
        self.is_lost = True
        asked, self._asked = self._asked, {}
        for on_answer in asked.values():
            on_answer(Unavailable("lost", reason="LINK_LOST"))
        self.handler.on_lost(self, error)
        self._over.set()


class Leg:
    """Something that uses a writer link."""

    def __init__(self):
        self.failure = None

    def fail(self, error):
        self.failure = error


class Openers:
    """Every link that was opened, in order."""

    def __init__(self):
        self.opened: list[OneEnd] = []

    def __call__(self, decode, handler):
        self.opened.append(OneEnd(decode, handler))
        return self.opened[-1]


@contextlib.asynccontextmanager
async def open_writers():
    openers, clock = Openers(), FakeClock()
    async with Writers.open(openers, clock) as writers:
        await asyncio.sleep(0)
        yield writers, openers.opened, clock


def rank(number: int) -> WorkerIdentity:
    return WorkerIdentity(f"d:{number}", f"epoch {number}")


def test_legs_to_one_rank_share_a_link_that_opens_with_the_first_and_closes_after_idleness():
    async def scenario():
        async with open_writers() as (writers, opened, clock):
            assert not opened
            one, other = Leg(), Leg()
            writer = writers.enter(one, DECODE)
            assert writers.enter(other, DECODE) is writer and len(opened) == 1
            writer.leave(one)
            await clock.advance(2 * IDLE_S)
            assert not opened[0].is_lost, "another leg uses it"
            writer.leave(other)
            writer.leave(other)
            await clock.advance(IDLE_S / 2)
            assert not opened[0].is_lost
            await clock.advance(IDLE_S)
            assert opened[0].is_lost
            assert writers.enter(one, DECODE) is not writer and len(opened) == 2

    asyncio.run(scenario())


def test_another_process_at_the_same_address_gets_another_link():
    async def scenario():
        async with open_writers() as (writers, opened, _):
            writers.enter(Leg(), WorkerIdentity("d:1", "before"))
            writers.enter(Leg(), WorkerIdentity("d:1", "after"))
            assert [end.peer.epoch for end in opened] == ["before", "after"]

    asyncio.run(scenario())


def test_the_number_of_links_is_bounded_and_idle_ones_make_room(monkeypatch):
    monkeypatch.setattr(writer_links, "MAX_WRITERS", 2)

    async def scenario():
        async with open_writers() as (writers, opened, clock):
            first, second = Leg(), Leg()
            writer = writers.enter(first, rank(1))
            writers.enter(second, rank(2))
            with pytest.raises(Overloaded):
                writers.enter(Leg(), rank(3))
            writer.leave(first)
            writers.enter(Leg(), rank(3))
            assert [end.is_lost for end in opened] == [True, False, False]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "refusal",
    [StaleAttempt("taken back"), Overloaded("full"), Unavailable("drains", reason="DRAINING"), InvalidRequest("what?")],
)
def test_what_a_decode_rank_refuses_is_said_as_it_is(refusal):
    async def scenario():
        async with open_writers() as (writers, opened, _):
            answer = writers.enter(Leg(), DECODE).ask(BEGIN, 5.0)
            opened[0].peer_answers(1, refusal)
            with pytest.raises(type(refusal)) as caught:
                await answer
            assert caught.value is refusal

    asyncio.run(scenario())


SILENCES = {
    "the time is over": (lambda end: None, 1.0),
    "the call was cancelled there": (lambda end: end.peer_answers(1, Cancelled("it stops")), 5.0),
    "the link is lost": (lambda end: end.lose(Unavailable("silent", reason="LINK_LOST")), 5.0),
}


@pytest.mark.parametrize("silence", SILENCES)
def test_a_decode_rank_that_does_not_answer_is_to_blame_however_that_shows(silence):
    happens, within_s = SILENCES[silence]

    async def scenario():
        async with open_writers() as (writers, opened, clock):
            answer = writers.enter(Leg(), DECODE).ask(BEGIN, within_s)
            happens(opened[0])
            await clock.advance(1.0)
            with pytest.raises(Unavailable) as caught:
                await asyncio.wait_for(answer, 5)
            assert (caught.value.reason, caught.value.retryable) == ("DECODE_UNANSWERED", True)

    asyncio.run(scenario())


def test_a_late_answer_changes_nothing_and_a_timely_one_is_given():
    async def scenario():
        async with open_writers() as (writers, opened, clock):
            writer = writers.enter(Leg(), DECODE)
            late, timely = writer.ask(BEGIN, 1.0), writer.ask(BEGIN, 5.0)
            await clock.advance(2.0)
            opened[0].peer_answers(1, Renewed(10.0))
            opened[0].peer_answers(2, Renewed(9.0))
            assert late.exception().reason == "DECODE_UNANSWERED" and await timely == Renewed(9.0)

    asyncio.run(scenario())


def test_a_lost_link_ends_the_legs_that_write_there_and_no_others():
    async def scenario():
        async with open_writers() as (writers, opened, _):
            here, gone, elsewhere = Leg(), Leg(), Leg()
            writers.enter(here, rank(1))
            writers.enter(gone, rank(1)).leave(gone)
            writers.enter(elsewhere, rank(2))
            opened[0].lose(Unavailable("silent", reason="LINK_LOST"))
            assert here.failure.reason == "DECODE_UNANSWERED" and here.failure.retryable
            assert gone.failure is None and elsewhere.failure is None
            writers.enter(Leg(), rank(1))
            assert len(opened) == 3, "the next leg gets a new link"

    asyncio.run(scenario())


def test_stops_reach_the_core_with_the_rank_that_asks_and_the_answer_goes_back():
    async def scenario():
        async with open_writers() as (writers, opened, _):
            asked = []
            writers.on_stop = lambda *stop: asked.append(stop)
            writer = writers.enter(Leg(), DECODE)
            writer.on_item(opened[0], 7, StopCommand("r1", 3.0))
            ((reservation_id, decode, wait_s, tell),) = asked
            assert (reservation_id, decode, wait_s) == ("r1", DECODE, 3.0) and not opened[0].answers
            tell(StopState.DRAINED)
            assert opened[0].answers == [(7, Stopped(StopState.DRAINED))]
            writer.on_item(opened[0], 8, StopCommand("r2", 3.0))
            opened[0].lose(Unavailable("silent"))
            asked[1][3](StopState.UNKNOWN)  # nobody hears it, and nothing fails
            with pytest.raises(InvalidRequest):
                writer.on_item(opened[0], 9, CommitCommand("r1", "q", 1, (), (), ()))

    asyncio.run(scenario())


# --- routers ---------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def a_router(bench: Bench, core, held: Held):
    """A router's link, open."""
    end = OneEnd(WorkerIdentity("r:1", "epoch-r"))
    end.handler = RouterLink(core, held, end)
    end.handler.on_open(end)
    yield end
    end.lose(Unavailable("the test is over"))
    await bench.settled(core)


async def answered(end: OneEnd, count: int) -> list:
    async with asyncio.timeout(5):
        while len(end.answers) < count:
            await asyncio.sleep(0.005)
    return end.answers


def test_a_prefill_is_answered_by_first_tokens_and_then_its_end_under_its_number():
    async def scenario():
        bench = Bench()
        async with bench.open() as core, a_router(bench, core, Held(bench.pool)) as end:
            end.handler.on_item(end, 4, command(6))
            end.handler.on_item(end, 5, command(6, attempt=2, reservation=False))
            await bench.run_job()
            await answered(end, 2)
            await bench.run_job()
            answers = await answered(end, 4)
            assert [type(body) for number, body in answers if number == 4] == [FirstTokens, Committed]
            assert [type(body) for number, body in answers if number == 5] == [FirstTokens, Committed]

    asyncio.run(scenario())


def test_what_is_refused_at_the_door_is_raised_to_the_link():
    async def scenario():
        bench = Bench()
        async with bench.open() as core, a_router(bench, core, Held(bench.pool)) as end:
            with pytest.raises(InvalidRequest):
                end.handler.on_item(end, 1, command(101))
            with pytest.raises(InvalidRequest):
                end.handler.on_item(end, 2, StopCommand("r1", 1.0))
            assert not end.answers

    asyncio.run(scenario())


def test_a_cancel_is_answered_by_the_end_of_the_attempt_alone():
    async def scenario():
        bench = Bench()
        async with bench.open() as core, a_router(bench, core, Held(bench.pool)) as end:
            end.handler.on_item(end, 1, command(6))
            await asyncio.sleep(0.02)
            end.handler.on_item(end, 2, CancelPrefillCommand("q", 1))
            ((number, error),) = await answered(end, 1)
            assert (number, error.reason) == (1, "CANCELLED")
            end.handler.on_item(end, 3, CancelPrefillCommand("q", 1))
            assert len(end.answers) == 1

    asyncio.run(scenario())


def test_a_lost_router_link_cancels_that_routers_prompts_only():
    async def scenario():
        bench = Bench(prefix_cache=False)
        held = Held(bench.pool)
        async with bench.open() as core, a_router(bench, core, held) as stays:
            async with a_router_that_is_lost(core, held) as lost:
                lost.handler.on_item(lost, 1, command(6))
                stays.handler.on_item(stays, 1, command(6, request_id="other", reservation=False))
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.02)
            assert not lost.answers and len(core._running) == 1
            (job,) = [job for job in bench.batcher.jobs if job.key.startswith("other/")]
            bench.batcher.jobs = [job]
            await bench.run_job()
            await answered(stays, 2)
            assert isinstance(stays.answers[-1][1], Committed)

    asyncio.run(scenario())


@contextlib.asynccontextmanager
async def a_router_that_is_lost(core, held: Held):
    end = OneEnd(WorkerIdentity("r:2", "epoch-r2"))
    end.handler = RouterLink(core, held, end)
    end.handler.on_open(end)
    yield end
    end.lose(Unavailable("silent", reason="LINK_LOST"))


def test_a_new_link_hears_all_that_is_held_and_then_what_changes_and_a_resumed_one_nothing_twice():
    async def scenario():
        bench = Bench()
        held = Held(bench.pool)
        async with bench.open() as core, a_router(bench, core, held) as first:
            first.handler.on_item(first, 1, command(10))
            await bench.run_job()
            await answered(first, 2)
            await asyncio.sleep(0.02)
            keys = bench.pool.registered_keys()
            assert len(keys) == 2
            assert first.sent == [
                HeldPrefixes(is_snapshot=True, added=(), removed=()),
                HeldPrefixes(is_snapshot=False, added=keys, removed=()),
            ]
            first.handler.on_broken(first)
            bench.pool.forget(keys[1:])
            await asyncio.sleep(0)
            first.handler.on_open(first)
            assert first.sent[2:] == [HeldPrefixes(is_snapshot=False, added=(), removed=keys[1:])]
            async with a_router_that_is_lost(core, held) as second:
                assert second.sent == [HeldPrefixes(is_snapshot=True, added=keys[:1], removed=())]
            bench.pool.forget(keys)
            await asyncio.sleep(0)
            assert len(second.sent) == 1 and len(first.sent) == 4

    asyncio.run(scenario())


def test_errors_are_answers_like_others():
    async def scenario():
        bench = Bench()
        bench.decode.errors[BeginCommand] = [StaleAttempt("taken back")]
        async with bench.open() as core, a_router(bench, core, Held(bench.pool)) as end:
            end.handler.on_item(end, 1, command(6))
            ((number, error),) = await answered(end, 1)
            assert number == 1 and isinstance(error, HeadraceError) and error.reason == "STALE_ATTEMPT"

    asyncio.run(scenario())
