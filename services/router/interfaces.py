"""What the router needs of others, as small protocols."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.clock import Deadline
from headrace.errors import HeadraceError
from headrace.protocol.common import WorkerIdentity, WorkerInfo, WorkerProgress


class Link(Protocol):
    """headrace.rpc.links.Link, as far as the router uses it."""

    info: WorkerInfo | None
    progress: WorkerProgress | None
    is_open: bool
    is_lost: bool
    acknowledged_through: int

    def send(
        self, body: object, *, deadline: Deadline | None = None, on_answer: Callable[[object], None] | None = None
    ) -> int: ...

    def lose(self, error: HeadraceError) -> None: ...


class LinkHandler(Protocol):
    """headrace.rpc.links.LinkHandler: what hears of a link. Called on the loop, must not block."""

    def on_item(self, link: Link, number: int, body: object) -> None: ...

    def on_open(self, link: Link) -> None: ...

    def on_broken(self, link: Link) -> None: ...

    def on_progress(self, link: Link) -> None: ...

    def on_lost(self, link: Link, error: HeadraceError) -> None: ...


class LinkKeeper(Protocol):
    """headrace.rpc.links.LinkOpener: a link, and the task that keeps it until it is lost."""

    link: Link

    async def run(self) -> None: ...


class Dialer(Protocol):
    """Makes links to ranks. An empty epoch means whoever is there."""

    def open_prefill_link(self, rank: WorkerIdentity, handler: LinkHandler) -> LinkKeeper: ...

    def open_decode_link(self, rank: WorkerIdentity, handler: LinkHandler) -> LinkKeeper: ...

    def open_token_link(self, rank: WorkerIdentity, handler: LinkHandler) -> LinkKeeper: ...


class Member(Protocol):
    """headrace.process.registry.Member, as far as the router uses it."""

    @property
    def identity(self) -> WorkerIdentity: ...


class Membership(Protocol):
    """headrace.process.registry.Registry, as far as the router uses it."""

    version: int

    def members(self, role: str) -> Sequence[Member]: ...

    async def wait_change(self, timeout_s: float, since: int | None = None) -> bool: ...


class Claims(Protocol):
    """Names taken across all routers of the mesh: headrace.process.registry.Registry."""

    @property
    def reachable(self) -> bool: ...

    async def claim(self, name: str, ttl_s: float) -> bool: ...

    async def unclaim(self, name: str) -> None: ...
