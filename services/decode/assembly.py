"""A decode rank put together over any engine that steps: the real one (`wiring.py`) or a bench's. No torch here."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator
from dataclasses import dataclass

from headrace.cache.blocks import BlockPool
from headrace.errors import Unavailable
from headrace.process.start import Start
from headrace.protocol.common import WorkerInfo
from headrace.rpc.links import LinkSettings
from headrace.rpc.promises import MeshKeys, sign
from services.decode.core import Decoder
from services.decode.interfaces import Checksums, Collaborators, CopyRows, DecodeEngine, Target
from services.decode.links import STOP_MARGIN_S, DecodeLinks, Writers


@dataclass
class Opened:
    """A decode rank that runs: its core, and the servers of its links."""

    core: Decoder
    links: DecodeLinks

    async def drain(self, grace_s: float) -> None:
        """Refuses new requests and lets what runs finish; then the links end, when their last frames were heard."""
        try:
            await self.core.drain(grace_s)
        finally:
            await self.links.wait_heard()
            self.links.close(Unavailable("this decode rank is draining", reason="DRAINING"))


@contextlib.asynccontextmanager
async def assemble(
    start: Start,
    info: WorkerInfo,
    keys: MeshKeys,
    pool: BlockPool,
    engine: DecodeEngine,
    target: Target,
    checksums: Checksums,
    copy_rows: CopyRows,
) -> AsyncIterator[Opened]:
    """The rank over any engine, as long as the block. What each part must do is said in interfaces.py."""
    config, writers = start.config, Writers(start.clock)
    collaborators = Collaborators(
        clock=start.clock,
        pool=pool,
        engine=engine,
        target=target,
        checksums=checksums,
        copy_rows=copy_rows,
        sign=functools.partial(sign, keys=keys),
        stop_writer=writers.stop,
        faults=start.faults(),
    )
    settings = LinkSettings.from_beat(config.links.beat_s, config.links.max_queued_bytes)
    async with (
        Decoder.open(
            config.decode,
            info,
            collaborators,
            stop_wait_s=config.transfer.timeout_s + STOP_MARGIN_S,
            output_chunk=config.engine.output_chunk,
        ) as core,
        DecodeLinks.open(core, writers, start.clock, settings) as links,
    ):
        yield Opened(core, links)
