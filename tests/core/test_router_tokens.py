"""One token stream: numbered frames, resumed after the last one, lost for good only when it must be."""

from __future__ import annotations

import asyncio

from router_fakes import wait_until

from headrace.clock import FakeClock
from headrace.errors import HeadraceError, Overloaded, StaleEpoch, Unavailable
from headrace.protocol import FinishReason, SampleEnd, TokenFrame, TokenRecord, WorkerIdentity
from services.router.tokens import TokenStream


class Source:
    """Plays one list of frames or errors per connection; None keeps it open."""

    def __init__(self, *connections):
        self.connections = list(connections)
        self.resumed_after: list[int] = []

    async def stream_tokens(self, router, decode_epoch, resume_after_frame=0):
        self.resumed_after.append(resume_after_frame)
        for item in self.connections.pop(0) if self.connections else [Unavailable("refused")]:
            if isinstance(item, HeadraceError):
                raise item
            if item is None:
                await asyncio.Event().wait()
            yield item


class Sink:
    def __init__(self):
        self.seen: list = []
        self.lost: list[HeadraceError] = []

    def on_record(self, record):
        self.seen.append(record.token_ids)

    def on_end(self, end):
        self.seen.append(end.finish_reason)

    def on_frame_end(self):
        self.seen.append("|")

    def on_lost(self, error):
        self.lost.append(error)


def frame(number: int, *tokens: int, handle: int = 1, end: bool = False) -> TokenFrame:
    records = (TokenRecord(handle, 0, 0, tokens),) if tokens else ()
    return TokenFrame(number, records, (SampleEnd(handle, 0, FinishReason.EOS),) if end else ())


def play(source: Source, check, seconds: float = 0.0):
    """Runs a stream with one sink on handle 1 and calls `check(stream, sink, losses)`."""

    async def scenario():
        clock, losses, sink = FakeClock(), [], Sink()
        stream = TokenStream(source, WorkerIdentity("r", "r1"), WorkerIdentity("d", "d1"), clock, 2.0, losses.append)
        stream.attach(1, sink)
        task = asyncio.ensure_future(stream.run())
        for _ in range(20):
            await asyncio.sleep(0)
        passed = 0.0
        while passed < seconds:
            await clock.advance(0.05)
            passed += 0.05
        await wait_until(lambda: True)
        check(stream, sink, losses)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(scenario())


def test_records_and_ends_reach_the_attempt_they_name_frame_by_frame():
    source = Source([frame(1), frame(2, 7, 8), frame(3, 9, end=True), None])

    def check(stream, sink, losses):
        assert sink.seen == [(7, 8), "|", (9,), FinishReason.EOS, "|"]
        assert stream.is_open and not losses and stream.open_handles == 1

    play(source, check)


def test_frames_for_unknown_handles_are_dropped():
    def check(stream, sink, losses):
        assert sink.seen == [(7,), "|"] and not losses

    play(Source([frame(1), frame(2, 5, handle=99, end=True), frame(3, 7), None]), check)


def test_a_broken_stream_resumes_after_its_last_frame_and_repeated_frames_are_dropped():
    source = Source([frame(1), frame(2, 7), Unavailable("reset")], [frame(2, 7), frame(3, 8), None])

    def check(stream, sink, losses):
        assert source.resumed_after == [0, 2]
        assert sink.seen == [(7,), "|", (8,), "|"]
        assert not sink.lost and not losses and stream.is_open

    play(source, check, seconds=0.2)


def test_a_slow_reader_may_resume_as_well():
    source = Source([frame(1), Overloaded("slow", reason="READER_STALLED")], [frame(2, 8), None])

    def check(stream, sink, losses):
        assert sink.seen == [(8,), "|"] and not losses

    play(source, check, seconds=0.2)


def test_a_stream_that_does_not_come_back_within_the_window_fails_its_attempts():
    def not_yet(stream, sink, losses):
        assert not sink.lost and not stream.is_open

    def gone(stream, sink, losses):
        assert sink.lost and losses

    play(Source([frame(1), frame(2, 7), Unavailable("reset")]), not_yet, seconds=1.8)
    play(Source([frame(1), frame(2, 7), Unavailable("reset")]), gone, seconds=2.4)


def test_a_refusal_fails_its_attempts_at_once_and_the_stream_begins_anew():
    for refusal in (StaleEpoch("restarted"), Unavailable("frames are gone", reason="STREAM_LOST")):
        source = Source([frame(1), frame(2, 7), Unavailable("reset")], [refusal], [frame(1), frame(2, 9), None])

        def check(stream, sink, losses, source=source):
            assert len(sink.lost) == len(losses) == 1
            assert source.resumed_after == [0, 2, 0]

        play(source, check, seconds=0.4)


def test_a_gap_in_the_frames_is_never_read_over():
    source = Source([frame(1), frame(2, 7), frame(4, 9), None], [None])

    def check(stream, sink, losses):
        assert sink.seen == [(7,), "|"]
        assert [error.reason for error in sink.lost] == ["TOKEN_FRAME_GAP"] and losses

    play(source, check, seconds=0.1)


def test_a_closed_stream_tells_every_attempt_why():
    def check(stream, sink, losses):
        stream.close(StaleEpoch("restarted"))
        assert isinstance(sink.lost[0], StaleEpoch)

    play(Source([frame(1), None]), check)


def test_an_attempt_that_cannot_take_its_tokens_is_lost_alone():
    class Picky(Sink):
        def on_record(self, record):
            raise ValueError("what is this?")

    async def scenario():
        source = Source([frame(1), frame(2, 7, handle=1), frame(3, 8, handle=2), None])
        good, picky, losses = Sink(), Picky(), []
        stream = TokenStream(
            source, WorkerIdentity("r", "r1"), WorkerIdentity("d", "d1"), FakeClock(), 2.0, losses.append
        )
        stream.attach(1, picky)
        stream.attach(2, good)
        task = asyncio.ensure_future(stream.run())
        await wait_until(lambda: good.seen)
        assert picky.lost[0].reason == "SINK_FAILED" and not good.lost
        assert stream.is_open and not losses
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(scenario())
