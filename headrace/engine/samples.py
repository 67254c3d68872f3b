"""The samples that step, as columns with one row each, so that planning and ending a step are a few numpy operations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.engine.request import DecodeSequence, finish_reason
from headrace.engine.sampling_table import SamplingTable
from headrace.engine.step import BlockTables
from headrace.protocol.common import FinishReason


class Samples:
    """Rows are reused after `leave`; all columns grow together. One thread uses it.

    turn           rows in the order in which they step next; without those whose last step has been planned
    sampling       parameters and noise keys by row           tables  block tables by row
    handle, sample_index, prompt_len  [rows] int64
    last_token     [rows] int64   the newest token that the host has seen
    context_len    [rows] int64   rows attended to by the next step to plan, its fed token's included
    last_position  [rows] int64   the output position at which a sample ends by its length
    place          [rows] int64   place in the step that is in flight, -1 when not in it
    ended          [rows] bool    ended by a token, while a later step with it is in flight
    """

    _COLUMNS = ("handle", "sample_index", "prompt_len", "last_token", "context_len", "last_position", "place", "ended")

    def __init__(self, vocab_size: int, max_context: int, capacity: int):
        self.max_context = max_context
        self.sampling = SamplingTable(vocab_size, capacity)
        self.tables = BlockTables(capacity)
        self.by_row: dict[int, DecodeSequence] = {}
        self.turn = np.zeros(0, np.int64)
        for name in self._COLUMNS:
            setattr(self, name, np.zeros(capacity, bool if name == "ended" else np.int64))
        self.place.fill(-1)
        self._vacant: list[int] = []
        self._end_counts = np.zeros(vocab_size, np.int32)  # how many samples might end with a token

    handle: np.ndarray
    sample_index: np.ndarray
    prompt_len: np.ndarray
    last_token: np.ndarray
    context_len: np.ndarray
    last_position: np.ndarray
    place: np.ndarray
    ended: np.ndarray

    def __len__(self) -> int:
        return len(self.by_row)

    def join(self, sequence: DecodeSequence) -> None:
        """Gives a sample a row and the last turn. Raises InvalidRequest (SamplingTable.put); then nothing has changed."""
        row = self._vacant[-1] if self._vacant else len(self.by_row)
        prompt, output = sequence.prompt_token_ids, sequence.output_token_ids
        self.sampling.put(row, sequence.sampling, sequence.sample_index, prompt, output)
        if self._vacant:
            self._vacant.pop()
        if row >= len(self.handle):
            for name in self._COLUMNS:
                setattr(self, name, np.resize(getattr(self, name), max(row + 1, 2 * len(self.handle))))
        self.handle[row], self.sample_index[row] = sequence.handle, sequence.sample_index
        self.prompt_len[row], self.last_token[row] = len(prompt), output[-1]
        self.context_len[row] = len(prompt) + len(output)
        self.last_position[row] = min(sequence.sampling.max_tokens, self.max_context - len(prompt)) - 1
        self.place[row], self.ended[row] = -1, False
        self.tables.put(row, sequence.block_table)
        self._count_ends(sequence, 1)
        self.by_row[row] = sequence
        self.turn = np.append(self.turn, row)

    def leave(self, rows: Sequence[int]) -> None:
        """These rows may be given to others from now on."""
        if not len(rows):
            return
        for row in rows:
            self._count_ends(self.by_row.pop(row), -1)
            self.sampling.clear(row)
        self._vacant.extend(rows)
        self.rest(rows)

    def rest(self, rows: Sequence[int] | np.ndarray) -> None:
        """These rows get no further turn."""
        self.turn = self.turn[~np.isin(self.turn, rows)]

    def rows_of(self, handle: int, sample_index: int | None) -> list[int]:
        """Rows of a request, or of one sample of it."""
        return [
            row
            for row, sequence in self.by_row.items()
            if sequence.handle == handle and sample_index in (None, sequence.sample_index)
        ]

    def reasons(self, rows: np.ndarray, positions: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
        """[n] int8 FinishReason of each, as `request.finish_reason` would say; only tokens that may end somebody are
        looked at one by one."""
        reasons = np.where(positions >= self.last_position[rows], FinishReason.LENGTH, FinishReason.NONE).astype(
            np.int8
        )
        for place in np.flatnonzero(self._end_counts[token_ids]).tolist():
            row, position = int(rows[place]), int(positions[place])
            total = int(self.prompt_len[row]) + position + 1
            sampling = self.by_row[row].sampling
            reasons[place] = finish_reason(int(token_ids[place]), sampling, position, total, self.max_context)
        return reasons

    def _count_ends(self, sequence: DecodeSequence, change: int) -> None:
        sampling, size = sequence.sampling, len(self._end_counts)
        for token_id in {*sampling.eos_token_ids, *sampling.stop_token_ids}:
            if 0 <= token_id < size:
                self._end_counts[token_id] += change
