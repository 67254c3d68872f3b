"""The links to one rank, and the way of token frames to the attempts they name.

The command link comes first: its hello says who serves there. Beside that of a decode rank stands the token link. Either both
are open or the rank gets nothing new; when one is lost, so is the other, and with them everything that was under way there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from headrace.errors import HeadraceError, InternalError, InvalidRequest
from headrace.observe import logs, telemetry
from headrace.protocol.common import WorkerIdentity, WorkerInfo, WorkerRole
from headrace.protocol.decode import SampleEnd, TokenFrame, TokenRecord
from headrace.protocol.prefill import HeldPrefixes
from services.router.interfaces import Dialer, Link, LinkKeeper

log = logs.get(__name__)

_tokens_after_cancel = telemetry.counter("headrace.router.tokens_after_cancel")


class TokenSink(Protocol):
    """An attempt, as token frames see it. Called on the loop, must not block."""

    def on_record(self, record: TokenRecord) -> None: ...

    def on_sample_end(self, end: SampleEnd) -> None: ...

    def on_frame_end(self) -> None: ...

    def on_lost(self, error: HeadraceError) -> None: ...


class LinksObserver(Protocol):
    """Who owns the links."""

    def on_open(self, info: WorkerInfo) -> None: ...

    def on_broken(self) -> None: ...

    def on_progress(self) -> None: ...

    def on_held(self, held: HeldPrefixes) -> None: ...

    def on_lost(self, error: HeadraceError) -> None: ...


class TokenDispatch:
    """Handler of a token link: records go to the sink that their handle names."""

    def __init__(self, links: RankLinks):
        self._links = links
        self._sinks: dict[int, TokenSink] = {}

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

    def fail_all(self, error: HeadraceError) -> None:
        """No more frames will come."""
        for sink in list(self._sinks.values()):
            sink.on_lost(error)

    # --- LinkHandler -----------------------------------------------------------------------------------------------------

    def on_item(self, link: Link, number: int, body: object) -> None:
        """A frame. One attempt that cannot take its tokens is lost alone; everyone else on the link goes on."""
        if not isinstance(body, TokenFrame):
            raise InvalidRequest(f"{type(body).__name__} is no item of a token link")
        touched: dict[int, TokenSink] = {}
        find = self._sinks.get
        for record in body.records:
            sink = find(record.handle)
            if sink is None:
                _tokens_after_cancel.add(len(record.token_ids))
                continue
            touched[record.handle] = sink
            try:
                sink.on_record(record)
            except Exception as error:
                _sink_failed(sink, error)
        for end in body.ends:
            sink = find(end.handle)
            if sink is None:
                continue
            touched[end.handle] = sink
            try:
                sink.on_sample_end(end)
            except Exception as error:
                _sink_failed(sink, error)
        for sink in touched.values():
            try:
                sink.on_frame_end()
            except Exception as error:
                _sink_failed(sink, error)

    def on_open(self, link: Link) -> None:
        """Connected, for the first time or again."""
        self._links.look()

    def on_broken(self, link: Link) -> None:
        """It may come back: attempts wait."""
        self._links.broke()

    def on_progress(self, link: Link) -> None:
        """The command link brings the same."""

    def on_lost(self, link: Link, error: HeadraceError) -> None:
        """For good."""
        self._links.lose(error)


def _sink_failed(sink: TokenSink, error: Exception) -> None:
    log.error("an attempt could not take its tokens", error=error)
    sink.on_lost(InternalError(f"tokens could not be taken: {type(error).__name__}", reason="SINK_FAILED"))


class RankLinks:
    """One life of the links to one rank; after a loss their owner makes new ones. Also the handler of the command link."""

    def __init__(
        self, role: WorkerRole, rank: WorkerIdentity, dialer: Dialer, tasks: asyncio.TaskGroup, observer: LinksObserver
    ):
        self.is_lost = False
        self._role, self._dialer, self._tasks, self._observer = role, dialer, tasks, observer
        is_prefill = role is WorkerRole.PREFILL
        self._commands = (dialer.open_prefill_link if is_prefill else dialer.open_decode_link)(rank, self)
        self._token_link: LinkKeeper | None = None
        self.tokens = TokenDispatch(self)
        self._release = 0
        self._running: list[asyncio.Task[None]] = [tasks.create_task(self._commands.run())]

    @property
    def commands(self) -> Link:
        """Where commands go."""
        return self._commands.link

    @property
    def is_open(self) -> bool:
        """Whether every link of this rank is connected now."""
        if self.is_lost or not self._commands.link.is_open:
            return False
        return self._role is WorkerRole.PREFILL or (self._token_link is not None and self._token_link.link.is_open)

    def send_release(self, command: object) -> None:
        """A command whose arrival `is_flushed` asks for; it is kept until the rank has it or is lost."""
        self._release = self.commands.send(command)

    @property
    def is_flushed(self) -> bool:
        """Whether the last release has arrived, or cannot."""
        link = self.commands
        return not link.is_open or link.acknowledged_through >= self._release

    def lose(self, error: HeadraceError) -> None:
        """Ends both links: everything under way there is lost. Safe to repeat."""
        if self.is_lost:
            return
        self.is_lost = True
        for keeper in (self._commands, self._token_link):
            if keeper is not None and not keeper.link.is_lost:
                keeper.link.lose(error)
        self.tokens.fail_all(error)
        self._observer.on_lost(error)

    def close(self, error: HeadraceError) -> None:
        """The same, and nobody keeps them any more."""
        self.lose(error)
        for task in self._running:
            task.cancel()

    def look(self) -> None:
        """A link was opened: tells the owner once all are."""
        info = self.commands.info
        if self.is_open and info is not None:
            self._observer.on_open(info)

    def broke(self) -> None:
        """A link is silent or disconnected."""
        if not self.is_lost:
            self._observer.on_broken()

    # --- LinkHandler of the command link -----------------------------------------------------------------------------------

    def on_item(self, link: Link, number: int, body: object) -> None:
        """News of a prefill rank; decode ranks only answer."""
        if not isinstance(body, HeldPrefixes):
            raise InvalidRequest(f"{type(body).__name__} is nothing that a rank says unasked")
        self._observer.on_held(body)

    def on_open(self, link: Link) -> None:
        """The rank has said who it is: the token link goes to that process and no other."""
        if self._role is WorkerRole.DECODE and self._token_link is None and link.info is not None:
            self._token_link = self._dialer.open_token_link(link.info.identity, self.tokens)
            self._running.append(self._tasks.create_task(self._token_link.run()))
        self.look()

    def on_broken(self, link: Link) -> None:
        """It may come back."""
        self.broke()

    def on_progress(self, link: Link) -> None:
        """A beat."""
        self._observer.on_progress()

    def on_lost(self, link: Link, error: HeadraceError) -> None:
        """For good."""
        self.lose(error)


def open_handles(links: Sequence[RankLinks]) -> int:
    """Attempts that frames of any of these ranks may still name."""
    return sum(x.tokens.open_handles for x in links)
