"""Text, deltas and ends of an answer: the same whatever the interval and however frames cut the tokens."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_fakes import EOS, ByteTokenizer

from headrace.errors import Cancelled, Overloaded
from headrace.protocol.common import FinishReason, SamplingParams
from headrace.protocol.inference import GenerateEvent, SampleDelta, TokenLogprob
from services.router.answer import AnswerBuilder
from services.router.outbox import Outbox


def made(interval: int = 1, final_only: bool = False, **sampling) -> AnswerBuilder:
    sampling = {"max_tokens": 1000, "eos_token_ids": (EOS,)} | sampling
    return AnswerBuilder(ByteTokenizer(), SamplingParams(**sampling), interval, final_only)


def feed(answer: AnswerBuilder, ids, frame: int = 1) -> list[SampleDelta]:
    """Pushes `frame` tokens at a time and takes what is due after each."""
    deltas: list[SampleDelta] = []
    for start in range(0, len(ids), frame):
        piece = ids[start : start + frame]
        if answer.is_running(0):
            logprobs = [-float(start + k) for k in range(len(piece))]
            answer.push(0, piece, logprobs, [((token, 0.0),) for token in piece])
            deltas += answer.take()
    return deltas


def text_of(deltas) -> str:
    return "".join(delta.text for delta in deltas)


def ids_of(deltas) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


@pytest.mark.parametrize("length", range(1, 14))
def test_interval_four_gives_one_then_fours_then_the_rest_with_one_logprob_a_token(length):
    answer = made(4, max_tokens=length, logprobs=0)
    deltas = feed(answer, list(range(97, 97 + length)))
    sizes = [len(delta.token_ids) for delta in deltas]
    fours, rest = divmod(length - 1, 4)
    assert sizes == [1] + [4] * fours + ([rest] if rest else [])
    assert [x.logprob for delta in deltas for x in delta.logprobs] == [-float(k) for k in range(length)]
    assert [delta.finish_reason for delta in deltas][-1] is FinishReason.LENGTH
    assert [delta.first_position for delta in deltas] == [sum(sizes[:k]) for k in range(len(sizes))]


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(
        st.sampled_from([97, 98, 99, 257, 258, 259, 260, 0xF0, 0x9F, 0x92, 0xA7, 0xC3, 0xA9, EOS]), max_size=40
    ),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    interval=st.integers(1, 9),
    frame=st.integers(1, 7),
)
def test_the_pieces_join_to_the_unstreamed_answer(ids, stop, interval, frame):
    ids = [*ids, EOS]
    whole = feed(made(final_only=True, stop=tuple(stop), logprobs=1), ids)
    parts = feed(made(interval, stop=tuple(stop), logprobs=1), ids, frame)
    assert len(whole) == 1
    assert text_of(parts) == whole[0].text
    assert ids_of(parts) == list(whole[0].token_ids)
    assert tuple(x for delta in parts for x in delta.logprobs) == whole[0].logprobs
    assert len(whole[0].logprobs) == len(whole[0].token_ids)
    assert sum(bool(delta.finish_reason) for delta in parts) == 1
    assert (parts[-1].finish_reason, parts[-1].matched_stop) == (whole[0].finish_reason, whole[0].matched_stop)
    assert all(string not in whole[0].text for string in stop)


@pytest.mark.parametrize("interval", [1, 2, 3, 4, 5])
def test_characters_split_over_tokens_come_out_whole(interval):
    text = "a\u00e9\u6c34\U0001f4a7\U0001f469\u200d\U0001f467!"
    deltas = feed(made(interval), [*text.encode(), EOS])
    assert text_of(deltas) == text
    assert not any("\ufffd" in delta.text for delta in deltas)


def test_nothing_that_could_begin_a_stop_string_is_shown_early():
    answer = made(stop=("END",))
    shown = [text_of(feed(answer, [byte])) for byte in b"aENxE"]
    assert shown == ["a", "", "", "ENx", ""]
    assert text_of(feed(answer, list(b"ND"))) == ""
    assert answer.finished and answer.cut_samples == [0]


def test_an_end_token_is_part_of_the_ids_and_not_of_the_text():
    deltas = feed(made(stop_token_ids=(ord("c"),)), list(b"abcde"))
    assert (text_of(deltas), ids_of(deltas)) == ("ab", list(b"abc"))
    assert deltas[-1].finish_reason is FinishReason.STOP
    deltas = feed(made(), [97, EOS, 98])
    assert (text_of(deltas), ids_of(deltas)) == ("a", [97, EOS])
    assert deltas[-1].finish_reason is FinishReason.EOS


def test_a_later_end_from_the_worker_does_not_change_the_first():
    answer = made(max_tokens=2)
    feed(answer, [97, 98])
    answer.end(0, FinishReason.EOS)
    assert answer.finished and answer.take() == ()
    late = made(max_tokens=5)
    feed(late, [97])
    late.end(0, FinishReason.LENGTH)
    (delta,) = late.take()
    assert (delta.token_ids, delta.finish_reason) == ((), FinishReason.LENGTH)


def event(text: str = "", logprobs: int = 0) -> GenerateEvent:
    tokens = tuple(range(len(text)))
    top = tuple((token, -1.0) for token in range(20))
    return GenerateEvent("r", (SampleDelta(0, 0, tokens, text, (TokenLogprob(1, -1.0, top),) * logprobs),))


@pytest.mark.parametrize("what", [event("x" * 1000), event("\u6c34" * 1000), event("x", logprobs=20)])
def test_an_unread_outbox_is_bounded_in_bytes_and_says_so(what):
    async def scenario():
        outbox = Outbox(10_000)
        with pytest.raises(Overloaded) as caught:
            for _ in range(100):
                outbox.put(what)
        assert caught.value.reason == "READER_STALLED"
        assert 10_000 <= outbox.unread_bytes < 20_000
        outbox.close(error=caught.value)
        with pytest.raises(Overloaded):
            await outbox.next()  # at once, without what was not read

    asyncio.run(scenario())


def test_one_message_may_be_larger_than_the_bound_and_reading_makes_room():
    async def scenario():
        outbox = Outbox(1000)
        for _ in range(5):
            outbox.put(event("x" * 5000))
            assert await outbox.next() is not None
            assert outbox.unread_bytes == 0

    asyncio.run(scenario())


def test_an_outbox_gives_everything_before_its_end_or_its_error():
    async def scenario():
        outbox = Outbox(9)
        outbox.put(event("first"))
        outbox.close(error=Cancelled("over"))
        outbox.close(event("too late"))
        assert await outbox.next() == event("first")
        with pytest.raises(Cancelled):
            await outbox.next()
        outbox = Outbox(9)
        outbox.put(event("first"))
        outbox.close(event("last"))
        assert [await outbox.next() for _ in range(3)] == [event("first"), event("last"), None]

    asyncio.run(scenario())


def test_a_waiting_reader_is_woken_by_a_message_and_by_the_end():
    async def scenario():
        outbox = Outbox(99)
        for change, expected in ((lambda: outbox.put(event("a")), event("a")), (outbox.close, None)):
            reading = asyncio.ensure_future(outbox.next())
            await asyncio.sleep(0)
            assert not reading.done()
            change()
            assert await reading == expected

    asyncio.run(scenario())
