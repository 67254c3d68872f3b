"""The block catalogue: two stateless kvstore cores over one real Redis."""

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

from headrace.clock import SystemClock
from headrace.config import RegistryConfig
from headrace.errors import InvalidRequest, StaleEpoch, Unavailable
from headrace.launch.redis_server import BundledRedis
from headrace.process.registry import Registry
from headrace.protocol.common import CacheTier, WorkerIdentity
from headrace.protocol.kvstore import PrefixHolder, PublishCommand, WithdrawCommand
from services.kvstore import changes as kvstore_changes
from services.kvstore import core as kvstore_core
from services.kvstore.changes import LOST, Change
from services.kvstore.core import KvStore
from services.kvstore.reading import PIECE
from services.kvstore.redis_index import RedisIndex
from services.kvstore.restarts import follow_restarts

A, A2, B = WorkerIdentity("a:1", "e1"), WorkerIdentity("a:1", "e2"), WorkerIdentity("b:1", "e1")
ROUTER = WorkerIdentity("r:1", "e1")
KEYS = [hashlib.md5(str(number).encode()).digest() for number in range(5000)]
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
    """One kvstore process's inside, called as its links and calls do."""

    index: RedisIndex
    core: KvStore

    async def publish(self, worker, keys, ttl_s=TTL_S, tier=CacheTier.DEVICE):
        """Publish, and what it is answered with."""
        await self.apply(worker, PublishCommand(keys=tuple(keys), time_to_live_s=ttl_s, tier=tier))

    async def withdraw(self, worker, keys):
        """Withdraw of some keys."""
        await self.apply(worker, WithdrawCommand(keys=tuple(keys), all=False))

    async def withdraw_all(self, worker):
        """Withdraw of everything."""
        await self.apply(worker, WithdrawCommand(keys=(), all=True))

    async def apply(self, worker, *commands):
        """Commands that came in one message; raises the first failure."""
        for command in commands:
            self.core.check(worker, command)
        for error in await self.core.apply(worker, commands):
            if error is not None:
                raise error


@contextlib.asynccontextmanager
async def serving(url: str, mesh: str, reachable=lambda: True):
    """A kvstore process's inside."""
    async with RedisIndex.open(url, mesh, SystemClock(), reachable) as index, KvStore.open(index) as core:
        yield Store(index, core)


@pytest.fixture
def two(redis_server, mesh):
    """Runs a test's coroutine with two kvstore cores on one catalogue."""

    def run(test):
        async def main():
            async with serving(redis_server.url, mesh) as one, serving(redis_server.url, mesh) as other:
                return await test(one, other)

        return asyncio.run(main())

    return run


async def holders(store: Store, keys) -> dict[WorkerIdentity, int]:
    return {holder.worker: holder.num_blocks for holder in await store.core.lookup(keys)}


def test_the_longest_prefix_of_each_holder_is_found_from_any_process(two):
    async def test(one, other):
        await one.publish(A, KEYS[:5])
        await other.publish(B, KEYS[:2] + KEYS[3:5])
        await other.publish(WorkerIdentity("c:1", "e"), KEYS[1:5])
        assert await one.core.lookup(KEYS[:8]) == (
            PrefixHolder(A, 5, CacheTier.DEVICE),
            PrefixHolder(B, 2, CacheTier.DEVICE),
        )
        assert await holders(other, KEYS[:1]) == {A: 1, B: 1}
        assert await holders(other, KEYS[6:]) == {} and await holders(other, []) == {}

    two(test)


def test_a_prefix_of_thousands_of_blocks_is_found_whole(two):
    async def test(one, other):
        await one.publish(A, KEYS)
        await one.publish(B, KEYS[: PIECE + 1])
        assert await holders(other, KEYS) == {A: len(KEYS), B: PIECE + 1}
        await one.withdraw(A, KEYS[3000:3001])
        assert await holders(other, KEYS) == {A: 3000, B: PIECE + 1}

    two(test)


def test_publishing_and_withdrawing_twice_is_once(two):
    async def test(one, other):
        for store in (one, other):
            await store.publish(A, KEYS[:3])
        for store in (one, other):
            await store.withdraw(A, KEYS[1:3])
        assert await holders(one, KEYS[:3]) == {A: 1}
        await one.withdraw_all(B)

    two(test)


def test_withdrawing_everything_leaves_other_workers_alone(two):
    async def test(one, other):
        await one.publish(A, KEYS[:3])
        await one.publish(B, KEYS[:2])
        await other.withdraw_all(A)
        assert await holders(one, KEYS[:3]) == {B: 2}
        await other.publish(A, KEYS[:1])
        assert await holders(one, KEYS[:3]) == {B: 2, A: 1}, "what was withdrawn must not come back"

    two(test)


def test_entries_lapse_unless_published_again(two):
    async def test(one, other):
        await one.publish(A, KEYS[:2], 1.0)
        await one.publish(B, KEYS[:2])
        assert await holders(other, KEYS[:2]) == {A: 2, B: 2}
        await asyncio.sleep(0.6)
        await one.publish(A, KEYS[:1], 1.0)
        await asyncio.sleep(0.6)
        assert await holders(other, KEYS[:2]) == {A: 1, B: 2}

    two(test)


def test_a_new_epoch_at_an_address_makes_the_old_entries_vanish_and_stay_away(two):
    async def test(one, other):
        await one.publish(A, KEYS[:4])
        await other.publish(A2, KEYS[:1])
        assert await holders(one, KEYS[:4]) == {A2: 1}
        with pytest.raises(StaleEpoch):
            await one.publish(A, KEYS[:4])
        await one.withdraw(A, KEYS[:1])
        await one.withdraw_all(A)
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
            await store.publish(A, KEYS[:3])
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
        await one.publish(A, KEYS[:3], 1.0)
        lease_id, count = await other.core.acquire(ROUTER, [*KEYS[:2], bytes(16), KEYS[2]], 10.0)
        assert count == 2, "only leading keys that exist are pinned"
        await asyncio.sleep(1.2)
        assert await holders(one, KEYS[:3]) == {A: 2}
        await one.core.release(lease_id)
        await one.core.release(lease_id)
        assert await holders(one, KEYS[:3]) == {}

    two(test)


def test_a_lease_lapses_by_itself_and_does_not_hold_what_is_gone(two):
    async def test(one, other):
        await one.publish(A, KEYS[:2], 1.0)
        await other.core.acquire(ROUTER, KEYS[:2], 1.2)
        await one.withdraw(A, KEYS[1:2])
        assert await holders(one, KEYS[:2]) == {A: 1}
        await asyncio.sleep(1.5)
        assert await holders(one, KEYS[:2]) == {}
        assert (await other.core.acquire(ROUTER, KEYS[:2], 1.0))[1] == 0

    two(test)


class Heard:
    """What one watcher was told, in order."""

    def __init__(self, store: Store):
        self.changes: list[Change] = []
        self._store = store

    async def run(self) -> None:
        async for change in self._store.core.watch():
            self.changes.append(change)

    async def until(self, count: int) -> list[Change]:
        """The first `count` changes, without LOST, which is said when listening begins."""
        async with asyncio.timeout(5):
            while len(self.told()) < count:
                await asyncio.sleep(0.01)
        return self.told()

    def told(self) -> list[Change]:
        return [change for change in self.changes if change.kind != "LOST"]


@contextlib.asynccontextmanager
async def watching(store: Store):
    async with asyncio.TaskGroup() as tasks:
        heard = Heard(store)
        running = tasks.create_task(heard.run())
        async with asyncio.timeout(5):
            while not store.core._watchers:
                await asyncio.sleep(0.01)
        yield heard
        running.cancel()


def test_a_watcher_hears_what_happens_through_any_process(two):
    async def test(one, other):
        await asyncio.sleep(0.1)  # both listen
        async with watching(other) as heard:
            await one.publish(A, KEYS[:2])
            await one.publish(A, KEYS[:2])  # nothing new: nothing to hear
            await one.publish(A, KEYS[:1], tier=CacheTier.HOST)
            await one.withdraw(A, KEYS[1:2])
            await one.publish(A2, KEYS[:1])
            await one.withdraw_all(A2)
            return await heard.until(6)

    told = two(test)
    assert [(change.kind, change.worker, change.keys, change.all, change.tier) for change in told] == [
        ("PUBLISHED", A, tuple(KEYS[:2]), False, CacheTier.DEVICE),
        ("PUBLISHED", A, (KEYS[0],), False, CacheTier.HOST),
        ("WITHDRAWN", A, (KEYS[1],), False, CacheTier.UNSPECIFIED),
        ("WITHDRAWN", A, (), True, CacheTier.UNSPECIFIED),
        ("PUBLISHED", A2, (KEYS[0],), False, CacheTier.DEVICE),
        ("WITHDRAWN", A2, (), True, CacheTier.UNSPECIFIED),
    ]


def test_a_watch_begins_with_the_catalogue_as_it_is_and_numbers_everything(two):
    async def test(one, other):
        await one.publish(A, KEYS[: PIECE + 100])
        await one.publish(B, KEYS[:3], tier=CacheTier.HOST)
        await one.withdraw(A, KEYS[:1])
        await asyncio.sleep(0.1)
        async with watching(other) as heard:
            async with asyncio.timeout(5):
                while sum(len(change.keys) for change in heard.told()) < PIECE + 102:
                    await asyncio.sleep(0.01)
            before = len(heard.told())
            await one.publish(A2, KEYS[:1])
            told = await heard.until(before + 2)
        assert [change.number for change in heard.changes] == list(range(1, len(heard.changes) + 1))
        parts, news = [c for c in told if c.is_snapshot], [c for c in told if not c.is_snapshot]
        assert told == [*parts, *news], "changes follow after the last part"
        assert {key for c in parts if c.worker == A for key in c.keys} == set(KEYS[1 : PIECE + 100])
        assert {(key, c.tier) for c in parts if c.worker == B for key in c.keys} == {
            (key, CacheTier.HOST) for key in KEYS[:3]
        }
        assert [(c.kind, c.worker) for c in news] == [("WITHDRAWN", A), ("PUBLISHED", A2)]

    two(test)


def test_a_watcher_that_redraws_the_catalogue_from_what_it_hears_agrees_with_it(two):
    async def test(one, other):
        await asyncio.sleep(0.1)
        await one.publish(A, KEYS[:40])
        async with watching(other) as heard:
            for round_number in range(10):
                await one.publish(A, KEYS[round_number * 5 : round_number * 5 + 10])
                await other.withdraw(A, KEYS[round_number * 3 : round_number * 3 + 4])
            await one.publish(B, KEYS[:1])
            async with asyncio.timeout(5):
                while not any(change.worker == B for change in heard.told()):
                    await asyncio.sleep(0.01)
        known: set[bytes] = set()
        for change in heard.told():
            if change.worker == A:
                known = known | set(change.keys) if change.kind == "PUBLISHED" else known - set(change.keys)
        found = {key for key in KEYS[:60] if A in await holders(one, [key])}
        assert known == found

    two(test)


def test_a_prefix_lies_where_its_slowest_block_lies(two):
    async def test(one, other):
        await one.publish(A, KEYS[:4])
        await one.publish(A, KEYS[2:3], tier=CacheTier.DISK)
        await one.publish(B, KEYS[:2])
        assert await other.core.lookup(KEYS[:4]) == (
            PrefixHolder(A, 4, CacheTier.DISK),
            PrefixHolder(B, 2, CacheTier.DEVICE),
        )

    two(test)


def test_commands_of_one_message_are_carried_out_in_order_and_answered_each(two):
    async def test(one, other):
        publish = PublishCommand(keys=tuple(KEYS[:3]), time_to_live_s=TTL_S, tier=CacheTier.DEVICE)
        withdraw = WithdrawCommand(keys=tuple(KEYS[1:3]), all=False)
        assert await one.core.apply(A, [publish, withdraw, publish, withdraw]) == [None] * 4
        assert await holders(other, KEYS[:3]) == {A: 1}
        await other.publish(A2, KEYS[:1])
        stale, fine = await one.core.apply(A, [publish, withdraw])
        assert isinstance(stale, StaleEpoch) and fine is None
        assert await holders(other, KEYS[:3]) == {A2: 1}

    two(test)


def test_a_flushed_catalogue_is_rebuilt_by_publishing(two):
    async def test(one, other):
        await one.publish(A, KEYS[:3])
        await one.index._connection.client.flushall()
        assert await holders(other, KEYS[:3]) == {}
        await one.publish(A, KEYS[:3])
        assert await holders(other, KEYS[:3]) == {A: 3}

    two(test)


def test_every_key_has_a_time_to_live(two):
    async def test(one, other):
        await one.publish(A, KEYS[:3])
        await one.publish(A2, KEYS[:3])
        await one.core.acquire(ROUTER, KEYS[:3], 5.0)
        names = await one.index._connection.client.keys(f"headrace:{{{one.index._connection._mesh}}}:*")
        assert len(names) == 3 + 1 + 1 + 1
        assert [name for name in names if await one.index._connection.client.pttl(name) <= 0] == []

    two(test)


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_without_redis_calls_fail_soon_and_recover(signal_number):
    async def main(server: BundledRedis):
        url, quick = server.url, RegistryConfig(heartbeat_s=0.2, lease_s=1.0)
        async with (
            Registry.open(url, "m", quick, SystemClock()) as view,
            serving(url, "m", lambda: view.reachable) as store,
        ):
            await store.publish(A, KEYS[:3])
            os.kill(server.pid, signal_number)
            begin = time.monotonic()
            with pytest.raises(Unavailable):
                await store.core.lookup(KEYS[:3])
            assert time.monotonic() - begin < 2.0
            async with asyncio.timeout(5):
                while view.reachable:
                    await asyncio.sleep(0.02)
            begin = time.monotonic()
            with pytest.raises(Unavailable) as caught:
                await store.core.lookup(KEYS[:3])
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
        (lambda store: store.core.lookup([b"xyz"]), "keys"),
        (lambda store: store.core.lookup([bytes(16)] * (kvstore_core.MAX_KEYS + 1)), "keys"),
        (lambda store: store.publish(A, [bytes(16)] * (kvstore_core.MAX_COMMAND_KEYS + 1)), "keys"),
        (lambda store: store.publish(WorkerIdentity("", "e"), KEYS[:1]), "worker"),
        (lambda store: store.publish(WorkerIdentity("a:1", ""), KEYS[:1]), "worker"),
        (lambda store: store.publish(WorkerIdentity("a:1", "e 1"), KEYS[:1]), "worker"),
        (lambda store: store.publish(A, KEYS[:1], 0.5), "time_to_live"),
        (lambda store: store.publish(A, KEYS[:1], 2.0**40), "time_to_live"),
        (lambda store: store.publish(A, KEYS[:1], tier=CacheTier.UNSPECIFIED), "tier"),
        (lambda store: store.withdraw_all(WorkerIdentity("", "")), "worker"),
        (lambda store: store.apply(A, WithdrawCommand(keys=tuple(KEYS[:1]), all=True)), "keys"),
        (lambda store: store.core.acquire(ROUTER, KEYS[:1], 601), "time_to_live"),
        (lambda store: store.core.acquire(WorkerIdentity("", ""), KEYS[:1], 5), "holder"),
        (lambda store: store.core.release("nonsense"), "lease_id"),
    ],
)
def test_a_malformed_call_is_refused_by_field(redis_server, call, field):
    async def main():
        async with serving(redis_server.url, "refusals") as store:
            with pytest.raises(InvalidRequest) as caught:
                await call(store)
            assert caught.value.field == field
            assert await holders(store, KEYS[:1]) == {}

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
                    assert await index.apply(worker, [PublishCommand(tuple(keys), TTL_S, CacheTier.DEVICE)]) == [None]
                    held[worker] |= numbers
                elif verb == "withdraw" and keys:
                    assert await index.apply(worker, [WithdrawCommand(tuple(keys), False)]) == [None]
                    held[worker] -= numbers
                elif verb == "all":
                    assert await index.apply(worker, [WithdrawCommand((), True)]) == [None]
                    held[worker] = set()
            found = {holder.worker: holder.num_blocks for holder in await index.lookup(KEYS[:6])}
            assert found == {worker: count for worker, numbers in held.items() if (count := prefix(numbers))}

    asyncio.run(main())


def prefix(numbers: set[int]) -> int:
    """How many of 0, 1, 2, ... are there without a gap."""
    return next(count for count in range(7) if count not in numbers)


# --- the core alone --------------------------------------------------------------------------------------------------


class SilentIndex:
    """An index with nothing in it, whose changes come from the test."""

    async def listen(self, on_change):
        self.on_change = on_change
        await asyncio.Event().wait()

    async def snapshot(self):
        for nothing in ():
            yield nothing


def test_a_watcher_that_falls_behind_is_told_so_by_a_gap_and_nothing_else():
    async def main():
        index = SilentIndex()
        async with KvStore.open(index) as core:
            await asyncio.sleep(0)
            changes = core.watch()
            first = asyncio.ensure_future(anext(changes))
            await asyncio.sleep(0)
            index.on_change(Change("PUBLISHED", A, (KEYS[0],)))
            assert ((await first).keys, (await first).number) == ((KEYS[0],), 1)
            for _ in range(kvstore_changes.WATCH_BUFFER + 5):
                index.on_change(Change("PUBLISHED", A, (KEYS[1],)))
            lost = await anext(changes)
            assert (lost.kind, lost.number) == (LOST.kind, 1 + kvstore_changes.WATCH_BUFFER + 1 + 1)
            left = [await anext(changes) for _ in range(4)]
            assert [change.kind for change in left] == ["PUBLISHED"] * 4
            assert [change.number - lost.number for change in left] == [1, 2, 3, 4]
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
