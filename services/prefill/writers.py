"""Writer links: opened to a decode rank when a leg first needs it, kept while legs use it, closed after idleness.

A link belongs to the decode rank's epoch. Over it go Begin, Renew and Commit; from there come Stops. When it is lost, the legs
that write to that rank are lost with it: nothing can be committed, and what was promised expires.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from headrace.clock import Clock, Deadline
from headrace.errors import Cancelled, DeadlineExceeded, HeadraceError, InvalidRequest, Overloaded, Unavailable
from headrace.protocol.common import WorkerIdentity
from headrace.protocol.decode import StopCommand, Stopped, StopState
from headrace.rpc.links import Link, LinkHandler
from services.prefill.leg import Leg, settle, settle_error

MAX_WRITERS = 256
"""Decode ranks that may be written to at once."""
IDLE_S = 300.0
"""A link that no leg has used for so long is closed."""

OnStop = Callable[[str, WorkerIdentity, float, Callable[[StopState], None]], None]
"""(reservation id, decode rank that asks, how long it waits, what hears of the state)."""


class Opener(Protocol):
    """Keeps one link (headrace.rpc.links.LinkOpener)."""

    link: Link

    async def run(self) -> None: ...


OpenLink = Callable[[WorkerIdentity, LinkHandler], Opener]
"""An opener of the writer link to a decode rank, not running yet."""


class Writers:
    """The links of one prefill rank. Use `async with Writers.open(...)`; `on_stop` is set by the core."""

    def __init__(self, open_link: OpenLink, clock: Clock):
        self.on_stop: OnStop = lambda reservation_id, decode, wait_s, tell: tell(StopState.UNKNOWN)
        self.clock = clock
        self._open_link = open_link
        self._by_epoch: dict[str, Writer] = {}
        self._tasks: asyncio.TaskGroup

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, open_link: OpenLink, clock: Clock) -> AsyncIterator[Writers]:
        """The links with the tasks that keep them; on leaving they are lost."""
        writers = cls(open_link, clock)
        async with asyncio.TaskGroup() as tasks:
            writers._tasks = tasks
            closing = tasks.create_task(writers._close_idle())
            try:
                yield writers
            finally:
                closing.cancel()
                for writer in list(writers._by_epoch.values()):
                    writer.close("this prefill rank stops")

    def enter(self, leg: Leg, decode: WorkerIdentity) -> Writer:
        """The link to that process, opened if there is none, with `leg` among those that use it. Raises Overloaded."""
        writer = self._by_epoch.get(decode.epoch)
        if writer is None:
            self._make_room()
            writer = Writer(self, decode)
            writer.opener = self._open_link(decode, writer)
            self._by_epoch[decode.epoch] = writer
            self._tasks.create_task(writer.opener.run())
        writer.legs.add(leg)
        return writer

    def forget(self, writer: Writer) -> None:
        """Its link is lost."""
        if self._by_epoch.get(writer.decode.epoch) is writer:
            del self._by_epoch[writer.decode.epoch]

    def _make_room(self) -> None:
        if len(self._by_epoch) < MAX_WRITERS:
            return
        idle = [writer for writer in self._by_epoch.values() if not writer.legs]
        if not idle:
            raise Overloaded(f"{MAX_WRITERS} decode ranks are being written to", reason="TOO_MANY_WRITER_LINKS")
        min(idle, key=lambda writer: writer.idle_since).close("another decode rank is written to")

    async def _close_idle(self) -> None:
        while True:
            await self.clock.wait(IDLE_S / 4)
            for writer in list(self._by_epoch.values()):
                if not writer.legs and self.clock.now() - writer.idle_since >= IDLE_S:
                    writer.close("nothing is written to that rank")


class Writer:
    """One link, and its handler."""

    opener: Opener

    def __init__(self, writers: Writers, decode: WorkerIdentity):
        self.decode = decode
        self.legs: set[Leg] = set()
        self.idle_since = writers.clock.now()
        self._writers = writers

    # --- what legs do --------------------------------------------------------------------------------------------------

    def ask(self, body: object, within_s: float) -> asyncio.Future[Any]:
        """As in interfaces."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(_look)  # a leg that has ended does not
        silent = Unavailable(f"{self.decode.address} did not answer", reason="DECODE_UNANSWERED")
        timer = self._writers.clock.call_later(within_s, lambda: settle_error(answer, silent))

        def on_answer(said: object) -> None:
            timer.cancel()
            if isinstance(said, HeadraceError):
                settle_error(answer, _of_this_link(said, self.decode))
            else:
                settle(answer, said)

        try:
            deadline = Deadline.after(self._writers.clock, within_s)
            self.opener.link.send(body, deadline=deadline, on_answer=on_answer)
        except HeadraceError as error:
            on_answer(error)
        return answer

    def leave(self, leg: Leg) -> None:
        """As in interfaces."""
        self.legs.discard(leg)
        self.idle_since = self._writers.clock.now()

    def close(self, why: str) -> None:
        """Ends the link."""
        self._writers.forget(self)
        self.opener.link.lose(Unavailable(why, reason="LINK_LOST"))

    # --- LinkHandler ---------------------------------------------------------------------------------------------------

    def on_item(self, link: Link, number: int, body: object) -> None:
        """A Stop. Answered at once, or when running writes have ended."""
        if not isinstance(body, StopCommand):
            raise InvalidRequest(f"{type(body).__name__} is nothing a decode rank asks of a writer")

        def tell(state: StopState) -> None:
            if not link.is_lost:
                link.answer(number, Stopped(state))

        self._writers.on_stop(body.reservation_id, self.decode, body.wait_s, tell)

    def on_open(self, link: Link) -> None:
        """Nothing to do: what is queued goes out."""

    def on_broken(self, link: Link) -> None:
        """It may come back; what was promised expires meanwhile or does not."""

    def on_progress(self, link: Link) -> None:
        """How a decode rank is matters to routers only."""

    def on_lost(self, link: Link, error: HeadraceError) -> None:
        """The legs that write there end."""
        self._writers.forget(self)
        for leg in list(self.legs):
            leg.fail(_of_this_link(error, self.decode))


def _look(answer: asyncio.Future[Any]) -> None:
    if not answer.cancelled():
        answer.exception()


def _of_this_link(error: HeadraceError, decode: WorkerIdentity) -> HeadraceError:
    """The rank's own refusals as they are; what says only that it is silent, gone or another process, as one thing."""
    if isinstance(error, Cancelled | DeadlineExceeded) or error.reason in (
        "LINK_LOST",
        "UNAVAILABLE",
        "READER_STALLED",
    ):
        return Unavailable(f"decode rank {decode.address}: {error.message or error.reason}", reason="DECODE_UNANSWERED")
    return error
