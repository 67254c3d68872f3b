"""Sampling parameters of many samples as columns, one row a sample, so that a step is set up without a Python loop.

What a sample needs beyond argmax is a bit mask (`Need`); a step looks at the bits of its rows first and does nothing
for needs nobody has.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

import numpy as np

from headrace.engine import noise
from headrace.errors import InvalidRequest
from headrace.protocol.common import SamplingParams

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy."""
SMALLEST_REPETITION = 0.01
"""A smaller penalty would lift logits beyond float32."""


class Need(enum.IntFlag):
    """What choosing a sample's token takes beyond the largest logit."""

    PENALTY = 1
    BIAS = 2
    MIN_TOKENS = 4
    NOISE = 8
    CUT = 16  # top-k, top-p or min-p
    LOGPROB = 32


class TokenCounts:
    """The distinct tokens of one sample: ids, and how often each is in the output (0: only in the prompt)."""

    def __init__(self, prompt_ids: Sequence[int], output_ids: Sequence[int]):
        prompt, output = np.asarray(prompt_ids, np.int64), np.asarray(output_ids, np.int64)
        distinct = np.unique(np.concatenate((prompt, output)))
        self._ids = np.empty(max(64, 2 * len(distinct)), np.int64)
        self._counts = np.zeros(len(self._ids), np.float32)
        self.size = len(distinct)
        self._ids[: self.size] = distinct
        np.add.at(self._counts, np.searchsorted(distinct, output), 1)
        self._place = dict(zip(distinct.tolist(), range(self.size), strict=True))

    @property
    def ids(self) -> np.ndarray:
        """[size] int64, a view."""
        return self._ids[: self.size]

    @property
    def counts(self) -> np.ndarray:
        """[size] fp32, a view."""
        return self._counts[: self.size]

    def add(self, token_id: int) -> None:
        """One more output token."""
        place = self._place.setdefault(token_id, self.size)
        if place == self.size:
            if self.size == len(self._ids):
                self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[place] = token_id
            self.size += 1
        self._counts[place] += 1


class SamplingTable:
    """Rows are numbered by the caller; the table grows to hold the largest."""

    def __init__(self, vocab_size: int, capacity: int = 64):
        self.vocab_size = vocab_size
        self.needs = np.zeros(capacity, np.int64)
        self.temperature = np.ones(capacity, np.float32)
        self.top_k = np.zeros(capacity, np.int64)
        self.top_p = np.ones(capacity, np.float32)
        self.min_p = np.zeros(capacity, np.float32)
        self.repetition = np.ones(capacity, np.float32)
        self.presence = np.zeros(capacity, np.float32)
        self.frequency = np.zeros(capacity, np.float32)
        self.min_tokens = np.zeros(capacity, np.int64)
        self.num_logprobs = np.zeros(capacity, np.int64)
        self.keys = np.zeros(capacity, np.uint64)
        self.token_counts: dict[int, TokenCounts] = {}
        self.biases: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.end_ids: dict[int, np.ndarray] = {}

    def put(
        self,
        row: int,
        sampling: SamplingParams,
        sample_index: int,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
    ) -> None:
        """Fills a row. Raises InvalidRequest, naming the field, for what no vocabulary of this size can do, and for numbers that
        would make logits infinite: one such row must not end the step of its neighbours."""
        _check_finite(sampling)
        if row >= len(self.needs):
            self._grow(row + 1)
        self.clear(row)
        needs = self._needs(sampling)
        if Need.BIAS in needs:
            self.biases[row] = self._bias(sampling)
        if Need.MIN_TOKENS in needs:
            self.end_ids[row] = self._end_ids(sampling)
        if Need.PENALTY in needs:
            counts = TokenCounts(prompt_ids, output_ids)
            if counts.ids.min(initial=0) < 0 or counts.ids.max(initial=0) >= self.vocab_size:
                raise InvalidRequest(f"a token outside 0..{self.vocab_size - 1}", field="prompt_token_ids")
            self.token_counts[row] = counts
        self.temperature[row] = sampling.temperature
        self.top_k[row] = sampling.top_k if 0 < sampling.top_k < self.vocab_size else 0
        self.top_p[row], self.min_p[row] = sampling.top_p, sampling.min_p
        self.repetition[row] = sampling.repetition_penalty
        self.presence[row], self.frequency[row] = sampling.presence_penalty, sampling.frequency_penalty
        self.min_tokens[row] = sampling.min_tokens
        self.num_logprobs[row] = min(sampling.logprobs or 0, self.vocab_size)
        self.keys[row] = noise.sample_keys(_signed(sampling.seed), np.array([sample_index]))[0]
        self.needs[row] = needs

    def clear(self, row: int) -> None:
        """Forgets a row."""
        self.needs[row] = 0
        for table in (self.token_counts, self.biases, self.end_ids):
            table.pop(row, None)

    def observe(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """Counts the tokens just drawn, for rows with penalties."""
        if self.token_counts:
            for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
                counts = self.token_counts.get(row)
                if counts is not None:
                    counts.add(token_id)

    def _needs(self, sampling: SamplingParams) -> Need:
        needs = Need(0)
        if sampling.has_penalties:
            needs |= Need.PENALTY
        if sampling.logit_bias:
            needs |= Need.BIAS
        if sampling.min_tokens > 0:
            needs |= Need.MIN_TOKENS
        if sampling.temperature >= GREEDY_BELOW:
            needs |= Need.NOISE
            if 0 < sampling.top_k < self.vocab_size or sampling.top_p < 1 or sampling.min_p > 0:
                needs |= Need.CUT
        if sampling.logprobs is not None:
            needs |= Need.LOGPROB
        return needs

    def _bias(self, sampling: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
        ids = np.array([token_id for token_id, _ in sampling.logit_bias], np.int64)
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            raise InvalidRequest(
                f"logit_bias names a token outside 0..{self.vocab_size - 1}", field="sampling.logit_bias"
            )
        return ids, np.array([value for _, value in sampling.logit_bias], np.float32)

    def _end_ids(self, sampling: SamplingParams) -> np.ndarray:
        ids = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else sampling.eos_token_ids)}
        return np.array(sorted(token_id for token_id in ids if 0 <= token_id < self.vocab_size), np.int64)

    def _grow(self, size: int) -> None:
        for name, column in vars(self).items():
            if isinstance(column, np.ndarray):
                longer = np.zeros(max(size, 2 * len(column)), column.dtype)
                longer[: len(column)] = column
                setattr(self, name, longer)


def _check_finite(sampling: SamplingParams) -> None:
    if not sampling.repetition_penalty >= SMALLEST_REPETITION:
        raise InvalidRequest(
            f"repetition_penalty = {sampling.repetition_penalty}; at least {SMALLEST_REPETITION}",
            field="sampling.repetition_penalty",
        )
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        if not math.isfinite(getattr(sampling, name)):
            raise InvalidRequest(f"{name} = {getattr(sampling, name)}", field=f"sampling.{name}")
    if not all(math.isfinite(value) for _, value in sampling.logit_bias):
        raise InvalidRequest("logit_bias holds a value that is not finite", field="sampling.logit_bias")


def _signed(value: int) -> np.ndarray:
    """A seed of any size as [1] int64."""
    return np.array([value & (2**64 - 1)], np.uint64).view(np.int64)
