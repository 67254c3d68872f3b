"""Which prompts run next: whole prompts in the order they came, up to a token budget. A prompt is never cut.

A batch goes through `plan` (which jobs, which tensors), `run` (the forward, layer by layer) and `finish` (first tokens,
callbacks). A callback that raises, or a cancel, concerns its own job only; a forward that fails concerns all of its batch.

On a GPU the forward has only been queued when `run` returns. So a layer is handed over with a `ready` that waits for its
rows, and no job hears of its end before the device has reached it: until then the forward may still write the job's blocks.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from headrace.engine.batches import plan_prefill
from headrace.engine.request import PrefillJob, finish_reason
from headrace.engine.runner import Runner
from headrace.engine.sampler import SamplingTable
from headrace.engine.streams import event_now
from headrace.errors import Cancelled, InvalidRequest
from headrace.model.base import ForwardBatch
from headrace.protocol.common import FinishReason
from headrace.protocol.prefill import FirstToken

log = logging.getLogger(__name__)


@dataclass
class _Running:
    """A job in the batch that computes now. `failure` is set once; then it hears of nothing but that."""

    job: PrefillJob
    failure: Exception | None = None


@dataclass
class PrefillPlan:
    """A batch ready to run. `first_rows[i]` is the logits row of job i's first sequence."""

    running: list[_Running]
    batch: ForwardBatch
    first_rows: list[int]


class PrefillBatcher:
    """A WorkSource over one Runner. `add` and `cancel` may be called from any thread, the rest by the engine thread."""

    def __init__(self, runner: Runner, max_batch_tokens: int):
        self.runner = runner
        self.max_batch_tokens = max_batch_tokens
        self.on_work = lambda: None
        self.batches = 0
        self.queued_tokens = 0
        self._lock = threading.Lock()
        self._queue: deque[PrefillJob] = deque()
        self._running: list[_Running] = []
        self._counted_layers = 0
        self._awaited_layers: deque[torch.cuda.Event] = deque(maxlen=4096)  # nobody may ask for a long time

    @property
    def completed_layers(self) -> int:
        """Layers of all batches that have been computed, not only queued on a device. Ask from one thread only."""
        while self._awaited_layers and self._awaited_layers[0].query():
            self._awaited_layers.popleft()
            self._counted_layers += 1
        return self._counted_layers

    @property
    def pending_batches(self) -> int:
        """Batches whose end is awaited: the one that computes, and one more while prompts wait for theirs."""
        return bool(self._running) + bool(self._queue)

    @property
    def queued_jobs(self) -> int:
        """Jobs that have not started."""
        return len(self._queue)

    @property
    def running_jobs(self) -> int:
        """Jobs in the batch that computes now."""
        return len(self._running)

    def add(self, job: PrefillJob) -> None:
        """Queues a job and says so to the engine thread. Raises InvalidRequest for a token that the model does not have: its
        forward would fail, and with it its neighbours'."""
        vocab_size = self.runner.sampler.vocab_size
        for sequence in job.sequences:
            if min(sequence.token_ids) < 0 or max(sequence.token_ids) >= vocab_size:
                raise InvalidRequest(f"prompt_token_ids: must be 0 to {vocab_size - 1}", field="prompt_token_ids")
        with self._lock:
            self._queue.append(job)
            self.queued_tokens += job.num_computed
        self.on_work()

    def cancel(self, key: str) -> bool:
        """True: the job had not started, is forgotten, and hears nothing. False: unknown, done, or running.

        A running one hears no more of layers from now on; `on_error(Cancelled)` comes when its forward has ended.
        """
        with self._lock:
            for place, job in enumerate(self._queue):
                if job.key == key:
                    del self._queue[place]
                    self.queued_tokens -= job.num_computed
                    return True
            for running in self._running:
                if running.job.key == key and running.failure is None:
                    running.failure = Cancelled("cancelled while prefilling")
            return False

    def has_work(self) -> bool:
        """Whether a job waits."""
        return bool(self._queue)

    def run_once(self) -> None:
        """One batch from queue to first tokens."""
        plan = self.plan()
        if plan is not None:
            self.finish(plan, self.run(plan))

    def plan(self) -> PrefillPlan | None:
        """Takes jobs off the queue and packs them; None when nothing waits."""
        with self._lock:
            self._running = [_Running(job) for job in self._take()]
        if not self._running:
            return None
        for running in self._running:
            self._guarded(running, running.job.on_start)
        sequences = [sequence for running in self._running for sequence in running.job.sequences]
        counts = [len(running.job.sequences) for running in self._running]
        batch = self.runner.to_batch(plan_prefill(sequences, self.runner.block_size))
        return PrefillPlan(self._running, batch, np.cumsum([0, *counts[:-1]]).tolist())

    def run(self, plan: PrefillPlan) -> torch.Tensor:
        """[num_sequences, vocab] logits of each sequence's last token."""

        def on_layer(layer: int, ready: Callable[[], None] | None = None) -> None:
            ready = ready or _ready_now(self.runner.pool.rows.device)
            self._count_layer()
            for running in plan.running:
                if running.failure is None:
                    self._guarded(running, running.job.on_layer, layer, ready)

        return self.runner.forward(plan.batch, "prefill", on_layer)

    def finish(self, plan: PrefillPlan, logits: torch.Tensor) -> None:
        """Draws every sample's token, waits for the forward, and calls back."""
        answers = self._sample(plan, logits)
        _ready_now(
            self.runner.pool.rows.device
        )()  # sampling has waited for it already, unless nothing was to be sampled
        self.batches += 1
        with self._lock:
            self._running = []
        for running, tokens in zip(plan.running, answers, strict=True):
            if running.failure is None:
                self._guarded(running, running.job.on_tokens, tokens)
            if running.failure is not None:
                _report(running.job, running.failure)

    def on_error(self, error: Exception) -> None:
        """The forward failed: every job of the batch hears of it, once the device has ended what was queued of it."""
        try:
            _ready_now(self.runner.pool.rows.device)()
        except RuntimeError:
            log.exception("the device has failed")  # nothing runs on it any more
        with self._lock:
            failed, self._running = self._running, []
        for running in failed:
            _report(running.job, running.failure or error)

    def _count_layer(self) -> None:
        event = event_now(self.runner.pool.rows.device)
        if event is None:
            self._counted_layers += 1
        else:
            self._awaited_layers.append(event)

    def _take(self) -> list[PrefillJob]:
        taken: list[PrefillJob] = []
        num_tokens = 0
        while self._queue and (not taken or num_tokens + self._queue[0].num_computed <= self.max_batch_tokens):
            job = self._queue.popleft()
            num_tokens += job.num_computed
            taken.append(job)
        self.queued_tokens -= num_tokens
        return taken

    def _guarded(self, running: _Running, callback, *args) -> None:
        try:
            callback(*args)
        except Exception as error:
            running.failure = running.failure or error

    def _sample(self, plan: PrefillPlan, logits: torch.Tensor) -> list[list[FirstToken]]:
        table = SamplingTable(self.runner.sampler.vocab_size)
        drawn: list[list[tuple[int, int]]] = []  # per job: (row of the table, position)
        logit_rows: list[int] = []
        for running, first_row in zip(plan.running, plan.first_rows, strict=True):
            drawn.append([])
            if running.failure is not None or running.job.sampling.max_tokens < 1:
                continue
            start = len(logit_rows)
            self._guarded(running, _fill, running.job, first_row, table, logit_rows)
            if running.failure is None:
                drawn[-1] = list(zip(range(start, len(logit_rows)), running.job.delivered_counts, strict=True))
        if not logit_rows:
            return [[] for _ in plan.running]
        return self._draw(plan, logits, table, logit_rows, drawn)

    def _draw(self, plan, logits, table, logit_rows, drawn) -> list[list[FirstToken]]:
        positions = np.zeros(len(logit_rows), np.int64)
        for entries in drawn:
            for row, position in entries:
                positions[row] = position
        chosen = logits[torch.tensor(logit_rows, device=logits.device)]
        sampled = self.runner.sample(chosen, table, np.arange(len(logit_rows)), positions)
        return [
            [self._first_token(running.job, place, entry, sampled) for place, entry in enumerate(entries)]
            for running, entries in zip(plan.running, drawn, strict=True)
        ]

    def _first_token(self, job: PrefillJob, place: int, entry: tuple[int, int], sampled) -> FirstToken:
        row, position = entry
        token_id = int(sampled.token_ids[row])
        total = job.prompt_length + position + 1
        reason = finish_reason(token_id, job.sampling, position, total, self.runner.max_context)
        logprob = 0.0 if sampled.logprobs is None else float(sampled.logprobs[row])
        return FirstToken(
            job.sample_indices[place], position, token_id, logprob, sampled.top.get(row, ()), FinishReason(reason)
        )


def _ready_now(device: torch.device) -> Callable[[], None]:
    """Waits, in any thread, for all that this thread has queued on the device by now."""
    event = event_now(device)
    return _no_wait if event is None else event.synchronize


def _no_wait() -> None:
    """Of a CPU, where a call has happened when it returns."""


def _report(job: PrefillJob, error: Exception) -> None:
    try:
        job.on_error(error)
    except Exception:
        log.exception("a job could not hear of its failure")


def _fill(job: PrefillJob, first_row: int, table: SamplingTable, logit_rows: list[int]) -> None:
    """A row of `table` and of `logit_rows` for each sample of the job."""
    own = {sequence.sample_index: place for place, sequence in enumerate(job.sequences)}
    start, rows = len(logit_rows), []
    for place, sample_index in enumerate(job.sample_indices):
        sequence = job.sequences[own.get(sample_index, 0)]
        prompt, output = sequence.token_ids[: job.prompt_length], sequence.token_ids[job.prompt_length :]
        table.put(start + place, job.sampling, sample_index, prompt, output)
        rows.append(first_row + own.get(sample_index, 0))
    logit_rows.extend(rows)
