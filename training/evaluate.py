"""What the run is judged by: held-out recall by exact match, bits per byte of held-out stories, sample texts.

Exact match needs no generation loop: with prompt and true answer in one forward pass, greedy decoding would give the
whole value if and only if the arg-max at every answer position is right. A case counts as right only if the value also
ends there.
"""

import math
import multiprocessing
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from headrace.evals import recall
from training.model import TinyModel
from training.skills import BEGIN_ID, END_ID

USER_ID, ASSISTANT_ID = 4, 5
CONTEXT_LENGTHS = (256, 1024, 3500)
PADDED = {256: 512, 1024: 2048, 3500: 4096}
STYLES = ("haystack", "dense", "story")


@dataclass(frozen=True)
class RecallSet:
    """Cases of one context length.

    ids      [num_cases, padded] uint16   prompt, answer, padding
    begin    [num_cases]                  position of the answer's first id
    size     [num_cases]                  ids of the answer
    labels   (style, value kind, question) of each case
    """

    length: int
    ids: np.ndarray
    begin: np.ndarray
    size: np.ndarray
    labels: list[tuple[str, str, str]]


def sentences(text: str) -> list[str]:
    """Sentences of a story that end in a full stop, each with a leading blank, in order."""
    found = [part for line in text.split("\n\n") for part in re.split(r"(?<=\.) (?=[A-Z])", line)]
    return [" " + part for part in found if part.endswith(".") and 8 < len(part) < 400]


def build_recall_sets(
    tokenizer: Tokenizer, held_out: list[str], seed: int, count: int, processes: int
) -> list[RecallSet]:
    """`count` fresh cases for each context length; every style, value kind and question takes its turn."""
    pool_of_sentences = [sentences(text) for text in held_out]
    jobs = [(seed, length, index) for length in CONTEXT_LENGTHS for index in range(count)]
    with multiprocessing.get_context("fork").Pool(processes, _keep, ((tokenizer, pool_of_sentences),)) as pool:
        cases = pool.map(_make_one, jobs, chunksize=16)
    return [_as_set(length, [c for c in cases if c[0] == length]) for length in CONTEXT_LENGTHS]


_shared: tuple = ()


def _keep(shared: tuple) -> None:
    global _shared
    _shared = shared


def _make_one(job: tuple[int, int, int]) -> tuple:
    """(length, prompt ids, answer ids, labels) of case `index`."""
    tokenizer, stories = _shared
    seed, length, index = job
    rng = random.Random(f"held-out/{seed}/{length}/{index}")
    style = STYLES[index % 3]
    kind = recall.VALUE_KINDS[index // 3 % 3]
    question = recall.QUESTIONS[index // 9 % 4]

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    filler = _story_filler(rng, stories) if style == "story" else None
    case = recall.make_case(encode, rng, length, kind, "dense" if style == "dense" else "haystack", question, filler)
    prompt = [BEGIN_ID, *encode(case.prompt)]
    if case.is_chat:
        prompt = [BEGIN_ID, USER_ID, *encode(case.prompt), ASSISTANT_ID]
    return length, prompt, encode(" " + case.answer), (style, kind, question)


def _story_filler(rng: random.Random, stories: list[list[str]]) -> Iterator[str]:
    """Consecutive sentences from a random place of a random held-out work."""
    while True:
        story = rng.choice(stories)
        yield from story[rng.randrange(len(story)) :]


def _as_set(length: int, cases: list[tuple]) -> RecallSet:
    ids = np.full((len(cases), PADDED[length]), END_ID, dtype=np.uint16)
    for row, (_, prompt, answer, _) in enumerate(cases):
        ids[row, : len(prompt) + len(answer)] = prompt + answer
    begin = np.array([len(prompt) for _, prompt, _, _ in cases])
    size = np.array([len(answer) for _, _, answer, _ in cases])
    return RecallSet(length, ids, begin, size, [labels for *_, labels in cases])


def word_continuations(tokenizer: Tokenizer) -> np.ndarray:
    """[vocab] bool: ids that would continue a value, i.e. begin with a letter or digit and no blank."""
    count = tokenizer.get_vocab_size()
    return np.array([tokenizer.decode([index])[:1].isalnum() for index in range(count)])


@torch.no_grad()
def recall_scores(model: TinyModel, cases: RecallSet, continues: np.ndarray, tokens: int, limit: int) -> dict:
    """Shares of exact answers: `all`, and by style, value kind, question and style x kind.

    tokens  ids of one forward pass, as the compiled functions want them
    """
    rows = tokens // PADDED[cases.length]
    right: list[bool] = []
    count = min(limit, len(cases.labels))
    for first in range(0, count, rows):
        block = slice(first, min(first + rows, count))
        ids = np.full((rows, PADDED[cases.length]), END_ID, dtype=np.int64)
        ids[: block.stop - first] = cases.ids[block]
        stream, _ = model.trunk(torch.from_numpy(ids).to(model.embedding.device))
        right += _exact(model, stream.view(*ids.shape, -1), ids, cases.begin[block], cases.size[block], continues)
    return _shares(right, cases.labels[:count])


def _exact(model: TinyModel, stream: Tensor, ids: np.ndarray, begin: np.ndarray, size: np.ndarray, continues) -> list:
    """Whether each row's arg-max spells the answer and then ends the value."""
    row = np.repeat(np.arange(len(begin)), size + 1)
    offset = np.concatenate([np.arange(length + 1) for length in size])
    place = np.repeat(begin, size + 1) + offset - 1
    picked = stream[torch.from_numpy(row).to(stream.device), torch.from_numpy(place).to(stream.device)]
    guess = model.logits(picked, model.head.norm).argmax(-1).cpu().numpy()
    is_last = offset == np.repeat(size, size + 1)
    expected = ids[row, np.minimum(place + 1, ids.shape[1] - 1)]
    good = np.where(is_last, ~continues[guess], guess == expected)
    return [bool(good[row == index].all()) for index in range(len(begin))]


def _shares(right: list[bool], labels: list[tuple[str, str, str]]) -> dict:
    cells: dict[str, list[bool]] = defaultdict(list)
    for correct, (style, kind, question) in zip(right, labels, strict=True):
        for name in ("all", f"style {style}", f"value {kind}", f"question {question}", f"{style} {kind}"):
            cells[name].append(correct)
    return {name: {"exact": round(sum(c) / len(c), 5), "right": sum(c), "cases": len(c)} for name, c in cells.items()}


def held_out_windows(tokenizer: Tokenizer, texts: list[str], length: int = 4096) -> tuple[np.ndarray, int]:
    """Held-out works end to end, cut into windows [num_windows, length + 1] that share one id; and their bytes."""
    encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    ids = [token for item in encoded for token in (BEGIN_ID, *item.ids)]
    count = math.ceil((len(ids) - 1) / length)
    padded = np.full(count * length + 1, BEGIN_ID, dtype=np.int64)
    padded[: len(ids)] = ids
    windows = np.stack([padded[index * length : (index + 1) * length + 1] for index in range(count)])
    return windows, sum(len(text.encode("utf-8")) for text in texts)


@torch.no_grad()
def bits_per_byte(model: TinyModel, windows: np.ndarray, num_bytes: int, tokens: int) -> float:
    """Bits the model needs for each byte of held-out text; begin tokens cost nothing."""
    length = windows.shape[1] - 1
    rows = tokens // length
    nats = 0.0
    for first in range(0, len(windows), rows):
        block = np.full((rows, length + 1), BEGIN_ID, dtype=np.int64)
        part = windows[first : first + rows]
        block[: len(part)] = part
        ids = torch.from_numpy(block).to(model.embedding.device)
        targets = ids[:, 1:].flatten()
        stream, _ = model.trunk(ids[:, :-1])
        for x, wanted in zip(stream.split(16384), targets.split(16384), strict=True):
            losses = torch.nn.functional.cross_entropy(model.logits(x, model.head.norm), wanted, reduction="none")
            nats += float((losses * (wanted != BEGIN_ID)).sum())
    return nats / math.log(2) / num_bytes


@dataclass(frozen=True)
class Sampling:
    temperature: float = 0.0
    top_p: float = 1.0
    repetition_penalty: float = 1.0


STORY_SAMPLING = Sampling(0.7, 0.9, 1.1)


@torch.no_grad()
def continue_prompts(model: TinyModel, prompts: list[list[int]], count: int, sampling: Sampling, seed: int) -> list:
    """`count` more ids for each prompt, by recomputing the whole prefix each time; stops at the end token.

    Needs uncompiled operations: the length changes. Rows are padded on the right, which a causal model never sees.
    """
    device = model.embedding.device
    generator = torch.Generator(device=device).manual_seed(seed)
    width = max(map(len, prompts)) + count
    ids = torch.full((len(prompts), width), END_ID, device=device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    rows = torch.arange(len(prompts), device=device)
    for _ in range(count):
        used = int(lengths.max())
        stream = model.trunk(ids[:, :used])[0].view(len(prompts), used, -1)
        logits = model.logits(stream[rows, lengths - 1], model.head.norm)
        seen = torch.zeros_like(logits, dtype=torch.bool)
        valid = torch.arange(used, device=device) < lengths[:, None]
        seen.scatter_(1, torch.where(valid, ids[:, :used], BEGIN_ID), True)
        ids[rows, lengths] = _sample(logits, seen, sampling, generator)
        lengths += 1
    texts = []
    for prompt, row in zip(prompts, ids.tolist(), strict=True):
        written = row[len(prompt) : len(prompt) + count]
        texts.append(written[: written.index(END_ID)] if END_ID in written else written)
    return texts


def _sample(logits: Tensor, seen: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """One id a row [rows]; greedy at temperature 0."""
    penalised = torch.where(logits > 0, logits / sampling.repetition_penalty, logits * sampling.repetition_penalty)
    logits = torch.where(seen, penalised, logits)
    if sampling.temperature == 0:
        return logits.argmax(-1)
    shares, order = (logits / sampling.temperature).softmax(-1).sort(-1, descending=True)
    shares = torch.where(shares.cumsum(-1) - shares < sampling.top_p, shares, 0)
    return order.gather(1, torch.multinomial(shares, 1, generator=generator))[:, 0]
