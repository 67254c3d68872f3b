"""One token stream per decode rank: frames come in numbered, records go to the attempt that their handle names.

A broken stream resumes after its last frame for `resume_s`; then, or when the rank says that it knows the stream no
longer, it is lost: every attempt on it fails over, and the stream begins anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from headrace.clock import Clock
from headrace.errors import Cancelled, DeadlineExceeded, HeadraceError, InternalError, Overloaded, Unavailable
from headrace.observe import logs, telemetry
from headrace.protocol import SampleEnd, TokenFrame, TokenRecord, WorkerIdentity

log = logs.get(__name__)

_RETRY_S = 0.05
_MAX_RETRY_S = 1.0
_SETTLED_S = 1.0
"""A stream that stayed open so long, or brought a frame, was up: its next break starts a new count."""


class TokenSink(Protocol):
    """An attempt, as seen by the stream. Called on the loop, must not block."""

    def on_record(self, record: TokenRecord) -> None: ...

    def on_end(self, end: SampleEnd) -> None: ...

    def on_frame_end(self) -> None: ...

    def on_lost(self, error: HeadraceError) -> None: ...


class TokenSource(Protocol):
    """What opens a stream: DecodeClient."""

    def stream_tokens(
        self, router: WorkerIdentity, decode_epoch: str, resume_after_frame: int = 0
    ) -> AsyncIterator[TokenFrame]: ...


class TokenStream:
    """The stream of one decode rank's epoch. `run` is a task that outlives every attempt on that rank."""

    def __init__(
        self,
        source: TokenSource,
        router: WorkerIdentity,
        decode: WorkerIdentity,
        clock: Clock,
        resume_s: float,
        on_lost: Callable[[HeadraceError], None],
        on_open: Callable[[], None] = lambda: None,
    ):
        self._source, self._router, self._decode = source, router, decode
        self._clock, self._resume_s = clock, resume_s
        self._on_lost, self._on_open = on_lost, on_open
        self._sinks: dict[int, TokenSink] = {}
        self._last_frame = 0
        self._closed = False
        self.is_open = False
        """Whether the rank has answered, with its first (empty) frame, that it serves this stream; false while it resumes."""

    @property
    def open_handles(self) -> int:
        """Attempts that frames may still name."""
        return len(self._sinks)

    def attach(self, handle: int, sink: TokenSink) -> None:
        """Frames that name `handle` go to `sink` from now on."""
        self._sinks[handle] = sink

    def detach(self, handle: int) -> None:
        """Frames that name `handle` are dropped from now on, and counted."""
        self._sinks.pop(handle, None)

    def close(self, error: HeadraceError) -> None:
        """The rank is gone: fails every attempt. `run` must be cancelled by its owner."""
        self._closed = True
        self._fail_all(error)

    async def run(self) -> None:
        """Keeps the stream open until cancelled or closed."""
        down_since, wait_s = self._clock.now(), _RETRY_S
        while not self._closed:
            opened, frames = self._clock.now(), self._last_frame
            error = await self._follow()
            now = self._clock.now()
            if self._last_frame > frames or now - opened > _SETTLED_S:
                down_since, wait_s = now, _RETRY_S
            self.is_open = False
            resume_left_s = self._resume_s - (now - down_since)
            if not _may_resume(error) or resume_left_s <= 0:
                self._lose(error)
                resume_left_s = wait_s
            await self._clock.wait(min(wait_s, resume_left_s))
            wait_s = min(2 * wait_s, _MAX_RETRY_S)

    async def _follow(self) -> HeadraceError:
        """Reads one stream until it breaks; returns why it did."""
        stream = self._source.stream_tokens(self._router, self._decode.epoch, self._last_frame)
        try:
            async with contextlib.aclosing(stream) as frames:
                async for frame in frames:
                    if not self.is_open:
                        self.is_open = True
                        self._on_open()
                    self._on_frame(frame)
        except HeadraceError as error:
            return error
        return Unavailable("the decode rank ended the token stream")

    def _on_frame(self, frame: TokenFrame) -> None:
        if frame.frame_number <= self._last_frame:
            telemetry.counter("headrace.router.repeated_frames").add(1)
            return
        if frame.frame_number != self._last_frame + 1:
            raise InternalError(
                f"frame {frame.frame_number} follows frame {self._last_frame}", reason="TOKEN_FRAME_GAP"
            )
        self._last_frame = frame.frame_number
        touched: dict[int, TokenSink] = {}
        for record in frame.records:
            sink = self._sinks.get(record.handle)
            if sink is None:
                telemetry.counter("headrace.router.tokens_after_cancel").add(len(record.token_ids))
                continue
            touched[record.handle] = sink
            self._tell(sink, sink.on_record, record)
        for end in frame.ends:
            sink = self._sinks.get(end.handle)
            if sink is not None:
                touched[end.handle] = sink
                self._tell(sink, sink.on_end, end)
        for sink in touched.values():
            self._tell(sink, sink.on_frame_end)

    def _tell(self, sink: TokenSink, hears: Callable[..., None], *what: object) -> None:
        """One attempt that cannot take its tokens is lost alone; the stream and everyone else on it go on."""
        try:
            hears(*what)
        except Exception as error:
            log.error("an attempt could not take its tokens", error=error)
            sink.on_lost(InternalError(f"tokens could not be taken: {type(error).__name__}", reason="SINK_FAILED"))

    def _lose(self, error: HeadraceError) -> None:
        was_running = bool(self._last_frame or self._sinks)
        self._last_frame = 0
        self._fail_all(error)
        if was_running:
            log.warning("token stream lost", address=self._decode.address, reason=error.reason)
        self._on_lost(error)

    def _fail_all(self, error: HeadraceError) -> None:
        for sink in list(self._sinks.values()):
            sink.on_lost(error)


def _may_resume(error: HeadraceError) -> bool:
    """A transport error or our own slowness may pass; a refusal (old epoch, frames forgotten, frame gap) does not."""
    if error.reason == "STREAM_LOST":
        return False
    return isinstance(error, Unavailable | DeadlineExceeded | Overloaded | Cancelled)
