"""Only the writer, the attempt and the memory that a decode rank promised: everything else ends at the door or at Begin."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from prefill_fakes import (
    BLOCK,
    DECODE,
    KEYS,
    ME,
    TARGET,
    Asked,
    Bench,
    attempt,
    command,
    promise,
    signed,
)

from headrace.errors import HeadraceError, InvalidRequest, LayoutMismatch, StaleAttempt, StaleEpoch, Unavailable
from headrace.protocol.common import TransferBackend, WorkerIdentity
from headrace.protocol.decode import BeginCommand, TargetSequence
from headrace.protocol.prefill import Committed
from headrace.rpc.promises import MeshKeys
from headrace.transfer.base import PoolGeometry

LENGTH = 6
BLOCK_IDS = (30, 31)


def with_target(**changes):
    return {"target": replace(TARGET, **changes)}


def with_rows(first_row=0, num_rows=LENGTH, block_ids=BLOCK_IDS, sample_index=0):
    return {"sequences": (TargetSequence(sample_index, first_row, num_rows, block_ids),)}


ABSURD = {
    "for another request": ({"request_id": "other"}, "PROMISE_INVALID"),
    "for another attempt": ({"attempt": 2}, "PROMISE_INVALID"),
    "to another writer": ({"writer": WorkerIdentity(ME.address, "earlier epoch")}, "STALE_EPOCH"),
    "of another layout": ({"layout_fingerprint": "other"}, "LAYOUT_MISMATCH"),
    "without an id": ({"reservation_id": ""}, "PROMISE_INVALID"),
    "of nobody": ({"decode": WorkerIdentity("", "")}, "PROMISE_INVALID"),
    "over another back end": (with_target(backend=TransferBackend.MOONCAKE), "LAYOUT_MISMATCH"),
    "of longer rows": (with_target(row_bytes=64), "PROMISE_INVALID"),
    "of larger blocks": (with_target(block_size=BLOCK * 2), "PROMISE_INVALID"),
    "of fewer layers": (with_target(num_layers=1), "PROMISE_INVALID"),
    "with a gap between blocks": (with_target(block_stride_bytes=256), "PROMISE_INVALID"),
    "with layers that overlap": (with_target(layer_stride_bytes=128), "PROMISE_INVALID"),
    "without blocks": (with_target(num_blocks=0, layer_stride_bytes=0), "PROMISE_INVALID"),
    "below zero": (with_target(base_address=-1), "PROMISE_INVALID"),
    "past all memory": (with_target(base_address=(1 << 63) - 1), "PROMISE_INVALID"),
    "without a session": (with_target(session=""), "PROMISE_INVALID"),
    "of no sequence": ({"sequences": ()}, "PROMISE_INVALID"),
    "of two sequences": ({"sequences": with_rows()["sequences"] * 2}, "PROMISE_INVALID"),
    "of too many rows": (with_rows(num_rows=LENGTH + 1), "PROMISE_INVALID"),
    "of rows before the first": (with_rows(first_row=-1, num_rows=LENGTH + 1), "PROMISE_INVALID"),
    "of fewer than no rows": (with_rows(first_row=LENGTH + 1, num_rows=-1), "PROMISE_INVALID"),
    "with too few blocks": (with_rows(block_ids=(30,)), "PROMISE_INVALID"),
    "with one block twice": (with_rows(block_ids=(30, 30)), "PROMISE_INVALID"),
    "with a block outside the pool": (with_rows(block_ids=(30, TARGET.num_blocks)), "PROMISE_INVALID"),
    "with a block below zero": (with_rows(block_ids=(30, -1)), "PROMISE_INVALID"),
    "for another sample": (with_rows(sample_index=1), "PROMISE_INVALID"),
}


@pytest.mark.parametrize("what", ABSURD)
def test_a_promise_that_cannot_be_meant_is_refused_before_anything_is_held(what):
    changes, reason = ABSURD[what]

    async def scenario():
        bench = Bench(prefix_cache=False)
        async with bench.open() as core:
            order = command(LENGTH)
            with pytest.raises(HeadraceError) as caught:
                Asked(bench, core, command(LENGTH, reservation=signed(promise(order, **changes))))
            assert caught.value.reason == reason
            assert isinstance(caught.value, InvalidRequest | StaleEpoch | LayoutMismatch)
            assert not bench.decode.begins and not bench.batcher.jobs
            await bench.settled(core)

    asyncio.run(scenario())


@pytest.mark.parametrize("where", ["promise", "code"])
def test_an_altered_promise_is_refused(where):
    async def scenario():
        bench = Bench(prefix_cache=False)
        async with bench.open() as core:
            good = command(LENGTH).reservation
            for place in range(0, len(getattr(good, where)), 7):
                altered = bytearray(getattr(good, where))
                altered[place] ^= 1
                with pytest.raises(InvalidRequest) as caught:
                    Asked(bench, core, command(LENGTH, reservation=replace(good, **{where: bytes(altered)})))
                assert caught.value.reason == "PROMISE_FORGED"
            assert not bench.decode.begins and not bench.batcher.jobs

    asyncio.run(scenario())


def test_a_promise_under_another_mesh_key_is_refused_and_one_under_the_older_key_is_not():
    async def scenario():
        older, foreign = MeshKeys((b"the key before this one" * 2,)), MeshKeys((b"the key of another mesh" * 2,))
        bench = Bench(keys=MeshKeys((*KEYS.keys, *older.keys)), prefix_cache=False)
        async with bench.open() as core:
            promised = promise(command(LENGTH))
            with pytest.raises(InvalidRequest):
                Asked(bench, core, command(LENGTH, reservation=signed(promised, foreign)))
            events, _ = await attempt(bench, core, command(LENGTH, reservation=signed(promised, older)))
            assert isinstance(events[-1], Committed)
            await bench.settled(core)

    asyncio.run(scenario())


def test_a_promise_is_good_for_one_attempt():
    async def scenario():
        bench = Bench(prefix_cache=False)
        async with bench.open() as core:
            asked = Asked(bench, core, command(LENGTH))
            with pytest.raises(StaleAttempt):
                Asked(bench, core, command(LENGTH))
            await bench.run_job()
            await asked.all()
            await bench.settled(core)
            with pytest.raises(StaleAttempt):
                Asked(bench, core, command(LENGTH))
            assert bench.decode.begins == ["r1"]

    asyncio.run(scenario())


def test_no_job_is_given_to_the_engine_before_decode_has_confirmed_begin():
    async def scenario():
        bench = Bench(prefix_cache=False)
        bench.decode.silent.add(BeginCommand)
        async with bench.open() as core:
            asked = Asked(bench, core, command(LENGTH))
            await asyncio.sleep(0.05)
            assert bench.decode.begins == ["r1"] and not bench.batcher.jobs
            (_, answer), bench.decode.silent = bench.decode.unanswered[0], set()
            answer.set_exception(StaleAttempt("that room was given to somebody else"))
            assert (await asked.all())[-1].reason == "STALE_ATTEMPT"
            assert not bench.batcher.jobs and not bench.source.pushes
            await bench.settled(core)

    asyncio.run(scenario())


def test_begin_is_sent_while_blocks_are_waited_for_and_its_refusal_ends_the_wait():
    async def scenario():
        bench = Bench(prefix_cache=False)
        async with bench.open() as core:
            running = Asked(bench, core, command(90, reservation=False))
            bench.decode.errors[BeginCommand] = [Unavailable("silent", reason="DECODE_UNANSWERED")]
            waiting = Asked(bench, core, command(60, attempt=2))
            assert (await waiting.all())[-1].reason == "DECODE_UNANSWERED"
            await bench.run_job()
            await running.all()
            await bench.settled(core)

    asyncio.run(scenario())


def test_a_rank_without_keys_takes_promises_without_codes_but_nothing_absurd():
    async def scenario():
        bench = Bench(keys=MeshKeys(()), prefix_cache=False)
        async with bench.open() as core:
            promised = promise(command(LENGTH))
            events, _ = await attempt(bench, core, command(LENGTH, reservation=signed(promised, MeshKeys(()))))
            assert isinstance(events[-1], Committed)
            absurd = promise(command(LENGTH, attempt=2), **with_rows(block_ids=(30, 10**6)))
            with pytest.raises(InvalidRequest):
                Asked(bench, core, command(LENGTH, attempt=2, reservation=signed(absurd, MeshKeys(()))))
            await bench.settled(core)

    asyncio.run(scenario())


def test_what_a_pool_says_of_itself_is_what_a_promise_is_checked_against():
    """The check knows the pool's geometry from the layout alone; both must mean the same."""
    geometry = PoolGeometry(base_address=0, num_layers=2, num_blocks=64, block_size=BLOCK, row_bytes=32)
    assert geometry.describe(TransferBackend.LOCAL, "s") == TARGET
    assert DECODE.epoch != ME.epoch
