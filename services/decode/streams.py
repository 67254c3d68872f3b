"""Tokens on their way to routers: one numbered stream of columnar frames per router epoch.

A frame carries what one step (or several, when the loop was behind) produced for all requests of a router. Frames that were
sent are kept for a while, so that a connection which broke can go on after the last frame its router has seen. A router
that does not come back within the window, or comes back under a new epoch, has lost its requests here: `on_lost` says so.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from headrace.clock import Clock
from headrace.engine.request import SampledToken
from headrace.errors import HeadraceError, Overloaded, Unavailable
from headrace.observe import telemetry
from headrace.protocol import SampleEnd, SamplingParams, TokenFrame, TokenRecord, WorkerIdentity

KEPT_FRAMES = 4096
"""Sent frames kept for a resume, at most."""
KEPT_S = 15.0
"""Sent frames older than this are dropped."""
MAX_UNREAD_FRAMES = 1024
"""A reader further behind than this has stalled: its stream is broken, with that reason."""

_frames = telemetry.counter("headrace.stream.messages")
_tokens = telemetry.counter("headrace.stream.tokens")


class SampleOutput:
    """Gathers one sample's tokens until they are due: `interval` since the last send, or the sample's end."""

    __slots__ = ("_first_position", "_handle", "_interval", "_logprobs", "_sample_index", "_tokens", "_top")

    def __init__(self, handle: int, sample_index: int, interval: int, sampling: SamplingParams):
        self._handle, self._sample_index, self._interval = handle, sample_index, interval
        self._first_position = 0
        self._tokens: list[int] = []
        self._logprobs: list[float] | None = None if sampling.logprobs is None else []
        self._top: list[tuple[tuple[int, float], ...]] = []

    def add(self, token: SampledToken) -> bool:
        """Takes a token; whether the sample's tokens are due."""
        tokens = self._tokens
        if not tokens:
            self._first_position = token.position
        tokens.append(token.token_id)
        if self._logprobs is not None:
            self._logprobs.append(token.logprob or 0.0)
            self._top.append(token.top)
        return len(tokens) >= self._interval

    def take(self) -> TokenRecord:
        """What has gathered."""
        tokens, self._tokens = tuple(self._tokens), []
        if self._logprobs is None:
            return TokenRecord(self._handle, self._sample_index, self._first_position, tokens)
        logprobs, self._logprobs = tuple(self._logprobs), []
        top, self._top = tuple(self._top), []
        return TokenRecord(self._handle, self._sample_index, self._first_position, tokens, logprobs, top)


class _Connection:
    """One reader of a stream: the number of the last frame it has taken, and why it must stop."""

    def __init__(self, cursor: int):
        self.cursor = cursor
        self.news = asyncio.Event()
        self.ending: HeadraceError | None = None
        self.reads_on = True
        """False: stop at once; else the frames up to here are still delivered when `ending` is set."""

    def end(self, error: HeadraceError, *, reads_on: bool) -> None:
        """Makes the reader stop with `error`."""
        self.ending, self.reads_on = error, reads_on
        self.news.set()


class RouterStream:
    """The frames of one router epoch."""

    def __init__(self, router: WorkerIdentity, clock: Clock, on_broken: Callable[[], None]):
        self.router = router
        self._clock, self._on_broken = clock, on_broken
        self._kept: deque[tuple[float, TokenFrame]] = deque()
        self._last = 0
        self._records: list[TokenRecord] = []
        self._ends: list[SampleEnd] = []
        self.connection: _Connection | None = None
        self.broken_at: float | None = None

    @property
    def is_open(self) -> bool:
        """A reader is connected."""
        return self.connection is not None

    def add_record(self, record: TokenRecord) -> None:
        """For the next frame."""
        self._records.append(record)

    def add_end(self, end: SampleEnd) -> None:
        """For the next frame."""
        self._ends.append(end)

    def flush(self) -> None:
        """Makes a frame of what was added."""
        if self._records or self._ends:
            frame = TokenFrame(self._last + 1, tuple(self._records), tuple(self._ends))
            _frames.add(1)
            _tokens.add(sum(len(record.token_ids) for record in self._records))
            self._records, self._ends = [], []
            self._append(frame)

    def can_resume(self, after_frame: int) -> bool:
        """Whether the router can have seen `after_frame` and every frame after `after_frame` is still here."""
        first_kept = self._kept[0][1].frame_number if self._kept else self._last + 1
        return first_kept <= after_frame + 1 <= self._last + 1

    def connect(self, after_frame: int) -> _Connection:
        """A reader that continues after a frame. It replaces the one that is connected.

        A new connection gets an empty frame at once: its router then knows that the stream is open.
        """
        if self.connection is not None:
            self.connection.end(Unavailable("another stream was opened under this epoch"), reads_on=False)
        self.connection, self.broken_at = _Connection(after_frame), None
        self._append(TokenFrame(self._last + 1))
        return self.connection

    def disconnect(self, connection: _Connection) -> None:
        """The reader has left: the window begins, unless another reader has taken its place."""
        if connection is self.connection:
            self.connection, self.broken_at = None, self._clock.now()
            self._on_broken()

    def frame_after(self, number: int) -> TokenFrame | None:
        """The next frame, None when there is none yet."""
        if number >= self._last:
            return None
        return self._kept[number + 1 - self._kept[0][1].frame_number][1]

    def _append(self, frame: TokenFrame) -> None:
        self._last = frame.frame_number
        self._kept.append((self._clock.now(), frame))
        if self.connection is not None:
            self.connection.news.set()
            self._check_progress(self.connection)
        self._trim()

    def _check_progress(self, connection: _Connection) -> None:
        unread = self._last - connection.cursor
        if unread > MAX_UNREAD_FRAMES:
            # It may be stuck in a write that never ends: the break does not wait for it to notice.
            connection.end(
                Overloaded(f"the reader left {unread} frames unread", reason="READER_STALLED"), reads_on=False
            )
            self.disconnect(connection)

    def _trim(self) -> None:
        """Drops old frames, never one that the connected reader has not taken."""
        oldest_useful = self._clock.now() - KEPT_S
        taken = self._last if self.connection is None else self.connection.cursor
        while self._kept and self._kept[0][1].frame_number <= taken:
            if self._kept[0][0] >= oldest_useful and len(self._kept) <= KEPT_FRAMES:
                break
            self._kept.popleft()


class TokenStreams:
    """All routers' streams.

    on_lost(router_epoch, error)  must end everything that belongs to a lost router
    on_broken()                   a stream broke: somebody must call `lapse` from time to time until `any_broken` is false
    """

    def __init__(
        self,
        clock: Clock,
        resume_s: float,
        on_lost: Callable[[str, HeadraceError], None],
        on_broken: Callable[[], None],
    ):
        self._clock, self._resume_s, self._on_lost, self._on_broken = clock, resume_s, on_lost, on_broken
        self._by_epoch: dict[str, RouterStream] = {}
        self._closing: HeadraceError | None = None

    def find(self, router_epoch: str) -> RouterStream | None:
        """The stream of a router epoch, connected or within its window."""
        return self._by_epoch.get(router_epoch)

    @property
    def num_open(self) -> int:
        """Streams with a reader."""
        return sum(stream.is_open for stream in self._by_epoch.values())

    @property
    def any_broken(self) -> bool:
        """A stream is within its window."""
        return any(not stream.is_open for stream in self._by_epoch.values())

    async def read(self, router: WorkerIdentity, resume_after_frame: int) -> AsyncGenerator[TokenFrame, None]:
        """Frames as they come, without an end. Raises Unavailable when it is replaced or this rank stops, Overloaded when
        the reader stalls."""
        stream = self._open(router, resume_after_frame)
        connection = stream.connect(resume_after_frame)
        if self._closing is not None:
            connection.end(self._closing, reads_on=True)
        try:
            async for frame in _frames_of(stream, connection):
                yield frame
        finally:
            stream.disconnect(connection)

    def lapse(self) -> None:
        """Forgets routers whose stream has been broken for too long, with everything of theirs."""
        now = self._clock.now()
        for epoch, stream in list(self._by_epoch.items()):
            if stream.broken_at is not None and stream.broken_at + self._resume_s <= now:
                del self._by_epoch[epoch]
                self._on_lost(epoch, Unavailable("the router's token stream did not come back"))

    def close(self, error: HeadraceError) -> None:
        """Ends all streams with `error` after their last frame."""
        self._closing = error
        for stream in self._by_epoch.values():
            stream.flush()
            if stream.connection is not None:
                stream.connection.end(error, reads_on=True)

    def _open(self, router: WorkerIdentity, resume_after_frame: int) -> RouterStream:
        for epoch, other in list(self._by_epoch.items()):
            if other.router.address == router.address and epoch != router.epoch:
                self._drop(other, "a new process answers at the router's address")
        stream = self._by_epoch.get(router.epoch)
        if stream is not None and not (resume_after_frame and stream.can_resume(resume_after_frame)):
            self._drop(stream, "the stream began anew")
            stream = None
        if stream is None:
            if resume_after_frame:
                raise Unavailable(f"frame {resume_after_frame + 1} is not here any more", reason="STREAM_LOST")
            stream = self._by_epoch[router.epoch] = RouterStream(router, self._clock, self._on_broken)
        return stream

    def _drop(self, stream: RouterStream, why: str) -> None:
        del self._by_epoch[stream.router.epoch]
        if stream.connection is not None:
            stream.connection.end(Unavailable(why), reads_on=False)
        self._on_lost(stream.router.epoch, Unavailable(why))


async def _frames_of(stream: RouterStream, connection: _Connection) -> AsyncIterator[TokenFrame]:
    while True:
        if connection.ending is not None and not connection.reads_on:
            raise connection.ending
        frame = stream.frame_after(connection.cursor)
        if frame is not None:
            yield frame
            connection.cursor = frame.frame_number
        elif connection.ending is not None:
            raise connection.ending
        else:
            connection.news.clear()
            await connection.news.wait()
