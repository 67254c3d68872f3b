"""Logits to tokens. A row's result depends on its own logits and parameters only, never on the rest of the batch.

Order: penalties (repetition over prompt and output, then presence and frequency over the output) -> logit bias -> end
tokens masked below min_tokens -> temperature -> top-k -> top-p -> min-p -> noise. top-k keeps ties with its last token;
top-p keeps the fewest of the likeliest tokens that reach it (ties by id), after renormalising what top-k left; min-p is
relative to the likeliest token. Log-probabilities are natural logarithms of the softmax of the raw logits.

Rows are computed one by one inside each operation (softmax, cumsum, amax along a row; elementwise products), which is
what makes them independent; sums over a padded row are left to cumsum, which adds from left to right.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from headrace.engine import noise
from headrace.engine.request import finish_reason
from headrace.engine.sampling_table import Need, SamplingTable, TokenCounts

_FACTORS = (1 / 1024, 1 / 256, 1 / 64, 1 / 16, 1 / 4)

__all__ = ["Need", "Sampled", "Sampler", "SamplingTable", "TokenCounts", "finish_reason"]


@dataclass
class Sampled:
    """token_ids [n] int64; logprobs [n] fp32 or None when nobody asked; top: alternatives by place in the batch."""

    token_ids: np.ndarray
    logprobs: np.ndarray | None
    top: dict[int, tuple[tuple[int, float], ...]]


class Sampler:
    """Chooses tokens for one model on one device."""

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu"):
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._hashes = torch.from_numpy(noise.token_hashes(vocab_size)).to(self.device)

    def sample(self, logits: torch.Tensor, table: SamplingTable, rows: np.ndarray, positions: np.ndarray) -> Sampled:
        """One token a row. logits [n, vocab] fp32, not written to; rows [n] of `table`; positions [n] in the output."""
        needs = table.needs[rows]
        present = int(np.bitwise_or.reduce(needs)) if len(needs) else 0
        edited = logits
        if present & (Need.PENALTY | Need.BIAS | Need.MIN_TOKENS):
            edited = self._edit(logits, table, rows, positions, needs)
        if not present & Need.NOISE:
            token_ids = _argmax(edited)
        else:
            token_ids = self._choose(edited, table, rows, positions, needs)
        if not present & Need.LOGPROB:
            return Sampled(token_ids, None, {})
        return Sampled(token_ids, *self._logprobs(logits, table, rows, token_ids, needs))

    # --- what changes logits ---

    def _edit(self, logits, table, rows, positions, needs) -> torch.Tensor:
        edited = logits.clone()
        flat = edited.view(-1)
        self._penalise(flat, table, rows, needs)
        places = _places(needs, Need.BIAS)
        if len(places):
            biases = [table.biases[row] for row in rows[places].tolist()]
            at = self._to_device(self._flat_indices(places, [ids for ids, _ in biases]))
            flat.index_put_((at,), self._to_device(np.concatenate([values for _, values in biases])), accumulate=True)
        places = _places(needs, Need.MIN_TOKENS)
        places = places[positions[places] < table.min_tokens[rows[places]]]
        if len(places):
            at = self._flat_indices(places, [table.end_ids[row] for row in rows[places].tolist()])
            flat[self._to_device(at)] = float("-inf")
        return edited

    def _penalise(self, flat, table, rows, needs) -> None:
        places = _places(needs, Need.PENALTY)
        if not len(places):
            return
        chosen = rows[places]
        counted = [table.token_counts[row] for row in chosen.tolist()]
        at = self._to_device(self._flat_indices(places, [one.ids for one in counted]))
        sizes = [one.size for one in counted]
        per_token = np.stack((table.repetition, table.presence, table.frequency))[:, chosen].repeat(sizes, axis=1)
        repetition, presence, frequency = self._to_device(per_token)
        counts = self._to_device(np.concatenate([one.counts for one in counted]))
        values = flat[at]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= presence * (counts > 0)
        values -= frequency * counts
        flat[at] = values

    def _flat_indices(self, places: np.ndarray, ids: list[np.ndarray]) -> np.ndarray:
        starts = (places * self.vocab_size).repeat([len(one) for one in ids])
        return starts + np.concatenate(ids)

    # --- what chooses ---

    def _choose(self, logits, table, rows, positions, needs) -> np.ndarray:
        token_ids = np.empty(len(rows), np.int64)
        noisy, cut = needs & Need.NOISE != 0, needs & Need.CUT != 0
        for places, choose in (
            (np.flatnonzero(~noisy), None),
            (np.flatnonzero(noisy & ~cut), self._choose_from_all),
            (np.flatnonzero(cut), self._choose_from_cut),
        ):
            if not len(places):
                continue
            part = logits if len(places) == len(rows) else logits[self._to_device(places)]
            if choose is None:
                token_ids[places] = _argmax(part)
                continue
            chosen = rows[places]
            keys = self._to_device(noise.position_keys(table.keys[chosen], positions[places]))[:, None]
            scaled = part / self._to_device(table.temperature[chosen])[:, None]
            token_ids[places] = choose(scaled, keys, table, chosen)
        return token_ids

    def _choose_from_all(self, scaled, keys, table, rows) -> np.ndarray:
        return _argmax(torch.softmax(scaled, -1).div_(noise.exponential(keys, self._hashes)))

    def _choose_from_cut(self, scaled, keys, table, rows) -> np.ndarray:
        """Only tokens that can survive the cuts are sorted: usually a few hundred of the vocabulary."""
        probs = torch.softmax(scaled, -1)
        top_k, top_p, min_p = table.top_k[rows], table.top_p[rows], table.min_p[rows]
        best, free_p = probs.amax(-1), np.where(top_k > 0, 1.0, top_p)
        survivors = _true_places(self._survivors(scaled, probs, best, top_k, top_p, min_p))
        ids, likely = self._pack(probs, self._nearer(survivors, probs, best, free_p))
        likely, order = likely.sort(dim=-1, descending=True, stable=True)
        ids = ids.gather(1, order)
        before = likely.double().cumsum(-1)
        total = torch.where(self._to_device(top_k > 0), before[:, -1], 1.0)[:, None]
        before -= likely
        reach = self._to_device(np.where(top_p < 1, top_p, np.inf).astype(np.float64))[:, None] * total
        keep = (before < reach) & (likely >= self._to_device(min_p)[:, None] * likely[:, :1])
        keep[:, 0] = True
        scores = likely / noise.exponential(keys, self._hashes[ids])
        best = scores.masked_fill_(~keep, -1.0).argmax(-1, keepdim=True)
        return ids.gather(1, best)[:, 0].cpu().numpy()

    def _survivors(self, scaled, probs, best, top_k, top_p, min_p) -> torch.Tensor:
        """[n, vocab] bool: every token that the cuts may keep, and few others.

        A token of the top-p set has at least (1 - top_p) / vocab: it and all less likely ones together weigh more than
        1 - top_p. After a top-k cut the other two are relative to what it left, so there only top-k counts.
        """
        from_top_p = self._to_device(((1.0 - top_p.astype(np.float64)) / self.vocab_size * 0.999).astype(np.float32))
        floor = torch.maximum(from_top_p, self._to_device(min_p) * best * 0.999)
        survivors = probs >= floor.minimum(best)[:, None]
        for k in np.unique(top_k[top_k > 0]).tolist():
            places = self._to_device(np.flatnonzero(top_k == k))
            part = scaled[places]
            survivors[places] = part >= part.topk(k, -1).values[:, -1:]
        return survivors

    def _nearer(self, at: torch.Tensor, probs: torch.Tensor, best: torch.Tensor, top_p: np.ndarray) -> torch.Tensor:
        """Fewer of the flat places `at`: tokens within a factor of the row's best whose weight reaches top_p alone."""
        if not (top_p < 1).any():
            return at
        row = at // self.vocab_size
        likely = probs.view(-1)[at]
        relative, floor = likely / best[row], torch.zeros_like(best)
        enough = self._to_device(np.where(top_p < 1, top_p * 1.00001, np.inf))
        for factor in _FACTORS:
            weight = torch.bincount(row, likely.masked_fill(relative < factor, 0.0).double(), minlength=len(best))
            floor[weight >= enough] = factor
        return at[relative >= floor[row]]

    def _pack(self, probs: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids, ascending, and probabilities of flat places, both [n, width], padded with id 0 and 0.0."""
        row = at // self.vocab_size
        counts = torch.bincount(row, minlength=len(probs))
        column = torch.arange(len(at), device=at.device) - (counts.cumsum(0) - counts)[row]
        width = int(counts.max())
        ids = torch.zeros(len(probs), width, dtype=torch.int64, device=probs.device)
        likely = torch.zeros(len(probs), width, dtype=probs.dtype, device=probs.device)
        ids[row, column] = at - row * self.vocab_size
        likely[row, column] = probs.view(-1)[at]
        return ids, likely

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
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)


def _places(needs: np.ndarray, need: Need) -> np.ndarray:
    return np.flatnonzero(needs & need)


def _argmax(values: torch.Tensor) -> np.ndarray:
    """[n] int64, the first of equals. On CPUs numpy's is several times faster than torch's."""
    if values.device.type == "cpu":
        return values.numpy().argmax(-1)
    return values.argmax(-1).cpu().numpy()


def _true_places(mask: torch.Tensor) -> torch.Tensor:
    """Flat indices of True, ascending."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.view(-1).nonzero()[:, 0]
