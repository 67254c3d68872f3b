"""Whatever breaks when: each item of a link is handled once and in order, and everything that was asked gets one last answer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from headrace.clock import FakeClock
from headrace.errors import HeadraceError
from headrace.protocol.decode import BeginCommand, Renewed, StopCommand, Stopped, StopState
from headrace.rpc.links import WRITER_LINK, Link
from tests.link_fakes import MemoryLink, MemoryLinks, Recorder, in_loop

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("opener"), st.integers(1, 4)),
        st.tuples(st.just("server"), st.integers(1, 4)),
        st.tuples(st.just("turns"), st.integers(1, 12)),
        st.tuples(st.just("advance"), st.sampled_from([0.05, 0.3, 0.9])),
        st.tuples(st.sampled_from(["cut", "silence", "refuse", "accept"]), st.just(0)),
    ),
    min_size=1,
    max_size=40,
)
LONG_ENOUGH_S = 20.0


class Conversation:
    """One link whose ends ask one another, and what became of every question."""

    def __init__(self, links: MemoryLinks, pair: MemoryLink):
        self.links, self.pair = links, pair
        self.there: Link = pair.server
        self.sent: dict[str, list[Any]] = {"opener": [], "server": []}
        self.answers: Counter[str] = Counter()
        self.lost_answers: Counter[str] = Counter()

    def ask(self, side: str) -> None:
        """One command of one side, if its end is not lost."""
        link = self.pair.opener if side == "opener" else self.there
        if link.is_lost:
            return
        name = f"{side} {len(self.sent[side])}"
        command = BeginCommand(name) if side == "opener" else StopCommand(name, 1.0)
        self.sent[side].append(command)
        link.send(command, on_answer=self._hears(name))

    def _hears(self, name: str) -> Callable[[Any], None]:
        def on_answer(said: Any) -> None:
            self.answers[name] += 1
            if isinstance(said, HeadraceError):
                assert said.reason == "LINK_LOST"
                self.lost_answers[name] += 1

        return on_answer

    async def happen(self, event: str, amount: float) -> None:
        """One event of the story."""
        if event in self.sent:
            for _ in range(int(amount)):
                self.ask(event)
        elif event == "turns":
            await self.pair.settle(int(amount))
        elif event == "advance":
            await self.links.clock.advance(amount)  # type: ignore[attr-defined]
        elif event == "cut":
            self.links.cut()
        elif event == "silence":
            self.links.silence()
        else:
            self.links.is_refusing = event == "refuse"

    async def end_well(self) -> None:
        """Nothing breaks any more, and time goes on."""
        self.links.is_refusing = False
        for _ in range(int(LONG_ENOUGH_S / 0.2)):
            await self.links.clock.advance(0.2)  # type: ignore[attr-defined]
            await self.pair.settle(5)

    def check(self) -> None:
        """The promise."""
        asked = [f"{side} {index}" for side, sent in self.sent.items() for index in range(len(sent))]
        assert self.answers == Counter(asked)
        for side, handler in (("opener", self.pair.at_server), ("server", self.pair.at_opener)):
            assert handler.items == self.sent[side][: len(handler.items)]
            if not self.is_lost:
                assert len(handler.items) == len(self.sent[side])
        if not self.is_lost:
            assert not self.lost_answers
            assert (self.pair.opener.unacknowledged_bytes, self.there.unacknowledged_bytes) == (0, 0)

    @property
    def is_lost(self) -> bool:
        """Both ends agree in the end."""
        assert self.pair.opener.is_lost == self.there.is_lost
        return self.there.is_lost


def reply(link: Link, number: int, body: Any) -> None:
    """What the other side says to a command at once."""
    link.answer(number, Renewed(1.0) if isinstance(body, BeginCommand) else Stopped(StopState.DRAINED))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(EVENTS)
@example([("opener", 3), ("turns", 3), ("cut", 0), ("server", 2), ("turns", 1), ("cut", 0), ("opener", 1)])
@example([("silence", 0), ("opener", 2), ("server", 2)])
@example([("opener", 2), ("refuse", 0), ("cut", 0)] + [("advance", 0.9)] * 9)
def test_items_are_handled_once_in_order_whatever_breaks(events):
    @in_loop
    async def story():
        async with MemoryLinks.open(FakeClock()) as links:
            pair = await links.connect(WRITER_LINK, at_opener=Recorder(reply), at_server=Recorder(reply))
            talk = Conversation(links, pair)
            for event, amount in events:
                await talk.happen(event, amount)
            await talk.end_well()
            talk.check()

    story()


def test_a_short_cut_loses_nothing_and_a_long_one_the_link():
    """The story above is not empty: both ends of it happen."""

    @in_loop
    async def story(refused_s: float, is_lost: bool):
        async with MemoryLinks.open(FakeClock()) as links:
            pair = await links.connect(WRITER_LINK, at_opener=Recorder(reply), at_server=Recorder(reply))
            talk = Conversation(links, pair)
            await talk.happen("refuse", 0)
            await talk.happen("cut", 0)
            await talk.happen("opener", 3)
            for _ in range(int(refused_s / 0.5)):
                await talk.happen("advance", 0.5)
                await asyncio.sleep(0)
            await talk.end_well()
            talk.check()
            assert talk.is_lost is is_lost
            assert len(talk.lost_answers) == (3 if is_lost else 0)

    story(3.0, False)
    story(9.0, True)
