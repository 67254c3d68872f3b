"""From sampled tokens to frames: the only code of this service that runs once per token.

The engine thread posts each step here (`on_step` costs it an append and one wake-up of the loop). The loop gathers each
sample's tokens, hands what is due to the router's link, and reports samples that ended. What cannot be handled ends the requests
it belongs to: a token is never dropped and the request left running.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from headrace.clock import Clock
from headrace.engine.request import DecodeSequence, SampledToken
from headrace.errors import HeadraceError, InternalError
from headrace.observe import logs
from headrace.protocol.common import FinishReason, Stage
from headrace.protocol.decode import SampleEnd
from services.decode.request import Request
from services.decode.running import RunningRequest, SampleOutput, Step
from services.decode.tokens import RouterTokens, TokenLinks

log = logs.get(__name__)


class Listener(Protocol):
    """Who must know what became of the batch; `engine_handle` names a request there."""

    def sample_ended(self, engine_handle: int, sample_index: int) -> None:
        """It ended by itself and has left the batch."""

    def requests_lost(self, engine_handles: Iterable[int], reason: str, error: HeadraceError) -> None:
        """They cannot go on here."""


class Outputs:
    """All running requests by engine handle. `connect` comes before the first step."""

    def __init__(self, clock: Clock, links: TokenLinks, chunk: int):
        self._clock, self._links, self._chunk = clock, links, chunk
        self._listener: Listener
        self._running: dict[int, RunningRequest] = {}
        self._steps: deque[Step] = deque()
        self._last_step = Step(0, 0.0, 0.0, ())
        self._stepped = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def connect(self, listener: Listener) -> None:
        """Who hears of ends and losses."""
        self._listener = listener

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
            self._loop.call_soon_threadsafe(self._fail, handles, "ENGINE_FAILED", error)

    # --- loop ---

    def begin(self, request: Request, arrived: float, now: float, samples: dict[int, SampleOutput]) -> None:
        """Its tokens are expected from now on."""
        link = self._links.find(request.router_epoch)
        assert link is not None, "a router's requests end with its link"
        self._running[request.engine_handle] = RunningRequest(request, link, arrived, now, samples)

    def samples(self, handle: int) -> set[int]:
        """Samples of a handle that step; empty when it does not run."""
        running = self._running.get(handle)
        return set(running.samples) if running is not None else set()

    def drop(self, handle: int, sample_index: int | None = None) -> bool:
        """Ignores what still comes for a handle, or one sample of it. False when it was not expected."""
        if sample_index is None:
            return self._running.pop(handle, None) is not None
        running = self._running.get(handle)
        return running is not None and running.samples.pop(sample_index, None) is not None

    def report_loss(self, request: Request, reason: str) -> None:
        """Tells the router that an attempt is lost here. Tokens that wait for their interval go first, so that the next attempt
        need not compute them."""
        link = self._links.find(request.router_epoch)
        if link is None:
            return
        running = self._running.get(request.engine_handle)
        samples = running.samples if running is not None else {}
        try:
            gathered = [record for output in samples.values() if (record := output.take()).token_ids]
        except Exception as error:  # they are what is broken
            log.error("gathered tokens are lost with their request", error=error, request_id=request.name)
            gathered = []
        for record in gathered:
            link.add_record(record)
        for sample in samples or [s for s in request.command.sample_indices if s not in request.dropped]:
            link.add_end(SampleEnd(request.command.handle, sample, FinishReason.NONE, reason))
        link.flush()

    async def run(self) -> None:
        """Handles steps as they come, for good."""
        while True:
            await self._stepped.wait()
            self._stepped.clear()
            try:
                await self._handle_waiting_steps()
            except Exception as error:
                log.error("requests that are lost could not be ended", error=error)

    async def _handle_waiting_steps(self) -> None:
        """All steps that have gathered become at most one frame a router."""
        touched: set[RouterTokens] = set()
        while self._steps:
            step = self._steps.popleft()
            try:
                for first in range(0, len(step.tokens), self._chunk):
                    if first:
                        await asyncio.sleep(0)
                    for token in step.tokens[first : first + self._chunk]:
                        self._take(step, token, touched)
            except Exception as error:  # the step itself cannot be read: whose tokens it has is not known
                self._fail(list(self._running), "OUTPUT_FAILED", error)
        for link in touched:
            link.flush()

    def _take(self, step: Step, token: SampledToken, touched: set[RouterTokens]) -> None:
        running = self._running.get(token.handle)
        output = running.samples.get(token.sample_index) if running is not None else None
        if running is None or output is None:
            return  # released meanwhile
        try:
            running.stepped(step)
            is_due = output.add(token)
            if not is_due and token.finish_reason is FinishReason.NONE:
                return
            touched.add(running.link)
            running.link.add_record(output.take())
            if token.finish_reason is not FinishReason.NONE:
                self._end(running, token)
        except Exception as error:
            self._fail((token.handle,), "OUTPUT_FAILED", error)

    def _end(self, running: RunningRequest, token: SampledToken) -> None:
        del running.samples[token.sample_index]
        stages: tuple[Stage, ...] = ()
        if not running.samples:
            self._running.pop(token.handle, None)
            stages = running.stages()
        handle = running.request.command.handle
        end = SampleEnd(handle, token.sample_index, token.finish_reason, "", stages, token.position + 1)
        running.link.add_end(end)
        self._listener.sample_ended(token.handle, token.sample_index)

    def _fail(self, handles: Iterable[int], reason: str, error: Exception) -> None:
        handles = list(handles)
        log.error("requests are lost", error=error, reason=reason, requests=len(handles))
        what = (
            "a decode step failed" if reason == "ENGINE_FAILED" else "the output of a decode step could not be handled"
        )
        self._listener.requests_lost(handles, reason, InternalError(what, retryable=True))
