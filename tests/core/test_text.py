"""Shown text is final: joined, it is the decoded whole cut before the first complete stop string (ACCEPTANCE R5, R6)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InvalidRequest
from headrace.text.stream import TextStream
from headrace.text.tokenizer import Tokenizer

INTERVALS = (1, 2, 3, 4, 5, 8, 100)


class Spelled:
    """A tokenizer whose token i is `tokens[i]`."""

    def __init__(self, tokens: Sequence[bytes]):
        self.tokens = tokens

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id]


def stream_all(
    tokenizer, ids: Iterable[int], stop: Sequence[str] = (), interval: int = 1
) -> tuple[list[str], str | None]:
    """The chunks a client would see at this interval, the last one from `finish`, and the stop string met."""
    stream, chunks = TextStream(tokenizer, stop), []
    for count, token_id in enumerate(ids, 1):
        if stream.push(token_id):
            break
        if count % interval == 0:
            chunks.append(stream.take())
    return [*chunks, stream.finish()], stream.matched_stop


def shown(tokens: Sequence[str | bytes], stop: Sequence[str] = (), interval: int = 1) -> tuple[str, str | None]:
    spelled = [token.encode() if isinstance(token, str) else token for token in tokens]
    chunks, matched = stream_all(Spelled(spelled), range(len(spelled)), stop, interval)
    return "".join(chunks), matched


def cut_like_a_reader_of_characters(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """The rule of text.py, written as slowly as it is said: after each character, does a stop string end here?"""
    for end in range(1, len(text) + 1):
        ending = [one for one in stop if text[:end].endswith(one)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize("interval", INTERVALS)
@pytest.mark.parametrize(
    ("tokens", "stop", "expected", "matched"),
    [
        (["one ", "ST", "OP", " two"], ["STOP"], "one ", "STOP"),
        (["one S", "TO", "P two"], ["STOP"], "one ", "STOP"),
        (["one S", "T", "OP two"], ["STOP"], "one ", "STOP"),
        (["STOP", " two"], ["STOP"], "", "STOP"),
        (["S", "TOP"], ["STOP"], "", "STOP"),
        (["a STOP b STOP"], ["STOP"], "a ", "STOP"),
        (["see the", " end of", " it"], ["the end", "the end of"], "see ", "the end"),
        (["see the", " end of", " it"], ["the end of", "the end"], "see ", "the end"),
        (["xab", "cd"], ["abcd", "bc"], "xa", "bc"),
        (["xabcd"], ["abcd", "bc"], "xa", "bc"),
        (["xabcd"], ["bcd", "abcd"], "x", "abcd"),
        (["aaa", "ab"], ["aab"], "aa", "aab"),
        (["abab", "ac"], ["abac"], "ab", "abac"),
        (["one STO", "NE"], ["STOP"], "one STONE", None),
        (["one ST"], ["STOP"], "one ST", None),
        (["中", "文。", "後"], ["。"], "中文", "。"),
        (["x\n", "\ny"], ["\n\n"], "x", "\n\n"),
        ([b"caf\xc3", b"\xa9 au", b" lait"], ["é a"], "caf", "é a"),
    ],
)
def test_nothing_of_a_stop_string_leaks(interval: int, tokens, stop, expected: str, matched: str | None):
    assert shown(tokens, stop, interval) == (expected, matched)


@pytest.mark.parametrize("interval", INTERVALS)
@pytest.mark.parametrize("text", ["é", "aéz", "中文", "😀", "👩‍👩‍👧‍👦 family", "❤️", "e\u0301", "🇩🇪🇫🇷", "x€y𐍈z"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_characters_split_over_tokens_appear_whole_and_once(interval: int, text: str, size: int):
    data = text.encode()
    tokens = [data[start : start + size] for start in range(0, len(data), size)]
    chunks, _ = stream_all(Spelled(tokens), range(len(tokens)), (), interval)
    assert "\ufffd" not in "".join(chunks)
    assert "".join(chunks) == text


def test_every_way_to_split_an_emoji_into_two_tokens_shows_it_whole():
    data = "a😀é".encode()
    for cut in range(1, len(data)):
        assert shown([data[:cut], data[cut:]]) == ("a😀é", None)


def test_an_incomplete_character_is_replaced_only_at_the_very_end():
    stream = TextStream(Spelled([b"ok \xf0\x9f", b"\x98"]))
    stream.push(0)
    assert stream.take() == "ok "
    stream.push(1)
    assert stream.take() == ""
    assert stream.finish() == "\ufffd"
    assert stream.finish() == stream.take() == ""


def test_bytes_that_never_were_a_character_are_replaced_in_their_place():
    assert shown([b"a\xff", b"b\xe4\xb8", b"c"]) == ("a\ufffdb\ufffdc", None)


def test_text_that_may_begin_a_stop_string_waits_for_the_next_token():
    stream = TextStream(Spelled([b"one ST", b"AR", b"T ST"]), ["STOP"])
    stream.push(0)
    assert stream.take() == "one "
    stream.push(1)
    assert stream.take() == "STAR"
    stream.push(2)
    assert stream.take() == "T "
    assert stream.finish() == "ST"


def test_tokens_after_a_stop_string_are_not_accepted():
    stream = TextStream(Spelled([b"a.", b"later"]), ["."])
    assert stream.push(0) is True
    assert stream.push(1) is True
    assert stream.take() == "a"
    assert stream.finish() == ""
    assert stream.matched_stop == "."


def test_text_already_taken_is_not_part_of_a_later_match():
    stream = TextStream(Spelled([b"ab", b"xb"]), ["bb"])
    stream.push(0)
    assert stream.take() == "a"
    assert stream.push(1) is False
    assert stream.take() + stream.finish() == "bx" + "b"


def test_an_empty_stop_string_is_refused():
    with pytest.raises(InvalidRequest) as caught:
        TextStream(Spelled([]), ["ok", ""])
    assert caught.value.field == "stop"


byte_tokens = st.lists(st.one_of(st.binary(max_size=4), st.text("ab.é中😀", max_size=4).map(str.encode)), max_size=20)


@given(
    tokens=byte_tokens,
    stop=st.lists(st.text("ab.é中😀\ufffd", min_size=1, max_size=4), max_size=3),
    interval=st.integers(1, 25),
)
def test_chunks_join_to_the_decoded_whole_cut_at_the_first_stop_string(tokens, stop, interval):
    whole = b"".join(tokens).decode("utf-8", "replace")
    assert shown(tokens, stop, interval) == cut_like_a_reader_of_characters(whole, stop)


@given(
    text=st.text("ab", max_size=40),
    stop=st.lists(st.text("ab", min_size=2, max_size=6), min_size=1, max_size=4),
    data=st.data(),
)
def test_how_text_is_cut_into_tokens_does_not_change_what_is_shown(text, stop, data):
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    tokens = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for interval in (1, 2, 100):
        assert shown(tokens, stop, interval) == cut_like_a_reader_of_characters(text, stop)


@pytest.fixture(scope="module")
def tiny(tiny_directory) -> Tokenizer:
    return Tokenizer.load(tiny_directory)


@given(data=st.data())
def test_any_ids_of_the_tiny_model_stream_to_what_decode_gives(tiny: Tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tiny.vocab_size - 1), max_size=40))
    stop = data.draw(st.lists(st.text("etao nih.\n", min_size=1, max_size=3), max_size=2))
    expected = cut_like_a_reader_of_characters(tiny.decode(ids), stop)
    for interval in (1, 3, 8, 100):
        chunks, matched = stream_all(tiny, ids, stop, interval)
        assert ("".join(chunks), matched) == expected


def test_special_tokens_of_the_tiny_model_are_not_shown(tiny: Tokenizer):
    ids = tiny.encode("Hello 👩‍👩‍👧 there<|end|>")
    for interval in INTERVALS:
        assert "".join(stream_all(tiny, ids, (), interval)[0]) == "Hello 👩‍👩‍👧 there"
