"""A prefill rank put together over any engine that takes jobs: the real one (`wiring`) or a bench's. No torch here."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any

from headrace.cache.blocks import BlockPool
from headrace.clock import Clock, Deadline
from headrace.errors import Unavailable
from headrace.process.registry import Registry
from headrace.process.start import Start
from headrace.protocol.common import WorkerIdentity, WorkerInfo
from headrace.rpc.links import (
    CATALOGUE_LINK,
    PREFILL_LINK,
    WRITER_LINK,
    LinkHandler,
    LinkOpener,
    LinkServer,
    LinkSettings,
)
from headrace.rpc.promises import MeshKeys
from headrace.transfer.base import TransferSource
from services.prefill.core import Prefiller
from services.prefill.held import Held
from services.prefill.interfaces import Batcher
from services.prefill.links import RouterLink
from services.prefill.publisher import Publisher
from services.prefill.pusher import Pusher, Rows
from services.prefill.writers import OpenLink, Writers

HEARD_LOOK_S = 0.02
HEARD_S = 2.0
"""How long the last answers may take to be acknowledged when this rank stops."""


@dataclass
class Opened:
    """A prefill rank that runs: its core, and the server of its links to routers."""

    core: Prefiller
    links: LinkServer
    clock: Clock

    async def drain(self, grace_s: float) -> None:
        """Refuses new prompts and waits for running ones; then the links end, when their last answers were heard."""
        await self.core.drain(grace_s)
        deadline = Deadline.after(self.clock, HEARD_S)
        while deadline.left_s() and any(link.is_open and link.unacknowledged_bytes for link in self.links.links()):
            await self.clock.wait(HEARD_LOOK_S)
        self.links.close(Unavailable("this prefill rank has stopped", reason="DRAINING"))


@contextlib.asynccontextmanager
async def assemble(
    start: Start,
    info: WorkerInfo,
    registry: Registry,
    source: TransferSource,
    keys: MeshKeys,
    pool: BlockPool,
    batcher: Batcher,
    rows: Rows,
    *,
    open_writer_link: OpenLink | None = None,
) -> AsyncIterator[Opened]:
    """The rank over any engine that takes jobs as `batcher`, whose rows `rows` and `source` know how to read and to move."""
    config, clock, faults = start.config, start.clock, start.faults()
    settings = LinkSettings.from_beat(config.links.beat_s, config.links.max_queued_bytes)

    def writer_link(decode: WorkerIdentity, handler: LinkHandler) -> LinkOpener:
        return LinkOpener(WRITER_LINK, decode.address, info.identity, decode.epoch, handler, clock, settings, info=info)

    def catalogue_link(handler: LinkHandler) -> LinkOpener | None:
        members = registry.members("kvstore")
        if not members:
            return None
        kvstore = members[0].identity
        return LinkOpener(
            CATALOGUE_LINK, kvstore.address, info.identity, kvstore.epoch, handler, clock, settings, info=info
        )

    layout, margin_s = info.layout, config.prefill.expiry_margin_s
    pusher = Pusher(source, rows, layout.block_size, layout.layer_count, margin_s, faults)
    pusher.start()
    held = Held(pool)
    publisher = Publisher(held, catalogue_link, clock, config.kvstore.publish_ttl_s)
    try:
        async with Writers.open(open_writer_link or writer_link, clock) as writers:
            opened = Prefiller.open(
                config.prefill,
                info,
                pool=pool,
                batcher=batcher,
                pusher=pusher,
                writers=writers,
                keys=keys,
                clock=clock,
                faults=faults,
            )
            async with opened as core:
                writers.on_stop = core.stop
                links = LinkServer(
                    PREFILL_LINK,
                    info.identity,
                    lambda link: RouterLink(core, held, link),
                    clock,
                    settings,
                    info=info,
                    progress=core.progress,
                )
                async with _running(links.run(), publisher.run()):
                    yield Opened(core, links, clock)
    finally:
        await asyncio.to_thread(pusher.stop, 2 * config.transfer.timeout_s)


@contextlib.asynccontextmanager
async def _running(*works: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Background coroutines that live as long as the block."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(work) for work in works]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
