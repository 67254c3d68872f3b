"""Messages between the links of the ranks and one reader: bounded in bytes, because a reader may stall."""

from __future__ import annotations

import asyncio
from collections import deque

from headrace.errors import HeadraceError, Overloaded
from headrace.protocol.inference import GenerateEvent

_EVENT_BYTES, _DELTA_BYTES, _TOKEN_BYTES, _CHARACTER_BYTES, _LOGPROB_BYTES, _TOP_BYTES = 64, 32, 4, 4, 16, 12


def event_bytes(event: GenerateEvent) -> int:
    """What a message takes on the wire at most, nearly: text counts as if every character took four bytes."""
    size = _EVENT_BYTES
    for delta in event.deltas:
        size += _DELTA_BYTES + _TOKEN_BYTES * len(delta.token_ids) + _CHARACTER_BYTES * len(delta.text)
        if delta.logprobs:
            size += sum([_LOGPROB_BYTES + _TOP_BYTES * len(x.top) for x in delta.logprobs])
    return size


class Outbox:
    """What one request has to say. `unread_bytes` is its present size."""

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._events: deque[tuple[GenerateEvent, int]] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._closed = False
        self._error: HeadraceError | None = None
        self.unread_bytes = 0

    def put(self, event: GenerateEvent) -> None:
        """Raises Overloaded when the reader has left more than `max_bytes` unread before this message."""
        if self.unread_bytes >= self._max_bytes:
            raise Overloaded(f"reader stalled: {self.unread_bytes} bytes unread", reason="READER_STALLED")
        size = event_bytes(event)
        self._events.append((event, size))
        self.unread_bytes += size
        if self._reader is not None:
            self._wake()

    def close(self, last: GenerateEvent | None = None, error: HeadraceError | None = None) -> None:
        """No more messages but `last`; what was put is still read, then `error` is raised. Only the first close counts."""
        if not self._closed:
            self._closed, self._error = True, error
            if last is not None:
                self._events.append((last, 0))
            self._wake()

    async def next(self) -> GenerateEvent | None:
        """The next message, None after the last. A stalled reader's error comes at once, without the unread ones."""
        while True:
            if self._error is not None and self._error.reason == "READER_STALLED":
                raise self._error
            if self._events:
                event, size = self._events.popleft()
                self.unread_bytes -= size
                return event
            if self._closed:
                if self._error is not None:
                    raise self._error
                return None
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    def _wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)
