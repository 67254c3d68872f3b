"""Which samples step together: all of them, or, when there are more than fit, each in its turn.

What a step needs of its samples stands in arrays, one row a sample, so that planning a step is a few numpy operations.
A step goes through `plan`, `run` and `finish`; samples join and leave between steps.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.engine.request import DecodeSequence, SampledToken, finish_reason
from headrace.engine.runner import BatchPlan, Runner
from headrace.engine.sampler import Sampled, SamplingTable
from headrace.model.deepseek import ForwardBatch
from headrace.protocol import FinishReason


@dataclass
class StepPlan:
    """A step ready to run. rows [n]: its samples' rows in the arrays; positions [n]: of the tokens to draw."""

    rows: np.ndarray
    positions: np.ndarray
    batch: ForwardBatch


class DecodeBatcher:
    """A WorkSource over one Runner. `add` may be called from any thread, the rest by the engine thread.

    on_step(tokens)               after each step, one SampledToken a sample; a sample that ended has left already
    on_failure(sequences, error)  these samples have left without an end
    """

    def __init__(
        self,
        runner: Runner,
        max_batch_size: int,
        on_step: Callable[[list[SampledToken]], None],
        on_failure: Callable[[list[DecodeSequence], Exception], None] | None = None,
    ):
        self.runner = runner
        self.max_batch_size = max_batch_size
        self.on_step = on_step
        self.on_failure = on_failure
        self.on_work: Callable[[], None] = lambda: None
        self.steps = 0
        self._lock = threading.Lock()
        self._joining: deque[DecodeSequence] = deque()
        self._sampling = SamplingTable(runner.sampler.vocab_size, max_batch_size)
        self._sequences: dict[int, DecodeSequence] = {}  # by row
        self._vacant: list[int] = []
        self._turn = np.zeros(0, np.int64)  # rows, who steps next first
        self._planned = np.zeros(0, np.int64)
        self._last_token = np.zeros(max_batch_size, np.int64)
        self._context_len = np.zeros(max_batch_size, np.int64)  # rows attended to, the last token's included
        self._prompt_len = np.zeros(max_batch_size, np.int64)
        self._tables = np.zeros((max_batch_size, 16), np.int32)

    @property
    def running(self) -> int:
        """Samples that step, and those that join with the next step."""
        return len(self._sequences) + len(self._joining)

    def add(self, sequences: Sequence[DecodeSequence]) -> None:
        """Lets samples join with the next step."""
        with self._lock:
            self._joining.extend(sequences)
        self.on_work()

    def remove(self, handle: int, sample_index: int | None = None) -> int:
        """Takes a request, or one sample of it, out. No later forward touches its blocks. -> samples that left."""
        self._admit()
        leaving = [
            row
            for row, sequence in self._sequences.items()
            if sequence.handle == handle and sample_index in (None, sequence.sample_index)
        ]
        self._leave(leaving)
        return len(leaving)

    def has_work(self) -> bool:
        """Whether anyone steps or wants to."""
        return bool(self._sequences) or bool(self._joining)

    def run_once(self) -> None:
        """One step."""
        plan = self.plan()
        if plan is not None:
            self.finish(plan, self.run(plan))

    def plan(self) -> StepPlan | None:
        """Who steps now, and the tensors of that; None when nobody is left."""
        self._admit()
        rows = self._turn[: self.max_batch_size]
        self._planned = rows
        if not len(rows):
            return None
        if len(self._turn) > len(rows):
            self._turn = np.concatenate((self._turn[len(rows) :], rows))
        lens = self._context_len[rows]
        at, block_size = lens - 1, self.runner.block_size
        blocks = self._tables[rows, at // block_size].astype(np.int64)
        batch = BatchPlan(
            token_ids=self._last_token[rows],
            positions=at,
            slots=blocks * block_size + at % block_size,
            block_tables=self._tables[rows, : -(-int(lens.max()) // block_size)],
            query_starts=list(range(len(rows) + 1)),
            context_lens=lens.tolist(),
            logit_indices=np.arange(len(rows)),
        )
        return StepPlan(rows, lens - self._prompt_len[rows], self.runner.to_batch(batch))

    def run(self, plan: StepPlan) -> Sampled:
        """The forward and the draw."""
        logits: torch.Tensor = self.runner.forward(plan.batch, "decode")
        return self.runner.sample(logits, self._sampling, plan.rows, plan.positions)

    def finish(self, plan: StepPlan, sampled: Sampled) -> None:
        """Moves every sample on by its token, lets those at their end leave, and reports."""
        rows = plan.rows
        self.steps += 1
        self._last_token[rows] = sampled.token_ids
        self._context_len[rows] += 1
        self._sampling.observe(rows, sampled.token_ids)
        tokens, ended = [], []
        logprobs = [None] * len(rows) if sampled.logprobs is None else sampled.logprobs.tolist()
        columns = (rows, plan.positions, sampled.token_ids, self._context_len[rows])
        for place, (row, position, token_id, total) in enumerate(zip(*(one.tolist() for one in columns), strict=True)):
            sequence = self._sequences[row]
            reason = finish_reason(token_id, sequence.sampling, position, total, self.runner.max_context)
            if reason is not FinishReason.NONE:
                ended.append(row)
            logprob = None if sequence.sampling.logprobs is None else logprobs[place]
            top = sampled.top.get(place, ())
            tokens.append(
                SampledToken(sequence.handle, sequence.sample_index, position, token_id, logprob, top, reason)
            )
        self._leave(ended)
        self._planned = self._planned[:0]
        self.on_step(tokens)

    def on_error(self, error: Exception) -> None:
        """A step failed: its samples leave and their owner hears of it."""
        rows = [row for row in self._planned.tolist() if row in self._sequences]
        self._planned = self._planned[:0]
        self._fail([self._sequences[row] for row in rows], error, rows)

    def _fail(self, sequences: list[DecodeSequence], error: Exception, rows: Sequence[int] = ()) -> None:
        self._leave(rows)
        if sequences and self.on_failure is not None:
            self.on_failure(sequences, error)

    def _admit(self) -> None:
        while self._joining:
            with self._lock:
                sequence = self._joining.popleft()
            row = self._vacant.pop() if self._vacant else len(self._sequences)
            try:
                self._join(row, sequence)
            except Exception as error:
                self._vacant.append(row)
                self._fail([sequence], error)

    def _join(self, row: int, sequence: DecodeSequence) -> None:
        self._make_room(row + 1, len(sequence.block_table))
        prompt, output = sequence.prompt_token_ids, sequence.output_token_ids
        self._sampling.put(row, sequence.sampling, sequence.sample_index, prompt, output)
        self._last_token[row] = output[-1]
        self._prompt_len[row] = len(prompt)
        self._context_len[row] = len(prompt) + len(output)
        self._tables[row] = 0
        self._tables[row, : len(sequence.block_table)] = sequence.block_table
        self._sequences[row] = sequence
        self._turn = np.append(self._turn, row)

    def _leave(self, rows: Sequence[int]) -> None:
        if not rows:
            return
        for row in rows:
            del self._sequences[row]
            self._sampling.clear(row)
        self._vacant.extend(rows)
        self._turn = self._turn[~np.isin(self._turn, rows)]

    def _make_room(self, num_rows: int, num_blocks: int) -> None:
        if num_rows > len(self._last_token):
            size = max(num_rows, 2 * len(self._last_token))
            for name in ("_last_token", "_context_len", "_prompt_len"):
                setattr(self, name, np.resize(getattr(self, name), size))
        height, width = len(self._last_token), self._tables.shape[1]
        if num_blocks > width:
            width = max(num_blocks, 2 * width)
        if self._tables.shape != (height, width):
            tables = np.zeros((height, width), np.int32)
            tables[: self._tables.shape[0], : self._tables.shape[1]] = self._tables
            self._tables = tables
