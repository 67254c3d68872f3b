"""Links over streams: who opens one keeps it (`LinkOpener`), who serves them finds them by epoch (`LinkServer`).

What a link is, and how it outlives a connection, is said in `protos/headrace/v1/link.proto`; the two ends are the same class, `Link`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Any

from headrace.clock import Clock
from headrace.errors import (
    HeadraceError,
    IncompatiblePeer,
    InternalError,
    InvalidRequest,
    Overloaded,
    StaleAttempt,
    StaleEpoch,
    Unavailable,
)
from headrace.observe import logs
from headrace.protocol.common import WorkerIdentity, WorkerInfo, WorkerProgress
from headrace.protocol.link import NEWEST_VERSION, OLDEST_VERSION, LinkHello
from headrace.rpc.channel import dial
from headrace.rpc.connection import Connection
from headrace.rpc.connection import LinkSettings as LinkSettings
from headrace.rpc.kinds import CATALOGUE_LINK as CATALOGUE_LINK
from headrace.rpc.kinds import DECODE_LINK as DECODE_LINK
from headrace.rpc.kinds import PREFILL_LINK as PREFILL_LINK
from headrace.rpc.kinds import TOKEN_LINK as TOKEN_LINK
from headrace.rpc.kinds import WRITER_LINK as WRITER_LINK
from headrace.rpc.kinds import LinkKind as LinkKind
from headrace.rpc.link import Link, LinkHandler, outgoing
from headrace.wire.link import hello_from_pb, hello_to_pb

log = logs.get(__name__)

RESUMABLE = ("CONNECTION_LOST", "LINK_SILENT")
"""Reasons after which a link goes on over another connection; every other one is final."""
RETRY_BEATS = 0.25
"""Pause between two tries to connect again."""
MAX_LINKS = 4096
"""Peers that one server has links to; one more is refused."""
MAX_LOST_IDS = 1024
"""Ids of lost links that a server remembers, to refuse those who would resume them."""

Dial = Callable[[LinkKind, str, AsyncIterator[Any]], contextlib.AbstractAsyncContextManager[AsyncIterator[Any]]]
"""(kind, address, messages to send) -> the messages of the other side, inside the block. Iterating raises HeadraceError: reason
CONNECTION_LOST when the stream broke, anything else when the server refused or ended it."""


class LinkOpener:
    """The end that opens. `link` may be sent over at once; `run` keeps it until it is lost, and then another opener is made.

    `peer_epoch` names the process that is meant; empty accepts whoever is there, for the life of the link.
    """

    def __init__(
        self,
        kind: LinkKind,
        channel_address: str,
        own: WorkerIdentity,
        peer_epoch: str,
        handler: LinkHandler,
        clock: Clock,
        settings: LinkSettings,
        *,
        info: WorkerInfo | None = None,
        progress: Callable[[], WorkerProgress] | None = None,
        dial: Dial = dial,
    ):
        self._address, self._clock, self._settings, self._info, self._dial = (
            channel_address,
            clock,
            settings,
            info,
            dial,
        )
        peer, link_id = WorkerIdentity(channel_address, peer_epoch), secrets.token_hex(8)
        self.link = Link(
            kind, kind.from_opener, kind.from_server, own, peer, link_id, clock, settings, progress_now=progress
        )
        self.link.handler = handler
        self._was_open = False

    async def run(self) -> None:
        """Connects, connects again, and ends when the link is lost: refused, not resumed in time, or never there at all."""
        try:
            while not self.link.is_lost:
                error = await self._carry()
                if self.link.is_lost:
                    return
                if error.reason not in RESUMABLE:
                    self.link.lose(_final(error))
                elif not self._was_open:
                    self.link.lose(Unavailable(error.message))
                elif self._clock.now() - self.link.broken_at >= self._settings.resume_s:
                    self.link.lose(Unavailable(f"not resumed in time: {error.message}", reason="LINK_LOST"))
                else:
                    await self._clock.wait(RETRY_BEATS * self._settings.beat_s)
        finally:
            self.link.lose(Unavailable("nobody keeps this link any more", reason="LINK_LOST"))

    async def _carry(self) -> HeadraceError:
        """One connection, from hello to its end. Returns why it ended."""
        link, connection = self.link, Connection(self._clock, self._settings)
        messages = outgoing(link, connection, self._hello())
        try:
            async with (
                self._dial(link.kind, self._address, messages) as answers,
                asyncio.TaskGroup() as tasks,
            ):
                reading = tasks.create_task(self._read(connection, answers))
                await connection.over.wait()  # at the latest after silence
                reading.cancel()
        finally:
            connection.end(None)
            link.disconnect(connection)
        return connection.error or Unavailable("the connection was closed", reason="CONNECTION_LOST")

    async def _read(self, connection: Connection, answers: AsyncIterator[Any]) -> None:
        error: HeadraceError = Unavailable("the server ended the stream", reason="CONNECTION_LOST")
        try:
            async for message in answers:
                if connection.is_over:
                    return
                if connection.is_greeted:
                    self.link.receive(connection, message)
                else:
                    self._greet(connection, message)
        except HeadraceError as refused:
            error = refused
        except Exception as unexpected:
            log.error("a link could not be read", link=self.link.kind.name, error=unexpected)
            error = InternalError(f"unexpected {type(unexpected).__name__}; the log has the rest")
        connection.end(error)

    def _hello(self) -> Any:
        link = self.link
        message = link.header_message(with_progress=True)
        hello = LinkHello(
            link.own, link.link_id, self._settings.beat_s, link.peer.epoch, link.received_through, self._info
        )
        message.header.hello.CopyFrom(hello_to_pb(hello))
        return message

    def _greet(self, connection: Connection, message: Any) -> None:
        link, hello = self.link, _hello_of(message)
        if not OLDEST_VERSION <= hello.newest_version <= NEWEST_VERSION:
            raise _other_version(hello)
        if hello.link_id != link.link_id or not link.can_resume_after(hello.received_through):
            raise Unavailable("the server has lost this link", reason="LINK_LOST")
        if link.peer.epoch not in ("", hello.sender.epoch):
            raise StaleEpoch(f"{self._address} is epoch {hello.sender.epoch} now")
        link.peer, link.info = WorkerIdentity(self._address, hello.sender.epoch), hello.info
        link.note_progress(message)
        connection.heard(0)
        self._was_open = True
        link.connect(connection, hello.received_through)


class LinkServer:
    """The ends that are served, one link for each epoch of a peer. Readers live in `run`: without it nothing is served."""

    def __init__(
        self,
        kind: LinkKind,
        own: WorkerIdentity,
        handler_for: Callable[[Link], LinkHandler],
        clock: Clock,
        settings: LinkSettings,
        *,
        info: WorkerInfo | None = None,
        progress: Callable[[], WorkerProgress] | None = None,
    ):
        self._kind, self._own, self._handler_for = kind, own, handler_for
        self._clock, self._settings, self._info, self._progress = clock, settings, info, progress
        self._by_epoch: dict[str, Link] = {}
        self._lost_ids: dict[str, None] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._closed: HeadraceError | None = None

    def find(self, epoch: str) -> Link | None:
        """The link of that process, None when it has none."""
        link = self._by_epoch.get(epoch)
        return None if link is None or link.is_lost else link

    def links(self) -> list[Link]:
        """All links that are not lost."""
        return [link for link in self._by_epoch.values() if not link.is_lost]

    def close(self, error: HeadraceError) -> None:
        """Ends every link with `error`, which new ones get as well."""
        self._closed = error
        for link in self.links():
            self._lose(link, error)

    async def run(self) -> None:
        """Loses links that were not resumed in time, until cancelled; then all of them."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                while True:
                    await self._clock.wait(self._settings.beat_s)
                    self._expire()
        finally:
            self._tasks = None
            self.close(self._closed or Unavailable("this process stops", reason="DRAINING"))

    async def serve(self, requests: AsyncIterator[Any], context: object) -> AsyncIterator[Any]:
        """The body of the servicer's method: answers to `requests`, hello first. Raises HeadraceError to refuse or end the stream."""
        if self._closed is not None or self._tasks is None:
            raise self._closed or Unavailable("links are not served yet", reason="STARTING", retry_after_s=1.0)
        connection = Connection(self._clock, self._settings)
        link: Link | None = None
        try:
            hello = _hello_of(await self._first(requests))
            link = self._accept(hello, connection)
            reading = self._tasks.create_task(self._read(link, connection, requests))
            try:
                async for message in outgoing(link, connection, self._answer(link, hello)):
                    yield message
            finally:
                reading.cancel()
            if connection.error is not None:
                raise connection.error
        finally:
            connection.end(None)
            if link is not None:
                link.disconnect(connection)

    async def _first(self, requests: AsyncIterator[Any]) -> Any:
        try:
            async with asyncio.timeout(self._settings.silent_s):
                return await anext(requests.__aiter__())
        except StopAsyncIteration:
            raise InvalidRequest("a link opens with a hello", field="header.hello") from None

    def _accept(self, hello: LinkHello, connection: Connection) -> Link:
        """The link that this connection carries from now on: the one that is resumed, or a new one."""
        self._check(hello)
        link = self._by_epoch.get(hello.sender.epoch)
        if link is not None and link.link_id == hello.link_id and not link.is_lost:
            if not link.can_resume_after(hello.received_through):
                self._lose(link, InternalError("the peer does not know what it has received", reason="LINK_GAP"))
        elif hello.received_through or hello.link_id in self._lost_ids:
            link = None
        else:
            link = self._replace(link, hello)
        if link is None or link.is_lost:
            raise StaleAttempt(f"link {hello.link_id} is not known here", reason="LINK_LOST")
        connection.heard(0)
        link.connect(connection, hello.received_through)
        return link

    def _replace(self, older: Link | None, hello: LinkHello) -> Link:
        if older is not None:
            self._lose(older, Unavailable("its process opened another link", reason="LINK_LOST"))
        elif len(self._by_epoch) >= MAX_LINKS:
            raise Overloaded(f"{MAX_LINKS} links are open here", reason="TOO_MANY_LINKS", retry_after_s=1.0)
        link = Link(
            self._kind,
            self._kind.from_server,
            self._kind.from_opener,
            self._own,
            hello.sender,
            hello.link_id,
            self._clock,
            self._settings,
            progress_now=self._progress,
        )
        link.info = hello.info
        link.handler = self._handler_for(link)
        self._by_epoch[hello.sender.epoch] = link
        return link

    def _check(self, hello: LinkHello) -> None:
        if hello.newest_version < OLDEST_VERSION or hello.oldest_version > NEWEST_VERSION:
            raise _other_version(hello)
        if hello.receiver_epoch not in ("", self._own.epoch):
            raise StaleEpoch(f"{self._own.address} is epoch {self._own.epoch}, not {hello.receiver_epoch}")
        if abs(hello.beat_interval_s - self._settings.beat_s) > 1e-6:
            raise IncompatiblePeer(
                f"links.beat_s is {self._settings.beat_s:g} s here and {hello.beat_interval_s:g} s there",
                reason="BEAT_INTERVAL",
                field="header.hello.beat_interval",
            )

    def _answer(self, link: Link, hello: LinkHello) -> Any:
        chosen = min(hello.newest_version, NEWEST_VERSION)
        message = link.header_message(with_progress=True)
        answer = LinkHello(
            self._own,
            link.link_id,
            self._settings.beat_s,
            hello.sender.epoch,
            link.received_through,
            self._info,
            chosen,
            chosen,
        )
        message.header.hello.CopyFrom(hello_to_pb(answer))
        return message

    async def _read(self, link: Link, connection: Connection, requests: AsyncIterator[Any]) -> None:
        error: HeadraceError = Unavailable("the opener ended the stream", reason="CONNECTION_LOST")
        try:
            async for message in requests:
                if connection.is_over:
                    return
                link.receive(connection, message)
        except HeadraceError as refused:
            error = refused
        except Exception as unexpected:  # gRPC says in many ways that a stream broke
            error = Unavailable(f"the stream broke: {type(unexpected).__name__}", reason="CONNECTION_LOST")
        connection.end(error)

    def _expire(self) -> None:
        now = self._clock.now()
        for link in self.links():
            if not link.is_open and now - link.broken_at >= self._settings.resume_s:
                self._lose(link, Unavailable(f"{link.peer.address} did not come back", reason="LINK_LOST"))
        self._by_epoch = {epoch: link for epoch, link in self._by_epoch.items() if not link.is_lost}

    def _lose(self, link: Link, error: HeadraceError) -> None:
        self._lost_ids[link.link_id] = None
        while len(self._lost_ids) > MAX_LOST_IDS:
            del self._lost_ids[next(iter(self._lost_ids))]
        link.lose(error)


def _hello_of(message: Any) -> LinkHello:
    if not message.header.HasField("hello"):
        raise InvalidRequest("a link opens with a hello", field="header.hello")
    return hello_from_pb(message.header.hello)


def _other_version(hello: LinkHello) -> IncompatiblePeer:
    return IncompatiblePeer(
        f"protocol versions {OLDEST_VERSION} to {NEWEST_VERSION} are spoken here, "
        f"{hello.oldest_version} to {hello.newest_version} there",
        reason="PROTOCOL_VERSION",
        field="header.hello.newest_version",
    )


def _final(error: HeadraceError) -> HeadraceError:
    """Whatever class its status has, a link that the server does not know is lost."""
    return Unavailable(error.message, reason="LINK_LOST") if error.reason == "LINK_LOST" else error
