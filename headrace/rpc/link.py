"""One end of a link: numbered items in both directions, kept until acknowledged, over one connection after another.

`Link` knows no transport. Whoever has a stream (`links.py`) makes a `Connection`, tells the link when it is greeted and when it is
over, hands it what arrives, and sends what `outgoing` yields. Everything runs on one loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.clock import Clock, Deadline
from headrace.errors import (
    DeadlineExceeded,
    HeadraceError,
    InternalError,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from headrace.observe import logs
from headrace.protocol.common import WorkerIdentity, WorkerInfo, WorkerProgress
from headrace.protocol.prefill import FirstTokens
from headrace.rpc.connection import Connection, LinkSettings
from headrace.rpc.kinds import Direction, LinkKind
from headrace.wire.common import progress_from_pb, progress_to_pb

log = logs.get(__name__)

MESSAGE_BYTES = 256 * 1024
"""Items of one message, unless a single item is larger."""
MAX_ITEM_BYTES = 15 * 1024 * 1024
"""Largest item: a channel takes messages of 16 MiB."""


class LinkHandler(Protocol):
    """What the owner of a link gives. All are called on the loop and must not block."""

    def on_item(self, link: Link, number: int, body: Any) -> None:
        """A command or event of the peer, in order. A HeadraceError that is raised becomes the answer."""

    def on_open(self, link: Link) -> None:
        """Connected, for the first time or again."""

    def on_broken(self, link: Link) -> None:
        """Silent or disconnected; it may still be resumed."""

    def on_progress(self, link: Link) -> None:
        """A beat of a worker came."""

    def on_lost(self, link: Link, error: HeadraceError) -> None:
        """Final. Everything that was asked has already been answered with LINK_LOST."""


@dataclass(slots=True)
class _Kept:
    """An item that the other side has not acknowledged."""

    number: int
    item: Any
    size: int
    deadline: Deadline | None


class Link:
    """One reliable, ordered, numbered channel between two epochs.

    `progress_now` says how this end is, for its beats. `info` and `progress` are the peer's, from its hello and last beat.
    """

    def __init__(
        self,
        kind: LinkKind,
        ours: Direction,
        theirs: Direction,
        own: WorkerIdentity,
        peer: WorkerIdentity,
        link_id: str,
        clock: Clock,
        settings: LinkSettings,
        progress_now: Callable[[], WorkerProgress] | None = None,
    ):
        self.kind, self.own, self.peer, self.link_id = kind, own, peer, link_id
        self.handler: LinkHandler
        self.info: WorkerInfo | None = None
        self.progress: WorkerProgress | None = None
        self.is_open = self.is_lost = False
        self.unacknowledged_bytes = 0
        self.acknowledged_through = 0
        self.received_through = 0
        self.broken_at = clock.now()
        """When its last connection ended, by the clock; while none is open."""
        self._ours, self._theirs = ours, theirs
        self._clock, self._settings, self._progress_now = clock, settings, progress_now
        self._number = 0
        self._waiting: deque[_Kept] = deque()
        self._sent: deque[_Kept] = deque()
        self._asked: dict[int, Callable[[Any], None]] = {}
        self._connection: Connection | None = None

    # --- for its owner -------------------------------------------------------------------------------------------------

    def send(
        self, body: object, *, deadline: Deadline | None = None, on_answer: Callable[[Any], None] | None = None
    ) -> int:
        """Queues a command or an event and returns its number; never blocks.

        `on_answer(body or error)` is called for every item that answers it; FirstTokens is not the last, everything else is. Raises
        Unavailable (LINK_LOST) on a lost link, and when this item is too much for a reader that has stalled.
        """
        return self._queue(body, 0, deadline, on_answer)

    def answer(self, number: int, body: object) -> None:
        """Answers the peer's command `number` with a value or a HeadraceError. Raises as `send`."""
        self._queue(body, number, None, None)

    async def ask(self, body: object, deadline: Deadline) -> Any:
        """Sends and waits for the last answer. Raises what was answered as an error, and DeadlineExceeded; a later answer is dropped."""
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def on_answer(said: object) -> None:
            if not answered.done() and not isinstance(said, FirstTokens):
                answered.set_result(said)

        late = DeadlineExceeded(f"{self.peer.address} did not answer in time")
        number = self.send(body, deadline=deadline, on_answer=on_answer)
        timer = self._clock.call_later(deadline.left_s(), lambda: on_answer(late))
        try:
            said = await answered
        finally:
            timer.cancel()
            self._asked.pop(number, None)
        if isinstance(said, HeadraceError):
            raise said
        return said

    def lose(self, error: HeadraceError) -> None:
        """Ends the link for good, at this end now and at the other when it hears. Safe to repeat."""
        if self.is_lost:
            return
        self.is_lost, self.is_open = True, False
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.end(error)
        self._waiting.clear()
        self._sent.clear()
        self.unacknowledged_bytes = 0
        asked, self._asked = self._asked, {}
        for on_answer in asked.values():
            self._call(on_answer, self._lost_error(error.message or error.reason))
        self._call(self.handler.on_lost, self, error)

    # --- for whoever has a stream --------------------------------------------------------------------------------------

    def connect(self, connection: Connection, received_through: int) -> None:
        """`connection` is greeted, and the peer has received our items up to that number: goes on from there."""
        if self._connection is not None:
            self._connection.end(Unavailable("the link goes on over another connection", reason="LINK_SILENT"))
        self._connection, connection.is_greeted = connection, True
        self._acknowledge(received_through)
        while self._sent:
            self._waiting.appendleft(self._sent.pop())
        self.is_open = True
        connection.wake.set()
        self._call(self.handler.on_open, self)

    def can_resume_after(self, received_through: int) -> bool:
        """Whether a peer that has received so much can go on."""
        return self.acknowledged_through <= received_through <= self._number

    def disconnect(self, connection: Connection) -> None:
        """That connection is over. Safe to repeat, also for one that was replaced."""
        if connection is self._connection:
            self._connection, self.is_open, self.broken_at = None, False, self._clock.now()
            self._call(self.handler.on_broken, self)

    def receive(self, connection: Connection, message: Any) -> None:
        """A message of the peer after its hello."""
        if connection is not self._connection:
            return
        header = message.header
        items = message.items if self._theirs.items is not None else ()
        connection.heard(message.ByteSize() if items else 0)
        if not self.acknowledged_through <= header.acknowledged_through <= self._number:
            self.lose(
                InternalError(f"{self.peer.address} acknowledges {header.acknowledged_through}", reason="LINK_GAP")
            )
            return
        self._acknowledge(header.acknowledged_through)
        for number, item in enumerate(items, header.first_number):
            if number > self.received_through + 1:
                self.lose(InternalError(f"item {number} came after {self.received_through}", reason="LINK_GAP"))
            if self.is_lost:
                return
            if number == self.received_through + 1:
                self.received_through = number
                self._take(number, item)
        if header.HasField("progress") and not self.is_lost:
            self.note_progress(message)
            self._call(self.handler.on_progress, self)

    def note_progress(self, message: Any) -> None:
        """Keeps what a message says about how the peer is."""
        if message.header.HasField("progress"):
            self.progress = progress_from_pb(message.header.progress)

    def header_message(self, with_progress: bool) -> Any:
        """A message of this direction without items."""
        message = self._ours.message()
        message.header.acknowledged_through = self.received_through
        if with_progress and self._progress_now is not None:
            message.header.progress.CopyFrom(progress_to_pb(self._progress_now()))
        return message

    def next_message(self, connection: Connection) -> Any | None:
        """What is ready to be sent over `connection`, at most MESSAGE_BYTES of it; None when nothing is."""
        if connection is not self._connection:
            return None
        if not self._waiting and not connection.beat_is_due and not connection.acknowledgement_is_due:
            return None
        message = self.header_message(connection.beat_is_due)
        connection.said()
        if self._waiting:
            message.header.first_number = self._waiting[0].number
            message.items.extend(self._take_waiting())
        return message

    # --- inside --------------------------------------------------------------------------------------------------------

    def _take_waiting(self) -> list[Any]:
        taken, size = [], 0
        while self._waiting and (not taken or size + self._waiting[0].size <= MESSAGE_BYTES):
            kept = self._waiting.popleft()
            if kept.deadline is not None:
                self._ours.items.set_time_left(kept.item, kept.deadline.left_s())  # type: ignore[union-attr]
            self._sent.append(kept)
            taken.append(kept.item)
            size += kept.size
        return taken

    def _queue(
        self, body: object, command_number: int, deadline: Deadline | None, on_answer: Callable[[Any], None] | None
    ) -> int:
        if self.is_lost:
            raise self._lost_error("it was used after that")
        if self._ours.items is None:
            raise InternalError(f"a {self.kind.name} link carries nothing in this direction")
        item = self._ours.items.to_pb(body, command_number)
        size = item.ByteSize()
        if size > MAX_ITEM_BYTES:
            raise InvalidRequest(
                f"an item of {size} bytes: a link carries {MAX_ITEM_BYTES} at most", reason="ITEM_SIZE"
            )
        if self.unacknowledged_bytes + size > self._settings.max_queued_bytes:
            stalled = f"{self.peer.address} has left {self.unacknowledged_bytes} bytes unacknowledged"
            self.lose(Overloaded(stalled, reason="READER_STALLED"))
            raise self._lost_error(stalled)
        self._number += 1
        self.unacknowledged_bytes += size
        self._waiting.append(_Kept(self._number, item, size, deadline))
        if on_answer is not None:
            self._asked[self._number] = on_answer
        if self._connection is not None:
            self._connection.wake.set()
        return self._number

    def _acknowledge(self, through: int) -> None:
        self.acknowledged_through = max(through, self.acknowledged_through)
        for queue in (self._sent, self._waiting):
            while queue and queue[0].number <= through:
                self.unacknowledged_bytes -= queue.popleft().size

    def _take(self, number: int, item: Any) -> None:
        """One item, once."""
        codec = self._theirs.items
        assert codec is not None
        answered = codec.command_number(item)
        try:
            body = codec.from_pb(item)
            if not answered:
                self.handler.on_item(self, number, body)
                return
        except HeadraceError as error:
            body = error
        except Exception as error:
            log.error("an item could not be handled", link=self.kind.name, error=error)
            body = InternalError(f"unexpected {type(error).__name__}; the log has the rest")
        if answered:
            self._take_answer(answered, body)
        else:
            self._refuse(number, body)

    def _take_answer(self, number: int, body: object) -> None:
        is_last = not isinstance(body, FirstTokens)
        on_answer = self._asked.pop(number, None) if is_last else self._asked.get(number)
        if on_answer is not None:
            self._call(on_answer, body)

    def _refuse(self, number: int, error: HeadraceError) -> None:
        """An item that cannot be answered and cannot be taken leaves a hole: the link is lost with it."""
        if self.is_lost:
            return
        if self._ours.items is not None and self._ours.items.carries_failures:
            self.answer(number, error)
        else:
            self.lose(error)

    def _lost_error(self, why: str) -> Unavailable:
        return Unavailable(f"the {self.kind.name} link to {self.peer.address} is lost: {why}", reason="LINK_LOST")

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        """An owner's mistake must not stop what belongs to others on this link."""
        try:
            function(*arguments)
        except Exception as error:
            log.error("a handler of a link failed", link=self.kind.name, error=error)


async def outgoing(link: Link, connection: Connection, hello: Any) -> AsyncIterator[Any]:
    """Messages to send over `connection`, hello first, until it is over. What is ready in one turn of the loop is one message."""
    yield hello
    while not connection.is_over:
        await connection.wake.wait()  # at the latest with the next beat
        connection.wake.clear()
        while not connection.is_over and (message := link.next_message(connection)) is not None:
            yield message
