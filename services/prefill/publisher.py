"""Tells the catalogue which prefixes this rank holds, over a link of its own and never on a request's way.

Changes gather for GATHER_S and travel in one message; what was told is told again before it lapses. When no kvstore answers,
nothing waits and nothing is lost but hints: what could not be told is told to the next one.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from headrace.clock import Clock, Deadline
from headrace.errors import HeadraceError, InvalidRequest
from headrace.observe import telemetry
from headrace.protocol.common import CacheTier
from headrace.protocol.kvstore import PublishCommand, WithdrawCommand
from headrace.rpc.links import Link, LinkHandler
from services.prefill.held import KEYS_PER_ITEM, Held

GATHER_S = 0.1
RETRY_S = 1.0
ANSWER_S = 5.0
MAX_GONE = 65_536
"""Keys that wait to be withdrawn while no kvstore answers; the oldest are left to lapse."""

failed_calls = telemetry.counter("headrace.prefill.failed_publishes")


class Opener(Protocol):
    """Keeps one link (headrace.rpc.links.LinkOpener)."""

    link: Link

    async def run(self) -> None: ...


class Publisher:
    """`open_link(handler)` gives an opener of a link to a kvstore of now, None when there is none."""

    def __init__(self, held: Held, open_link: Callable[[LinkHandler], Opener | None], clock: Clock, ttl_s: float):
        self._held = held
        self._open_link = open_link
        self._clock = clock
        self._ttl_s = ttl_s
        self._told: dict[bytes, None] = {}  # what the catalogue may believe
        self._new: dict[bytes, None] = {}
        self._gone: dict[bytes, None] = {}
        self._dirty = asyncio.Event()

    async def run(self) -> None:
        """Keeps a link and sends what changed, for ever."""
        self._changed(self._held.listen(self._changed), ())
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._refresh())
                while True:
                    await self._publish_over_one_link()
                    await self._clock.wait(RETRY_S)
        finally:
            self._held.leave(self._changed)

    async def _publish_over_one_link(self) -> None:
        opener = self._open_link(self)
        if opener is None:
            return
        async with asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(self._send(opener.link))
            await opener.run()
            sending.cancel()

    async def _send(self, link: Link) -> None:
        while True:
            await self._dirty.wait()
            await self._clock.wait(GATHER_S)
            self._dirty.clear()
            if not await self._flush(link):
                await self._clock.wait(RETRY_S)
            if self._new or self._gone:
                self._dirty.set()

    async def _refresh(self) -> None:
        while True:
            await self._clock.wait(self._ttl_s / 3)
            self._new = {**self._told, **self._new}
            if self._new:
                self._dirty.set()

    async def _flush(self, link: Link) -> bool:
        """Withdraws and publishes what has gathered, in one message; False when something was not taken."""
        gone, new = _take(self._gone), _take(self._new)
        self._told.update(dict.fromkeys(new))
        commands: list[object] = []
        if gone:
            commands.append(WithdrawCommand(keys=tuple(gone), all=False))
        if new:
            commands.append(PublishCommand(keys=tuple(new), time_to_live_s=self._ttl_s, tier=CacheTier.DEVICE))
        deadline = Deadline.after(self._clock, ANSWER_S)
        answers = await asyncio.gather(*(link.ask(command, deadline) for command in commands), return_exceptions=True)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        if not errors:
            return True
        for error in errors:
            if not isinstance(error, HeadraceError):
                raise error
            failed_calls.add(1, reason=error.reason)
        self._new.update((key, None) for key in new if key in self._told)
        self._forget_later(key for key in gone if key not in self._told and key not in self._new)
        return False

    def _changed(self, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        for key in added:
            self._gone.pop(key, None)
            if key not in self._told:
                self._new[key] = None
        for key in removed:
            self._new.pop(key, None)
            if self._told.pop(key, 0) is None:
                self._forget_later([key])
        if self._new or self._gone:
            self._dirty.set()

    def _forget_later(self, keys: Iterable[bytes]) -> None:
        self._gone.update(dict.fromkeys(keys))
        while len(self._gone) > MAX_GONE:
            del self._gone[next(iter(self._gone))]

    # --- LinkHandler -----------------------------------------------------------------------------------------------------

    def on_item(self, link: Link, number: int, body: object) -> None:
        """A kvstore only answers."""
        raise InvalidRequest(f"{type(body).__name__} is nothing a kvstore asks")

    def on_open(self, link: Link) -> None:
        """Nothing to do: what is queued goes out."""

    def on_broken(self, link: Link) -> None:
        """It may come back."""

    def on_progress(self, link: Link) -> None:
        """A kvstore tells none."""

    def on_lost(self, link: Link, error: HeadraceError) -> None:
        """`run` ends with the opener and looks for another."""


def _take(keys: dict[bytes, None]) -> list[bytes]:
    """Takes the oldest keys of one command out."""
    taken = list(itertools.islice(keys, KEYS_PER_ITEM))
    for key in taken:
        del keys[key]
    return taken
