"""What a prefill rank tells of the prefixes it holds: routers see exactly what its pool can find, the catalogue hears it in batches."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.cache.blocks import BlockPool, block_keys
from headrace.clock import FakeClock
from headrace.errors import Unavailable
from headrace.protocol.common import CacheTier
from headrace.protocol.kvstore import PublishCommand, WithdrawCommand
from headrace.protocol.prefill import HeldPrefixes
from services.prefill import publisher as publishing
from services.prefill.held import KEYS_PER_ITEM, Held, changes, snapshot
from services.prefill.publisher import GATHER_S, RETRY_S, Publisher

BLOCKS = 8


class View:
    """What a router knows from the items it was sent."""

    def __init__(self, held: Held):
        self.keys: set[bytes] = set()
        self.items: list[HeldPrefixes] = []
        for item in snapshot(held.listen(self.hear)):
            self.take(item)

    def hear(self, added, removed) -> None:
        for item in changes(added, removed):
            self.take(item)

    def take(self, item: HeldPrefixes) -> None:
        if item.is_snapshot:
            self.keys.clear()
        assert not set(item.added) & set(item.removed)
        assert not set(item.added) & self.keys, "what is known is not told again"
        assert set(item.removed) <= self.keys, "what is not known is not taken back"
        self.keys |= set(item.added)
        self.keys -= set(item.removed)
        self.items.append(item)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("prompt"), st.integers(0, 3), st.integers(1, BLOCKS)),
        st.tuples(st.just("forget"), st.integers(0, 3), st.integers(1, BLOCKS)),
        st.tuples(st.just("turn"), st.just(0), st.just(0)),
        st.tuples(st.just("router"), st.just(0), st.just(0)),
    ),
    max_size=30,
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_after_any_history_every_router_knows_what_the_pool_can_find(steps):
    """Prompts share prefixes by their first number and push one another out; routers come at any time."""

    async def scenario():
        pool = BlockPool(BLOCKS, 4)
        held = Held(pool)
        views = [View(held)]
        for verb, which, length in steps:
            keys = block_keys(str(which), range(4 * length), 4)
            if verb == "prompt":
                found = pool.match_prefix(keys)
                blocks = (*found, *pool.allocate(length - len(found)))
                for key, block in zip(keys, blocks, strict=True):
                    pool.register(key, block)
                pool.free(blocks)
            elif verb == "forget":
                pool.forget(keys[length // 2 :])
            elif verb == "turn":
                await asyncio.sleep(0)
                assert all(view.keys == set(pool.registered_keys()) for view in views)
            else:
                views.append(View(held))
                assert views[-1].keys == set(pool.registered_keys())
        await asyncio.sleep(0)
        assert all(view.keys == set(pool.registered_keys()) for view in views)

    asyncio.run(scenario())


def test_what_happens_in_one_turn_travels_as_one_item():
    async def scenario():
        pool = BlockPool(4, 4)
        held = Held(pool)
        view = View(held)
        blocks = pool.allocate(4)
        for key, block in zip(block_keys("", range(16), 4), blocks, strict=True):
            pool.register(key, block)
        pool.free(blocks)
        pool.free(pool.allocate(2))
        assert view.items == [HeldPrefixes(is_snapshot=True, added=(), removed=())]
        await asyncio.sleep(0)
        assert len(view.items) == 2 and len(view.keys) == 2

    asyncio.run(scenario())


def test_a_router_that_left_hears_nothing_more():
    async def scenario():
        pool = BlockPool(4, 4)
        held = Held(pool)
        view, other = View(held), View(held)
        held.leave(view.hear)
        held.leave(view.hear)
        pool.register(b"k" * 16, pool.allocate(1)[0])
        await asyncio.sleep(0)
        assert (view.keys, other.keys) == (set(), {b"k" * 16})

    asyncio.run(scenario())


@pytest.mark.parametrize("count", [0, 1, KEYS_PER_ITEM, KEYS_PER_ITEM + 1, 3 * KEYS_PER_ITEM])
def test_long_lists_travel_in_items_below_256_kib(count):
    keys = [number.to_bytes(16, "big") for number in range(count)]
    items = list(snapshot(keys))
    assert [item.is_snapshot for item in items] == [True] + [False] * (len(items) - 1)
    assert [key for item in items for key in item.added] == keys
    both = list(changes(keys, keys[::-1]))
    assert all(16 * (len(item.added) + len(item.removed)) <= 128 * 1024 for item in (*items, *both))
    assert [key for item in both for key in item.added] == keys
    assert [key for item in both for key in item.removed] == keys[::-1]


# --- the catalogue ---------------------------------------------------------------------------------------------------


class Catalogue:
    """A kvstore at the end of a link: keeps what it was told, with times to live; `error` is what it answers instead."""

    def __init__(self, clock: FakeClock):
        self.clock, self.error, self.away = clock, None, False
        self.known: dict[bytes, float] = {}
        self.batches: list[list[object]] = []
        self._batch: list[object] = []
        self.on_publish = lambda: None
        self.links: list[CatalogueLink] = []

    def open(self, handler):
        if self.away:
            return None
        self.links.append(CatalogueLink(self))
        return self.links[-1]

    def found(self) -> set[bytes]:
        return {key for key, until in self.known.items() if until > self.clock.now()}

    def take(self, body) -> None:
        if not self._batch:
            asyncio.get_running_loop().call_soon(self._end_batch)
        self._batch.append(body)

    def _end_batch(self) -> None:
        batch, self._batch = self._batch, []
        self.batches.append(batch)

    def carry_out(self, body) -> None:
        if isinstance(body, PublishCommand):
            assert body.tier is CacheTier.DEVICE
            self.on_publish()
            self.known.update(dict.fromkeys(body.keys, self.clock.now() + body.time_to_live_s))
        else:
            assert isinstance(body, WithdrawCommand) and not body.all
            for key in body.keys:
                self.known.pop(key, None)


class CatalogueLink:
    """Opener and link in one."""

    def __init__(self, catalogue: Catalogue):
        self.link, self._catalogue = self, catalogue
        self._lost = asyncio.Event()

    async def run(self) -> None:
        await self._lost.wait()

    def lose(self) -> None:
        self._lost.set()

    async def ask(self, body, deadline):
        self._catalogue.take(body)
        await asyncio.sleep(0)
        if self._lost.is_set() or self._catalogue.error is not None:
            raise self._catalogue.error or Unavailable("lost", reason="LINK_LOST")
        self._catalogue.carry_out(body)


@contextlib.asynccontextmanager
async def publishing_from(pool: BlockPool, catalogue: Catalogue, clock: FakeClock, ttl_s: float = 30.0):
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(Publisher(Held(pool), catalogue.open, clock, ttl_s).run())
        await asyncio.sleep(0)
        yield
        running.cancel()


def hold(pool: BlockPool, which: str, length: int) -> list[bytes]:
    keys = block_keys(which, range(4 * length), 4)
    blocks = pool.allocate(length)
    for key, block in zip(keys, blocks, strict=True):
        pool.register(key, block)
    pool.free(blocks)
    return keys


async def pass_time(clock: FakeClock, seconds: float, step: float = GATHER_S) -> None:
    for _ in range(round(seconds / step)):
        await clock.advance(step)


def test_changes_of_many_requests_travel_in_one_message():
    async def scenario():
        pool, clock = BlockPool(8, 4), FakeClock()
        catalogue = Catalogue(clock)
        async with publishing_from(pool, catalogue, clock):
            first = hold(pool, "a", 4)
            await asyncio.sleep(0)
            second = hold(pool, "b", 4)
            await asyncio.sleep(0)
            assert not catalogue.batches, "nothing is sent on a request's way"
            await pass_time(clock, GATHER_S)
            assert catalogue.found() == {*first, *second} and len(catalogue.batches) == 1
            third = hold(pool, "c", 2)  # pushes out the end of the first
            await pass_time(clock, 2 * GATHER_S)
            assert [type(body) for body in catalogue.batches[1]] == [WithdrawCommand, PublishCommand]
            assert catalogue.found() == {*first[:2], *second, *third}

    asyncio.run(scenario())


def test_what_is_held_is_published_again_before_it_lapses_and_what_is_gone_is_not():
    async def scenario():
        pool, clock = BlockPool(8, 4), FakeClock()
        catalogue = Catalogue(clock)
        async with publishing_from(pool, catalogue, clock, ttl_s=6.0):
            keys = hold(pool, "a", 4)
            for _ in range(10):
                await pass_time(clock, 2.0)
                assert catalogue.found() == set(keys)
            pool.forget(keys[2:])
            await pass_time(clock, 20.0)
            assert catalogue.found() == set(keys[:2])

    asyncio.run(scenario())


def test_what_was_held_before_the_publisher_began_is_published_too():
    async def scenario():
        pool, clock = BlockPool(8, 4), FakeClock()
        keys, catalogue = hold(pool, "a", 4), Catalogue(clock)
        async with publishing_from(pool, catalogue, clock):
            await pass_time(clock, 2 * GATHER_S)
            assert catalogue.found() == set(keys)

    asyncio.run(scenario())


@pytest.mark.parametrize("away", ["no kvstore is announced", "it answers with an error", "its link is lost"])
def test_while_the_kvstore_is_away_nothing_waits_and_afterwards_it_hears_everything(away):
    async def scenario():
        pool, clock = BlockPool(4, 4), FakeClock()
        catalogue = Catalogue(clock)
        catalogue.away = away == "no kvstore is announced"
        async with publishing_from(pool, catalogue, clock):
            old = hold(pool, "a", 2)
            await pass_time(clock, 2 * GATHER_S)
            if away == "it answers with an error":
                catalogue.error = Unavailable("Redis is away", reason="REDIS_AWAY")
            elif away == "its link is lost":
                catalogue.away = True
                catalogue.links[0].lose()
            await asyncio.sleep(0)
            new = hold(pool, "b", 3)
            await pass_time(clock, 3 * RETRY_S)
            assert not catalogue.found() & set(new), "it heard nothing of this"
            catalogue.error, catalogue.away = None, False
            await pass_time(clock, 3 * RETRY_S)
            assert catalogue.found() == set(pool.registered_keys()) == {*old[:1], *new}

    asyncio.run(scenario())


def test_a_block_given_up_while_it_is_being_published_is_withdrawn():
    async def scenario():
        pool, clock = BlockPool(4, 4), FakeClock()
        catalogue = Catalogue(clock)
        async with publishing_from(pool, catalogue, clock, ttl_s=6.0):
            keys = hold(pool, "a", 2)
            catalogue.on_publish = lambda: pool.forget([keys[1]])
            await pass_time(clock, 10.0)  # past several refreshes
            assert catalogue.found() == {keys[0]}

    asyncio.run(scenario())


def test_keys_to_withdraw_do_not_pile_up_while_the_kvstore_is_away(monkeypatch):
    monkeypatch.setattr(publishing, "MAX_GONE", 3)

    async def scenario():
        pool, clock = BlockPool(8, 4), FakeClock()
        catalogue = Catalogue(clock)
        publisher = Publisher(Held(pool), catalogue.open, clock, 30.0)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(publisher.run())
            keys = hold(pool, "a", 8)
            await pass_time(clock, 2 * GATHER_S)
            catalogue.error = Unavailable("away")
            pool.forget(keys)
            await pass_time(clock, 3 * RETRY_S)
            catalogue.error = None
            await pass_time(clock, 3 * RETRY_S)
            assert len(catalogue.found()) == 5, "the newest three are withdrawn, the others lapse"
            await pass_time(clock, 40.0, step=1.0)
            assert catalogue.found() == set()
            running.cancel()

    asyncio.run(scenario())
