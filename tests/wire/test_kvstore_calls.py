"""A kvstore process's door over real gRPC: a worker's catalogue link, and the calls of operators and workers."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from headrace.clock import Deadline, SystemClock
from headrace.errors import InvalidRequest
from headrace.launch.redis_server import BundledRedis
from headrace.protocol.common import CacheTier, WorkerIdentity
from headrace.protocol.kvstore import PrefixHolder, PublishCommand, WithdrawCommand
from headrace.protocol.link import Done
from headrace.rpc.channel import open_channel
from headrace.rpc.clients import KvStoreClient
from headrace.rpc.links import CATALOGUE_LINK, LinkOpener, LinkSettings
from headrace.rpc.server import start_server
from services.kvstore.core import KvStore
from services.kvstore.links import worker_links
from services.kvstore.redis_index import RedisIndex
from services.kvstore.server import SERVICE, register
from tests.link_fakes import Recorder

OWN, WORKER = WorkerIdentity("127.0.0.1:1", "1" * 16), WorkerIdentity("127.0.0.1:2", "2" * 16)
KEYS = tuple(number.to_bytes(16, "big") for number in range(6))
CLOCK, SETTINGS = SystemClock(), LinkSettings.from_beat(1.0)


@contextlib.asynccontextmanager
async def served(mesh: str):
    """(client, link of WORKER) of a kvstore that serves on a port of its own."""
    with BundledRedis() as redis:
        async with (
            RedisIndex.open(redis.url, mesh, CLOCK, lambda: True) as index,
            KvStore.open(index) as core,
            asyncio.TaskGroup() as tasks,
        ):
            links = worker_links(core, OWN, CLOCK, SETTINGS, tasks)
            keeping = [tasks.create_task(links.run())]
            server = await start_server("127.0.0.1", 0, register(core, links), [SERVICE])
            opener = LinkOpener(CATALOGUE_LINK, server.address, WORKER, OWN.epoch, Recorder(), CLOCK, SETTINGS)
            keeping.append(tasks.create_task(opener.run()))
            async with open_channel(server.address) as channel:
                yield KvStoreClient(channel), opener.link
            for task in keeping:
                task.cancel()
            await server.stop(None)


async def said(link, body) -> object:
    return await link.ask(body, Deadline.after(CLOCK, 5.0))


def test_what_a_worker_publishes_is_found_pinned_and_unpinned_by_calls():
    async def main():
        async with served("calls") as (client, link):
            assert await said(link, PublishCommand(KEYS[:4], 30.0, CacheTier.DEVICE)) == Done()
            assert await client.lookup(KEYS, 5.0) == (PrefixHolder(WORKER, 4, CacheTier.DEVICE),)
            lease, count = await client.acquire(WORKER, KEYS, 10.0, 5.0)
            assert lease and count == 4
            await client.release_lease(lease, 5.0)
            await client.release_lease(lease, 5.0)  # safe to repeat
            with pytest.raises(InvalidRequest) as wrong:
                await client.acquire(WORKER, KEYS, 601.0, 5.0)
            assert wrong.value.field == "time_to_live"
            assert await said(link, WithdrawCommand((), True)) == Done()
            assert await client.lookup(KEYS, 5.0) == ()

    asyncio.run(main())


def test_a_watch_over_the_wire_begins_with_what_there_is_and_counts_on():
    async def main():
        async with served("watch") as (client, link):
            await said(link, PublishCommand(KEYS[:2], 30.0, CacheTier.DEVICE))
            async with asyncio.timeout(10), contextlib.aclosing(client.watch()) as changes:
                first = await anext(changes)
                await said(link, PublishCommand(KEYS[2:3], 30.0, CacheTier.HOST))
                then = await anext(changes)
            assert (first.is_snapshot, first.worker, sorted(first.keys)) == (True, WORKER, sorted(KEYS[:2]))
            assert (then.is_snapshot, then.kind, then.keys, then.tier) == (
                False,
                "PUBLISHED",
                KEYS[2:3],
                CacheTier.HOST,
            )
            assert (first.number, then.number) == (1, 2)

    asyncio.run(main())
