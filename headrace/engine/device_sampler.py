"""The sampler of an accelerator: the same rules, but nothing on the way to a token waits for the host.

What edits logits is worked out on the host from what a plan knows and uploaded; the choice is one kernel for all rows,
greedy ones and those with noise; log-probabilities are computed where somebody asked. The tokens stay on the device for
the next step and go to the host beside it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from headrace.engine import noise
from headrace.engine.sampler import Drawn, Sampled, Sampler, Uncounted
from headrace.engine.sampling_table import Need, SamplingTable
from headrace.engine.step import TopColumns
from headrace.model.upload import Readback, upload
from kernels.rows import sampling
from kernels.select import choose


class Columns(NamedTuple):
    """What kernels/rows/sampling.py takes beside logits, [n] each: int64, fp32, int32, fp32, fp32. On the host or the device."""

    keys: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray


def columns(table: SamplingTable, rows: np.ndarray, positions: np.ndarray) -> Columns:
    """On the host, for these rows at these output positions."""
    return Columns(
        noise.position_keys(table.keys[rows], positions),
        table.temperature[rows],
        table.top_k[rows].astype(np.int32),
        table.top_p[rows],
        table.min_p[rows],
    )


class DeviceSampler(Sampler):
    """As Sampler, on any device."""

    def __init__(self, vocab_size: int, device: torch.device | str):
        super().__init__(vocab_size, device)
        self._run = choose(sampling.BACKENDS, self.device, None, op="sampling").run

    def sample(self, logits: torch.Tensor, table: SamplingTable, rows: np.ndarray, positions: np.ndarray) -> Sampled:
        """As Sampler; waits for the tokens."""
        return self.draw(logits, table, rows, positions).wait()

    def draw(self, logits: torch.Tensor, table: SamplingTable, rows: np.ndarray, positions: np.ndarray) -> Drawn:
        """As Sampler."""
        edited = self.edited(logits, table, rows, positions)
        there = Columns(*(upload(column, self.device) for column in columns(table, rows, positions)))
        token_ids = self.choose(logits if edited is None else edited, there)
        return self.reported(logits, token_ids, table, rows)

    def choose(self, logits: torch.Tensor, there: Columns) -> torch.Tensor:
        """[n] int64 from [n, vocab] fp32 and columns on the device. Can be captured."""
        return self._run(logits, *there)

    def edited(
        self,
        logits: torch.Tensor,
        table: SamplingTable,
        rows: np.ndarray,
        positions: np.ndarray,
        uncounted: Uncounted | None = None,
    ) -> torch.Tensor | None:
        """A copy with penalties, biases and masks applied; None when nobody has any now."""
        needs = table.needs[rows]
        masked = (needs & Need.MIN_TOKENS != 0) & (positions < table.min_tokens[rows])
        if not (masked | (needs & (Need.PENALTY | Need.BIAS) != 0)).any():
            return None
        return self._edit(logits, table, rows, positions, needs, uncounted)

    def reported(self, logits: torch.Tensor, token_ids: torch.Tensor, table: SamplingTable, rows: np.ndarray) -> Drawn:
        """The tokens, and log-probabilities of those who asked, on their way to the host."""
        places = np.flatnonzero(table.needs[rows] & Need.LOGPROB)
        if not len(places):
            return _OnItsWay(token_ids, (token_ids,), places, np.zeros(0, np.int64))
        at = upload(places, self.device)
        part = torch.log_softmax(logits.index_select(0, at), -1)
        found = part.gather(1, token_ids.index_select(0, at)[:, None])[:, 0]
        counts = table.num_logprobs[rows[places]]
        top = part.topk(int(counts.max()), -1)
        return _OnItsWay(token_ids, (token_ids, found, top.values, top.indices), places, counts)


class _OnItsWay(Drawn):
    """parts: token ids, then log-probabilities, likeliest values and ids of `places`; `counts` of these are wanted."""

    def __init__(
        self, token_ids: torch.Tensor, parts: tuple[torch.Tensor, ...], places: np.ndarray, counts: np.ndarray
    ):
        super().__init__(token_ids)
        self._parts, self._places, self._counts = Readback(*parts), places, counts

    def wait(self) -> Sampled:
        """As Drawn."""
        token_ids, *rest = self._parts.wait()
        if not rest:
            return Sampled(token_ids, None, {})
        found, values, ids = rest
        logprobs = np.zeros(len(token_ids), np.float32)
        logprobs[self._places] = found
        places = self._places.tolist()
        rows = {place: row for row, (place, count) in enumerate(zip(places, self._counts, strict=True)) if count}
        counts = dict(zip(places, self._counts.tolist(), strict=True))
        return Sampled(token_ids, logprobs, TopColumns(ids, values, rows, counts))
