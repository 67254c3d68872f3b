"""Links in memory: numbers, order, acknowledgement, silence, resuming, loss. The same class serves both ends."""

from __future__ import annotations

import asyncio

import pytest

from headrace.clock import Deadline, FakeClock
from headrace.errors import DeadlineExceeded, InvalidRequest, Overloaded, StaleEpoch, Unavailable
from headrace.protocol.common import FinishReason, SamplingParams, WorkerIdentity, WorkerProgress
from headrace.protocol.decode import (
    BeginCommand,
    ReleaseCommand,
    RenewCommand,
    Renewed,
    Reservation,
    ReserveCommand,
    SampleEnd,
    StopCommand,
    Stopped,
    StopState,
    TokenFrame,
    TokenRecord,
)
from headrace.protocol.link import Done
from headrace.protocol.prefill import Committed, FirstTokens, PrefillCommand
from headrace.rpc import links as links_module
from headrace.rpc.links import DECODE_LINK, PREFILL_LINK, TOKEN_LINK, WRITER_LINK, LinkOpener, LinkSettings
from tests.link_fakes import OPENER, SERVER, MemoryLinks, Recorder, in_loop


def reserve(request_id: str = "q") -> ReserveCommand:
    return ReserveCommand(request_id, 1, OPENER, 10, (0,), (0,), SamplingParams(), 1, 7)


def prefill(request_id: str = "q") -> PrefillCommand:
    return PrefillCommand(request_id, 1, (1, 2, 3), SamplingParams(), (0,), {})


@in_loop
async def test_items_arrive_once_in_order_and_are_numbered_from_one():
    async with MemoryLinks.open() as links:
        pair = await links.connect(WRITER_LINK)
        numbers = [pair.opener.send(BeginCommand(f"r{index}")) for index in range(500)]
        await pair.settle()
        assert numbers == pair.at_server.numbers == list(range(1, 501))
        assert pair.at_server.items == [BeginCommand(f"r{index}") for index in range(500)]


@in_loop
async def test_what_is_ready_in_one_turn_travels_in_one_message():
    async with MemoryLinks.open() as links:
        pair = await links.connect(WRITER_LINK)
        before = links.streams[0].messages
        for index in range(500):
            pair.opener.send(BeginCommand(f"r{index}"))
        await pair.settle()
        assert links.streams[0].messages == before + 1


@in_loop
async def test_a_message_holds_256_kib_unless_one_item_is_larger():
    async with MemoryLinks.open() as links:
        pair = await links.connect(TOKEN_LINK)
        sizes = []
        put = links.streams[0].put
        links.streams[0].put = lambda queue, message: (sizes.append(message.ByteSize()), put(queue, message))[1]
        frames = [TokenFrame((TokenRecord(1, 0, 0, tuple(range(20_000))),)) for _ in range(10)]
        frames.append(TokenFrame((TokenRecord(1, 0, 0, tuple(range(100_000))),)))
        for frame in frames:
            pair.server.send(frame)
        await pair.settle()
        assert pair.at_opener.items == frames
        of_frames = [size for size in sizes if size > 1000]
        assert len(of_frames) == 5 and sorted(of_frames)[-2] <= 256 * 1024 + 200


@in_loop
async def test_both_sides_ask_over_one_link_and_answers_find_their_commands():
    def decode(link, number, body):
        link.answer(number, Renewed(3.0) if body.reservation_id == "good" else InvalidRequest("no", field="x"))

    def writer(link, number, body):
        link.answer(number, Stopped(StopState.DRAINED))

    async with MemoryLinks.open() as links:
        pair = await links.connect(WRITER_LINK, at_opener=Recorder(writer), at_server=Recorder(decode))
        deadline = Deadline.after(links.clock, 5)
        good, bad, stopped = await asyncio.gather(
            pair.opener.ask(BeginCommand("good"), deadline),
            pair.opener.ask(RenewCommand("bad"), deadline),
            pair.server.ask(StopCommand("good", 1.0), deadline),
            return_exceptions=True,
        )
        assert (good, stopped) == (Renewed(3.0), Stopped(StopState.DRAINED))
        assert isinstance(bad, InvalidRequest) and (bad.message, bad.field) == ("no", "x")


@in_loop
async def test_what_a_handler_raises_is_the_answer():
    def refuse(link, number, body):
        raise Overloaded("full", retry_after_s=2.0)

    async with MemoryLinks.open() as links:
        pair = await links.connect(DECODE_LINK, at_server=Recorder(refuse))
        with pytest.raises(Overloaded) as caught:
            await pair.opener.ask(reserve(), Deadline.after(links.clock, 5))
        assert caught.value.retry_after_s == 2.0


@in_loop
async def test_first_tokens_are_not_the_last_answer():
    heard = []

    def answer(link, number, body):
        link.answer(number, FirstTokens((), 0, 3))
        link.answer(number, Committed(100, ()))
        link.answer(number, Committed(200, ()))  # a second end is dropped

    async with MemoryLinks.open() as links:
        pair = await links.connect(PREFILL_LINK, at_server=Recorder(answer))
        pair.opener.send(prefill(), on_answer=heard.append)
        await pair.settle()
        assert heard == [FirstTokens((), 0, 3), Committed(100, ())]


@in_loop
async def test_a_late_answer_is_dropped_and_the_link_goes_on():
    async with MemoryLinks.open() as links:
        pair = await links.connect(DECODE_LINK)
        waiting = asyncio.ensure_future(pair.opener.ask(reserve(), Deadline.after(links.clock, 0.5)))
        await pair.settle()
        await links.clock.advance(0.5)
        with pytest.raises(DeadlineExceeded):
            await waiting
        pair.server.answer(1, Done())
        await pair.settle()
        assert pair.opener.is_open


@in_loop
async def test_a_command_carries_the_time_that_is_left_when_it_is_sent_again():
    async with MemoryLinks.open() as links:
        pair = await links.connect(DECODE_LINK)
        links.silence()
        links.is_refusing = True
        pair.opener.send(reserve(), deadline=Deadline.after(links.clock, 20))
        await pair.settle()
        for _ in range(4):
            await links.clock.advance(1.0)
            await pair.settle()
        assert pair.at_server.items == [] and not pair.opener.is_open
        links.is_refusing = False
        for _ in range(4):
            await links.clock.advance(0.25)
            await pair.settle()
        (command,) = pair.at_server.items
        assert 15.0 <= command.time_left_s <= 16.1


@in_loop
async def test_a_broken_link_is_resumed_and_nothing_is_lost_or_doubled():
    async with MemoryLinks.open() as links:
        pair = await links.connect(WRITER_LINK)
        for round_ in range(6):
            for index in range(20):
                pair.opener.send(BeginCommand(f"{round_}-{index}"))
                pair.server.send(StopCommand(f"{round_}-{index}", 1.0))
                if index == 10:
                    await pair.settle(round_ * 3)
                    links.cut()
            await pair.settle()
            await links.clock.advance(0.3)
            await pair.settle()
        names = [f"{round_}-{index}" for round_ in range(6) for index in range(20)]
        assert [body.reservation_id for body in pair.at_server.items] == names
        assert [body.reservation_id for body in pair.at_opener.items] == names
        assert pair.at_opener.told.count("broken") == 6 and pair.at_opener.told[-1] == "open"


@in_loop
async def test_a_silent_connection_is_broken_after_three_beats_at_both_ends():
    async with MemoryLinks.open() as links:
        pair = await links.connect(WRITER_LINK)
        links.is_refusing = True
        for _ in range(5):
            await links.clock.advance(1.0)
            await pair.settle()
        assert pair.opener.is_open and pair.server.is_open, "beats keep a quiet link open"
        links.silence()
        for _ in range(3):
            assert pair.opener.is_open
            await links.clock.advance(1.0)
            await pair.settle()
        assert not pair.opener.is_open and not pair.server.is_open
        assert not pair.opener.is_lost and pair.at_server.told[-1] == "broken"


@in_loop
async def test_a_link_that_is_not_resumed_in_time_is_lost_at_both_ends_with_all_that_was_asked():
    heard = []
    async with MemoryLinks.open() as links:
        pair = await links.connect(WRITER_LINK)
        pair.opener.send(BeginCommand("r"), on_answer=heard.append)
        await pair.settle()
        links.is_refusing = True
        links.cut()
        for _ in range(30):
            await links.clock.advance(0.25)
            await pair.settle()
        assert pair.opener.is_lost and pair.at_opener.lost.reason == "LINK_LOST"
        assert [error.reason for error in heard] == ["LINK_LOST"]
        assert pair.at_server.lost is not None and pair.links_served.links() == []
        with pytest.raises(Unavailable) as caught:
            pair.opener.send(BeginCommand("r"))
        assert caught.value.reason == "LINK_LOST"


@in_loop
async def test_a_process_that_stood_still_does_not_take_its_own_sleep_for_silence():
    async with MemoryLinks.open() as links:
        pair = await links.connect(WRITER_LINK)
        await links.clock.advance(30.0)
        await pair.settle()
        await links.clock.advance(1.0)
        await pair.settle()
        assert pair.opener.is_open and pair.server.is_open


@in_loop
async def test_acknowledgements_come_alone_soon_and_free_what_was_kept():
    async with MemoryLinks.open() as links:
        pair = await links.connect(WRITER_LINK)
        number = pair.opener.send(BeginCommand("r"))
        await pair.settle()
        assert pair.opener.unacknowledged_bytes > 0
        await links.clock.advance(0.06)
        await pair.settle()
        assert pair.opener.unacknowledged_bytes == 0 and pair.opener.acknowledged_through == number


@in_loop
async def test_a_reader_that_stalls_loses_its_link_and_hears_why():
    async with MemoryLinks.open() as links:
        settings = LinkSettings.from_beat(1.0, max_queued_bytes=10_000)
        pair = await links.connect(TOKEN_LINK, settings=settings)
        server = pair.server
        frame = TokenFrame((TokenRecord(1, 0, 0, tuple(range(1000))),), (SampleEnd(1, 0, FinishReason.EOS),))
        with pytest.raises(Unavailable):
            for _ in range(3):
                server.send(frame)
        await pair.settle()
        assert isinstance(pair.at_server.lost, Overloaded) and pair.at_server.lost.reason == "READER_STALLED"
        assert isinstance(pair.at_opener.lost, Overloaded) and pair.at_opener.lost.reason == "READER_STALLED"


@in_loop
async def test_a_new_link_of_the_same_epoch_replaces_the_older_one():
    async with MemoryLinks.open() as links:
        pair = await links.connect(WRITER_LINK)
        older, again = pair.server, Recorder()
        opener = LinkOpener(
            WRITER_LINK, SERVER.address, OPENER, SERVER.epoch, again, links.clock, LinkSettings(), dial=links.dial
        )
        links.run(opener.run())
        await pair.settle()
        assert older.is_lost and pair.server is not older and again.told == ["open"]
        assert pair.at_opener.lost is not None and pair.at_opener.lost.reason == "LINK_LOST"


@in_loop
async def test_a_server_has_a_bounded_number_of_links(monkeypatch):
    monkeypatch.setattr(links_module, "MAX_LINKS", 1)
    async with MemoryLinks.open() as links:
        pair = await links.connect(WRITER_LINK)
        one_more = Recorder()
        own = WorkerIdentity("127.0.0.1:3", "f" * 16)
        opener = LinkOpener(
            WRITER_LINK, SERVER.address, own, "", one_more, links.clock, LinkSettings(), dial=links.dial
        )
        links.run(opener.run())
        await pair.settle()
        assert one_more.lost is not None and one_more.lost.reason == "TOO_MANY_LINKS"
        assert pair.opener.is_open


@in_loop
async def test_another_process_at_the_address_is_told_apart():
    async with MemoryLinks.open() as links:
        pair = await links.connect(WRITER_LINK)
        stranger = Recorder()
        opener = LinkOpener(
            WRITER_LINK,
            SERVER.address,
            WorkerIdentity("127.0.0.1:3", "f" * 16),
            "e" * 16,
            stranger,
            links.clock,
            LinkSettings(),
            dial=links.dial,
        )
        links.run(opener.run())
        await pair.settle()
        assert isinstance(stranger.lost, StaleEpoch)


@in_loop
async def test_the_server_says_how_it_is_in_its_hello_and_every_beat():
    progress = [WorkerProgress(completed_steps=1)]
    async with MemoryLinks.open() as links:
        pair = await links.connect(DECODE_LINK, progress=lambda: progress[0])
        assert pair.opener.progress == progress[0]
        progress[0] = WorkerProgress(serving=False, completed_steps=5, pause_reason="FENCING")
        await links.clock.advance(1.0)
        await pair.settle()
        assert pair.opener.progress == progress[0] and pair.at_opener.told[-1] == "progress"


@in_loop
async def test_a_server_that_closes_says_why_and_refuses_new_links():
    async with MemoryLinks.open() as links:
        pair = await links.connect(WRITER_LINK)
        pair.links_served.close(Unavailable("going", reason="DRAINING"))
        await pair.settle()
        assert pair.at_opener.lost.reason == "DRAINING"


@in_loop
async def test_an_item_that_this_direction_cannot_carry_is_refused_where_it_is_sent():
    from headrace.errors import InternalError

    async with MemoryLinks.open(FakeClock()) as links:
        pair = await links.connect(DECODE_LINK)
        with pytest.raises(InternalError):
            pair.opener.send(BeginCommand("r"))
        pair.opener.send(ReleaseCommand("q", 1))
        await pair.settle()
        assert pair.at_server.numbers == [1] and isinstance(Reservation(b"", b"", 1.0), Reservation)
