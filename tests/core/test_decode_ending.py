"""Requests that end before their own end, in every state: every block comes back, once, when nobody can touch it."""

from __future__ import annotations

import asyncio
import threading

import pytest
from decode_fakes import WRITER, decode_rank, run, settle, until

from headrace import errors


@run
async def test_a_cancel_before_reserve_leaves_a_tombstone():
    async with decode_rank() as rank:
        rank.release(attempt=2)
        for attempt in (1, 2):
            with pytest.raises(errors.StaleAttempt):
                await rank.reserve(rank.command(attempt=attempt))
        await rank.reserve(rank.command(attempt=3))
        rank.release(attempt=3)
        await rank.all_free()


@run
async def test_a_cancel_while_waiting_ends_the_wait():
    async with decode_rank(num_blocks=3) as rank:
        await rank.reserve(rank.command("a"))
        waiting = asyncio.ensure_future(rank.reserve(rank.command("b")))
        await settle()
        rank.release("b")
        with pytest.raises(errors.Cancelled):
            await waiting
        assert rank.core.ledger().waiting_requests == 0
        rank.release("a")
        await rank.all_free()


@run
async def test_what_was_never_begun_is_freed_at_once_without_asking_anybody():
    async with decode_rank() as rank:
        rank.writer.answer = None
        promise = await rank.reserve(rank.command())
        rank.core.renew(promise.reservation_id, WRITER.epoch)
        rank.release()
        assert rank.core.ledger().blocks.free == rank.pool.num_blocks
        assert not rank.writer.asked
        await rank.all_free()


@run
async def test_a_cancel_of_what_was_begun_waits_for_the_writer():
    async with decode_rank() as rank:
        rank.writer.hangs = True
        promise = await rank.writing(rank.command())
        rank.release()
        await settle()
        assert rank.core.ledger().blocks.quarantined == 3
        assert rank.core.ledger().quarantined_requests == 1
        assert rank.writer.asked == [promise.reservation_id]
        rank.release()  # safe to repeat
        await settle()
        assert len(rank.writer.asked) == 1
    async with decode_rank() as rank:
        await rank.writing(rank.command())
        rank.release()
        await rank.all_free()
        assert rank.target.fences == 0


@run
async def test_a_cancel_during_a_commits_check_lets_the_check_end_first():
    async with decode_rank() as rank:
        command = rank.command(n=2)
        reservation = await rank.reserve(command)
        commit = rank.commit_command(command, reservation, rank.push(reservation))
        rank.rows.slow = threading.Event()
        committing = asyncio.ensure_future(rank.commit(commit))
        await settle()
        rank.release()
        await settle()
        assert rank.core.ledger().blocks.quarantined == 5
        rank.rows.slow.set()
        with pytest.raises(errors.StaleAttempt):
            await committing
        assert not rank.engine.batch
        await rank.all_free()


@run
async def test_a_cancel_while_partial_blocks_are_copied_waits_for_the_copy():
    async with decode_rank() as rank:
        command = rank.command(n=2)
        reservation = await rank.reserve(command)
        commit = rank.commit_command(command, reservation, rank.push(reservation))
        gate, copying = threading.Event(), threading.Event()

        def slow_copy(*_):
            copying.set()
            gate.wait(5)

        rank.collaborators.copy_rows = slow_copy
        committing = asyncio.ensure_future(rank.commit(commit))
        await until(copying.is_set)
        rank.release()
        await settle()
        assert rank.core.ledger().blocks.quarantined == 5
        gate.set()
        with pytest.raises(errors.StaleAttempt):
            await committing
        assert not rank.engine.batch and not rank.writer.asked
        await rank.all_free()


@run
async def test_a_cancel_while_running_frees_when_the_engine_has_let_go():
    async with decode_rank() as rank:
        await rank.start()
        await rank.step()
        rank.engine.removing.clear()
        rank.release()
        await settle()
        assert rank.core.ledger().blocks.quarantined == 3
        sent = len(rank.records())
        await rank.step()  # the step that was under way
        assert len(rank.records()) == sent
        rank.engine.removing.set()
        await rank.all_free()
        assert not rank.writer.asked and not rank.engine.batch


@run
async def test_a_cancel_at_the_last_step_frees_once():
    async with decode_rank() as rank:
        await rank.start(max_tokens=2)
        rank.engine.step()
        rank.release()
        await rank.all_free()
        await rank.start("again")
        await rank.step(3)
        await rank.all_free()


@run
async def test_one_of_several_samples_can_be_released():
    async with decode_rank() as rank:
        await rank.start(n=2, max_tokens=4)
        await rank.step()
        rank.release(samples=(0,))
        await settle()
        assert rank.core.ledger().blocks.running == 3
        await rank.step(2)
        assert [end.sample_index for end in rank.ends()] == [1]
        assert rank.ends()[0].stages
        await rank.all_free()


@run
async def test_a_sample_released_before_the_commit_never_starts():
    async with decode_rank() as rank:
        command = rank.command(n=2)
        reservation = await rank.reserve(command)
        rank.release(samples=(1,))
        await rank.commit(rank.commit_command(command, reservation, rank.push(reservation)))
        assert {key[1] for key in rank.engine.batch} == {0}
        rank.release(samples=(0,))
        await rank.all_free()
        with pytest.raises(errors.StaleAttempt):
            await rank.reserve(command)


@run
async def test_three_hundred_cancels_leave_nothing_behind_without_traffic():
    async with decode_rank(num_blocks=64) as rank:
        waiting = []
        for index in range(300):
            waiting.append(asyncio.ensure_future(rank.reserve(rank.command(f"r{index}"))))
        await settle()
        for index in range(300):
            rank.release(f"r{index}")
        await asyncio.gather(*waiting, return_exceptions=True)
        await rank.all_free()
        await rank.start("one more")
        await rank.step(3)
        await rank.all_free()


@run
async def test_a_reservation_expires_without_traffic_and_says_so():
    async with decode_rank() as rank:
        command = rank.command(n=2)
        reservation = await rank.writing(command)
        await rank.clock.advance(9.0)
        assert rank.core.renew(reservation.reservation_id, WRITER.epoch) == 10.0
        await rank.clock.advance(9.0)
        assert rank.core.ledger().reserved_requests == 1
        await rank.clock.advance(1.5)
        await rank.all_free()
        assert rank.writer.asked == [reservation.reservation_id]
        await settle()
        assert [(end.sample_index, end.error_reason) for end in rank.ends()] == [
            (0, "RESERVATION_EXPIRED"), (1, "RESERVATION_EXPIRED"),
        ]  # fmt: skip
        with pytest.raises(errors.StaleAttempt):
            await rank.commit(rank.commit_command(command, reservation, ()))
