"""The two sides that talk to a decode rank, played by hand over real links: a router and a writer."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

from headrace.clock import Deadline, SystemClock, first_of
from headrace.protocol import decode as p
from headrace.protocol.common import WorkerIdentity
from headrace.rpc.links import DECODE_LINK, TOKEN_LINK, WRITER_LINK, LinkOpener, LinkSettings

TIMEOUT_S = 10.0
SETTINGS = LinkSettings.from_beat(1.0)


class Listener:
    """A link's handler that keeps what it hears."""

    def __init__(self, on_item=None):
        self.opened, self.lost = asyncio.Event(), asyncio.Event()
        self.error = None
        if on_item is not None:
            self.on_item = on_item

    def on_item(self, link, number, body):
        raise AssertionError(f"unexpected {body}")

    def on_open(self, link):
        self.opened.set()

    def on_broken(self, link):
        self.opened.clear()

    def on_progress(self, link):
        pass

    def on_lost(self, link, error):
        self.error = error
        self.lost.set()


@contextlib.asynccontextmanager
async def opened(kind, address, own, peer_epoch="", *, on_item=None, settings=SETTINGS, info=None):
    """(link, listener) of a link that this process keeps open."""
    listener = Listener(on_item)
    opener = LinkOpener(kind, address, own, peer_epoch, listener, SystemClock(), settings, info=info)
    async with asyncio.TaskGroup() as tasks:
        keeping = tasks.create_task(opener.run())
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await first_of(listener.opened.wait(), listener.lost.wait())
            refused = listener.error
            if refused is None:
                yield opener.link, listener
        finally:
            keeping.cancel()
    if refused is not None:
        raise refused


async def ask(link, body, timeout_s=TIMEOUT_S):
    """The answer to a command."""
    return await link.ask(body, Deadline.after(SystemClock(), timeout_s))


@dataclass
class Router:
    """A router's links to a decode rank, and the frames that have come."""

    commands: object = None
    tokens: object = None
    frames: list[p.TokenFrame] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def reserve(self, command: p.ReserveCommand, timeout_s=TIMEOUT_S) -> p.Reservation:
        return await ask(self.commands, command, timeout_s)

    async def release(self, request_id, attempt=1, samples=()):
        return await ask(self.commands, p.ReleaseCommand(request_id, attempt, tuple(samples)))

    def on_frame(self, link, number, frame):
        self.frames.append(frame)
        self.news.set()

    def records(self):
        return [record for frame in self.frames for record in frame.records]

    def ends(self):
        return [end for frame in self.frames for end in frame.ends]

    async def until_ended(self, num_samples):
        """Waits until so many samples have ended."""
        async with asyncio.timeout(TIMEOUT_S):
            while len(self.ends()) < num_samples:
                self.news.clear()
                await self.news.wait()


@contextlib.asynccontextmanager
async def router_of(address: str, own: WorkerIdentity, decode_epoch="", settings=SETTINGS):
    """A connected router."""
    router = Router()
    async with (
        opened(TOKEN_LINK, address, own, decode_epoch, on_item=router.on_frame, settings=settings) as (tokens, _),
        opened(DECODE_LINK, address, own, decode_epoch, settings=settings) as (commands, _),
    ):
        router.tokens, router.commands = tokens, commands
        yield router


@dataclass
class Writer:
    """A writer's link, and the reservations that it was asked to stop."""

    link: object = None
    answer: p.StopState | None = p.StopState.DRAINED
    """None: silence."""
    stopped: list[str] = field(default_factory=list)

    def on_item(self, link, number, body):
        assert isinstance(body, p.StopCommand)
        self.stopped.append(body.reservation_id)
        if self.answer is not None:
            link.answer(number, p.Stopped(self.answer))

    async def ask(self, body):
        return await ask(self.link, body)


@contextlib.asynccontextmanager
async def writer_of(address: str, own: WorkerIdentity, decode_epoch="", settings=SETTINGS):
    """A connected writer."""
    writer = Writer()
    async with opened(WRITER_LINK, address, own, decode_epoch, on_item=writer.on_item, settings=settings) as (link, _):
        writer.link = link
        yield writer
