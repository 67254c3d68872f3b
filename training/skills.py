"""Write one training document: a story, facts and questions, a chat, something to copy, a count.

Documents are built as ids from the start: every word is encoded once and then looked up, which is what makes millions of
fresh tokens a second possible. `headrace.evals.recall` supplies the wording, so what is trained is what is asked.
"""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from headrace.evals import recall
from headrace.evals.recall import Draft, Fact, Kind

BEGIN_ID, END_ID = 0, 1
_WORDS = re.compile(r" ?[^ ]+")


class WordEncoder:
    """Text -> ids, word by word from a table; numbers digit by digit."""

    def __init__(self, encode: Callable[[str], list[int]]):
        self._encode = encode
        self._known: dict[str, list[int]] = {}
        self._digits = {digit: encode(digit)[0] for digit in "0123456789"}
        self._blank = encode(" 1")[0]

    def __call__(self, text: str) -> list[int]:
        known = self._known.get(text)
        if known is not None:
            return known
        words = _WORDS.findall(text)
        if len(words) > 1:
            return [token for word in words for token in self(word)]
        if text.strip().isdigit():
            digits = [self._digits[digit] for digit in text.strip()]
            return [self._blank, *digits] if text[0] == " " else digits
        ids = self._encode(text)
        self._known[text] = ids
        return ids


class TokenPage(Draft):
    """A draft that keeps ids and their kinds instead of text."""

    def __init__(self, encoder: WordEncoder):
        super().__init__()
        self._encoder = encoder
        self._last_size = 0
        self.ids: list[int] = [BEGIN_ID]
        self.kinds: list[int] = [Kind.RANDOM]

    def __len__(self) -> int:
        return len(self.ids)

    def append(self, text: str, kind: Kind) -> None:
        self.append_ids(self._encoder(text), kind)

    def append_ids(self, ids: list[int], kind: Kind) -> None:
        self._last_size = len(ids)
        self.ids += ids
        self.kinds += [kind] * len(ids)

    def drop_last(self) -> None:
        del self.ids[-self._last_size :], self.kinds[-self._last_size :]

    def finish(self, kind: Kind = Kind.STORY) -> None:
        """Close the document with the end token, unless an answer already did."""
        if self.ids[-1] != END_ID:
            self.append_ids([END_ID], kind)


@dataclass(frozen=True)
class Stories:
    """Tokenised works, one after the other.

    tokens            [num_tokens] uint16
    starts            [num_paragraphs] int64   first token of each paragraph
    ends              [num_paragraphs] int64   end of the work that the paragraph is in
    tale_starts       paragraphs that open a work of the children tier
    openings          (first ids with a leading blank, where to go on, topic or ""): paragraphs that answer a chat
    full_stop         id of `.`
    opens_word        [vocab] bool   ids that begin with a blank and a letter
    """

    tokens: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    tale_starts: np.ndarray
    openings: list[tuple[list[int], int, str]]
    full_stop: int
    opens_word: np.ndarray

    def draw(self, rng: random.Random) -> int:
        """A random paragraph, as likely as it and its predecessor are long."""
        if rng.random() < 0.06:
            return int(self.tale_starts[rng.randrange(len(self.tale_starts))])
        place = rng.randrange(int(self.starts[-1]) + 1)
        return int(np.searchsorted(self.starts, place))

    def take(self, start: int, count: int, whole: bool = False) -> list[int]:
        """At most `count` ids from token `start`, never past its work's end; `whole`: up to the end of a paragraph."""
        paragraph = int(np.searchsorted(self.starts, start, side="right")) - 1
        stop = min(start + count, int(self.ends[paragraph]))
        if whole and stop < self.ends[paragraph]:
            last = int(self.starts[np.searchsorted(self.starts, stop, side="right") - 1])
            stop = last if last > start else stop
        return self.tokens[start:stop].tolist()


def log_uniform(rng: random.Random, low: int, high: int) -> int:
    """An integer in [low, high], each doubling as likely as the next."""
    return min(high, max(low, int(low * ((high + 1) / low) ** rng.random()))) if high > low else low


class FactSource:
    """Facts of one document: never the same (attribute, key) twice, never a held-out key."""

    def __init__(self, rng: random.Random, words: list[str], letter_strings: list[str]):
        self._rng, self._words, self._letter_strings = rng, words, letter_strings
        self._adjectives, self._nouns = recall.ADJECTIVES, recall.NOUNS
        if rng.random() < 0.4:  # few words: keys share one, so both must match
            self._words = rng.sample(words, rng.randint(20, 200))
            self._adjectives = rng.sample(self._adjectives, rng.randint(4, 20))
            self._nouns = rng.sample(self._nouns, rng.randint(10, 40))
        self._key_kind = self._draw_key_kind() if rng.random() < 0.5 else None
        self._value_kind = self._draw_value_kind() if rng.random() < 0.7 else None
        self._attribute = rng.choice(recall.ATTRIBUTES) if rng.random() < 0.4 else None
        self._share_keys = rng.random() < 0.1
        self._keys: list[str] = []
        self._seen: set[tuple[str, str]] = set()

    def draw(self, attribute: str | None = None) -> Fact:
        """A fresh fact; `attribute` is fixed for line shapes."""
        rng = self._rng
        for attempt in range(1000):
            name = attribute or self._attribute or rng.choice(recall.ATTRIBUTES)
            share = self._share_keys and self._keys and attempt < 5 and rng.random() < 0.4
            key = rng.choice(self._keys) if share else self._draw_key(attempt)
            known = (name, key) in self._seen or (not self._share_keys and ("", key) in self._seen)
            if not known and not recall.is_held_out(key):
                break
        self._seen |= {(name, key), ("", key)}
        self._keys.append(key)
        return Fact(name, key, self._draw_value())

    def _draw_key_kind(self) -> str:
        return self._rng.choices(("own", "pair", "letters", "numbered", "single"), (35, 27, 13, 17, 8))[0]

    def _draw_value_kind(self) -> str:
        return self._rng.choices(recall.VALUE_KINDS, (68, 19, 13))[0]

    def _draw_key(self, attempt: int) -> str:
        rng = self._rng
        kind = "numbered" if attempt > 20 else self._key_kind or self._draw_key_kind()
        if kind == "own":
            return f"{rng.choice(self._adjectives)} {rng.choice(self._nouns)}"
        if kind == "pair":
            return f"{rng.choice(self._words)} {rng.choice(self._words)}"
        if kind == "letters":
            return rng.choice(self._letter_strings)
        word = rng.choice(self._nouns if rng.random() < 0.5 else self._words)
        return word if kind == "single" else f"{word} {rng.randrange(10, 1000)}"

    def _draw_value(self) -> str:
        rng = self._rng
        kind = self._value_kind or self._draw_value_kind()
        if kind == "digits":
            count = rng.randint(4, 6) if rng.random() < 0.85 else rng.randint(1, 8)
            return str(rng.randrange(10**8)).zfill(8)[:count]
        if kind == "letters":
            return rng.choice(self._letter_strings)
        if rng.random() < 0.5:
            return f"{rng.choice(recall.ADJECTIVES)} {rng.choice(recall.NOUNS)}"
        return f"{rng.choice(self._words)} {rng.choice(self._words)}"


@dataclass
class Writer:
    """Writes documents of every kind from its own random numbers.

    words, letter_strings   what keys and values are made of, beside the lists of `headrace.evals.recall`
    """

    rng: random.Random
    encoder: WordEncoder
    stories: Stories
    words: list[str]
    letter_strings: list[str]

    def document(self, kind: str, room: int, to_the_edge: bool) -> TokenPage:
        """A document of about `room` ids, begin and end token included; the caller cuts what is too long.

        to_the_edge  the room is all that is left of a sequence: a story fills it, instead of closing with a paragraph
        """
        page = TokenPage(self.encoder)
        self._to_the_edge = to_the_edge
        if room < 96 and kind not in ("story", "copy", "count"):
            kind = "story"
        getattr(self, f"_{kind}")(page, room)
        page.finish()
        return page

    def _facts(self) -> FactSource:
        return FactSource(self.rng, self.words, self.letter_strings)

    def _story(self, page: TokenPage, room: int) -> None:
        if self.rng.random() < 0.08:
            self._tell_on_request(page, room)
            return
        start = int(self.stories.starts[self.stories.draw(self.rng)])
        page.append_ids(self.stories.take(start, room, not self._to_the_edge), Kind.STORY)

    def _tell_on_request(self, page: TokenPage, room: int) -> None:
        opening, resume, topic = self.rng.choice(self.stories.openings)
        wish = self.rng.choice(("Tell me a story", "Please tell me a story", "Write a story", "Tell a tale"))
        self._open_chat(page)
        page.add(f" {wish} about the {topic}" if topic else f" {wish}")
        page.end(".")
        page.end("<|assistant|>")
        page.append_ids(opening, Kind.STORY)
        page.append_ids(self.stories.take(resume, room - len(page), not self._to_the_edge), Kind.STORY)

    def _haystack(self, page: TokenPage, room: int) -> None:
        self._between_sentences(page, room, self._story_sentences)

    def _made_up(self, page: TokenPage, room: int) -> None:
        self._between_sentences(page, room, self._made_up_sentences)

    def _between_sentences(self, page: TokenPage, room: int, write: Callable[[TokenPage, int], Iterator[bool]]) -> None:
        """Facts between sentences, some asked half-way, the rest at the end."""
        rng, source = self.rng, self._facts()
        in_turn = rng.random() < 0.2
        if in_turn:
            self._open_chat(page)
        num_facts = log_uniform(rng, 1, max(1, min(40, room // 30)))
        num_questions = log_uniform(rng, min(2, room // 70), max(1, min(24, room // 70)))
        shapes = list(recall.PROSE_SHAPES) if rng.random() < 0.5 else [rng.choice(list(recall.PROSE_SHAPES))]
        until = room - 20 * num_questions
        places = self._places(num_facts, until)
        asks_early = rng.random() < 0.35
        told: list[tuple[str, Fact]] = []
        for may_state in write(page, until - 16 * num_facts):
            while may_state and places and len(page) >= places[0]:
                places.pop(0)
                self._tell(page, rng.choice(shapes), source, told)
                if asks_early and not in_turn and rng.random() < 0.3:
                    self._ask(page, rng.choice(("statement", "plain")), rng.choice(told))
        for _ in places:
            self._tell(page, rng.choice(shapes), source, told)
        self._ask_all(page, room, told, in_turn)

    def _places(self, count: int, until: int) -> list[int]:
        """Positions at which facts are due; in three documents of ten all in the first third."""
        last = until // 3 if self.rng.random() < 0.3 else until
        return sorted(self.rng.randrange(1, max(2, last)) for _ in range(count))

    def _tell(self, page: TokenPage, shape: str, source: FactSource, told: list[tuple[str, Fact]]) -> None:
        fact = source.draw("value" if shape in recall.LINE_SHAPES else None)
        recall.state(page, shape, fact)
        told.append((shape, fact))

    def _story_sentences(self, page: TokenPage, count: int) -> Iterator[bool]:
        """Append about `count` ids of story; yields at every full stop, True where a sentence may be put in."""
        ids = self.stories.take(int(self.stories.starts[self.stories.draw(self.rng)]), max(8, count))
        yield True
        if not page.at_line_start:  # a fact came first: the story begins its own paragraph
            page.break_paragraph()
        begin = 0
        for stop, token in enumerate(ids):
            if token != self.stories.full_stop or stop + 1 >= len(ids) or not self.stories.opens_word[ids[stop + 1]]:
                continue
            page.append_ids(ids[begin:stop], Kind.STORY)
            page.end(".", Kind.STORY)
            begin = stop + 1
            yield True

    def _made_up_sentences(self, page: TokenPage, count: int) -> Iterator[bool]:
        yield True
        while len(page) < count:
            recall.add_sentence(page, recall.filler_sentence(self.rng), Kind.FILLER)
            yield True

    def _ask(self, page: TokenPage, question: str, told: tuple[str, Fact]) -> None:
        shape, fact = told
        asking = self.rng.choices((0, 1, 2), (70, 15, 15))[0]
        recall.answer(page, fact, recall.ask(page, question, shape, fact, asking))

    def _ask_all(self, page: TokenPage, room: int, told: list[tuple[str, Fact]], in_turn: bool) -> None:
        """Questions until the room is used, mostly of one kind."""
        rng = self.rng
        first, usual = ("turn", "chat") if in_turn else (None, self._draw_question())
        mixed = not in_turn and rng.random() < 0.4
        in_lines = told[0][0] in recall.LINE_SHAPES
        while True:
            question = first or (self._draw_question() if mixed else usual)
            self._ask(page, question, rng.choice(told))
            if question in ("chat", "turn"):
                usual, mixed = "chat", False
            first = None
            if len(page) + (12 if in_lines and question == "statement" else 20) > room:
                return

    def _draw_question(self) -> str:
        return self.rng.choices(recall.QUESTIONS, (35, 27, 18, 20))[0]

    def _dense(self, page: TokenPage, room: int) -> None:
        """Facts until a third or most of the room is used, then questions; sometimes some story first."""
        rng, source = self.rng, self._facts()
        in_turn = rng.random() < 0.2
        if in_turn:
            self._open_chat(page)
        until = int(room * rng.uniform(0.3, 0.85))
        told: list[tuple[str, Fact]] = []
        if rng.random() < 0.3:
            write = self._story_sentences if rng.random() < 0.6 else self._made_up_sentences
            for _ in write(page, int(until * rng.random())):
                pass
        shape = rng.choice(list(recall.SHAPES))
        mixed = shape in recall.PROSE_SHAPES and rng.random() < 0.4
        while len(page) < until or not told:
            self._tell(page, rng.choice(list(recall.PROSE_SHAPES)) if mixed else shape, source, told)
        self._ask_all(page, room, told, in_turn)

    def _open_chat(self, page: TokenPage) -> None:
        if self.rng.random() < 0.25:
            page.end("<|system|>")
            page.add(" " + self.rng.choice(_SYSTEM))
            page.end(".")
        page.end("<|user|>")

    def _chat(self, page: TokenPage, room: int) -> None:
        """Facts told over several turns, small talk, and questions in between."""
        rng, source = self.rng, self._facts()
        told: list[tuple[str, Fact]] = []
        self._open_chat(page)
        while True:
            move = rng.random()
            if move < 0.15:
                self._small_talk(page)
            elif move < 0.55 or not told:
                for _ in range(log_uniform(rng, 1, 4)):
                    self._tell(page, rng.choice(list(recall.PROSE_SHAPES)), source, told)
                self._reply(page, rng.choice(_ACKNOWLEDGED))
            else:
                self._ask(page, "turn", rng.choice(told))
            if len(page) + 30 > room:
                return
            page.end("<|user|>")

    def _small_talk(self, page: TokenPage) -> None:
        said, reply = self.rng.choice(_SMALL_TALK)
        page.add(" " + said[:-1])
        page.end(said[-1])
        self._reply(page, reply)

    def _reply(self, page: TokenPage, text: str) -> None:
        page.end("<|assistant|>")
        page.at_line_start = False
        page.add(" " + text[:-1], Kind.STORY)
        page.end(text[-1], Kind.STORY)
        page.end("<|end|>", Kind.STORY)

    def _copy(self, page: TokenPage, room: int) -> None:
        """`Copy:` a random sequence, then the same once to three times after `Again:`."""
        while True:
            items = self._items(log_uniform(self.rng, 2, max(2, min(48, room // 8))))
            page.add(" Copy:")
            for item in items:
                page.add(item, Kind.RANDOM)
            page.end("\n")
            for _ in range(self.rng.randint(1, 3)):
                page.add(" Again:")
                for item in items:
                    page.add(item, Kind.ANSWER)
                page.end("\n", Kind.ANSWER)
            if len(page) + 60 > room:
                return

    def _items(self, count: int) -> list[str]:
        rng, kind = self.rng, self.rng.choice(recall.VALUE_KINDS)
        if kind == "digits":
            return [f" {rng.randrange(10 ** rng.randint(1, 5))}" for _ in range(count)]
        return [" " + rng.choice(self.words if kind == "words" else self.letter_strings) for _ in range(count)]

    def _count(self, page: TokenPage, room: int) -> None:
        """Numbers that go up by 1, 2, 5 or 10."""
        while True:
            number, step = log_uniform(self.rng, 1, 5000), self.rng.choice((1, 2, 5, 10))
            page.add(f" Count by {step}:")
            for _ in range(self.rng.randint(5, 40)):
                page.add(f" {number}", Kind.STORY)
                page.add(",", Kind.STORY)
                number += step
            page.add(f" {number}", Kind.STORY)
            page.end(".\n", Kind.STORY)
            if len(page) + 60 > room:
                return


_SYSTEM = (
    "You are a helpful storyteller",
    "You answer questions about what you were told",
    "Be kind and brief",
    "You are a small model",
    "Answer with the value only",
)
_ACKNOWLEDGED = ("I will remember that.", "I will keep it in mind.", "Good, I have noted it.", "Very well.")
_SMALL_TALK = (
    ("Hello!", "Hello! What shall I remember for you?"),
    ("Hi.", "Hello! Shall I tell you a story?"),
    ("Good morning.", "Good morning to you!"),
    ("Who are you?", "I am a small model that tells stories and remembers what it is told."),
    ("What can you do?", "I can tell a story, and I can remember what you tell me."),
    ("How are you?", "I am very well, thank you."),
    ("Thank you.", "You are welcome."),
    ("Thanks!", "You are welcome."),
    ("Goodbye.", "Goodbye! Come back soon."),
)
