"""From scaled logits to one token a row: softmax, the cuts (top-k, top-p, min-p) and noise.

Two forms of one rule, each the other's oracle: `RowByRow` walks over the rows in numpy and is the faster one on CPUs,
`Batched` is made of tensor operations only and stays on the device. Both look at few tokens: a token of the top-p set
weighs more than (1 - top_p) / vocab, because it and all less likely ones together weigh more than 1 - top_p.

Sums that decide something are cumulative sums, which add from left to right: padding and neighbours cannot change them.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch

from headrace.engine import noise

_MANY = 256
"""Candidates of a row from which a second look is worth it."""
_FACTORS = (1 / 1024, 1 / 256, 1 / 64, 1 / 16, 1 / 4)


class Cuts(NamedTuple):
    """Columns, one entry a row: top_k int64 (0: off), top_p fp32 (1: off), min_p fp32 (0: off)."""

    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray


class Choice(Protocol):
    """scaled [n, vocab] fp32 on the device, logits over temperature; keys [n] int64 of the noise; -> [n] int64."""

    def from_all(self, scaled: torch.Tensor, keys: np.ndarray, cuts: Cuts) -> np.ndarray: ...

    def from_cut(self, scaled: torch.Tensor, keys: np.ndarray, cuts: Cuts) -> np.ndarray: ...


def argmax(values: torch.Tensor) -> np.ndarray:
    """[n] int64, the first of equals. On CPUs numpy's is several times faster than torch's."""
    if values.device.type == "cpu":
        return values.numpy().argmax(-1)
    return values.argmax(-1).cpu().numpy()


def _floor(best: np.ndarray, cuts: Cuts, vocab_size: int) -> np.ndarray:
    """[n] fp32: without top-k, no token below it survives top-p and min-p."""
    from_top_p = ((1.0 - cuts.top_p.astype(np.float64)) / vocab_size * 0.999).astype(np.float32)
    return np.minimum(np.maximum(from_top_p, cuts.min_p * best * np.float32(0.999)), best)


class Batched:
    """Tensor operations over all rows at once; on any device."""

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu"):
        self.vocab_size, self.device = vocab_size, torch.device(device)
        self._hashes = self._to_device(noise.token_hashes(vocab_size))

    def from_all(self, scaled: torch.Tensor, keys: np.ndarray, cuts: Cuts) -> np.ndarray:
        """As Choice; no cut is looked at."""
        drawn = noise.exponential(self._to_device(keys)[:, None], self._hashes)
        return argmax(torch.softmax(scaled, -1).div_(drawn))

    def from_cut(self, scaled: torch.Tensor, keys: np.ndarray, cuts: Cuts) -> np.ndarray:
        """As Choice. Only tokens that can survive the cuts are sorted."""
        probs = torch.softmax(scaled, -1)
        ids, likely = self._pack(probs, self._survivors(scaled, probs, cuts))
        likely, order = likely.sort(dim=-1, descending=True, stable=True)
        ids = ids.gather(1, order)
        before = likely.double().cumsum(-1)
        total = torch.where(self._to_device(cuts.top_k > 0), before[:, -1], 1.0)[:, None]
        before -= likely
        reach = self._to_device(np.where(cuts.top_p < 1, cuts.top_p, np.inf).astype(np.float64))[:, None] * total
        keep = (before < reach) & (likely >= self._to_device(cuts.min_p)[:, None] * likely[:, :1])
        keep[:, 0] = True
        scores = likely / noise.exponential(self._to_device(keys)[:, None], self._hashes[ids])
        best = scores.masked_fill_(~keep, -1.0).argmax(-1, keepdim=True)
        return ids.gather(1, best)[:, 0].cpu().numpy()

    def _survivors(self, scaled: torch.Tensor, probs: torch.Tensor, cuts: Cuts) -> torch.Tensor:
        """Flat places, ascending, of every token that the cuts may keep, and of few others.

        After a top-k cut the other two are relative to what it left, so there only top-k counts.
        """
        best = probs.amax(-1)
        floor = self._to_device(_floor(best.cpu().numpy(), cuts, self.vocab_size))
        survivors = probs >= floor[:, None]
        for k in np.unique(cuts.top_k[cuts.top_k > 0]).tolist():
            places = self._to_device(np.flatnonzero(cuts.top_k == k))
            part = scaled[places]
            survivors[places] = part >= part.topk(k, -1).values[:, -1:]
        at = survivors.view(-1).nonzero()[:, 0]
        return self._nearer(at, probs, best, np.where(cuts.top_k > 0, 1.0, cuts.top_p))

    def _nearer(self, at: torch.Tensor, probs: torch.Tensor, best: torch.Tensor, top_p: np.ndarray) -> torch.Tensor:
        """Fewer of the places `at`: tokens within a factor of the row's best whose weight reaches top_p alone."""
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

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)


class RowByRow(Batched):
    """On a CPU a loop over rows beats padded tensors: a few short numpy calls for each."""

    def from_cut(self, scaled: torch.Tensor, keys: np.ndarray, cuts: Cuts) -> np.ndarray:
        """As Choice."""
        probs = torch.softmax(scaled, -1).numpy()
        floors = _floor(probs.max(-1), cuts, self.vocab_size)
        columns = (floors, *(column.tolist() for column in cuts))
        kept = [self._cut(*one) for one in zip(probs, *columns, strict=True)]
        counts = [len(ids) for ids, _ in kept]
        ids = np.concatenate([ids for ids, _ in kept])
        drawn = noise.exponential(torch.from_numpy(keys.repeat(counts)), self._hashes[torch.from_numpy(ids)])
        scores = np.concatenate([likely for _, likely in kept]) / drawn.numpy()
        ends = np.cumsum(counts).tolist()
        best = [start + scores[start:end].argmax() for start, end in zip([0, *ends], ends, strict=False)]
        return ids[best]

    def _cut(
        self, probs: np.ndarray, floor: np.float32, top_k: int, top_p: float, min_p: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ids and probabilities of the tokens that one row keeps."""
        if top_k:
            floor = np.partition(probs, self.vocab_size - top_k)[self.vocab_size - top_k]
        ids = (probs >= floor).nonzero()[0]
        likely = probs[ids]
        if top_p < 1:
            ids, likely = self._reach(ids, likely, top_p, whole=not top_k)
        if min_p > 0:
            keep = likely >= np.float32(min_p) * likely.max()
            ids, likely = ids[keep], likely[keep]
        return ids, likely

    def _reach(self, ids: np.ndarray, likely: np.ndarray, top_p: float, whole: bool) -> tuple[np.ndarray, np.ndarray]:
        """The fewest of the likeliest that reach top_p; `whole`: of all tokens, else of those given."""
        if whole and len(ids) > _MANY:
            near = likely >= likely.max() * _FACTORS[2]
            if likely[near].sum(dtype=np.float64) >= top_p * 1.00001:
                ids, likely = ids[near], likely[near]
        order = (-likely).argsort(kind="stable")
        ids, likely = ids[order], likely[order]
        weight = likely.cumsum(dtype=np.float64)
        total = 1.0 if whole else weight[-1]
        count = max(1, int((weight - likely).searchsorted(top_p * total)))
        return ids[:count], likely[:count]
