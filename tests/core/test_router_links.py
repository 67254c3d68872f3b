"""The links to one rank: who hears of frames, what a break and a loss mean, what a rank may say of itself."""

from __future__ import annotations

import asyncio

import pytest
from router_fakes import FakeMesh, wait_until

from headrace.clock import FakeClock
from headrace.errors import HeadraceError, InvalidRequest, StaleEpoch, Unavailable
from headrace.protocol.common import FinishReason, WorkerIdentity, WorkerProgress, WorkerRole
from headrace.protocol.decode import ReleaseCommand, ReserveCommand, SampleEnd, TokenFrame, TokenRecord
from headrace.protocol.prefill import HeldPrefixes
from services.router.links import RankLinks
from services.router.prefix import HeldKeys, PromptKeys
from services.router.rank import STALL_AFTER_S, RankState, RankView


class Sink:
    def __init__(self):
        self.seen: list = []
        self.lost: list[HeadraceError] = []

    def on_record(self, record):
        self.seen.append(record.token_ids)

    def on_sample_end(self, end):
        self.seen.append(end.finish_reason)

    def on_frame_end(self):
        self.seen.append("|")

    def on_lost(self, error):
        self.lost.append(error)


class Owner:
    """Remembers what the links say."""

    def __init__(self):
        self.heard: list[str] = []

    def on_open(self, info):
        self.heard.append(f"open {info.identity.epoch}")

    def on_broken(self):
        self.heard.append("broken")

    def on_progress(self):
        self.heard.append("beat")

    def on_held(self, held):
        self.heard.append("held")

    def on_lost(self, error):
        self.heard.append(f"lost {error.reason}")


def frame(*tokens: int, handle: int = 1, end: bool = False) -> TokenFrame:
    records = (TokenRecord(handle, 0, 0, tokens),) if tokens else ()
    return TokenFrame(records, (SampleEnd(handle, 0, FinishReason.EOS, "", (), 3),) if end else ())


def play(scenario, role: WorkerRole = WorkerRole.DECODE, epoch: str | None = None) -> None:
    """Calls `await scenario(rank, links, owner)` with the links to one fake rank open."""

    async def bounded():
        mesh, owner = FakeMesh(), Owner()
        rank = mesh.decodes[0] if role is WorkerRole.DECODE else mesh.prefills[0]
        identity = rank.identity if epoch is None else WorkerIdentity(rank.identity.address, epoch)
        async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
            links = RankLinks(role, identity, mesh, tasks, owner)
            await wait_until(lambda: owner.heard)
            await scenario(rank, links, owner)
            links.close(Unavailable("over"))

    asyncio.run(bounded())


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_records_and_ends_reach_the_attempt_they_name_frame_by_frame():
    async def scenario(rank, links, owner):
        sink = Sink()
        links.tokens.attach(1, sink)
        for item in (frame(7, 8), frame(5, handle=99, end=True), frame(9, end=True)):
            rank.links[1].push(item)
        await settle()
        assert sink.seen == [(7, 8), "|", (9,), FinishReason.EOS, "|"]
        links.tokens.detach(1)
        rank.links[1].push(frame(4))
        await settle()
        assert len(sink.seen) == 5 and links.tokens.open_handles == 0

    play(scenario)


def test_a_decode_rank_is_open_when_both_links_are_and_not_while_one_is_broken():
    async def scenario(rank, links, owner):
        assert owner.heard == ["open d-epoch-1"] and [x.kind for x in rank.links] == ["decode", "tokens"]
        for link in rank.links:
            link.break_()
            assert not links.is_open and not links.is_lost
            link.resume()
            assert links.is_open
        assert owner.heard == ["open d-epoch-1", "broken", "open d-epoch-1", "broken", "open d-epoch-1"]

    play(scenario)


def test_frames_and_commands_of_a_broken_link_arrive_once_it_is_resumed():
    async def scenario(rank, links, owner):
        sink = Sink()
        links.tokens.attach(1, sink)
        rank.break_links()
        rank.links[1].push(frame(7))
        links.send_release(ReleaseCommand("r", 1, ()))
        await settle()
        assert sink.seen == [] and rank.released == []
        rank.resume_links()
        await settle()
        assert sink.seen == [(7,), "|"] and not sink.lost
        assert rank.released == [("r", 1, ())] and links.is_flushed

    play(scenario)


@pytest.mark.parametrize("which", [0, 1])
def test_when_one_link_is_lost_so_is_the_other_and_everything_under_way(which):
    async def scenario(rank, links, owner):
        sink, answers = Sink(), []
        links.tokens.attach(1, sink)
        rank.reserve_gate.clear()
        command = ReserveCommand("r", 1, WorkerIdentity("p", "p1"), 1, (0,), (0,), None, 1, 1)
        links.commands.send(command, on_answer=answers.append, deadline=None)
        both = list(rank.links)
        both[which].lose(Unavailable("silent", reason="LINK_LOST"))
        assert both[0].is_lost and both[1].is_lost and links.is_lost
        assert [x.reason for x in sink.lost] == ["LINK_LOST"] == [x.reason for x in answers]
        assert owner.heard[-1] == "lost LINK_LOST" and owner.heard.count("lost LINK_LOST") == 1
        links.lose(Unavailable("again"))
        assert len(sink.lost) == 1

    play(scenario)


def test_another_process_at_the_address_is_refused_unless_we_ask_who_is_there():
    async def refused(rank, links, owner):
        assert owner.heard == [f"lost {StaleEpoch.reason}"] and links.is_lost

    async def asked(rank, links, owner):
        assert owner.heard == ["open d-epoch-1"] and rank.links[1].identity == rank.identity

    play(refused, epoch="an older one")
    play(asked, epoch="")


def test_an_attempt_that_cannot_take_its_tokens_is_lost_alone():
    class Picky(Sink):
        def on_record(self, record):
            raise ValueError("what is this?")

    async def scenario(rank, links, owner):
        good, picky = Sink(), Picky()
        links.tokens.attach(1, picky)
        links.tokens.attach(2, good)
        both = TokenFrame((*frame(7).records, *frame(8, handle=2).records), ())
        rank.links[1].push(both)
        await settle()
        assert picky.lost[0].reason == "SINK_FAILED" and not good.lost
        assert good.seen == [(8,), "|"] and links.is_open

    play(scenario)


def test_what_no_link_may_carry_is_refused():
    async def scenario(rank, links, owner):
        with pytest.raises(InvalidRequest):
            links.tokens.on_item(rank.links[1], 1, ReleaseCommand("r", 1, ()))
        with pytest.raises(InvalidRequest):
            links.on_item(rank.links[0], 1, frame(1))

    play(scenario)


# --- what ranks hold -----------------------------------------------------------------------------------------------------


def keys(*numbers: int) -> tuple[bytes, ...]:
    return tuple(number.to_bytes(16, "little") for number in numbers)


def test_held_prefixes_follow_snapshots_and_changes_and_are_never_more_than_the_pool():
    held = HeldKeys()
    held.update(HeldPrefixes(True, keys(1, 2, 3), ()), 4)
    assert held.num_held(keys(1, 2, 9, 3)) == 2 and held.num_held(keys(3, 1, 2)) == 3 and held.num_held(()) == 0
    held.update(HeldPrefixes(False, keys(4, 5), keys(2)), 4)
    assert held.num_held(keys(4, 5, 1, 3)) == 4 and held.num_held(keys(2)) == 0
    held.update(HeldPrefixes(False, keys(4, 6, 7), ()), 4)
    assert len(held) == 4 and held.num_held(keys(4)) == 1, "what is known stays; what the pool cannot have is left out"
    held.update(HeldPrefixes(True, keys(8), ()), 4)
    assert len(held) == 1 and held.num_held(keys(8)) == 1
    held.clear()
    assert len(held) == 0


def test_a_snapshot_comes_with_every_new_link_and_changes_after_it():
    async def scenario():
        mesh, clock = FakeMesh(), FakeClock()

        class Nobody:
            def on_rank_open(self, rank, info):
                rank.learn(info)

            def on_rank_broken(self, rank): ...

            def on_rank_progress(self, rank): ...

            def on_rank_lost(self, rank, error): ...

        fake = mesh.prefills[0]
        fake.held_keys = list(keys(1, 2))
        async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
            rank = RankView(WorkerRole.PREFILL, fake.identity, clock, Nobody())
            rank.open(mesh, tasks)
            await wait_until(lambda: len(rank.held) == 2)
            fake.hold(keys(3), gone=keys(1))
            await wait_until(lambda: rank.held.num_held(keys(2, 3)) == 2)
            fake.lose_links()
            fake.held_keys = list(keys(7))
            rank.open(mesh, tasks)
            assert len(rank.held) == 0
            await wait_until(lambda: rank.held.num_held(keys(7)) == 1)
            rank.links.close(Unavailable("over"))

    asyncio.run(scenario())


def test_keys_of_a_prompt_are_worked_out_once_for_a_block_size():
    made = PromptKeys("salt", tuple(range(40)))
    assert len(made.of(16)) == 2 and made.of(16) is made.of(16)
    assert PromptKeys("other", tuple(range(40))).of(16) != made.of(16)


# --- how a rank is -------------------------------------------------------------------------------------------------------


def _rank(progress: WorkerProgress | None = None) -> tuple[RankView, FakeClock]:
    class Open:
        is_open, is_lost = True, False

        def __init__(self):
            self.commands, self.progress = self, progress

    class Nobody:
        def on_rank_progress(self, rank): ...

    clock, fake = FakeClock(), FakeMesh().decodes[0]
    rank = RankView(WorkerRole.DECODE, fake.identity, clock, Nobody())  # type: ignore[arg-type]
    rank.learn(fake.info)
    rank.state, rank.links = RankState.READY, Open()  # type: ignore[assignment]
    return rank, clock


def test_beats_say_what_others_load_a_rank_with_and_our_bookings_are_our_own():
    rank, _ = _rank(WorkerProgress(serving=True, queued_tokens=100, available_blocks=40))
    rank.queued_tokens, rank.booked_blocks = 30, 20
    rank.on_progress()
    assert (rank.others_tokens, rank.others_blocks) == (70, 64 - 40 - 20)
    rank.queued_tokens, rank.booked_blocks = 130, 50
    rank.on_progress()
    assert (rank.others_tokens, rank.others_blocks) == (0, 0)


def test_a_rank_that_drains_or_is_stuck_is_not_ready_and_says_why():
    rank, _ = _rank(WorkerProgress(serving=False))
    assert not rank.is_ready and rank.why_not_ready() == "it takes no new work"

    async def scenario():
        rank, clock = _rank(WorkerProgress(serving=True, completed_steps=3, pending_steps=1))
        rank.on_progress()
        await clock.advance(STALL_AFTER_S - 0.1)
        assert rank.is_ready
        rank.on_progress()  # nothing has completed meanwhile
        await clock.advance(0.2)
        assert not rank.is_ready and "completed nothing" in rank.why_not_ready()
        rank.links.progress = WorkerProgress(serving=True, completed_steps=3, pending_steps=1, pause_reason="COMPILING")
        rank.on_progress()
        assert rank.is_ready, "a pause that was announced does not count"
        rank.links.progress = WorkerProgress(serving=True, completed_steps=4, pending_steps=1)
        rank.on_progress()
        await clock.advance(STALL_AFTER_S - 0.1)
        assert rank.is_ready

    asyncio.run(scenario())
