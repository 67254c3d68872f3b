"""The block catalogue: two stateless kvstore servers over one real Redis."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import time
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace import rpc
from headrace.client import KvStoreClient
from headrace.clock import SystemClock
from headrace.config import RegistryConfig
from headrace.errors import InvalidRequest, StaleEpoch, Unavailable
from headrace.launch.redis_server import BundledRedis
from headrace.process.registry import Registry
from headrace.protocol import PrefixHolder, WorkerIdentity
from services.kvstore import core as kvstore_core
from services.kvstore.__main__ import follow_restarts
from services.kvstore.core import LOST, Change, KvStore
from services.kvstore.redis_index import PIECE, RedisIndex
from services.kvstore.server import SERVICE, register

A, A2, B = WorkerIdentity("a:1", "e1"), WorkerIdentity("a:1", "e2"), WorkerIdentity("b:1", "e1")
ROUTER = WorkerIdentity("r:1", "e1")
KEYS = [hashlib.md5(str(number).encode()).hexdigest() for number in range(5000)]
TTL_S = 30.0


@pytest.fixture(scope="module")
def redis_server():
    """One Redis for this file; every test has a mesh name of its own."""
    with BundledRedis() as running:
        yield running


@pytest.fixture
def mesh(request) -> str:
    """A name nobody else uses."""
    return request.node.name


@dataclass
class Store:
    """One kvstore server and a client of it."""

    index: RedisIndex
    core: KvStore
    client: KvStoreClient


@contextlib.asynccontextmanager
async def serving(url: str, mesh: str, reachable=lambda: True):
    """A kvstore process's inside, with a client."""
    async with RedisIndex.open(url, mesh, SystemClock(), reachable) as index, KvStore.open(index) as core:
        server = await rpc.start_server("127.0.0.1", 0, register(core), [SERVICE])
        channel = rpc.open_channel(server.address, own_connection=True)
        try:
            yield Store(index, core, KvStoreClient(channel))
        finally:
            await channel.close()
            await server.stop(None)


@pytest.fixture
def two(redis_server, mesh):
    """Runs a test's coroutine with two kvstore clients on one catalogue."""

    def run(test):
        async def main():
            async with serving(redis_server.url, mesh) as one, serving(redis_server.url, mesh) as other:
                return await test(one, other)

        return asyncio.run(main())

    return run


async def holders(store: Store, keys) -> dict[WorkerIdentity, int]:
    return {holder.worker: holder.num_blocks for holder in await store.client.lookup(keys, 5)}


def test_the_longest_prefix_of_each_holder_is_found_from_any_process(two):
    async def test(one, other):
        await one.client.publish(A, KEYS[:5], TTL_S, 5)
        await other.client.publish(B, KEYS[:2] + KEYS[3:5], TTL_S, 5)
        await other.client.publish(WorkerIdentity("c:1", "e"), KEYS[1:5], TTL_S, 5)
        assert await one.client.lookup(KEYS[:8], 5) == (PrefixHolder(A, 5), PrefixHolder(B, 2))
        assert await holders(other, KEYS[:1]) == {A: 1, B: 1}
        assert await holders(other, KEYS[6:]) == {} and await holders(other, []) == {}

    two(test)


def test_a_prefix_of_thousands_of_blocks_is_found_whole(two):
    async def test(one, other):
        await one.client.publish(A, KEYS, TTL_S, 5)
        await one.client.publish(B, KEYS[: PIECE + 1], TTL_S, 5)
        assert await holders(other, KEYS) == {A: len(KEYS), B: PIECE + 1}
        await one.client.withdraw(A, KEYS[3000:3001], 5)
        assert await holders(other, KEYS) == {A: 3000, B: PIECE + 1}

    two(test)


def test_publishing_and_withdrawing_twice_is_once(two):
    async def test(one, other):
        for store in (one, other):
            await store.client.publish(A, KEYS[:3], TTL_S, 5)
        for store in (one, other):
            await store.client.withdraw(A, KEYS[1:3], 5)
        assert await holders(one, KEYS[:3]) == {A: 1}
        await one.client.withdraw(B, [], 5)

    two(test)


def test_withdrawing_everything_leaves_other_workers_alone(two):
    async def test(one, other):
        await one.client.publish(A, KEYS[:3], TTL_S, 5)
        await one.client.publish(B, KEYS[:2], TTL_S, 5)
        await other.client.withdraw(A, [], 5)
        assert await holders(one, KEYS[:3]) == {B: 2}
        await other.client.publish(A, KEYS[:1], TTL_S, 5)
        assert await holders(one, KEYS[:3]) == {B: 2, A: 1}, "what was withdrawn must not come back"

    two(test)


def test_entries_lapse_unless_published_again(two):
    async def test(one, other):
        await one.client.publish(A, KEYS[:2], 1.0, 5)
        await one.client.publish(B, KEYS[:2], TTL_S, 5)
        assert await holders(other, KEYS[:2]) == {A: 2, B: 2}
        await asyncio.sleep(0.6)
        await one.client.publish(A, KEYS[:1], 1.0, 5)
        await asyncio.sleep(0.6)
        assert await holders(other, KEYS[:2]) == {A: 1, B: 2}

    two(test)


def test_a_new_epoch_at_an_address_makes_the_old_entries_vanish_and_stay_away(two):
    async def test(one, other):
        await one.client.publish(A, KEYS[:4], TTL_S, 5)
        await other.client.publish(A2, KEYS[:1], TTL_S, 5)
        assert await holders(one, KEYS[:4]) == {A2: 1}
        with pytest.raises(StaleEpoch):
            await one.client.publish(A, KEYS[:4], TTL_S, 5)
        await one.client.withdraw(A, KEYS[:1], 5)
        await one.client.withdraw(A, [], 5)
        assert await holders(one, KEYS[:4]) == {A2: 1}, "the old process cannot harm the new one's entries"

    two(test)


def test_the_registry_alone_makes_a_restarted_workers_old_entries_vanish(redis_server, mesh):
    async def main():
        quick = RegistryConfig(heartbeat_s=0.1, lease_s=1.0)
        url, clock = redis_server.url, SystemClock()
        async with (
            Registry.open(url, mesh, quick, clock) as view,
            Registry.open(url, mesh, quick, clock) as worker,
            serving(url, mesh, lambda: view.reachable) as store,
            asyncio.TaskGroup() as tasks,
        ):
            following = tasks.create_task(follow_restarts(view, store.core))
            await worker.announce("prefill", A, {})
            await store.client.publish(A, KEYS[:3], TTL_S, 5)
            assert await holders(store, KEYS[:3]) == {A: 3}
            worker._own.clear()  # killed
            await worker.announce("prefill", A2, {})  # and started again
            async with asyncio.timeout(3):
                while await holders(store, KEYS[:3]):
                    await asyncio.sleep(0.02)
            following.cancel()

    asyncio.run(main())


def test_a_lease_keeps_entries_from_lapsing_until_it_ends(two):
    async def test(one, other):
        await one.client.publish(A, KEYS[:3], 1.0, 5)
        lease_id, count = await other.client.acquire(ROUTER, [*KEYS[:2], "0" * 32, KEYS[2]], 10.0, 5)
        assert count == 2, "only leading keys that exist are pinned"
        await asyncio.sleep(1.2)
        assert await holders(one, KEYS[:3]) == {A: 2}
        await one.client.release_lease(lease_id, 5)
        await one.client.release_lease(lease_id, 5)
        assert await holders(one, KEYS[:3]) == {}

    two(test)


def test_a_lease_lapses_by_itself_and_does_not_hold_what_is_gone(two):
    async def test(one, other):
        await one.client.publish(A, KEYS[:2], 1.0, 5)
        await other.client.acquire(ROUTER, KEYS[:2], 1.2, 5)
        await one.client.withdraw(A, KEYS[1:2], 5)
        assert await holders(one, KEYS[:2]) == {A: 1}
        await asyncio.sleep(1.5)
        assert await holders(one, KEYS[:2]) == {}
        assert (await other.client.acquire(ROUTER, KEYS[:2], 1.0, 5))[1] == 0

    two(test)


def test_a_watcher_hears_what_happens_through_any_process(two):
    async def test(one, other):
        heard: list[tuple] = []

        async def watch():
            async for change in other.client.watch():
                heard.append(change)

        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(watch())
            async with asyncio.timeout(5):
                while not other.core._watchers:
                    await asyncio.sleep(0.01)
            await one.client.publish(A, KEYS[:2], TTL_S, 5)
            await one.client.publish(A, KEYS[:2], TTL_S, 5)  # nothing new: nothing to hear
            await one.client.withdraw(A, KEYS[1:2], 5)
            await one.client.publish(A2, KEYS[:1], TTL_S, 5)
            await one.client.withdraw(A2, [], 5)
            async with asyncio.timeout(5):
                while len([change for change in heard if change[0] != "LOST"]) < 5:
                    await asyncio.sleep(0.01)
            watching.cancel()
        return [change for change in heard if change[0] != "LOST"]

    assert two(test) == [
        ("PUBLISHED", A, tuple(KEYS[:2])),
        ("WITHDRAWN", A, (KEYS[1],)),
        ("WITHDRAWN", A, ()),
        ("PUBLISHED", A2, (KEYS[0],)),
        ("WITHDRAWN", A2, ()),
    ]


def test_a_flushed_catalogue_is_rebuilt_by_publishing(two):
    async def test(one, other):
        await one.client.publish(A, KEYS[:3], TTL_S, 5)
        await one.index._redis.flushall()
        assert await holders(other, KEYS[:3]) == {}
        await one.client.publish(A, KEYS[:3], TTL_S, 5)
        assert await holders(other, KEYS[:3]) == {A: 3}

    two(test)


def test_every_key_has_a_time_to_live(two):
    async def test(one, other):
        await one.client.publish(A, KEYS[:3], TTL_S, 5)
        await one.client.publish(A2, KEYS[:3], TTL_S, 5)
        await one.client.acquire(ROUTER, KEYS[:3], 5.0, 5)
        names = await one.index._redis.keys(f"headrace:{{{one.index._mesh}}}:*")
        assert len(names) == 3 + 1 + 1 + 1
        assert [name for name in names if await one.index._redis.pttl(name) <= 0] == []

    two(test)


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_without_redis_calls_fail_soon_and_recover(signal_number):
    async def main(server: BundledRedis):
        url, quick = server.url, RegistryConfig(heartbeat_s=0.2, lease_s=1.0)
        async with (
            Registry.open(url, "m", quick, SystemClock()) as view,
            serving(url, "m", lambda: view.reachable) as store,
        ):
            await store.client.publish(A, KEYS[:3], TTL_S, 5)
            os.kill(server.pid, signal_number)
            begin = time.monotonic()
            with pytest.raises(Unavailable):
                await store.client.lookup(KEYS[:3], 5)
            assert time.monotonic() - begin < 2.0
            async with asyncio.timeout(5):
                while view.reachable:
                    await asyncio.sleep(0.02)
            begin = time.monotonic()
            with pytest.raises(Unavailable) as caught:
                await store.client.lookup(KEYS[:3], 5)
            assert time.monotonic() - begin < 0.3 and caught.value.reason == "REDIS_AWAY"
            if signal_number == signal.SIGKILL:
                server.stop()
                server.start()
                await until_found(store, {})
            else:
                os.kill(server.pid, signal.SIGCONT)
                await until_found(store, {A: 3})

    with BundledRedis() as server:
        asyncio.run(main(server))


async def until_found(store: Store, wanted: dict) -> None:
    async with asyncio.timeout(5):
        while True:
            with contextlib.suppress(Unavailable):
                assert await holders(store, KEYS[:3]) == wanted
                return
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda client: client.lookup(["xyz"], 5), "keys"),
        (lambda client: client.lookup(["A" * 32], 5), "keys"),
        (lambda client: client.lookup(["0" * 32] * (kvstore_core.MAX_KEYS + 1), 5), "keys"),
        (lambda client: client.publish(WorkerIdentity("", "e"), KEYS[:1], 5, 5), "worker"),
        (lambda client: client.publish(WorkerIdentity("a:1", ""), KEYS[:1], 5, 5), "worker"),
        (lambda client: client.publish(WorkerIdentity("a:1", "e 1"), KEYS[:1], 5, 5), "worker"),
        (lambda client: client.publish(A, KEYS[:1], 0.5, 5), "time_to_live"),
        (lambda client: client.publish(A, KEYS[:1], 2.0**40, 5), "time_to_live"),
        (lambda client: client.withdraw(WorkerIdentity("", ""), [], 5), "worker"),
        (lambda client: client.acquire(ROUTER, KEYS[:1], 601, 5), "time_to_live"),
        (lambda client: client.acquire(WorkerIdentity("", ""), KEYS[:1], 5, 5), "holder"),
        (lambda client: client.release_lease("nonsense", 5), "lease_id"),
    ],
)
def test_a_malformed_call_is_refused_by_field(redis_server, call, field):
    async def main():
        async with serving(redis_server.url, "refusals") as store:
            with pytest.raises(InvalidRequest) as caught:
                await call(store.client)
            assert caught.value.field == field
            assert await holders(store, KEYS[:1]) == {}, "the process lives"

    asyncio.run(main())


WORKERS = [A, B, WorkerIdentity("c:1", "e1")]
STEPS = st.lists(
    st.tuples(st.sampled_from(["publish", "withdraw", "all"]), st.sampled_from(WORKERS), st.sets(st.integers(0, 5))),
    max_size=12,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS)
def test_after_any_history_a_lookup_says_what_a_plain_account_says(redis_server, steps):
    async def main():
        async with RedisIndex.open(redis_server.url, f"history-{time.monotonic_ns()}", SystemClock()) as index:
            held: dict[WorkerIdentity, set[int]] = {worker: set() for worker in WORKERS}
            for verb, worker, numbers in steps:
                keys = [KEYS[number] for number in sorted(numbers)]
                if verb == "publish":
                    await index.publish(worker, keys, TTL_S)
                    held[worker] |= numbers
                elif verb == "withdraw" and keys:
                    await index.withdraw(worker, keys)
                    held[worker] -= numbers
                elif verb == "all":
                    await index.withdraw(worker, [])
                    held[worker] = set()
            found = {holder.worker: holder.num_blocks for holder in await index.lookup(KEYS[:6])}
            assert found == {worker: count for worker, numbers in held.items() if (count := prefix(numbers))}

    asyncio.run(main())


def prefix(numbers: set[int]) -> int:
    """How many of 0, 1, 2, ... are there without a gap."""
    return next(count for count in range(7) if count not in numbers)


# --- the core alone --------------------------------------------------------------------------------------------------


class SilentIndex:
    """An index whose changes come from the test."""

    async def listen(self, on_change):
        self.on_change = on_change
        await asyncio.Event().wait()


def test_a_watcher_that_falls_behind_is_told_so_and_nothing_else():
    async def main():
        index = SilentIndex()
        async with KvStore.open(index) as core:
            await asyncio.sleep(0)
            changes = core.watch()
            first = asyncio.ensure_future(anext(changes))
            await asyncio.sleep(0)
            index.on_change(Change("PUBLISHED", A, (KEYS[0],)))
            assert (await first).keys == (KEYS[0],)
            for _ in range(kvstore_core.WATCH_BUFFER + 5):
                index.on_change(Change("PUBLISHED", A, (KEYS[1],)))
            assert await anext(changes) == LOST
            left = [await anext(changes) for _ in range(4)]
            assert [change.kind for change in left] == ["PUBLISHED"] * 4
            await changes.aclose()
            assert not core._watchers

    asyncio.run(main())


def test_draining_sends_watchers_elsewhere():
    async def main():
        async with KvStore.open(SilentIndex()) as core:
            waiting = asyncio.ensure_future(anext(core.watch()))
            await asyncio.sleep(0)
            await core.drain(1.0)
            with pytest.raises(Unavailable):
                await waiting

    asyncio.run(main())
