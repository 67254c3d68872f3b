"""Which samples step together: all of them, or, when there are more than fit, each in its turn.

A step is planned, launched and completed (its tokens are read). With `steps_ahead` 1 the next step is planned and
launched before the tokens of the one in flight are read: nothing of a plan but the tokens to feed depends on them, and
those are fed on the device. So a sample whose end the host could not foresee is in one step too many; that token is
dropped, and its end is told when that step has completed. Ends by length are foreseen.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.engine.request import DecodeSequence
from headrace.engine.runner import Runner
from headrace.engine.sampler import Drawn, Need, Sampled
from headrace.engine.samples import Samples
from headrace.engine.step import StepPlan, StepTokens

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _InFlight:
    """A step that was launched; `began` is a reading of perf_counter."""

    plan: StepPlan
    drawn: Drawn
    began: float


class DecodeBatcher:
    """A WorkSource over one Runner. `add` may be called from any thread, the rest by the engine thread.

    on_step(tokens)               a step has completed: one token a sample, in columns. A sample whose end is told has left:
                                  no step that touches its blocks runs any more, on the device either
    on_failure(sequences, error)  these samples have left without an end; as to their blocks, likewise
    """

    def __init__(
        self,
        runner: Runner,
        max_batch_size: int,
        on_step: Callable[[StepTokens], None],
        on_failure: Callable[[list[DecodeSequence], Exception], None] | None = None,
        *,
        steps_ahead: int | None = None,
    ):
        """`steps_ahead` None: as the runner says; 0 reads each step's tokens before the next is planned."""
        self.runner = runner
        self.max_batch_size = max_batch_size
        self.steps_ahead = runner.steps_ahead if steps_ahead is None else steps_ahead
        self.on_step = on_step
        self.on_failure = on_failure
        self.on_work: Callable[[], None] = lambda: None
        self.steps = 0
        self._lock = threading.Lock()
        self._joining: deque[DecodeSequence] = deque()
        self._samples = Samples(runner.sampler.vocab_size, runner.max_context, max_batch_size)
        self._in_flight: _InFlight | None = None
        self._suspects: list[StepPlan] = []  # plans whose launch or completion is being tried
        self._held: StepTokens | None = None  # ends that wait for the step in flight
        self._held_rows: list[int] = []
        self._completed_at = 0.0

    @property
    def running(self) -> int:
        """Samples that step, and those that join with the next step."""
        return len(self._samples) + len(self._joining)

    def add(self, sequences: Sequence[DecodeSequence]) -> None:
        """Lets samples join with the next step."""
        with self._lock:
            self._joining.extend(sequences)
        self.on_work()

    def remove(self, handle: int, sample_index: int | None = None) -> int:
        """Takes a request, or one sample of it, out. -> samples that left.

        Waits for the step in flight when it has such a sample, and reports that step; afterwards no step touches their
        blocks, neither one that runs nor a later one.
        """
        self._admit()
        leaving = self._samples.rows_of(handle, sample_index)
        if any(self._samples.place[row] >= 0 for row in leaving):
            try:
                self.drain()
            except Exception as error:
                log.exception("the step in flight failed while a sample was removed")
                self.on_error(error)
            leaving = self._samples.rows_of(handle, sample_index)
        self._samples.leave(leaving)
        return len(leaving)

    def drain(self) -> None:
        """Waits for the step in flight, if there is one, and reports it."""
        step, self._in_flight = self._in_flight, None
        if step is not None:
            self._samples.place[step.plan.rows] = -1
            self._complete(step)

    def has_work(self) -> bool:
        """Whether anyone steps or wants to."""
        return bool(len(self._samples)) or bool(self._joining) or self._in_flight is not None

    def run_once(self) -> None:
        """Launches a step and completes one: the same one, or with steps_ahead the one before it."""
        self._admit()
        if self._next_needs_tokens():
            self.drain()
        before, plan = self._in_flight, self.plan()
        if plan is not None:
            self._suspects = [plan]
            began = time.perf_counter()
            drawn = self.launch(plan, None if before is None else before.drawn)
            self._suspects = []
            self._fly(before, _InFlight(plan, drawn, began))
            if before is not None:
                self._complete(before)
            if not self.steps_ahead:
                self.drain()
        elif before is not None:
            self.drain()

    def plan(self) -> StepPlan | None:
        """Who steps next, as if the step in flight had completed; None when nobody is left. Moves them on."""
        samples = self._samples
        rows = samples.turn[: self.max_batch_size]
        if not len(rows):
            return None
        lens = samples.context_len[rows]
        positions = lens - samples.prompt_len[rows]
        plan = StepPlan(
            rows=rows,
            positions=positions,
            token_ids=samples.last_token[rows],
            sources=samples.place[rows],
            slots=samples.tables.slots(rows, lens - 1, self.runner.block_size),
            context_lens=lens,
            tables=samples.tables,
        )
        samples.context_len[rows] += 1
        going_on = rows[positions < samples.last_position[rows]]
        samples.turn = np.concatenate((samples.turn[len(rows) :], going_on))
        return plan

    def launch(self, plan: StepPlan, before: Drawn | None) -> Drawn:
        """Queues the forward and the draw; on a CPU they have happened when it returns."""
        return self.runner.launch(plan, self._samples.sampling, before)

    def completed(self, plan: StepPlan, duration_s: float) -> None:
        """For measuring: called with each step's time on the device, or rather since the end of the step before."""

    def on_error(self, error: Exception) -> None:
        """A step failed: its samples leave and their owner hears of it. What the step before it made is reported first."""
        suspects, self._suspects = self._suspects, []
        if not suspects:
            return  # a listener raised; no step is lost
        self.runner.settle()
        if self._in_flight is not None and self._in_flight.plan not in suspects:
            healthy = self._in_flight.plan
            try:
                self.drain()
            except Exception:
                log.exception("the step before a failed one could not be completed")
                suspects += [healthy] if self._suspects else []
        step, self._in_flight, self._suspects = self._in_flight, None, []
        if step is not None:
            self._samples.place[step.plan.rows] = -1
        held, held_rows = self._release_held()
        lost = np.unique(np.concatenate([plan.rows for plan in suspects])).tolist()
        lost = [row for row in lost if row in self._samples.by_row and row not in held_rows]
        sequences = [self._samples.by_row[row] for row in lost]
        self._samples.leave([*held_rows, *lost])
        try:
            if held is not None:
                self.on_step(held)
        finally:
            self._tell_failure(sequences, error)

    # --- inside ---

    def _next_needs_tokens(self) -> bool:
        """Whether the next step cannot be launched before the tokens in flight are known: penalties count them."""
        samples = self._samples
        if self._in_flight is None or not samples.sampling.token_counts or not self.runner.counts_on_host:
            return False
        rows = samples.turn[: self.max_batch_size]
        return bool(((samples.sampling.needs[rows] & Need.PENALTY != 0) & (samples.place[rows] >= 0)).any())

    def _fly(self, before: _InFlight | None, step: _InFlight) -> None:
        if before is not None:
            self._samples.place[before.plan.rows] = -1
        self._samples.place[step.plan.rows] = np.arange(len(step.plan.rows))
        self._in_flight = step

    def _complete(self, step: _InFlight) -> None:
        """Reads a step's tokens and reports them, but for ends that have to wait for the step in flight."""
        self._suspects = [step.plan] + ([] if self._in_flight is None else [self._in_flight.plan])
        sampled = step.drawn.wait()
        self.steps += 1
        now = time.perf_counter()
        self.completed(step.plan, now - max(step.began, self._completed_at))
        self._completed_at = now
        tokens, rows = self._made(step.plan, sampled)
        self._suspects = []  # from here on nothing of the step can be lost: what raises now is a listener
        ends = tokens.reasons != 0
        waits = ends & (self._samples.place[rows] >= 0)
        told, told_rows = self._release_held()
        if waits.any():
            self._hold(tokens.take(np.flatnonzero(waits)), rows[waits])
            tokens, rows, ends = tokens.take(np.flatnonzero(~waits)), rows[~waits], ends[~waits]
        self._samples.leave([*told_rows, *rows[ends].tolist()])
        tokens = tokens if told is None else told + tokens
        if len(tokens):
            self.on_step(tokens)

    def _made(self, plan: StepPlan, sampled: Sampled) -> tuple[StepTokens, np.ndarray]:
        """The step's tokens and their rows, without samples that had ended before it."""
        samples, rows, positions, token_ids = self._samples, plan.rows, plan.positions, sampled.token_ids
        samples.last_token[rows] = token_ids
        samples.sampling.observe(rows, token_ids)
        logprobs = sampled.logprobs
        if logprobs is not None:
            asked = samples.sampling.needs[rows] & Need.LOGPROB != 0
            logprobs = np.where(asked, logprobs, np.float32(np.nan))
        reasons = samples.reasons(rows, positions, token_ids)
        columns = (samples.handle[rows], samples.sample_index[rows], positions, token_ids, reasons)
        tokens = StepTokens(*columns, logprobs, sampled.top)
        over = samples.ended[rows]
        if over.any():
            tokens, rows = tokens.take(np.flatnonzero(~over)), rows[~over]
        return tokens, rows

    def _hold(self, tokens: StepTokens, rows: np.ndarray) -> None:
        self._held, self._held_rows = tokens, rows.tolist()
        self._samples.ended[rows] = True
        self._samples.rest(rows)

    def _release_held(self) -> tuple[StepTokens | None, list[int]]:
        held = self._held, self._held_rows
        self._held, self._held_rows = None, []
        return held

    def _admit(self) -> None:
        while self._joining:
            with self._lock:
                sequence = self._joining.popleft()
            try:
                self._samples.join(sequence)
            except Exception as error:
                self._tell_failure([sequence], error)

    def _tell_failure(self, sequences: list[DecodeSequence], error: Exception) -> None:
        if sequences and self.on_failure is not None:
            self.on_failure(sequences, error)
