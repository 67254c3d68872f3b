"""Links in memory: the real `LinkOpener`, `LinkServer` and `Link`, their real messages, and streams that a test can break.

    async with MemoryLinks.open(clock) as links:
        pair = await links.connect(WRITER_LINK)
        pair.opener.send(BeginCommand("r1"))
        await pair.settle()
        assert pair.at_server.items == [BeginCommand("r1")]

Time is the test's own when `clock` is a FakeClock: beats, silence and resuming happen in `clock.advance`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from headrace.clock import Clock, FakeClock
from headrace.errors import HeadraceError, Unavailable
from headrace.protocol.common import WorkerIdentity, WorkerInfo, WorkerProgress
from headrace.rpc.links import Link, LinkHandler, LinkKind, LinkOpener, LinkServer, LinkSettings

OPENER = WorkerIdentity("127.0.0.1:1", "0" * 15 + "1")
SERVER = WorkerIdentity("127.0.0.1:2", "0" * 15 + "2")


def in_loop(test: Callable[..., Any]) -> Callable[..., None]:
    """Runs a coroutine test in a loop of its own, at most 30 s."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(30):
                await test(*arguments, **named)

        asyncio.run(bounded())

    return run


@dataclass
class Recorder:
    """A handler that writes down what it hears; `on_body(link, number, body)` does the rest."""

    on_body: Callable[[Link, int, Any], None] | None = None
    items: list[Any] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    lost: HeadraceError | None = None

    def on_item(self, link: Link, number: int, body: Any) -> None:
        self.items.append(body)
        self.numbers.append(number)
        if self.on_body is not None:
            self.on_body(link, number, body)

    def on_open(self, link: Link) -> None:
        self.told.append("open")

    def on_broken(self, link: Link) -> None:
        self.told.append("broken")

    def on_progress(self, link: Link) -> None:
        self.told.append("progress")

    def on_lost(self, link: Link, error: HeadraceError) -> None:
        self.told.append("lost")
        self.lost = error


class _Stream:
    """One call in memory. Messages are copied as bytes, so that nobody shares an object with the other side."""

    def __init__(self, kind: LinkKind):
        self.kind = kind
        self.requests: asyncio.Queue[bytes | Exception] = asyncio.Queue()
        self.answers: asyncio.Queue[bytes | Exception] = asyncio.Queue()
        self.is_silent = False
        self.messages = 0

    def put(self, queue: asyncio.Queue[bytes | Exception], message: Any) -> None:
        self.messages += 1
        if not self.is_silent:
            queue.put_nowait(message.SerializeToString())

    def cut(self) -> None:
        """As when a connection breaks: both sides hear that."""
        self.requests.put_nowait(ConnectionResetError("cut"))
        self.answers.put_nowait(Unavailable("cut", reason="CONNECTION_LOST"))

    async def read(self, queue: asyncio.Queue[bytes | Exception], message_class: Any) -> AsyncIterator[Any]:
        while True:
            said = await queue.get()
            if isinstance(said, Exception):
                raise said
            yield message_class.FromString(said)


class MemoryLinks:
    """Servers by address, and streams to them. `dial` is what a LinkOpener takes."""

    def __init__(self, clock: Clock, tasks: asyncio.TaskGroup):
        self.clock, self.tasks = clock, tasks
        self.streams: list[_Stream] = []
        self.is_refusing = False
        self._servers: dict[tuple[str, str], LinkServer] = {}
        self._running: list[asyncio.Task[Any]] = []

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, clock: Clock | None = None) -> AsyncIterator[MemoryLinks]:
        """Streams that live as long as the block."""
        async with asyncio.TaskGroup() as tasks:
            links = cls(clock or FakeClock(), tasks)
            try:
                yield links
            finally:
                for task in links._running:
                    task.cancel()

    def serve(self, address: str, kind: LinkKind, server: LinkServer) -> None:
        """`server` answers at `address` and runs."""
        self._servers[kind.name, address] = server
        self.run(server.run())

    def run(self, work: Any) -> asyncio.Task[Any]:
        """A task that ends with the block."""
        task = self.tasks.create_task(work)
        self._running.append(task)
        return task

    @contextlib.asynccontextmanager
    async def dial(
        self, kind: LinkKind, address: str, messages: AsyncIterator[Any]
    ) -> AsyncIterator[AsyncIterator[Any]]:
        """A stream to the server at `address`."""
        stream = _Stream(kind)
        self.streams.append(stream)
        server = self._servers.get((kind.name, address))
        if server is None or self.is_refusing:
            stream.cut()
            yield stream.read(stream.answers, kind.from_server.message)
            return
        pumps = [
            self.tasks.create_task(self._pump_requests(stream, messages)),
            self.tasks.create_task(self._pump_answers(stream, server)),
        ]
        try:
            yield stream.read(stream.answers, kind.from_server.message)
        finally:
            for pump in pumps:
                pump.cancel()

    async def _pump_requests(self, stream: _Stream, messages: AsyncIterator[Any]) -> None:
        async for message in messages:
            stream.put(stream.requests, message)

    async def _pump_answers(self, stream: _Stream, server: LinkServer) -> None:
        requests = stream.read(stream.requests, stream.kind.from_opener.message)
        try:
            async with contextlib.aclosing(server.serve(requests, None)) as answers:
                async for message in answers:
                    stream.put(stream.answers, message)
        except HeadraceError as error:
            if not stream.is_silent:
                stream.answers.put_nowait(error)

    def cut(self) -> None:
        """Breaks every stream; openers may dial again at once."""
        for stream in self.streams:
            stream.cut()

    def silence(self) -> None:
        """Nothing that is sent over the streams of now arrives any more, and nobody is told."""
        for stream in self.streams:
            stream.is_silent = True

    async def connect(
        self,
        kind: LinkKind,
        *,
        at_opener: LinkHandler | None = None,
        at_server: LinkHandler | None = None,
        own: WorkerIdentity = OPENER,
        peer: WorkerIdentity = SERVER,
        settings: LinkSettings | None = None,
        info: WorkerInfo | None = None,
        progress: Callable[[], WorkerProgress] | None = None,
    ) -> MemoryLink:
        """Two connected ends. `info` and `progress` are the server's."""
        settings = settings or LinkSettings()
        opener_handler, server_handler = at_opener or Recorder(), at_server or Recorder()
        server = LinkServer(kind, peer, lambda link: server_handler, self.clock, settings, info=info, progress=progress)
        self.serve(peer.address, kind, server)
        keeper = LinkOpener(kind, peer.address, own, peer.epoch, opener_handler, self.clock, settings, dial=self.dial)
        await asyncio.sleep(0)  # the server's task starts
        self.run(keeper.run())
        pair = MemoryLink(self, keeper.link, server, own, opener_handler, server_handler)
        await pair.settle()
        assert keeper.link.is_open or keeper.link.is_lost
        return pair


@dataclass
class MemoryLink:
    """Two ends of one link in memory, and their handlers."""

    links: MemoryLinks
    opener: Link
    links_served: LinkServer
    own: WorkerIdentity
    at_opener: Any
    at_server: Any

    @property
    def server(self) -> Link:
        """The end that is served."""
        link = self.links_served.find(self.own.epoch)
        assert link is not None, "the server has lost this link"
        return link

    async def settle(self, turns: int = 60) -> None:
        """Lets everything that is under way arrive; time stands still."""
        for _ in range(turns):
            await asyncio.sleep(0)
