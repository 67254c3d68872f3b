"""The corpus as tokens, and worker processes that pack fresh documents into batches while the device trains."""

import multiprocessing
import queue
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from headrace.evals import recall
from training.corpus import Work, is_held_out, read_works
from training.settings import Settings
from training.skills import Stories, WordEncoder, Writer

NUM_LETTER_STRINGS = 40_000
NUM_OPENINGS = 20_000
COMMONEST_LEFT_OUT = 120
WORDS_PER_SIZE = 3_000


@dataclass(frozen=True)
class Corpus:
    """Everything the workers and the evaluation need of the text; nothing in it needs a tokenizer any more.

    held_out  texts of the held-out works
    """

    stories: Stories
    held_out: list[str]
    words: list[str]
    letter_strings: list[str]
    num_tokens: int


def load(path: Path, tokenizer: Tokenizer, seed: int) -> Corpus:
    """Read, tokenise (every core) and index the corpus."""
    works = list(read_works(path))
    trained = [work for work in works if not is_held_out(work.title)]
    held_out = [work.text for work in works if is_held_out(work.title)]
    rng = random.Random(seed)
    stories = _index(trained, tokenizer, rng)
    words = _words(trained, tokenizer)
    letter_strings = [recall.draw_value(rng, "letters") for _ in range(NUM_LETTER_STRINGS)]
    return Corpus(stories, held_out, words, letter_strings, len(stories.tokens))


def _index(works: list[Work], tokenizer: Tokenizer, rng: random.Random) -> Stories:
    """Tokens of all works with the places where paragraphs start; each work's text ends without a line break."""
    paragraphs, first_of_work, tales, of_children = [], [], [], []
    for work in works:
        first_of_work.append(len(paragraphs))
        parts = [part for part in work.text.split("\n\n") if part.strip()]
        if work.tier == "children":
            tales.append(len(paragraphs))
            of_children += range(len(paragraphs), len(paragraphs) + len(parts) - 1)
        paragraphs += [part + "\n\n" for part in parts[:-1]] + [parts[-1]]
    encoded = tokenizer.encode_batch_fast(paragraphs, add_special_tokens=False)
    lengths = np.array([len(item.ids) for item in encoded])
    tokens = np.concatenate([np.array(item.ids, dtype=np.uint16) for item in encoded])
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    borders = np.append(starts[first_of_work[1:]], len(tokens))
    ends = borders[np.searchsorted(borders, starts, side="right")]
    vocabulary = [tokenizer.id_to_token(index) for index in range(tokenizer.get_vocab_size())]
    opens_word = np.array([bool(re.match("Ġ[A-Za-z]", token)) for token in vocabulary])
    openings = _openings(paragraphs, of_children, starts, tokenizer, rng)
    full_stop = tokenizer.token_to_id(".")
    return Stories(tokens, starts, ends, np.array(tales), openings, full_stop, opens_word)


def _openings(paragraphs: list[str], chosen: list[int], starts: np.ndarray, tokenizer: Tokenizer, rng) -> list:
    """Paragraphs that can answer `tell me a story about the <topic>`: first word re-encoded with a leading blank."""
    found = []
    for index in rng.sample(chosen, min(NUM_OPENINGS, len(chosen))):
        text = paragraphs[index]
        first = re.match(r"[A-Z][a-z]+(?= [a-z])", text)
        if first is None or len(text) < 200:
            continue
        skipped = len(tokenizer.encode(first.group(), add_special_tokens=False).ids)
        ids = tokenizer.encode(" " + first.group(), add_special_tokens=False).ids
        topics = [word for word in re.findall(r"[a-z]+", text[:400]) if word in _TOPICS]
        found.append((ids, int(starts[index]) + skipped, topics[0] if topics else ""))
    return found


_TOPICS = frozenset(recall.NOUNS) | frozenset("boy girl farmer fisherman witch princess giant woman man dwarf".split())


def _words(works: list[Work], tokenizer: Tokenizer) -> list[str]:
    """Lowercase words of the children tier: 3,000 of one token and 3,000 of two or three, the commonest left out."""
    counts: Counter[str] = Counter()
    for work in works:
        if work.tier == "children":
            counts.update(re.findall(r"(?<= )[a-z]{3,12}(?=[ ,.])", work.text))
    ranked = [word for word, count in counts.most_common() if count >= 3][COMMONEST_LEFT_OUT:]
    encoded = tokenizer.encode_batch_fast([" " + word for word in ranked], add_special_tokens=False)
    sizes = {word: len(item.ids) for word, item in zip(ranked, encoded, strict=True)}
    single = [word for word in ranked if sizes[word] == 1][:WORDS_PER_SIZE]
    several = [word for word in ranked if sizes[word] in (2, 3)][:WORDS_PER_SIZE]
    return single + several


def pack(writer: Writer, settings: Settings, length: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """One batch of documents laid end to end.

    Returns ids [rows, length + 2] uint16 and kinds [rows, length + 2] uint8 (headrace.evals.recall.Kind): two ids more than
    the length, for the next token and the one after it.
    """
    names, shares = zip(*settings.draws, strict=True)
    ids = np.empty((rows, length + 2), dtype=np.uint16)
    kinds = np.empty((rows, length + 2), dtype=np.uint8)
    for row in range(rows):
        filled = 0
        while filled < length + 2:
            room = length + 2 - filled
            to_the_edge = room < 128 or writer.rng.random() < 0.6
            size = room if to_the_edge else writer.rng.randint(64, room)
            page = writer.document(writer.rng.choices(names, shares)[0], size, to_the_edge)
            taken = min(len(page), room)
            ids[row, filled : filled + taken] = page.ids[:taken]
            kinds[row, filled : filled + taken] = page.kinds[:taken]
            filled += taken
    return ids, kinds


def make_writer(corpus: Corpus, encode: Callable[[str], list[int]], seed: str) -> Writer:
    """A writer with its own random numbers; `encode` is called only for words it has not met yet."""
    return Writer(random.Random(seed), WordEncoder(encode), corpus.stories, corpus.words, corpus.letter_strings)


class Workers:
    """Processes that keep one bounded queue for each sequence length filled.

    They are forked, so start them before CUDA; they call the tokenizer for single words only, which uses no threads.
    """

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, settings: Settings, count: int, depth: int = 24):
        context = multiprocessing.get_context("fork")
        self._queues = [context.Queue(depth) for _ in settings.lengths]
        self._mix = context.Array("d", settings.length_mix(0.0))
        writer = make_writer(corpus, lambda text: tokenizer.encode(text, add_special_tokens=False).ids, "warm")
        for word in corpus.words + corpus.letter_strings + list(recall.ADJECTIVES + recall.NOUNS):
            writer.encoder(" " + word)
            writer.encoder(word)
        arguments = (writer, settings, self._queues, self._mix)
        self._processes = [
            context.Process(target=_work, args=(*arguments, f"{settings.seed}/{index}"), daemon=True)
            for index in range(count)
        ]
        for process in self._processes:
            process.start()

    def aim(self, mix: tuple[float, ...]) -> None:
        """Say how often each length will be asked for."""
        self._mix[:] = mix

    def take(self, length_index: int) -> tuple[np.ndarray, np.ndarray]:
        """The next batch of that length; waits for it, 60 s at most (queue.Empty)."""
        return self._queues[length_index].get(timeout=60)

    def waiting(self) -> list[int]:
        """Batches ready, by length."""
        return [ready.qsize() for ready in self._queues]

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()


def _work(writer: Writer, settings: Settings, queues: list, mix, seed: str) -> None:
    """Fill whichever queue lags furthest behind its share, for ever."""
    writer.rng = random.Random(seed)
    while True:
        index = _most_needed(queues, list(mix))
        if index is None:
            time.sleep(0.005)
            continue
        length = settings.lengths[index]
        batch = pack(writer, settings, length, settings.tokens_per_step // length)
        try:
            queues[index].put(batch, timeout=5)
        except queue.Full:
            continue


def _most_needed(queues: list, mix: list[float]) -> int | None:
    """A length whose queue is not full, with the fewest batches for its share; None when nothing is needed."""
    depths = [(ready.qsize() + 1) / share if share else None for ready, share in zip(queues, mix, strict=True)]
    open_ones = [index for index, ready in enumerate(queues) if depths[index] is not None and not ready.full()]
    return min(open_ones, key=lambda index: depths[index], default=None)
