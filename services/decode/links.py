"""What comes over links, as calls of the core; what the core says, as answers. No decision is made here.

Routers open a decode link and a token link, writers a writer link; headrace/rpc/links.py keeps them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator

from headrace.clock import Clock, Deadline
from headrace.errors import HeadraceError, InvalidRequest, Unavailable
from headrace.protocol.common import WorkerIdentity
from headrace.protocol.decode import (
    BeginCommand,
    CommitCommand,
    ReleaseCommand,
    RenewCommand,
    Renewed,
    ReserveCommand,
    StopCommand,
    StopState,
)
from headrace.protocol.link import Done
from headrace.rpc.links import DECODE_LINK, TOKEN_LINK, WRITER_LINK, Link, LinkServer, LinkSettings
from services.decode.core import Decoder

STOP_MARGIN_S = 1.0
"""An answer to Stop may take so much longer than the wait that it asks for."""
CLOSE_LOOK_S = 0.02
CLOSE_S = 2.0
"""How long the last frames may take to be acknowledged when this rank stops."""


class _Handler:
    """What most links have nothing to say about."""

    def __init__(self, core: Decoder):
        self._core = core

    def on_open(self, link: Link) -> None:
        """Nothing to do: what is queued goes out."""

    def on_broken(self, link: Link) -> None:
        """It may come back."""

    def on_progress(self, link: Link) -> None:
        """How its opener is does not matter here."""

    def on_lost(self, link: Link, error: HeadraceError) -> None:
        """Nothing depends on it."""


class RouterCommands(_Handler):
    """Decode links: Reserve and Release of routers."""

    def __init__(self, core: Decoder):
        super().__init__(core)
        self._links: dict[str, Link] = {}

    def on_item(self, link: Link, number: int, body: object) -> None:
        """One command."""
        if isinstance(body, ReserveCommand):
            self._core.reserve(link.peer, body, functools.partial(_answer, link, number))
        elif isinstance(body, ReleaseCommand):
            self._core.release(link.peer, body)
            link.answer(number, Done())
        else:
            raise _unknown(body)

    def on_open(self, link: Link) -> None:
        """A new link of a router ends what was asked over its older one."""
        older = self._links.get(link.peer.epoch)
        if older is not link:
            self._links[link.peer.epoch] = link
            if older is not None:
                self._core.router_lost(
                    link.peer, Unavailable("the router opened another decode link", reason="LINK_LOST")
                )

    def on_lost(self, link: Link, error: HeadraceError) -> None:
        """Everything of that router ends, unless a newer link has taken this one's place."""
        if self._links.get(link.peer.epoch) is link:
            del self._links[link.peer.epoch]
            self._core.router_lost(link.peer, error)


class RouterTokenLinks(_Handler):
    """Token links: the core sends frames over them."""

    def on_item(self, link: Link, number: int, body: object) -> None:
        """There are no items in this direction."""
        raise _unknown(body)

    def on_open(self, link: Link) -> None:
        """Its router may reserve from now on."""
        self._core.token_link_opened(link)

    def on_lost(self, link: Link, error: HeadraceError) -> None:
        """Everything of that router ends."""
        self._core.token_link_lost(link, error)


class WriterCommands(_Handler):
    """Writer links: Begin, Renew and Commit. When one is lost its reservations expire, and their writer counts as silent."""

    def on_item(self, link: Link, number: int, body: object) -> None:
        """One command; whoever the link belongs to is the writer."""
        writer_epoch = link.peer.epoch
        if isinstance(body, CommitCommand):
            self._core.commit(body, writer_epoch, functools.partial(_answer, link, number))
        elif isinstance(body, RenewCommand):
            link.answer(number, Renewed(self._core.renew(body.reservation_id, writer_epoch)))
        elif isinstance(body, BeginCommand):
            link.answer(number, Renewed(self._core.begin(body.reservation_id, writer_epoch)))
        else:
            raise _unknown(body)


class Writers:
    """The way to writers. `links` is set once they can be reached."""

    links: LinkServer | None = None

    def __init__(self, clock: Clock):
        self._clock = clock

    async def stop(self, writer: WorkerIdentity, reservation_id: str, wait_s: float) -> StopState:
        """As interfaces.StopWriter."""
        link = self.links.find(writer.epoch) if self.links is not None else None
        if link is None or not link.is_open:
            raise Unavailable(f"writer {writer.address} has no open link here", reason="NO_WRITER_LINK")
        deadline = Deadline.after(self._clock, wait_s + STOP_MARGIN_S)
        return (await link.ask(StopCommand(reservation_id, wait_s), deadline)).state


class DecodeLinks:
    """The three kinds of links of one decode rank. Use `async with DecodeLinks.open(...)`."""

    def __init__(self, core: Decoder, writers: Writers, clock: Clock, settings: LinkSettings):
        self._clock = clock
        routers, tokens, from_writers = RouterCommands(core), RouterTokenLinks(core), WriterCommands(core)
        own, said = core.info.identity, {"info": core.info, "progress": core.progress}
        self.commands = LinkServer(DECODE_LINK, own, lambda link: routers, clock, settings, **said)
        self.tokens = LinkServer(TOKEN_LINK, own, lambda link: tokens, clock, settings, **said)
        self.writers = LinkServer(WRITER_LINK, own, lambda link: from_writers, clock, settings, **said)
        writers.links = self.writers

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, core: Decoder, writers: Writers, clock: Clock, settings: LinkSettings
    ) -> AsyncIterator[DecodeLinks]:
        """Links that live as long as the block."""
        links = cls(core, writers, clock, settings)
        async with asyncio.TaskGroup() as tasks:
            keeping = [tasks.create_task(server.run()) for server in links.all()]
            try:
                yield links
            finally:
                links.close(Unavailable("this decode rank has stopped", reason="DRAINING"))
                for task in keeping:
                    task.cancel()

    def all(self) -> tuple[LinkServer, ...]:
        """Of every kind."""
        return self.commands, self.tokens, self.writers

    def close(self, error: HeadraceError) -> None:
        """Ends all links with `error`."""
        for server in self.all():
            server.close(error)

    async def wait_heard(self) -> None:
        """Until every connected router has acknowledged what it was sent, at most CLOSE_S."""
        deadline = Deadline.after(self._clock, CLOSE_S)
        while deadline.left_s() and any(link.is_open and link.unacknowledged_bytes for link in self._to_routers()):
            await self._clock.wait(CLOSE_LOOK_S)

    def _to_routers(self) -> list[Link]:
        return [*self.commands.links(), *self.tokens.links()]


def _answer(link: Link, number: int, said: object) -> None:
    """Nobody waits for an answer over a link that is lost."""
    if not link.is_lost:
        link.answer(number, said)


def _unknown(body: object) -> InvalidRequest:
    return InvalidRequest(f"{type(body).__name__} is nothing that is asked over this link", field="body")
