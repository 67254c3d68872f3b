"""Recall questions: facts with random keys and values hidden in a long text, then a question about one of them.

A right answer can only be read out of the context: keys and values are drawn at random, and every two-part key whose hash
is 0 mod 16 was never used in training. Used by `headrace eval`, by tests, and by `training/` (which writes its documents
with the same `Draft`, so that what is trained is what is asked). Needs no torch; a tokenizer is only `encode(text) -> ids`
without begin or end token.

Text is joined from pieces that every tokenizer with blank-prefixed words encodes alike in one piece or in many: a value
carries its leading blank, and a line break belongs to the punctuation before it.
"""

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

HELD_OUT_MODULUS = 16
LENGTH_SLACK = 32
"""A prompt for `length` tokens has more than `length - LENGTH_SLACK` and at most `length` tokens."""

ADJECTIVES = tuple(
    """amber ancient azure bitter black blue bold brass brave bright broken bronze brown calm cheerful clever cloudy
    clumsy cold copper coral cosy crimson crooked curious dark dusty eager early empty faint faithful fancy fast fierce
    foggy fresh frozen gentle giant glad golden grand gray green grumpy happy heavy hidden hollow honest humble hungry
    icy idle iron ivory jolly kind late lazy light little lively lonely long lost loud lucky marble merry mighty misty
    modest muddy narrow neat new nimble noble old olive orange pale patient pink plain playful polite poor proud purple
    quick quiet rainy rapid rare red rich rough round royal rusty salty sandy scarlet secret shallow sharp shiny short
    shy silent silver simple sleepy slender slow small smooth snowy soft solid spotted square steady steep still stormy
    strange strong sturdy sunny sweet swift tall tame tender thick thin tidy tiny tired violet warm weary wet white wide
    wild windy wise wooden yellow young""".split()
)
NOUNS = tuple(
    """acorn anchor anvil apple arrow badger barrel basket beacon bear bell bench bird blanket boat book boot bottle
    bowl bridge broom brush bucket button cabin camel candle canoe carpet castle cat chair chest church clock cloak
    cloud coat cottage cow cradle crane crown cup curtain daisy deer desk dog donkey door dragon drum duck eagle engine
    falcon farm feather fence ferry fiddle field flag flower flute forest fork fountain fox frog garden gate ghost
    giant glove goat goose hammer harbor harp hat hawk hen hill horn horse hotel house island jacket jar jewel kettle
    key king kite kitten knife ladder lake lamb lamp lantern leaf lemon letter lion lizard mantle map market mask
    meadow mill mirror mitten monkey moon mountain mouse needle nest oak oar orchard otter oven owl oyster palace
    parrot path pear pebble pencil piano pigeon pillow pine pipe pirate plate plum pond pony potato prince pumpkin
    queen rabbit raven ribbon ring river road robin rocket roof rope rose saddle sailor school seal shadow sheep shell
    ship shovel sparrow spider spoon squirrel stable star statue stone stove stream swan sword table tailor teapot
    temple tent thimble tiger tower trumpet trunk tunnel turtle umbrella valley vase village violin wagon wall walnut
    watch well whale wheel whistle window wizard wolf""".split()
)
ATTRIBUTES = ("code", "number", "password", "secret", "price", "name", "word", "sign", "mark", "value")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
VALUE_KINDS = ("digits", "words", "letters")

_PEOPLE = "boy girl man woman farmer king queen prince miller sailor hunter teacher baker mother father child".split()
_PLACES = "garden forest river village market castle meadow kitchen valley harbor barn church mountain orchard".split()
_THINGS = "basket lantern letter blanket ladder bucket hammer kettle candle ribbon loaf drum hat rope apple cup".split()
_ANIMALS = "fox dog cat horse pony rabbit goose hen sheep goat owl donkey mouse bear crow lamb".split()
_MOVES = "walked ran hurried wandered went rode crept came".split()
_TAKES = "found carried lost painted washed mended hid brought dropped wanted".split()
_TIMES = (
    "in the morning|in the evening|that night|before breakfast|after dinner|on Sunday|in the spring|last winter".split(
        "|"
    )
)
_FEELINGS = "happy tired hungry afraid glad sorry cold proud angry quiet".split()
_SENTENCES = (
    " The {adjective} {person} {moves} to the {place} {time}.",
    " One {adjective} {animal} sat beside the {thing} and looked at the {person}.",
    " The {person} {takes} the {adjective} {thing} near the {place}.",
    " {Time} the {animal} was very {feeling}, but nobody in the {place} knew why.",
    ' "Where is my {adjective} {thing}?" asked the {person}.',
    " The {person} and the {animal} {moves} home, for they were {feeling}.",
    " There was a {thing} in the {place}, and it was {adjective}.",
    " The {animal} {takes} the {thing} and {moves} away.",
    " Nobody had seen the {adjective} {animal} since the {person} {moves} to the {place}.",
    " It rained {time}, and the {place} was {feeling} and {adjective}.",
    " The {person} gave the {thing} to the {animal} and said nothing.",
    " They talked about the {adjective} {thing} until the {person} fell asleep.",
)


class Kind(IntEnum):
    """What a piece of text is, which decides how much training cares about it; higher counts more."""

    RANDOM = 0  # random content at first sight, and that a fact or a question comes now: nobody can predict it
    FILLER = 1  # generated sentences: nobody should
    TEMPLATE = 2  # the fixed words after a key
    STORY = 3  # text of the corpus
    ANSWER = 4  # what a question asks for, and the token that ends it


@dataclass(frozen=True)
class Fact:
    """`the <attribute> of <key> is <value>`; key and value without surrounding blanks."""

    attribute: str
    key: str
    value: str


@dataclass
class Draft:
    """A text under construction, as (text, kind) pieces.

    `break_paragraph` turns the last terminator (a full stop, a line break) into a paragraph's end. Pieces given with a
    leading blank lose it at the start of a line. Training derives from it and keeps ids instead of text.
    """

    pieces: list[tuple[str, Kind]] = field(default_factory=list)
    at_line_start: bool = True
    _last_terminator: tuple[str, Kind] = ("<|begin|>", Kind.TEMPLATE)

    def add(self, text: str, kind: Kind = Kind.TEMPLATE) -> None:
        """Append words; `text` starts with a blank unless it continues a word or starts a line."""
        if self.at_line_start:
            text = text.lstrip(" ")
        if text:
            self.append(text, kind)
            self.at_line_start = False

    def end(self, terminator: str, kind: Kind = Kind.TEMPLATE) -> None:
        """Append a terminator: `.`, a line break, both, or a special token."""
        self.append(terminator, kind)
        self._last_terminator = (terminator, kind)
        self.at_line_start = terminator.endswith(("\n", "|>"))

    def break_paragraph(self) -> None:
        """Make the terminator just added end a paragraph. Does nothing at the very start or after a special token."""
        terminator, kind = self._last_terminator
        if not terminator.endswith("|>"):
            self.drop_last()
            self.end(terminator.rstrip("\n") + "\n\n", kind)

    def append(self, text: str, kind: Kind) -> None:
        self.pieces.append((text, kind))

    def drop_last(self) -> None:
        self.pieces.pop()

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)


# How a fact is stated: words before the key, words before the value, terminator.
PROSE_SHAPES = {
    "is": (" The {attribute} of", " is", "."),
    "is_the": (" The {attribute} of the", " is", "."),
    "remember": (" Remember that the {attribute} for", " is", "."),
    "has": (" The", " has the {attribute}", "."),
}
LINE_SHAPES = {
    "dash": ("-", ":", "\n"),
    "equals": ("", " =", "\n"),
    "key": ("Key", " has value", ".\n"),
}
SHAPES = PROSE_SHAPES | LINE_SHAPES
_ASKING = (" What is the {attribute} of", " What is the {attribute} of the", " What is the {attribute} for")
QUESTIONS = ("statement", "plain", "block", "chat")


def state(draft: Draft, shape: str, fact: Fact) -> None:
    """Append a statement of the fact; a line shape begins its own line."""
    _stem(draft, shape, fact)
    draft.add(" " + fact.value, Kind.RANDOM)
    draft.end(SHAPES[shape][2])


def _stem(draft: Draft, shape: str, fact: Fact) -> None:
    before_key, before_value, _ = SHAPES[shape]
    if shape in LINE_SHAPES and not draft.at_line_start:
        draft.break_paragraph()
    draft.add(before_key.format(attribute=fact.attribute), Kind.RANDOM)
    draft.add(" " + fact.key, Kind.RANDOM)
    draft.add(before_value.format(attribute=fact.attribute))


def ask(draft: Draft, question: str, shape: str, fact: Fact, asking: int = 0) -> str:
    """Append a question up to the point where its answer follows; returns the terminator that ends the answer.

    question  one of QUESTIONS: the statement again, a plain question, a Question/Answer block, a chat turn; or `turn`,
              which ends a user turn that is already open
    asking    which wording of the question, an index below 3
    """
    if question == "statement":
        _stem(draft, shape, fact)
        return SHAPES[shape][2]
    if question == "block":
        draft.break_paragraph()
        draft.add(" Question:", Kind.RANDOM)
    elif question == "chat":
        draft.end("<|user|>", Kind.RANDOM)
    draft.add(_ASKING[asking].format(attribute=fact.attribute), Kind.RANDOM)
    draft.add(" " + fact.key, Kind.RANDOM)
    if question == "plain":
        draft.add("?")
        return "."
    if question == "block":
        draft.add("?\nAnswer:")
        return "\n"
    draft.add("?")
    draft.end("<|assistant|>")
    draft.at_line_start = False  # the chat template puts a blank before an answer
    return "<|end|>"


def answer(draft: Draft, fact: Fact, terminator: str) -> None:
    """Append the answer and what ends it."""
    draft.add(" " + fact.value, Kind.ANSWER)
    draft.end(terminator, Kind.ANSWER)


def is_held_out(key: str) -> bool:
    """Whether training never used this key: CRC-32 of its text is 0 mod 16. Holds for keys of two parts."""
    return zlib.crc32(key.encode("utf-8")) % HELD_OUT_MODULUS == 0


def draw_key(rng: random.Random) -> str:
    """A held-out key: an adjective and a noun, or now and then a noun and a two- or three-digit number."""
    while True:
        if rng.random() < 0.75:
            key = f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
        else:
            key = f"{rng.choice(NOUNS)} {rng.randrange(10, 1000)}"
        if is_held_out(key):
            return key


def draw_value(rng: random.Random, kind: str = "digits") -> str:
    """A random value: 4 to 6 digits, two words, or 4 to 6 letters."""
    if kind == "digits":
        return "".join(rng.choice("0123456789") for _ in range(rng.randint(4, 6)))
    if kind == "words":
        return f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
    if kind == "letters":
        return "".join(rng.choice(LETTERS) for _ in range(rng.randint(4, 6)))
    raise ValueError(f"value kind must be one of {VALUE_KINDS}, not {kind!r}")


def draw_facts(rng: random.Random, count: int, value_kind: str = "digits") -> list[Fact]:
    """`count` facts about different held-out keys."""
    keys: dict[str, None] = {}
    while len(keys) < count:
        keys[draw_key(rng)] = None
    return [Fact(rng.choice(ATTRIBUTES), key, draw_value(rng, value_kind)) for key in keys]


def filler_sentence(rng: random.Random) -> str:
    """One made-up sentence, with a leading blank and a full stop or a quotation's end."""
    time = rng.choice(_TIMES)
    return rng.choice(_SENTENCES).format(
        adjective=rng.choice(ADJECTIVES),
        person=rng.choice(_PEOPLE),
        place=rng.choice(_PLACES),
        thing=rng.choice(_THINGS),
        animal=rng.choice(_ANIMALS),
        moves=rng.choice(_MOVES),
        takes=rng.choice(_TAKES),
        feeling=rng.choice(_FEELINGS),
        time=time,
        Time=time[0].upper() + time[1:],
    )


def filler_sentences(rng: random.Random) -> Iterator[str]:
    """Made-up sentences without end."""
    while True:
        yield filler_sentence(rng)


def add_sentence(draft: Draft, sentence: str, kind: Kind) -> None:
    """Append a whole sentence; its last character becomes the draft's terminator."""
    draft.add(sentence[:-1], kind)
    draft.end(sentence[-1], kind)


@dataclass(frozen=True)
class RecallCase:
    """One question.

    prompt              what is asked; for `chat` it is the user's message, to be wrapped by the chat template
    answer              the value, without a leading blank; the model's text must start with it
    prompt_token_count  ids the model sees: begin token, prompt, and the two role tokens of a chat
    answer_token_count  ids of the answer with its leading blank; generate one more to see that the value ends there
    style               `dense` (facts everywhere) or `haystack` (facts between sentences)
    """

    prompt: str
    answer: str
    prompt_token_count: int
    answer_token_count: int
    value_kind: str
    style: str
    question: str
    key: str

    @property
    def is_chat(self) -> bool:
        return self.question == "chat"

    def is_right(self, text: str) -> bool:
        """Whether generated text starts with the answer and the value ends there."""
        said = text.lstrip()
        follows = said[len(self.answer) : len(self.answer) + 1]
        return said.startswith(self.answer) and not follows.isalnum()


Encode = Callable[[str], Sequence[int]]
STYLES = ("haystack", "dense")
SHORTEST = 96


def make_case(
    encode: Encode,
    rng: random.Random,
    length: int,
    value_kind: str = "digits",
    style: str = "haystack",
    question: str = "plain",
    filler: Iterator[str] | None = None,
) -> RecallCase:
    """A fresh case of about `length` tokens (see LENGTH_SLACK).

    filler  sentences with a leading blank, ending in a full stop; made-up ones when None
    Raises ValueError for a length under SHORTEST.
    """
    if length < SHORTEST:
        raise ValueError(f"a recall case needs at least {SHORTEST} tokens, not {length}")
    shape = rng.choice(tuple(PROSE_SHAPES if style == "haystack" or rng.random() < 0.5 else LINE_SHAPES))
    facts = draw_facts(rng, _fact_count(rng, length, style), value_kind)
    if shape in LINE_SHAPES:
        facts = [Fact("value", fact.key, fact.value) for fact in facts]
    page = _Page(encode, rng, shape, facts[0], question, rng.randrange(len(_ASKING)))
    room = length - page.token_count()
    room = page.take_statements(facts[1:], room)
    page.take_filler(filler or filler_sentences(rng), room)
    while page.token_count() > length:
        page.drop_one()
    asked = facts[0]
    answer_count = len(encode("is " + asked.value)) - len(encode("is"))
    count = page.token_count()
    return RecallCase(page.draft().text, asked.value, count, answer_count, value_kind, style, question, asked.key)


def make_cases(
    encode: Encode,
    seed: int,
    length: int,
    count: int,
    value_kinds: Sequence[str] = ("digits",),
    styles: Sequence[str] = STYLES,
    questions: Sequence[str] = ("statement", "plain", "block"),
) -> Iterator[RecallCase]:
    """`count` cases that depend on nothing but the arguments; kinds, styles and questions take turns."""
    for index in range(count):
        rng = random.Random(f"{seed}/{length}/{index}")
        turn = index // len(styles)
        yield make_case(
            encode,
            rng,
            length,
            value_kinds[turn // len(questions) % len(value_kinds)],
            styles[index % len(styles)],
            questions[turn % len(questions)],
        )


def _fact_count(rng: random.Random, length: int, style: str) -> int:
    """Enough facts to fill a dense page; between 1 and 40, small counts as likely as large ones, for a haystack."""
    if style == "dense":
        return length // 5
    return round(max(1, min(40, length // 40)) ** rng.random())


class _Page:
    """Statements and filler around one asked fact, measured in tokens."""

    def __init__(self, encode: Encode, rng: random.Random, shape: str, asked: Fact, question: str, asking: int):
        self._encode, self._rng, self._shape = encode, rng, shape
        self._asked, self._question, self._asking = asked, question, asking
        self._order: list[str | Fact] = [asked]

    def take_statements(self, facts: Sequence[Fact], room: int) -> int:
        """Add facts while there is room, in random order; returns what is left."""
        for fact in facts:
            draft = Draft()
            state(draft, self._shape, fact)
            cost = len(self._encode(draft.text))
            if cost > room:
                break
            room -= cost
            self._order.append(fact)
        self._rng.shuffle(self._order)
        return room

    def take_filler(self, sentences: Iterator[str], room: int) -> None:
        """Add sentences while there is room: before lines, at random places between prose statements."""
        taken, misses = [], 0
        while room > LENGTH_SLACK // 2 and misses < 8:
            sentence = next(sentences)
            cost = len(self._encode(sentence))
            if cost > room:
                misses += 1
                continue
            room -= cost
            taken.append(sentence)
        self._order = taken + self._order if self._shape in LINE_SHAPES else _merge(self._rng, taken, self._order)

    def drop_one(self) -> None:
        """Remove the first entry that is not the asked fact."""
        self._order.remove(next(entry for entry in self._order if entry is not self._asked))

    def draft(self) -> Draft:
        draft = Draft()
        for entry in self._order:
            if isinstance(entry, str):
                add_sentence(draft, entry, Kind.FILLER)
                continue
            state(draft, self._shape, entry)
        ask(draft, "plain" if self._question == "chat" else self._question, self._shape, self._asked, self._asking)
        return draft

    def token_count(self) -> int:
        """Ids of the whole prompt, with begin token and, for a chat, the two roles."""
        return len(self._encode(self.draft().text)) + (3 if self._question == "chat" else 1)


def _merge(rng: random.Random, sentences: list[str], facts: list[str | Fact]) -> list[str | Fact]:
    """Both lists in one, each in its own order, at random places."""
    places = set(rng.sample(range(len(sentences) + len(facts)), len(facts)))
    left, right = iter(sentences), iter(facts)
    return [next(right) if place in places else next(left) for place in range(len(sentences) + len(facts))]
