"""From sampled tokens to frames: the only code of this service that runs once per token.

The engine thread posts each step here (`on_step` costs it an append and one wake-up of the loop). The loop gathers each
sample's tokens, hands what is due to the router's stream, and reports samples that ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.clock import Clock
from headrace.engine.request import DecodeSequence, SampledToken
from headrace.observe import logs, telemetry
from headrace.protocol import FinishReason, ReserveCommand, SampleEnd, Stage, TokenRecord
from services.decode.streams import RouterStream, SampleOutput, TokenStreams

log = logs.get(__name__)


@dataclass(frozen=True)
class Step:
    """What one step produced; the engine hands over columns, and a SampledToken is made where the loop looks at it.

    Steps run back to back: one `began` when the one before `ended`, or later.
    """

    number: int
    began: float
    ended: float
    tokens: Sequence[SampledToken]


@dataclass
class RunningRequest:
    """A request that steps; times are readings of the clock, in seconds. `name` is the client's request id."""

    command: ReserveCommand
    name: str
    traceparent: str
    arrived: float
    committed: float
    samples: dict[int, SampleOutput]
    first_step_began: float = 0.0
    last_step: int = 0
    step_times: list[float] = field(default_factory=list)

    def stepped(self, step: Step) -> None:
        """A step made tokens for this request; counted once however many samples it has."""
        if step.number == self.last_step:
            return
        if not self.step_times:
            self.first_step_began = step.began
        self.last_step = step.number
        self.step_times.append(step.ended)

    def stages(self, wall_offset_s: float) -> tuple[Stage, ...]:
        """Where the time on this rank went since Commit arrived; emits the same as spans of the request's trace."""
        began = max(self.committed, self.first_step_began)
        ended = self.step_times[-1]
        gaps = np.diff(self.step_times) if len(self.step_times) > 1 else np.zeros(1)
        parent = self.traceparent
        common: dict[str, Any] = {"request_id": self.name, "attempt": self.command.attempt}
        telemetry.emit("decode.queue", wall_offset_s + self.committed, wall_offset_s + began, parent=parent, **common)
        telemetry.emit(
            "decode.generate",
            wall_offset_s + began,
            wall_offset_s + ended,
            parent=parent,
            steps=len(self.step_times),
            itl_mean_s=float(gaps.mean()),
            itl_p99_s=float(np.quantile(gaps, 0.99)),
            **common,
        )
        queue = Stage("decode.queue", self.committed - self.arrived, began - self.committed)
        generate = Stage("decode.generate", began - self.arrived, ended - began, tokens=len(self.step_times))
        return queue, generate


class Outputs:
    """All running requests by engine handle.

    on_sample_end(handle, sample_index)  a sample ended by itself and has left the batch
    on_lost(handles, error)              a failed step has thrown these requests out
    """

    def __init__(
        self,
        clock: Clock,
        streams: TokenStreams,
        chunk: int,
        on_sample_end: Callable[[int, int], None],
        on_lost: Callable[[set[int], Exception], None],
    ):
        self._clock, self._streams, self._chunk = clock, streams, chunk
        self._on_sample_end, self._on_lost = on_sample_end, on_lost
        self._running: dict[int, RunningRequest] = {}
        self._steps: deque[Step] = deque()
        self._last_step = Step(0, 0.0, 0.0, ())
        self._stepped = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    # --- engine thread ---

    def on_step(self, tokens: Sequence[SampledToken]) -> None:
        """One step's tokens."""
        last = self._last_step
        self._last_step = Step(last.number + 1, last.ended, self._clock.now(), tokens)
        self._steps.append(self._last_step)
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._stepped.set)

    def on_failure(self, sequences: Sequence[DecodeSequence], error: Exception) -> None:
        """A step failed and these sequences have left."""
        handles = {sequence.handle for sequence in sequences}
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._on_lost, handles, error)

    # --- loop ---

    def begin(self, handle: int, request: RunningRequest) -> None:
        """Tokens of this handle are expected from now on."""
        self._running[handle] = request

    def samples(self, handle: int) -> set[int]:
        """Samples of a handle that step; empty when it does not run."""
        request = self._running.get(handle)
        return set(request.samples) if request is not None else set()

    def take_gathered(self, handle: int) -> list[TokenRecord]:
        """Tokens that wait for their interval; sent before an error, so that the next attempt need not compute them."""
        request = self._running.get(handle)
        outputs = request.samples.values() if request is not None else ()
        return [record for output in outputs if (record := output.take()).token_ids]

    def drop(self, handle: int, sample_index: int | None = None) -> bool:
        """Ignores what still comes for a handle, or one sample of it. False when it was not expected."""
        if sample_index is None:
            return self._running.pop(handle, None) is not None
        request = self._running.get(handle)
        return request is not None and request.samples.pop(sample_index, None) is not None

    @property
    def num_running(self) -> int:
        """Requests that step."""
        return len(self._running)

    async def run(self) -> None:
        """Handles steps as they come, for good."""
        while True:
            await self._stepped.wait()
            self._stepped.clear()
            try:
                await self._handle_waiting_steps()
            except Exception as error:
                log.error("the output of a step could not be handled", error=error)

    async def _handle_waiting_steps(self) -> None:
        """All steps that have gathered become at most one frame a router."""
        touched: set[RouterStream] = set()
        while self._steps:
            step = self._steps.popleft()
            for first in range(0, len(step.tokens), self._chunk):
                if first:
                    await asyncio.sleep(0)
                self._take(step, step.tokens[first : first + self._chunk], touched)
        for stream in touched:
            stream.flush()

    def _take(self, step: Step, tokens: Sequence[SampledToken], touched: set[RouterStream]) -> None:
        for token in tokens:
            request = self._running.get(token.handle)
            output = request.samples.get(token.sample_index) if request is not None else None
            if request is None or output is None:
                continue  # released meanwhile
            request.stepped(step)
            is_due = output.add(token)
            if not is_due and token.finish_reason is FinishReason.NONE:
                continue
            stream = self._streams.find(request.command.router.epoch)
            if stream is None:
                continue  # its router is lost, and the request with it
            touched.add(stream)
            stream.add_record(output.take())
            if token.finish_reason is not FinishReason.NONE:
                self._end(request, token, stream)

    def _end(self, request: RunningRequest, token: SampledToken, stream: RouterStream) -> None:
        del request.samples[token.sample_index]
        stages: tuple[Stage, ...] = ()
        if not request.samples:
            self._running.pop(token.handle, None)
            stages = request.stages(time.time() - self._clock.now())
        stream.add_end(SampleEnd(request.command.handle, token.sample_index, token.finish_reason, "", stages))
        self._on_sample_end(token.handle, token.sample_index)
