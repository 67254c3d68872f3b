"""Logits to tokens. A row's result depends on its own logits and parameters only, never on the rest of the batch.

Order: penalties (repetition over prompt and output, then presence and frequency over the output) -> logit bias -> end
tokens masked below min_tokens -> temperature -> top-k -> top-p -> min-p -> noise. top-k keeps ties with its last token;
top-p keeps the fewest of the likeliest tokens that reach it (ties by id), after renormalising what top-k left; min-p is
relative to the likeliest token. Log-probabilities are natural logarithms of the softmax of the raw logits.

Rows are computed one by one inside each operation (softmax along a row, elementwise products), which is what makes them
independent. What chooses among the probabilities is in `choice.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from headrace.engine import noise
from headrace.engine.choice import Batched, Choice, Cuts, RowByRow, argmax
from headrace.engine.request import finish_reason
from headrace.engine.sampling_table import Need, SamplingTable, TokenCounts
from headrace.engine.step import Top, TopColumns
from headrace.model.upload import upload

__all__ = ["Drawn", "Need", "Sampled", "Sampler", "SamplingTable", "TokenCounts", "finish_reason"]


@dataclass
class Sampled:
    """token_ids [n] int64; logprobs [n] fp32 or None when nobody asked; top: alternatives by place in the batch."""

    token_ids: np.ndarray
    logprobs: np.ndarray | None
    top: dict[int, Top] | TopColumns


class Uncounted(NamedTuple):
    """Tokens that a step is fed and the host has not seen, so that no TokenCounts has them.

    token_ids [n] int64, on the device, what each sample is fed; late [n] bool, on the host: whose token is uncounted
    """

    token_ids: torch.Tensor
    late: np.ndarray


class Drawn:
    """Tokens of a launched step. token_ids [n] int64 on the device, which may still compute them."""

    def __init__(self, token_ids: torch.Tensor, sampled: Sampled | None = None):
        self.token_ids = token_ids
        self._sampled = sampled

    def wait(self) -> Sampled:
        """The tokens on the host. Raises what the device raises."""
        assert self._sampled is not None
        return self._sampled


class Sampler:
    """Chooses tokens for one model on one device."""

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu"):
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._choice: Choice = (RowByRow if self.device.type == "cpu" else Batched)(vocab_size, self.device)

    def draw(self, logits: torch.Tensor, table: SamplingTable, rows: np.ndarray, positions: np.ndarray) -> Drawn:
        """As `sample`, for a step: waits for nothing that `Drawn.wait` can wait for."""
        sampled = self.sample(logits, table, rows, positions)
        return Drawn(torch.from_numpy(sampled.token_ids), sampled)

    def sample(self, logits: torch.Tensor, table: SamplingTable, rows: np.ndarray, positions: np.ndarray) -> Sampled:
        """One token a row. logits [n, vocab] fp32, not written to; rows [n] of `table`; positions [n] in the output."""
        needs = table.needs[rows]
        present = int(np.bitwise_or.reduce(needs)) if len(needs) else 0
        edited = logits
        if present & (Need.PENALTY | Need.BIAS | Need.MIN_TOKENS):
            edited = self._edit(logits, table, rows, positions, needs)
        if not present & Need.NOISE:
            token_ids = argmax(edited)
        else:
            token_ids = self._choose(edited, table, rows, positions, needs)
        if not present & Need.LOGPROB:
            return Sampled(token_ids, None, {})
        return Sampled(token_ids, *self._logprobs(logits, table, rows, token_ids, needs))

    # --- what changes logits ---

    def _edit(self, logits, table, rows, positions, needs, uncounted: Uncounted | None = None) -> torch.Tensor:
        edited = logits.clone()
        flat = edited.view(-1)
        self._penalise(flat, table, rows, needs, uncounted)
        places = _places(needs, Need.BIAS)
        if len(places):
            biases = [table.biases[row] for row in rows[places].tolist()]
            at = self._to_device(self._flat_indices(places, [ids for ids, _ in biases]))
            flat.index_put_((at,), self._to_device(np.concatenate([values for _, values in biases])), accumulate=True)
        places = _places(needs, Need.MIN_TOKENS)
        places = places[positions[places] < table.min_tokens[rows[places]]]
        if len(places):
            at = self._flat_indices(places, [table.end_ids[row] for row in rows[places].tolist()])
            flat.index_fill_(0, self._to_device(at), float("-inf"))
        return edited

    def _penalise(self, flat, table, rows, needs, uncounted) -> None:
        places = _places(needs, Need.PENALTY)
        if not len(places):
            return
        chosen = rows[places]
        counted = [table.token_counts[row] for row in chosen.tolist()]
        at = self._to_device(self._flat_indices(places, [one.ids for one in counted]))
        sizes = [one.size for one in counted]
        factors = np.stack((table.repetition, table.presence, table.frequency))[:, chosen]
        counts = self._to_device(np.concatenate([one.counts for one in counted]))
        late = np.zeros(0, np.int64) if uncounted is None else np.flatnonzero(uncounted.late[places])
        if len(late):
            at, counts = self._count_late(at, counts, sizes, late, places, uncounted.token_ids)
        per_token = np.concatenate((factors.repeat(sizes, axis=1), factors[:, late]), axis=1)
        repetition, presence, frequency = self._to_device(per_token)
        values = flat[at]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= presence * (counts > 0)
        values -= frequency * counts
        flat[at] = values

    def _count_late(self, at, counts, sizes, late, places, token_ids) -> tuple[torch.Tensor, torch.Tensor]:
        """`at` and `counts` with one more entry for each of `late`: its uncounted token. Where the sample had that token
        already both entries get the same count, hence the same value."""
        whose = np.full(len(places), -1)
        whose[late] = np.arange(len(late))
        owner = self._to_device(whose.repeat(sizes))
        fed = token_ids.index_select(0, self._to_device(places[late])) + self._to_device(places[late] * self.vocab_size)
        again = (owner >= 0) & (at == fed[owner.clamp(min=0)])
        before = counts.new_zeros(len(late)).index_add_(0, owner.clamp(min=0), counts * again)
        return torch.cat((at, fed)), torch.cat((counts + again, before + 1))

    def _flat_indices(self, places: np.ndarray, ids: list[np.ndarray]) -> np.ndarray:
        starts = (places * self.vocab_size).repeat([len(one) for one in ids])
        return starts + np.concatenate(ids)

    # --- what chooses ---

    def _choose(self, logits, table, rows, positions, needs) -> np.ndarray:
        token_ids = np.empty(len(rows), np.int64)
        noisy, cut = needs & Need.NOISE != 0, needs & Need.CUT != 0
        for places, choose in (
            (np.flatnonzero(~noisy), None),
            (np.flatnonzero(noisy & ~cut), self._choice.from_all),
            (np.flatnonzero(cut), self._choice.from_cut),
        ):
            if not len(places):
                continue
            part = logits if len(places) == len(rows) else logits[self._to_device(places)]
            if choose is None:
                token_ids[places] = argmax(part)
                continue
            chosen = rows[places]
            keys = noise.position_keys(table.keys[chosen], positions[places])
            scaled = part / self._to_device(table.temperature[chosen])[:, None]
            cuts = Cuts(table.top_k[chosen], table.top_p[chosen], table.min_p[chosen])
            token_ids[places] = choose(scaled, keys, cuts)
        return token_ids

    # --- what reports ---

    def _logprobs(self, logits, table, rows, token_ids, needs):
        places = _places(needs, Need.LOGPROB)
        part = torch.log_softmax(logits[self._to_device(places)], -1)
        found = np.zeros(len(rows), np.float32)
        found[places] = part.gather(1, self._to_device(token_ids[places])[:, None])[:, 0].cpu().numpy()
        wanted, top = table.num_logprobs[rows[places]], {}
        for k in np.unique(wanted[wanted > 0]).tolist():
            members = np.flatnonzero(wanted == k)
            values, ids = (made.cpu().tolist() for made in part[self._to_device(members)].topk(k, -1))
            for place, row_ids, row_values in zip(places[members].tolist(), ids, values, strict=True):
                top[place] = tuple(zip(row_ids, row_values, strict=True))
        return found, top

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return upload(array, self.device)


def _places(needs: np.ndarray, need: Need) -> np.ndarray:
    return np.flatnonzero(needs & need)
