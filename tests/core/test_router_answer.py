"""Text, deltas and ends of an answer: the same whatever the interval and however frames cut the tokens."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_fakes import EOS, ByteTokenizer

from headrace.errors import Cancelled, Overloaded
from headrace.protocol import FinishReason, GenerateEvent, SampleDelta, SamplingParams
from services.router.answer import Answer, Outbox


def made(interval: int = 1, final_only: bool = False, **sampling) -> Answer:
    sampling = {"max_tokens": 1000, "eos_token_ids": (EOS,)} | sampling
    return Answer(ByteTokenizer(), SamplingParams(**sampling), interval, final_only)


def feed(answer: Answer, ids, frame: int = 1) -> list[SampleDelta]:
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


def test_an_unread_outbox_fills_up_and_says_so():
    async def scenario():
        outbox = Outbox(2)
        outbox.put(GenerateEvent("r"))
        outbox.put(GenerateEvent("r"))
        with pytest.raises(Overloaded) as caught:
            outbox.put(GenerateEvent("r"))
        assert caught.value.reason == "READER_STALLED"

    asyncio.run(scenario())


def test_an_outbox_gives_everything_before_its_error():
    async def scenario():
        outbox, read = Outbox(9), []
        outbox.put(GenerateEvent("r"))
        outbox.close(Cancelled("over"))
        outbox.close(None)
        with pytest.raises(Cancelled):
            async for event in outbox.read():
                read.append(event)
        assert len(read) == 1

    asyncio.run(scenario())
