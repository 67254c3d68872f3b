"""The catalogue link of one worker: what gathered on it goes to Redis in one round trip, in order."""

from __future__ import annotations

import asyncio

from headrace.clock import Clock
from headrace.errors import HeadraceError, InvalidRequest, Overloaded
from headrace.observe import telemetry
from headrace.protocol.common import WorkerIdentity
from headrace.protocol.kvstore import PublishCommand, WithdrawCommand
from headrace.protocol.link import Done
from headrace.rpc.links import CATALOGUE_LINK, Link, LinkServer, LinkSettings
from services.kvstore.core import KvStore

MAX_WAITING_KEYS = 262_144
"""Keys that one worker may have sent and Redis has not taken."""

published_keys = telemetry.counter("headrace.kvstore.published_keys")


class WorkerLink:
    """The handler of one CATALOGUE_LINK. Its task lives in `tasks` until the link is lost."""

    def __init__(self, core: KvStore, link: Link, tasks: asyncio.TaskGroup):
        self._core = core
        self._link = link
        self._waiting: list[tuple[int, PublishCommand | WithdrawCommand]] = []
        self._waiting_keys = 0
        self._arrived = asyncio.Event()
        self._task = tasks.create_task(self._carry_out())

    def on_item(self, link: Link, number: int, body: object) -> None:
        """A command waits for its turn. What is raised is its answer."""
        if not isinstance(body, PublishCommand | WithdrawCommand):
            raise InvalidRequest(f"{type(body).__name__} is no command of the catalogue link")
        self._core.check(link.peer, body)
        if self._waiting_keys + len(body.keys) > MAX_WAITING_KEYS:
            raise Overloaded("too many keys wait for Redis", reason="CATALOGUE_QUEUE_FULL", retry_after_s=1.0)
        self._waiting.append((number, body))
        self._waiting_keys += len(body.keys)
        self._arrived.set()

    def on_open(self, link: Link) -> None:
        """Nothing to do."""

    def on_broken(self, link: Link) -> None:
        """It may come back."""

    def on_progress(self, link: Link) -> None:
        """How a worker is matters to routers only."""

    def on_lost(self, link: Link, error: HeadraceError) -> None:
        """What it published lapses unless its worker publishes again."""
        self._task.cancel()

    async def _carry_out(self) -> None:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            waiting, self._waiting, self._waiting_keys = self._waiting, [], 0
            outcomes = await self._core.apply(self._link.peer, [command for _, command in waiting])
            for (number, command), error in zip(waiting, outcomes, strict=True):
                if self._link.is_lost:
                    return
                self._link.answer(number, error or Done())
                if error is None and isinstance(command, PublishCommand):
                    published_keys.add(len(command.keys))


def worker_links(
    core: KvStore, own: WorkerIdentity, clock: Clock, settings: LinkSettings, tasks: asyncio.TaskGroup
) -> LinkServer:
    """The server of the links of all workers; `tasks` outlives it."""
    return LinkServer(CATALOGUE_LINK, own, lambda link: WorkerLink(core, link, tasks), clock, settings)
