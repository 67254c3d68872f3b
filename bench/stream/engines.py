"""Engines that compute nothing: tokens at a set pace, every id a pure function of its position. No torch.

A request names its pace itself: its seed is the time of its steps in microseconds, so that one mesh serves every part of the
bench. The tokens of a step are handed over when the event loop has taken those of the step before, as a device's time between
two steps would let it: at any pace, an interval of one token is one message a token.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence

from headrace.engine.request import DecodeSequence, PrefillJob, SampledToken, finish_reason
from headrace.errors import HeadraceError, InternalError
from headrace.protocol.common import TransferBackend
from headrace.protocol.decode import TargetDescriptor
from headrace.protocol.prefill import FirstToken
from headrace.transfer.base import RowRun

FIRST_TOKEN_ID = 304
TOKEN_IDS = 48
"""Ordinary pieces of words in the shipped tokenizer, none of them special."""
LOOP_TURNS = 4
"""Turns of the event loop in which a step's tokens become messages."""


def token_at(position: int) -> int:
    """The token at a position of any sample's output."""
    return FIRST_TOKEN_ID + position % TOKEN_IDS


def _stands() -> None:
    """Rows that nobody computes are there at once."""


class MockPrefill:
    """A prefill core's Batcher: every prompt is computed as soon as its thread gets to it."""

    def __init__(self, num_layers: int, max_context_tokens: int):
        self.queued_tokens = 0
        self.batches = 0
        self.completed_layers = 0
        self.pending_batches = 0
        self._num_layers, self._max_context = num_layers, max_context_tokens
        self._jobs: queue.SimpleQueue[PrefillJob | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the jobs that wait."""
        self._jobs.put(None)
        self._thread.join(1.0)

    @property
    def thread_id(self) -> int | None:
        """The kernel's number of the engine thread, once it has started."""
        return self._thread.native_id

    def add(self, job: PrefillJob) -> None:
        """As Batcher."""
        self._jobs.put(job)

    def cancel(self, key: str) -> bool:
        """As Batcher: a job that was added always ends by itself, at once."""
        return False

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self.batches += 1
            try:
                self._compute(job)
            except Exception as error:
                job.on_error(error if isinstance(error, HeadraceError) else InternalError(str(error)))

    def _compute(self, job: PrefillJob) -> None:
        job.on_start()
        for layer in range(self._num_layers):
            job.on_layer(layer, _stands)
            self.completed_layers += 1
        pairs = zip(job.sample_indices, job.delivered_counts, strict=True)
        job.on_tokens([self._first(job, sample, position) for sample, position in pairs])

    def _first(self, job: PrefillJob, sample_index: int, position: int) -> FirstToken:
        token = token_at(position)
        length = job.prompt_length + position + 1
        reason = finish_reason(token, job.sampling, position, length, self._max_context)
        return FirstToken(sample_index, position, token, finish_reason=reason)


class MockDecode:
    """A decode core's DecodeEngine: one token a step for everyone, at the slowest pace that a sequence asks for."""

    def __init__(self, max_context_tokens: int):
        self.steps = 0
        self._max_context = max_context_tokens
        self._lock = threading.Condition()
        self._running: dict[tuple[int, int], tuple[DecodeSequence, int]] = {}
        self._stopped = False
        self._taken = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_step: Callable[[Sequence[SampledToken]], None] = lambda tokens: None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def connect(self, on_step: Callable[[Sequence[SampledToken]], None], on_failure: Callable) -> None:
        """As DecodeEngine; on the event loop. Steps never fail."""
        self._on_step, self._loop = on_step, asyncio.get_running_loop()
        self._thread.start()

    @property
    def thread_id(self) -> int | None:
        """The kernel's number of the engine thread, once it has started."""
        return self._thread.native_id

    @property
    def pending(self) -> int:
        """As DecodeEngine."""
        return min(1, len(self._running))

    def add(self, sequences: Sequence[DecodeSequence]) -> None:
        """As DecodeEngine."""
        with self._lock:
            for sequence in sequences:
                self._running[sequence.handle, sequence.sample_index] = sequence, len(sequence.output_token_ids)
            self._lock.notify()

    async def remove(self, handle: int, sample_index: int | None = None) -> None:
        """As DecodeEngine: there is no forward, and no block is ever touched."""
        with self._lock:
            for key in [key for key in self._running if key[0] == handle and sample_index in (None, key[1])]:
                del self._running[key]

    def stop(self) -> None:
        """Ends the thread."""
        with self._lock:
            self._stopped = True
            self._lock.notify()
        self._taken.set()

    def _run(self) -> None:
        began = time.monotonic()
        while (pace_s := self._wait_pace()) is not None:
            time.sleep(max(0.0, began + pace_s - time.monotonic()))
            began = time.monotonic()
            tokens = self._step()
            if tokens:
                self.steps += 1
                self._hand_over(tokens)

    def _wait_pace(self) -> float | None:
        """Seconds from the last step to the next, once something runs; None at the end."""
        with self._lock:
            self._lock.wait_for(lambda: self._running or self._stopped)
            if self._stopped:
                return None
            return max(sequence.sampling.seed for sequence, _ in self._running.values()) / 1e6

    def _step(self) -> list[SampledToken]:
        with self._lock:
            tokens = [self._next(sequence, position) for sequence, position in self._running.values()]
            for token in tokens:
                key = token.handle, token.sample_index
                if token.finish_reason:
                    del self._running[key]
                else:
                    self._running[key] = self._running[key][0], token.position + 1
            return tokens

    def _next(self, sequence: DecodeSequence, position: int) -> SampledToken:
        token = token_at(position)
        length = len(sequence.prompt_token_ids) + position + 1
        reason = finish_reason(token, sequence.sampling, position, length, self._max_context)
        return SampledToken(sequence.handle, sequence.sample_index, position, token, None, (), reason)

    def _hand_over(self, tokens: list[SampledToken]) -> None:
        assert self._loop is not None
        self._taken.clear()
        try:
            self._on_step(tokens)
            self._loop.call_soon_threadsafe(self._turn, LOOP_TURNS)
        except RuntimeError:  # the loop has closed
            self.stop()
        self._taken.wait()

    def _turn(self, left: int) -> None:
        if left:
            assert self._loop is not None
            self._loop.call_soon(self._turn, left - 1)
        else:
            self._taken.set()


class NoRows:
    """Both ends of a transfer of rows that nobody computed: a checksum says only which rows are meant."""

    def __init__(self, num_layers: int, num_blocks: int, block_size: int, row_bytes: int):
        stride = block_size * row_bytes
        sizes = (num_blocks * stride, stride, row_bytes, block_size, num_layers, num_blocks)
        self._descriptor = TargetDescriptor(TransferBackend.LOCAL, "mock", 0, *sizes)

    def descriptor(self) -> TargetDescriptor:
        """As TransferTarget."""
        return self._descriptor

    def fence(self) -> TargetDescriptor:
        """As TransferTarget."""
        return self._descriptor

    def push(self, target: TargetDescriptor, layer: int, runs: Sequence[RowRun]) -> int:
        """As TransferSource: bytes that would have been written."""
        return sum(run.num_rows for run in runs) * self._descriptor.row_bytes

    def begin_checksum(self, layer: int, blocks: Sequence[int], first_row: int, num_rows: int) -> Callable[[], int]:
        """As Rows of a prefill rank."""
        return lambda: _checksum(layer, first_row, num_rows)

    def flip_byte(self, layer: int, block: int, offset: int) -> None:
        """As Rows of a prefill rank; no row has bytes."""

    def layer_checksums(self, blocks: Sequence[int], first_row: int, num_rows: int) -> list[int]:
        """As Rows of a decode rank."""
        return [_checksum(layer, first_row, num_rows) for layer in range(self._descriptor.num_layers)]

    def copy_rows(self, source: int, target: int, num_rows: int) -> None:
        """As Rows of a decode rank; no row has bytes."""


def _checksum(layer: int, first_row: int, num_rows: int) -> int:
    return (layer << 48) | (first_row << 24) | num_rows
