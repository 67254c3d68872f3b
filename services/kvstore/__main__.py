"""One kvstore process: `python -m services.kvstore`."""

from __future__ import annotations

import asyncio
import dataclasses

from headrace.launch.sockets import unused_port
from headrace.process.start import Start, run_service, serve
from headrace.protocol.common import WorkerIdentity
from headrace.rpc.links import LinkSettings
from services.kvstore.core import KvStore
from services.kvstore.links import worker_links
from services.kvstore.redis_index import RedisIndex
from services.kvstore.restarts import follow_restarts
from services.kvstore.server import SERVICE, register


async def main(start: Start) -> None:
    """Opens the catalogue and serves it until a signal."""
    config, host = start.config, start.config.mesh.host
    start = dataclasses.replace(start, port=start.port or unused_port(host))
    own = WorkerIdentity(f"{host}:{start.port}", start.epoch)
    async with (
        start.open_registry() as registry,
        RedisIndex.open(config.registry.url, config.mesh.name, start.clock, lambda: registry.reachable) as index,
        KvStore.open(index) as core,
        asyncio.TaskGroup() as tasks,
    ):
        links = worker_links(core, own, start.clock, LinkSettings.from_beat(config.links.beat_s, config.links.max_queued_bytes), tasks)
        background = [tasks.create_task(work) for work in (follow_restarts(registry, core), links.run())]
        server, _ = await start.listen(register(core, links), [SERVICE])
        await serve(start, server, registry, {}, core.drain)
        for task in background:
            task.cancel()


if __name__ == "__main__":
    run_service("kvstore", main)
