"""BlockPool as a state machine, and the keys of its prefix cache."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from headrace.cache.blocks import BlockPool, BlockState, PoolExhausted, block_keys
from headrace.errors import InternalError

NUM_BLOCKS = 24
KEYS = st.sampled_from([number.to_bytes(16, "big") for number in range(12)])
HELD = st.sampled_from([BlockState.RESERVED, BlockState.RUNNING, BlockState.QUARANTINED])


class PoolMachine(RuleBasedStateMachine):
    """Owners come and go; the pool is compared with a plain account of who holds what."""

    owners = Bundle("owners")

    def __init__(self):
        super().__init__()
        self.heard: set[bytes] = set()
        self.pool = BlockPool(NUM_BLOCKS, 16, on_register=self._hear, on_give_up=self._unhear)
        self.holdings: dict[int, tuple[int, ...]] = {}
        self.keys: dict[bytes, int] = {}
        self.counter = 0

    def _owner(self, blocks: tuple[int, ...]) -> int:
        self.counter += 1
        self.holdings[self.counter] = blocks
        return self.counter

    def _references(self, block: int) -> int:
        return sum(block in blocks for blocks in self.holdings.values())

    def _hear(self, key: bytes) -> None:
        assert key not in self.heard, "a key that is findable already is not told again"
        self.heard.add(key)

    def _unhear(self, keys: list[bytes]) -> None:
        assert self.heard >= set(keys), "only what was told of is taken back"
        self.heard -= set(keys)

    def _drop_evicted(self) -> None:
        self.keys = {key: block for key, block in self.keys.items() if key in self.heard}

    @rule(target=owners, count=st.integers(0, NUM_BLOCKS + 2), state=HELD)
    def allocate(self, count, state):
        before = self.pool.ledger()
        held_before = {block for blocks in self.holdings.values() for block in blocks}
        if count > before.free + before.cached:
            assert not self.pool.can_allocate(count)
            with pytest.raises(PoolExhausted):
                self.pool.allocate(count, state)
            assert self.pool.ledger() == before
            return self._owner(())
        blocks = self.pool.allocate(count, state)
        self._drop_evicted()
        assert len(set(blocks)) == count
        assert not held_before & set(blocks), "a block was given to a second owner"
        assert all(self.pool.state(block) == state for block in blocks)
        return self._owner(blocks)

    @rule(target=owners, owner=owners)
    def share(self, owner):
        blocks = self.holdings.get(owner, ())
        self.pool.share(blocks)
        return self._owner(blocks)

    @rule(owner=consumes(owners))
    def free(self, owner):
        self.pool.free(self.holdings.pop(owner, ()))

    @rule(owner=owners, state=HELD)
    def move(self, owner, state):
        blocks = self.holdings.get(owner, ())
        self.pool.move(blocks, state)
        assert all(self.pool.state(block) == state for block in blocks)

    @rule(owner=owners, key=KEYS)
    def register(self, owner, key):
        named = set(self.keys.values())
        fresh = [block for block in self.holdings.get(owner, ()) if block not in named]
        if fresh:
            took = self.pool.register(key, fresh[0])
            assert took == (key not in self.keys)
            self.keys.setdefault(key, fresh[0])

    @rule(target=owners, keys=st.lists(KEYS, unique=True), state=HELD)
    def match_prefix(self, keys, state):
        expected = []
        for key in keys:
            if key not in self.keys:
                break
            expected.append(self.keys[key])
        assert self.pool.match_prefix(keys, state) == tuple(expected)
        return self._owner(tuple(expected))

    @rule(key=KEYS)
    def forget(self, key):
        self.pool.forget([key])
        self.keys.pop(key, None)

    @invariant()
    def every_block_is_somewhere_exactly_once(self):
        ledger = self.pool.ledger()
        held = {block for blocks in self.holdings.values() for block in blocks}
        assert ledger.free + ledger.cached + ledger.held == NUM_BLOCKS
        assert ledger.held == len(held)
        assert ledger.cached == len(set(self.keys.values()) - held)
        for block in range(NUM_BLOCKS):
            assert self.pool.references(block) == self._references(block)
            assert (self.pool.references(block) > 0) == (
                self.pool.state(block) in (BlockState.RESERVED, BlockState.RUNNING, BlockState.QUARANTINED)
            )

    @invariant()
    def whoever_listens_knows_what_can_be_found(self):
        assert self.heard == set(self.pool.registered_keys()) == set(self.keys)

    @invariant()
    def free_runs_are_maximal_and_agree(self):
        runs = self.pool._runs
        assert runs._by_length == sorted((length, first) for first, length in runs._length_at.items())
        assert runs._first_before == {first + length: first for first, length in runs._length_at.items()}
        ids = [block for first, length in runs._length_at.items() for block in range(first, first + length)]
        assert sorted(ids) == [block for block in range(NUM_BLOCKS) if self.pool.state(block) == BlockState.FREE]
        assert not set(runs._length_at) & set(runs._first_before), "two neighbouring runs were not joined"


class TestPoolMachine(PoolMachine.TestCase):
    settings = settings(
        max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )


def test_an_allocation_is_one_run_of_ids_whenever_one_is_long_enough():
    pool = BlockPool(16, 4)
    first, second, third = pool.allocate(4), pool.allocate(2), pool.allocate(5)
    assert (first, second, third) == ((0, 1, 2, 3), (4, 5), (6, 7, 8, 9, 10))
    pool.free(second)
    assert pool.allocate(2) == (4, 5), "the shortest run that fits is used"
    pool.free(first)
    assert pool.allocate(5) == (11, 12, 13, 14, 15), "a longer run elsewhere beats two short ones"


def test_the_end_of_a_sequence_is_evicted_before_its_beginning():
    evicted = []
    pool = BlockPool(4, 16, on_give_up=evicted.extend)
    blocks = pool.allocate(4)
    for key, block in zip("abcd", blocks, strict=True):
        assert pool.register(key, block)
    pool.free(blocks)
    assert pool.ledger().cached == 4
    pool.allocate(2)
    assert evicted == ["d", "c"]
    assert pool.match_prefix("abcd") == blocks[:2]


def test_a_block_in_use_is_never_evicted():
    pool = BlockPool(4, 16)
    blocks = pool.allocate(2)
    pool.register("a", blocks[0])
    pool.free(blocks)
    assert pool.match_prefix(["a", "b"]) == blocks[:1]
    assert pool.can_allocate(3) and not pool.can_allocate(4)
    with pytest.raises(PoolExhausted):
        pool.allocate(4)


def test_freeing_what_nobody_holds_is_refused_and_changes_nothing():
    pool = BlockPool(4, 16)
    blocks = pool.allocate(2)
    pool.free(blocks)
    for wrong in (
        blocks,
        (3,),
    ):
        with pytest.raises(InternalError):
            pool.free(wrong)
    held = pool.allocate(1)
    with pytest.raises(InternalError):
        pool.free(held + held)
    assert pool.ledger().held == 1


def test_keys_depend_on_salt_and_every_token_before():
    ids = list(range(100))
    keys = block_keys("", ids, 16)
    assert len(keys) == 6 and all(len(key) == 16 for key in keys) and len(set(keys)) == 6
    assert block_keys("", ids[:96], 16) == keys and block_keys("", ids[:95], 16) == keys[:5]
    assert block_keys("", ids[:15], 16) == [] == block_keys("", [], 16)
    assert not set(block_keys("tenant", ids, 16)) & set(keys)
    changed = block_keys("", [*ids[:20], 7, *ids[21:]], 16)
    assert changed[0] == keys[0] and not set(changed[1:]) & set(keys[1:])
    assert block_keys("", tuple(ids), 16) == keys


def test_keys_are_the_same_on_every_host_and_in_every_version():
    assert block_keys("", range(16), 16) == [bytes.fromhex("16309c6218515aa8168144ad893737a2")]


def test_the_block_pool_needs_no_torch():
    code = "import headrace.cache.blocks, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
