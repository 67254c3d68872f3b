"""One kvstore process: `python -m services.kvstore`."""

from __future__ import annotations

import asyncio

from headrace.errors import Unavailable
from headrace.process.registry import Registry
from headrace.process.start import Start, run_service, serve
from services.kvstore.core import KvStore
from services.kvstore.redis_index import RedisIndex
from services.kvstore.server import SERVICE, register

WORKER_ROLES = ("prefill", "decode")


async def main(start: Start) -> None:
    """Opens the catalogue and serves it until a signal."""
    url, mesh = start.config.registry.url, start.config.mesh.name
    async with (
        start.open_registry() as registry,
        RedisIndex.open(url, mesh, start.clock, lambda: registry.reachable) as index,
        KvStore.open(index) as core,
        asyncio.TaskGroup() as tasks,
    ):
        following = tasks.create_task(follow_restarts(registry, core))
        server, _ = await start.listen(register(core), [SERVICE])
        await serve(start, server, registry, {}, core.drain)
        following.cancel()


async def follow_restarts(registry: Registry, core: KvStore) -> None:
    """Tells the core which process is at each worker address now."""
    told: dict[str, str] = {}
    while True:
        version = registry.version
        try:
            for worker in (member.identity for role in WORKER_ROLES for member in registry.members(role)):
                if told.get(worker.address) != worker.epoch:
                    await core.worker_seen(worker)
                    told[worker.address] = worker.epoch
        except Unavailable:
            version = -1  # again when Redis answers
        await registry.wait_change(1.0, since=version if version >= 0 else None)


if __name__ == "__main__":
    run_service("kvstore", main)
