"""Reserve: what is refused, what waits, and in which order room is given."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from decode_fakes import ROUTER, decode_rank, run, settle, until

from headrace import errors
from headrace.cache.blocks import BlockState
from headrace.protocol import common


@run
async def test_what_can_never_fit_is_refused_at_once_with_the_numbers():
    async with decode_rank(num_blocks=4) as rank:
        with pytest.raises(errors.InvalidRequest, match="9 blocks of 4; this rank has 4") as caught:
            await rank.reserve(rank.command(prompt=6, max_tokens=30), time_left_s=1e9)
        assert caught.value.field == "sampling.max_tokens"
        with pytest.raises(errors.InvalidRequest, match="context of 64"):
            await rank.reserve(rank.command(prompt=65))
        await rank.all_free()


@run
async def test_samples_and_counts_that_mean_nothing_are_refused_and_hold_nothing():
    async with decode_rank() as rank:
        good = rank.command()
        for field, changes in (
            ("sample_indices", dict(sample_indices=(0, 0), delivered_counts=(0, 0))),
            ("sample_indices", dict(sample_indices=(-1,))),
            ("sample_indices", dict(sample_indices=tuple(range(17)), delivered_counts=(0,) * 17)),
            ("delivered_token_counts", dict(delivered_counts=(-100,))),
            ("sampling.max_tokens", dict(sampling=common.SamplingParams(max_tokens=-50))),
        ):
            with pytest.raises(errors.InvalidRequest) as caught:
                await rank.reserve(dataclasses.replace(good, **changes))
            assert caught.value.field == field
        await rank.all_free()


@run
async def test_a_full_queue_refuses_one_more():
    async with decode_rank(num_blocks=3, max_waiting_requests=2) as rank:
        await rank.reserve(rank.command("a"))
        waiting = [asyncio.ensure_future(rank.reserve(rank.command(name))) for name in ("b", "c")]
        await settle()
        with pytest.raises(errors.Overloaded) as caught:
            await rank.reserve(rank.command("d"))
        assert caught.value.retry_after_s > 0
        assert rank.core.ledger().waiting_requests == 2
        for name in ("c", "b", "a"):
            rank.release(name)
        for task in waiting:
            with pytest.raises(errors.Cancelled):
                await task
        await rank.all_free()


@run
async def test_waiting_for_room_ends_with_the_deadline():
    async with decode_rank(num_blocks=3) as rank:
        await rank.reserve(rank.command("a"))
        waiting = asyncio.ensure_future(rank.reserve(rank.command("b"), time_left_s=2.0))
        await settle()
        await rank.clock.advance(1.0)
        assert not waiting.done()
        await rank.clock.advance(1.5)
        with pytest.raises(errors.Overloaded):
            await waiting
        rank.release("a")
        await rank.all_free()


@run
async def test_room_goes_to_those_who_wait_in_their_order():
    async with decode_rank(num_blocks=6) as rank:
        await rank.reserve(rank.command("a"))
        big = asyncio.ensure_future(rank.reserve(rank.command("big", prompt=16, max_tokens=8)))
        small = asyncio.ensure_future(rank.reserve(rank.command("small", prompt=1, max_tokens=2)))
        await settle()
        assert not big.done() and not small.done()
        rank.release("a")
        await settle()
        assert (await big).sequences and not small.done()
        rank.release("big")
        await small
        rank.release("small")
        await rank.all_free()


@run
async def test_those_behind_one_that_gave_up_get_their_room():
    async with decode_rank(num_blocks=6) as rank:
        await rank.reserve(rank.command("a"))
        big = asyncio.ensure_future(rank.reserve(rank.command("big", prompt=16, max_tokens=8), time_left_s=1.0))
        small = asyncio.ensure_future(rank.reserve(rank.command("small", prompt=1, max_tokens=2)))
        await settle()
        await rank.clock.advance(1.5)
        with pytest.raises(errors.Overloaded):
            await big
        assert (await small).sequences
        rank.release("a")
        rank.release("small")
        await rank.all_free()


@run
async def test_reserve_needs_the_router_epochs_open_token_link():
    async with decode_rank(connected=False) as rank:
        other = rank.connect(common.WorkerIdentity(ROUTER.address, "router-epoch-two"))
        for _ in range(2):
            with pytest.raises(errors.Unavailable) as caught:
                await rank.reserve(rank.command())
            assert caught.value.reason == "NO_TOKEN_LINK"
            rank.connect().is_open = False  # broken, and not resumed yet
        assert not other.frames
        await rank.all_free()


@run
async def test_a_handle_names_one_attempt():
    async with decode_rank() as rank:
        await rank.reserve(rank.command("a", handle=7))
        with pytest.raises(errors.InvalidRequest):
            await rank.reserve(rank.command("b", handle=7))
        rank.release("a")
        await rank.all_free()


@run
async def test_a_new_attempt_gets_fresh_blocks_and_the_old_ones_are_quarantined():
    async with decode_rank() as rank:
        rank.writer.hangs = True
        first = await rank.writing(rank.command(attempt=1))
        second = await rank.reserve(rank.command(attempt=2))
        assert not set(first.sequences[0].block_ids) & set(second.sequences[0].block_ids)
        assert all(rank.pool.state(block) is BlockState.QUARANTINED for block in first.sequences[0].block_ids)
        with pytest.raises(errors.StaleAttempt):
            await rank.reserve(rank.command(attempt=1))


@run
async def test_a_new_attempt_goes_to_the_head_of_the_queue():
    async with decode_rank(num_blocks=3) as rank:
        await rank.reserve(rank.command("a"))
        other = asyncio.ensure_future(rank.reserve(rank.command("b")))
        await settle()
        second = asyncio.ensure_future(rank.reserve(rank.command("a", attempt=2)))
        await second
        assert not other.done()
        rank.release("a", attempt=2)
        await other
        rank.release("b")
        await rank.all_free()


@run
async def test_a_new_attempt_ends_a_running_one():
    async with decode_rank() as rank:
        await rank.start(attempt=1)
        await rank.reserve(rank.command(attempt=2))
        await settle()
        assert not rank.engine.batch
        assert rank.core.ledger().running_requests == 0
        rank.release(attempt=1)  # touches nothing of the later attempt
        await settle()
        assert rank.core.ledger().reserved_requests == 1
        rank.release(attempt=2)
        await rank.all_free()


@run
async def test_larger_priority_is_served_first_and_what_another_rank_lost_before_new_requests():
    async with decode_rank(num_blocks=3) as rank:
        await rank.reserve(rank.command("a"))
        given: list[str] = []
        for name, attempt, priority in (("low", 1, -5), ("new", 1, 0), ("lost", 2, 0), ("high", 1, 7), ("next", 1, 0)):
            command = rank.command(name, attempt=attempt, priority=priority)
            rank.reserving(command).add_done_callback(lambda _, name=name: given.append(name))
        order = ["high", "lost", "new", "next", "low"]
        rank.release("a")
        for position, name in enumerate(order, start=1):
            await settle()
            assert given == order[:position]
            rank.release(name, attempt=2)
        await rank.all_free()


@run
async def test_two_routers_at_one_address_may_use_the_same_names():
    async with decode_rank() as rank:
        other = common.WorkerIdentity(ROUTER.address, "router-epoch-two")
        link = rank.connect(other)
        await rank.start(handle=1)
        await rank.start(handle=1, router=other)
        assert rank.core.ledger().running_requests == 2
        rank.release()  # whoever releases names only what is its own
        await until(lambda: rank.core.ledger().running_requests == 1)
        await rank.step(3)
        assert [end.finish_reason for end in link.frames[-1].ends] == [common.FinishReason.LENGTH]
        assert not rank.records()
        await rank.all_free()
