"""One decode step as columns: what is planned, and what came out. An entry's index is its *place* in the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

import numpy as np
import torch

from headrace.engine.request import SampledToken
from headrace.model.upload import upload
from headrace.protocol.common import FinishReason

Top = tuple[tuple[int, float], ...]


class BlockTables:
    """The block tables of many samples, one row each, on the host; and on a device, where only new rows are sent."""

    def __init__(self, num_rows: int, width: int = 16):
        self._host = np.zeros((num_rows, width), np.int32)
        self._device: torch.Tensor | None = None
        self._unsent: list[int] = []

    def put(self, row: int, block_table: Sequence[int]) -> None:
        """Fills a row, with zeros after its last block."""
        height, width = self._host.shape
        if row >= height or len(block_table) > width:
            height = max(row + 1, 2 * height) if row >= height else height
            width = max(len(block_table), 2 * width) if len(block_table) > width else width
            grown = np.zeros((height, width), np.int32)
            grown[: self._host.shape[0], : self._host.shape[1]] = self._host
            self._host = grown
        self._host[row, : len(block_table)] = block_table
        self._host[row, len(block_table) :] = 0
        self._unsent.append(row)

    def slots(self, rows: np.ndarray, at: np.ndarray, block_size: int) -> np.ndarray:
        """[n] int64 slots of places `at` in the sequences of `rows`."""
        return self._host[rows, at // block_size].astype(np.int64) * block_size + at % block_size

    def of(self, rows: np.ndarray, num_blocks: int) -> np.ndarray:
        """[n, num_blocks] int32, the first blocks of each."""
        return self._host[rows, :num_blocks]

    def on_device(self, device: torch.device, width: int) -> torch.Tensor:
        """[rows, width] int32 of all rows, up to date for what the current stream does next. `width` never changes."""
        if self._device is None or len(self._device) < len(self._host):
            self._device = torch.zeros(len(self._host), width, dtype=torch.int32, device=device)
            self._unsent = list(range(len(self._host)))
        if self._unsent:
            rows = np.unique(self._unsent)
            values = np.zeros((len(rows), width), np.int32)
            shared = min(width, self._host.shape[1])
            values[:, :shared] = self._host[rows, :shared]
            self._device.index_copy_(0, upload(rows, device), upload(values, device))
            self._unsent = []
        return self._device


@dataclass(eq=False)
class StepPlan:
    """A step ready to run; n samples.

    rows, positions   [n] int64   their rows in the batcher's columns; output positions of the tokens to draw
    token_ids         [n] int64   the tokens to feed, where the host knows them
    sources           [n] int64   place in the step before, whose token is fed from the device; -1: token_ids
    slots             [n] int64   where the rows of the fed tokens go
    context_lens      [n] int64   rows attended to, the fed token's included
    """

    rows: np.ndarray
    positions: np.ndarray
    token_ids: np.ndarray
    sources: np.ndarray
    slots: np.ndarray
    context_lens: np.ndarray
    tables: BlockTables


class StepTokens(Sequence[SampledToken]):
    """What a step drew. The engine thread fills columns; a SampledToken is made when somebody looks at it.

    handles, sample_indices, positions, token_ids  [n] int64      reasons  [n] int8, values of FinishReason
    logprobs  [n] fp32, NaN where none was asked for; None when nobody asked      top  alternatives by place
    """

    __slots__ = ("handles", "logprobs", "positions", "reasons", "sample_indices", "token_ids", "top")

    def __init__(self, handles, sample_indices, positions, token_ids, reasons, logprobs=None, top=None):
        self.handles, self.sample_indices, self.positions = handles, sample_indices, positions
        self.token_ids, self.reasons, self.logprobs = token_ids, reasons, logprobs
        self.top: dict[int, Top] | TopColumns = {} if top is None else top

    def __len__(self) -> int:
        return len(self.token_ids)

    @overload
    def __getitem__(self, place: int) -> SampledToken: ...

    @overload
    def __getitem__(self, place: slice) -> list[SampledToken]: ...

    def __getitem__(self, place):
        if isinstance(place, slice):
            return self._made(range(len(self))[place])
        return self._made(range(len(self))[place : place + 1 or None])[0]

    def __iter__(self) -> Iterator[SampledToken]:
        return iter(self._made(range(len(self))))

    def take(self, places: np.ndarray) -> StepTokens:
        """Some of them, in this order."""
        columns = [column[places] for column in self._columns()]
        logprobs = None if self.logprobs is None else self.logprobs[places]
        top = {new: found for new, old in enumerate(places.tolist()) if (found := self.top.get(old, ()))}
        return StepTokens(*columns, logprobs, top)

    def __add__(self, other: StepTokens) -> StepTokens:
        """These, then the others."""
        if not len(self):
            return other
        columns = [np.concatenate(both) for both in zip(self._columns(), other._columns(), strict=True)]
        logprobs = None
        if self.logprobs is not None or other.logprobs is not None:
            logprobs = np.concatenate([_or_nan(one) for one in (self, other)])
        top = {place: found for place in range(len(self)) if (found := self.top.get(place, ()))}
        top |= {len(self) + place: found for place in range(len(other)) if (found := other.top.get(place, ()))}
        return StepTokens(*columns, logprobs, top)

    def _columns(self) -> tuple[np.ndarray, ...]:
        return self.handles, self.sample_indices, self.positions, self.token_ids, self.reasons

    def _made(self, places: range) -> list[SampledToken]:
        part = slice(places.start, places.stop) if places.step == 1 else list(places)
        columns = [column[part].tolist() for column in self._columns()]
        reasons = [_REASONS[reason] for reason in columns.pop()]
        if self.logprobs is None:
            return [SampledToken(*one, None, (), reason) for *one, reason in zip(*columns, reasons, strict=True)]
        logprobs = [None if one != one else one for one in self.logprobs[part].tolist()]  # NaN is not itself
        tops = [self.top.get(place, ()) for place in places]
        return [SampledToken(*one) for one in zip(*columns, logprobs, tops, reasons, strict=True)]


_REASONS = {int(reason): reason for reason in FinishReason}


def _or_nan(tokens: StepTokens) -> np.ndarray:
    return np.full(len(tokens), np.nan, np.float32) if tokens.logprobs is None else tokens.logprobs


@dataclass
class TopColumns:
    """Alternatives of some places as columns: those of place p stand in row `rows[p]`, `counts[p]` of them are wanted."""

    ids: np.ndarray
    values: np.ndarray
    rows: dict[int, int] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)

    def get(self, place: int, default: Top = ()) -> Top:
        """As of a dict."""
        row = self.rows.get(place)
        if row is None:
            return default
        count = self.counts[place]
        return tuple(zip(self.ids[row, :count].tolist(), self.values[row, :count].tolist(), strict=True))
