"""A decode rank over fakes: every transition of a reservation, every way to end, and the ledger back at zero."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import threading

import pytest
from decode_fakes import DECODE, NUM_LAYERS, ROUTER, WRITER, decode_rank, reading, settle, until

from headrace import errors
from headrace import protocol as p
from headrace.cache.blocks import BlockState
from headrace.config import TelemetryConfig
from headrace.observe import telemetry
from headrace.observe.context import calling


def run(function):
    """An async test, run to its end."""

    @functools.wraps(function)
    def test():
        asyncio.run(asyncio.wait_for(function(), 60))

    return test


# --- the good way ----------------------------------------------------------------------------------------------------


@run
async def test_a_request_is_reserved_committed_stepped_and_freed():
    async with decode_rank() as rank:
        command, reservation = await rank.start(max_tokens=4)
        assert reservation.decode == DECODE
        assert reservation.expires_in_s == 10.0
        assert rank.core.ledger().running_requests == 1
        assert rank.core.ledger().blocks.running == 3  # 6 + 4 tokens in blocks of 4
        await rank.step(3)
        assert [(r.handle, r.first_position, r.token_ids) for r in rank.records()] == [
            (command.handle, position, (100 + position,)) for position in (1, 2, 3)
        ]
        (end,) = rank.ends()
        assert (end.handle, end.sample_index, end.finish_reason, end.error_reason) == (
            command.handle, 0, p.FinishReason.LENGTH, "",
        )  # fmt: skip
        assert [stage.name for stage in end.stages] == ["decode.queue", "decode.generate"]
        assert end.stages[1].tokens == 3
        await rank.all_free()


@run
async def test_samples_share_full_prompt_blocks_and_get_a_copy_of_the_partial_one():
    async with decode_rank() as rank:
        command, reservation = await rank.start(prompt=6, max_tokens=4, n=3)
        assert len(reservation.sequences) == 1
        assert rank.core.ledger().blocks.running == 1 + 3 * 2
        tables = [rank.engine.batch[key][0].block_table for key in sorted(rank.engine.batch)]
        assert len({table[0] for table in tables}) == 1
        assert len({table[1] for table in tables}) == 3
        for table in tables[1:]:
            for layer in range(NUM_LAYERS):
                there = rank.rows.values[layer].reshape(-1, 4)
                assert (there[table[1], :2] == there[tables[0][1], :2]).all()
        await rank.step(3)
        ends = rank.ends()
        assert [bool(end.stages) for end in ends] == [False, False, True]
        await rank.all_free()


@run
async def test_after_delivered_tokens_every_sample_has_its_own_sequence():
    async with decode_rank() as rank:
        command = rank.command(prompt=6, max_tokens=8, n=2, delivered=(3, 1))
        reservation = await rank.reserve(command)
        first, second = reservation.sequences
        assert (first.first_row, first.num_rows) == (0, 9)
        assert (second.first_row, second.num_rows) == (4, 3)
        assert first.block_ids[0] == second.block_ids[0]
        assert not set(first.block_ids[1:]) & set(second.block_ids[1:])
        await rank.core.commit(rank.commit_command(command, reservation, rank.rows.push(reservation)))
        await rank.step()
        assert sorted((r.sample_index, r.first_position) for r in rank.records()) == [(0, 4), (1, 2)]
        rank.release()
        await rank.all_free()


@run
async def test_a_sample_that_ended_at_its_first_token_gives_its_seat_back_at_commit():
    async with decode_rank() as rank:
        command = rank.command(n=2)
        reservation = await rank.reserve(command)
        commit = rank.commit_command(command, reservation, rank.rows.push(reservation))
        await rank.core.commit(dataclasses.replace(commit, samples=commit.samples[1:]))
        assert rank.core.ledger().blocks.running == 1 + 2
        await rank.step(3)
        assert {r.sample_index for r in rank.records()} == {1}
        await rank.all_free()


@run
async def test_tokens_leave_when_the_interval_is_full_and_the_rest_at_the_end():
    async with decode_rank() as rank:
        await rank.start(max_tokens=9, stream_interval=3, logprobs=2)
        await rank.step(8)
        assert [(r.first_position, len(r.token_ids)) for r in rank.records()] == [(1, 3), (4, 3), (7, 2)]
        assert all(len(r.logprobs) == len(r.top) == len(r.token_ids) for r in rank.records())
        await rank.all_free()


@run
async def test_steps_that_gathered_become_one_frame():
    async with decode_rank() as rank:
        await rank.start(max_tokens=5)
        before = len(rank.frames)
        for _ in range(4):
            rank.engine.step()
        await settle()
        assert len(rank.frames) == before + 1
        assert [token for r in rank.records() for token in r.token_ids] == [101, 102, 103, 104]
        await rank.all_free()


@run
async def test_repeated_reserve_and_commit_get_the_first_answer():
    async with decode_rank() as rank:
        command = rank.command()
        first = await rank.reserve(command)
        assert await rank.reserve(command) == first
        commit = rank.commit_command(command, first, rank.rows.push(first))
        both = await asyncio.gather(rank.core.commit(commit), rank.core.commit(commit))
        assert both[0] == both[1] == await rank.core.commit(commit)
        assert len(rank.engine.batch) == 1
        await rank.step(3)
        await rank.all_free()
        assert await rank.core.commit(commit) == both[0]
        with pytest.raises(errors.StaleAttempt):
            await rank.reserve(command)


# --- refusals --------------------------------------------------------------------------------------------------------


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
            ("sampling.max_tokens", dict(sampling=p.SamplingParams(max_tokens=-50))),
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
async def test_reserve_needs_the_router_epochs_open_stream():
    async with decode_rank(connected=False) as rank:
        with pytest.raises(errors.Unavailable) as caught:
            await rank.reserve(rank.command())
        assert caught.value.reason == "NO_TOKEN_STREAM"
        await rank.all_free()


@run
async def test_old_epochs_are_refused():
    async with decode_rank() as rank:
        with pytest.raises(errors.StaleEpoch):
            await rank.reserve(rank.command(decode_epoch="an-earlier-life"))
        with pytest.raises(errors.StaleEpoch):
            rank.core.release("r", 1, "an-earlier-life")
        command = rank.command()
        reservation = await rank.reserve(command)
        commit = rank.commit_command(command, reservation, rank.rows.push(reservation), writer_epoch="another")
        with pytest.raises(errors.StaleEpoch):
            await rank.core.commit(commit)
        with pytest.raises(errors.StaleEpoch):
            rank.core.renew(reservation.reservation_id, "another")
        rank.release()
        await rank.all_free()


@run
async def test_a_handle_names_one_attempt():
    async with decode_rank() as rank:
        await rank.reserve(rank.command("a", handle=7))
        with pytest.raises(errors.InvalidRequest):
            await rank.reserve(rank.command("b", handle=7))
        rank.release("a")
        await rank.all_free()


# --- a commit must prove itself --------------------------------------------------------------------------------------


def _flip(rank, reservation):
    block = reservation.sequences[0].block_ids[0]
    rank.rows.values[1, block * 4] ^= 1


@run
async def test_a_flipped_byte_is_found_and_may_be_pushed_again():
    async with decode_rank() as rank:
        command = rank.command()
        reservation = await rank.reserve(command)
        commit = rank.commit_command(command, reservation, rank.rows.push(reservation))
        _flip(rank, reservation)
        with pytest.raises(errors.ManifestMismatch, match="layer 1"):
            await rank.core.commit(commit)
        assert not rank.engine.batch
        assert rank.core.ledger().reserved_requests == 1
        rank.rows.push(reservation)
        await rank.core.commit(commit)
        await rank.step(3)
        await rank.all_free()


@run
async def test_a_dropped_layer_or_missing_rows_are_found():
    async with decode_rank() as rank:
        command = rank.command()
        reservation = await rank.reserve(command)
        (proof,) = rank.rows.push(reservation)
        short = dataclasses.replace(proof.layers[0], num_rows=5)
        wrong = [
            (),
            (dataclasses.replace(proof, layers=proof.layers[:2]),),
            (dataclasses.replace(proof, layers=(short, *proof.layers[1:])),),
            (dataclasses.replace(proof, first_row=1),),
            (dataclasses.replace(proof, sample_index=1),),
            (proof, proof),
        ]
        for manifest in wrong:
            with pytest.raises(errors.ManifestMismatch):
                await rank.core.commit(rank.commit_command(command, reservation, manifest))
        await rank.core.commit(rank.commit_command(command, reservation, (proof,)))
        rank.release()
        await rank.all_free()


@run
async def test_a_commit_of_other_samples_or_lengths_is_refused():
    async with decode_rank() as rank:
        command = rank.command()
        reservation = await rank.reserve(command)
        good = rank.commit_command(command, reservation, rank.rows.push(reservation))
        for change in (
            {"samples": ()},
            {"samples": (p.SampleState(1, (5,)),)},
            {"samples": (p.SampleState(0, (5, 6)),)},
            {"prompt_token_ids": (1, 2)},
        ):
            with pytest.raises(errors.InvalidRequest):
                await rank.core.commit(dataclasses.replace(good, **change))
        await rank.core.commit(good)
        rank.release()
        await rank.all_free()


@run
async def test_a_commit_of_an_ended_or_unknown_reservation_is_stale():
    async with decode_rank() as rank:
        command = rank.command()
        reservation = await rank.reserve(command)
        commit = rank.commit_command(command, reservation, rank.rows.push(reservation))
        with pytest.raises(errors.StaleAttempt):
            await rank.core.commit(dataclasses.replace(commit, attempt=2))
        rank.release()
        for _ in range(2):
            with pytest.raises(errors.StaleAttempt):
                await rank.core.commit(commit)
            await rank.all_free()
        with pytest.raises(errors.StaleAttempt):
            rank.core.renew(reservation.reservation_id, WRITER.epoch)
        await rank.clock.advance(100.0)
        with pytest.raises(errors.StaleAttempt):
            await rank.core.commit(commit)
        assert not rank.engine.batch


@run
async def test_a_caller_that_leaves_during_a_commit_does_not_stop_it():
    async with decode_rank() as rank:
        command = rank.command()
        reservation = await rank.reserve(command)
        commit = rank.commit_command(command, reservation, rank.rows.push(reservation))
        rank.rows.slow = threading.Event()
        leaving = asyncio.ensure_future(rank.core.commit(commit))
        await settle()
        leaving.cancel()
        await settle()
        rank.rows.slow.set()
        await until(lambda: rank.engine.batch)
        assert await rank.core.commit(commit) == 0.0
        rank.release()
        await rank.all_free()


# --- cancel in every state -------------------------------------------------------------------------------------------


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
async def test_a_reserve_whose_caller_left_while_waiting_is_gone_at_once():
    async with decode_rank(num_blocks=3) as rank:
        await rank.reserve(rank.command("a"))
        leaving = asyncio.ensure_future(rank.reserve(rank.command("b")))
        await settle()
        leaving.cancel()
        await settle()
        assert rank.core.ledger().waiting_requests == 0
        rank.release("a")
        await rank.all_free()


@run
async def test_a_grant_that_nobody_saw_is_freed_without_asking_the_writer():
    async with decode_rank() as rank:
        taken = rank.pool.allocate(16)
        leaving = asyncio.ensure_future(rank.reserve(rank.command()))
        await settle()
        rank.pool.free(taken)
        rank.core._admit()
        assert rank.core.ledger().reserved_requests == 1
        leaving.cancel()  # granted, and the caller has not run since
        await settle()
        assert leaving.cancelled() and not rank.writer.asked
        await rank.all_free()


@run
async def test_a_cancel_when_reserved_or_writing_waits_for_the_writer():
    for renewed in (False, True):
        async with decode_rank() as rank:
            rank.writer.hangs = True
            reservation = await rank.reserve(rank.command())
            if renewed:
                assert rank.core.renew(reservation.reservation_id, WRITER.epoch) == 10.0
            rank.release()
            await settle()
            assert rank.core.ledger().blocks.quarantined == 3
            assert rank.core.ledger().quarantined_requests == 1
            assert rank.writer.asked == [reservation.reservation_id]
            rank.release()  # safe to repeat
            await settle()
            assert len(rank.writer.asked) == 1
        async with decode_rank() as rank:
            await rank.reserve(rank.command())
            rank.release()
            await rank.all_free()
            assert rank.target.fences == 0


@run
async def test_a_cancel_during_a_commits_check_lets_the_check_end_first():
    async with decode_rank() as rank:
        command = rank.command(n=2)
        reservation = await rank.reserve(command)
        commit = rank.commit_command(command, reservation, rank.rows.push(reservation))
        rank.rows.slow = threading.Event()
        committing = asyncio.ensure_future(rank.core.commit(commit))
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
        commit = rank.commit_command(command, reservation, rank.rows.push(reservation))
        gate, copying = threading.Event(), threading.Event()

        def slow_copy(*_):
            copying.set()
            gate.wait(5)

        rank.core._copy_rows = slow_copy
        committing = asyncio.ensure_future(rank.core.commit(commit))
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
        await rank.core.commit(rank.commit_command(command, reservation, rank.rows.push(reservation)))
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


# --- attempts --------------------------------------------------------------------------------------------------------


@run
async def test_a_new_attempt_gets_fresh_blocks_and_the_old_ones_are_quarantined():
    async with decode_rank() as rank:
        rank.writer.hangs = True
        first = await rank.reserve(rank.command(attempt=1))
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


# --- time and the fence ----------------------------------------------------------------------------------------------


@run
async def test_a_reservation_expires_without_traffic_and_says_so():
    async with decode_rank() as rank:
        command = rank.command(n=2)
        reservation = await rank.reserve(command)
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
            await rank.core.commit(rank.commit_command(command, reservation, ()))


@run
async def test_an_unknown_answer_fences_at_once_and_frees():
    async with decode_rank() as rank:
        other_command = rank.command("other")
        other = await rank.reserve(other_command)
        await rank.reserve(rank.command())
        rank.writer.answer = p.StopState.UNKNOWN
        rank.release()
        await until(lambda: rank.core.ledger().blocks.quarantined == 0)
        assert rank.core.ledger().fences == rank.target.fences == 1
        fresh = await rank.reserve(rank.command("fresh"))
        assert (other.target.session, fresh.target.session) == ("session-0", "session-1")
        # another's old descriptor is useless: once it ends, nobody need be asked
        asked = len(rank.writer.asked)
        rank.release("other")
        await settle()
        assert len(rank.writer.asked) == asked
        rank.writer.answer = p.StopState.DRAINED
        rank.release("fresh")
        await rank.all_free()


@run
async def test_a_silent_writer_is_asked_again_and_may_still_say_drained():
    async with decode_rank() as rank:
        await rank.reserve(rank.command())
        rank.writer.answer = None
        rank.release()
        for _ in range(3):
            await rank.clock.advance(0.6)
        assert rank.core.ledger().blocks.quarantined == 3
        assert len(rank.writer.asked) >= 3
        rank.writer.answer = p.StopState.DRAINED
        await rank.clock.advance(0.6)
        await rank.all_free()
        assert rank.target.fences == 0


@run
async def test_silence_ends_in_a_fence_even_when_the_call_hangs():
    for hangs in (False, True):
        async with decode_rank() as rank:
            rank.writer.answer, rank.writer.hangs = None, hangs
            await rank.start("running", max_tokens=8)
            await rank.reserve(rank.command())
            rank.release()
            await rank.clock.advance(0.2)
            await rank.clock.advance(19.0)
            assert rank.target.fences == 0
            await rank.clock.advance(2.0)
            await until(lambda r=rank: r.core.ledger().blocks.quarantined == 0)
            assert rank.core.ledger().fences == rank.target.fences == 1
            await rank.step(7)  # a running request is untouched
            await rank.all_free()


@run
async def test_no_room_is_given_while_the_target_is_replaced():
    async with decode_rank(num_blocks=6) as rank:
        gate = threading.Event()
        fence = rank.target.fence
        rank.target.fence = lambda: (gate.wait(5), fence())
        await rank.reserve(rank.command())
        rank.writer.answer = p.StopState.UNKNOWN
        rank.release()
        await settle()
        waiting = asyncio.ensure_future(rank.reserve(rank.command("b")))
        await settle()
        assert not waiting.done()
        gate.set()
        assert (await waiting).target.session == "session-1"
        rank.writer.answer = p.StopState.DRAINED
        rank.release("b")
        await rank.all_free()


@run
async def test_a_fence_that_fails_keeps_the_blocks_and_is_tried_again():
    async with decode_rank() as rank:
        rank.target.broken = True
        await rank.reserve(rank.command())
        rank.writer.answer = p.StopState.UNKNOWN
        rank.release()
        await asyncio.sleep(0.05)
        assert rank.core.ledger().blocks.quarantined == 3
        rank.target.broken = False
        await rank.clock.advance(1.5)
        await until(lambda: rank.core.ledger().fences == 1)
        await rank.all_free()


@run
async def test_injected_faults_fail_or_delay_a_commit():
    async with decode_rank(faults=("decode.commit:fail", "decode.reserve:delay seconds=3")) as rank:
        command = rank.command()
        reserving = asyncio.ensure_future(rank.reserve(command))
        await settle()
        assert not reserving.done()
        await rank.clock.advance(3.0)
        reservation = await reserving
        commit = rank.commit_command(command, reservation, rank.rows.push(reservation))
        with pytest.raises(errors.Unavailable, match="fault"):
            await rank.core.commit(commit)
        await rank.core.commit(commit)
        rank.release()
        await rank.all_free()


# --- streams ---------------------------------------------------------------------------------------------------------


@run
async def test_a_broken_stream_goes_on_after_the_last_frame_seen():
    async with decode_rank(connected=False) as rank:
        async with reading(rank):
            command, _ = await rank.start(max_tokens=8)
            await rank.step(2)
        last = rank.frames[-1].frame_number
        await rank.step(2)
        await rank.clock.advance(1.5)
        async with reading(rank, resume_after=last):
            await rank.step(3)
            await rank.clock.advance(5.0)
        assert [frame.frame_number for frame in rank.frames] == list(range(1, len(rank.frames) + 1))
        assert [t for r in rank.records() for t in r.token_ids] == list(range(101, 108))
        assert len(rank.ends()) == 1
        await rank.all_free()


@run
async def test_a_stream_that_stays_broken_ends_everything_of_its_router():
    async with decode_rank(num_blocks=9, connected=False) as rank:
        async with reading(rank):
            await rank.start("running")
            await rank.reserve(rank.command("reserved"))
            waiting = asyncio.ensure_future(rank.reserve(rank.command("waiting", prompt=20, max_tokens=8)))
            await settle()
        with pytest.raises(errors.Unavailable):
            await rank.reserve(rank.command("new"))
        await rank.clock.advance(1.9)
        assert rank.core.ledger().running_requests == 1
        await rank.clock.advance(0.3)
        await rank.all_free()
        with pytest.raises(errors.Unavailable):
            await waiting
        with pytest.raises(errors.Unavailable) as caught:
            async for _ in rank.core.stream_tokens(ROUTER, DECODE.epoch, rank.frames[-1].frame_number):
                pass
        assert caught.value.reason == "STREAM_LOST"
        async with reading(rank), asyncio.timeout(5):
            await rank.start("after")
            await rank.step(3)
        await rank.all_free()


@run
async def test_a_new_epoch_at_the_routers_address_ends_the_old_ones_requests():
    async with decode_rank(connected=False) as rank:
        frames = []

        async def old_router():
            async for _ in rank.core.stream_tokens(ROUTER, "", 0):
                pass

        old = asyncio.ensure_future(old_router())
        await settle()
        await rank.start()
        async with reading(rank, p.WorkerIdentity(ROUTER.address, "router-epoch-two"), into=frames):
            with pytest.raises(errors.Unavailable):
                await old
            await rank.all_free()
            assert rank.core.ledger().open_streams == 1


@run
async def test_a_second_stream_of_an_epoch_replaces_the_first():
    async with decode_rank(connected=False) as rank:
        first = rank.core.stream_tokens(ROUTER, "", 0)
        assert (await anext(first)).frame_number == 1
        await rank.start(max_tokens=4)
        await rank.step()
        async with reading(rank, resume_after=1):
            await rank.step(2)
            assert [t for r in rank.records() for t in r.token_ids] == [101, 102, 103]
            with pytest.raises(errors.Unavailable):
                await anext(first)
            assert rank.core.ledger().open_streams == 1
            await rank.all_free()


@run
async def test_a_stream_that_begins_anew_ends_what_was_before():
    for resume_after in (0, 7):
        async with decode_rank(connected=False) as rank:
            first = rank.core.stream_tokens(ROUTER, "", 0)
            await anext(first)
            await rank.start()
            second = rank.core.stream_tokens(ROUTER, "", resume_after)
            if resume_after:
                with pytest.raises(errors.Unavailable):
                    await anext(second)
            else:
                assert (await anext(second)).frame_number == 1
            await rank.all_free()
            with pytest.raises(errors.Unavailable):
                await anext(first)
            await second.aclose()


@run
async def test_a_stalled_reader_is_cut_off_and_its_requests_end():
    async with decode_rank(num_blocks=600, max_context=2400, connected=False) as rank:
        stalled = rank.core.stream_tokens(ROUTER, "", 0)
        assert (await anext(stalled)).frame_number == 1  # and never again
        await rank.start(max_tokens=2000)
        for _ in range(1100):
            rank.engine.step()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert rank.core.ledger().open_streams == 0
        with pytest.raises(errors.Overloaded) as caught:
            await anext(stalled)
        assert caught.value.reason == "READER_STALLED"
        await rank.clock.advance(2.5)
        await rank.all_free()


# --- spans ---------------------------------------------------------------------------------------------------------------


def test_every_stage_of_a_request_is_a_span_of_its_callers_trace(tmp_path):
    router, writer = (f"00-{'ab' * 16}-{digit * 16}-01" for digit in "12")
    telemetry.setup("decode", "epoch", TelemetryConfig(), tmp_path)

    async def one_request():
        async with decode_rank() as rank:
            command = rank.command("r~0a1b", max_tokens=4)  # the router's name for what its client calls r
            with calling("r", router):
                reservation = await rank.reserve(command)
            with calling("r", writer):
                await rank.core.commit(rank.commit_command(command, reservation, rank.rows.push(reservation)))
            for _ in range(3):
                await rank.clock.advance(0.5)
                await rank.step()
            await rank.all_free()
            return rank.ends()[0]

    try:
        end = asyncio.run(one_request())
        spans = {span.name: span for span in telemetry.memory()}
    finally:
        telemetry.shutdown()
    assert {name: span.parent_id for name, span in spans.items()} == {
        "decode.reserve": "1" * 16,
        "decode.commit": "2" * 16,
        "decode.queue": "1" * 16,
        "decode.generate": "1" * 16,
    }
    assert {span.trace_id for span in spans.values()} == {"ab" * 16}
    assert {span.attributes["request_id"] for span in spans.values()} == {"r"}
    generate = spans["decode.generate"]
    assert (generate.attributes["steps"], generate.attributes["itl_mean_s"]) == (3, 0.5)
    assert abs(generate.duration_s - end.stages[1].duration_s) < 1e-3 and end.stages[1].duration_s == 1.5


# --- the engine and the end ------------------------------------------------------------------------------------------


@run
async def test_tokens_that_wait_for_their_interval_are_sent_before_a_lost_attempt_is_told():
    async with decode_rank() as rank:
        await rank.start(max_tokens=20, stream_interval=8)
        await rank.step(3)
        assert not rank.records()
        rank.engine.on_failure([entry[0] for entry in rank.engine.batch.values()], RuntimeError("no"))
        await until(lambda: rank.ends())
        assert [len(record.token_ids) for record in rank.records()] == [3]
        assert rank.ends()[0].error_reason == "ENGINE_FAILED"
        await rank.all_free()


@run
async def test_a_failed_step_ends_what_it_lost_and_nothing_else():
    async with decode_rank() as rank:
        lost, _ = await rank.start("lost")
        await rank.start("other")
        await rank.reserve(rank.command("reserved"))
        rank.engine.on_failure([rank.engine.batch[key][0] for key in rank.engine.batch][:1], RuntimeError("no"))
        await until(lambda: rank.ends())
        assert [(end.handle, end.error_reason) for end in rank.ends()] == [(lost.handle, "ENGINE_FAILED")]
        assert rank.core.ledger().running_requests == 1
        assert rank.core.ledger().reserved_requests == 1
        rank.release("reserved")
        rank.release("other")
        await rank.all_free()


@run
async def test_draining_refuses_new_requests_and_honours_promises():
    async with decode_rank(num_blocks=6, connected=False) as rank:

        async def read():
            async for frame in rank.core.stream_tokens(ROUTER, "", 0):
                rank.frames.append(frame)

        reader = asyncio.ensure_future(read())
        await settle()
        await rank.start("running", max_tokens=4)
        promised = rank.command("promised")
        reservation = await rank.reserve(promised)
        waiting = asyncio.ensure_future(rank.reserve(rank.command("waiting")))
        await settle()
        draining = asyncio.ensure_future(rank.core.drain(20.0))
        await settle()
        with pytest.raises(errors.Unavailable):
            await waiting
        with pytest.raises(errors.Unavailable) as caught:
            await rank.reserve(rank.command("new"))
        assert caught.value.reason == "DRAINING"
        await rank.core.commit(rank.commit_command(promised, reservation, rank.rows.push(reservation)))
        await rank.step(2)
        assert not draining.done()
        await rank.step()
        await draining
        with pytest.raises(errors.Unavailable):
            await reader
        assert [end.finish_reason for end in rank.ends()] == [p.FinishReason.LENGTH] * 2
        await rank.all_free()


@run
async def test_draining_hands_back_what_outlives_the_grace():
    for impatient in (False, True):
        await _drain_with_a_request_that_goes_on(impatient)


async def _drain_with_a_request_that_goes_on(impatient):
    async with decode_rank(connected=False) as rank:

        async def read():
            async for frame in rank.core.stream_tokens(ROUTER, "", 0):
                rank.frames.append(frame)

        reader = asyncio.ensure_future(read())
        await settle()
        await rank.start()
        draining = asyncio.ensure_future(rank.core.drain(5.0))
        await settle()
        if impatient:
            draining.cancel()
            await asyncio.gather(draining, return_exceptions=True)
        else:
            await rank.clock.advance(6.0)
            await draining
        with pytest.raises(errors.Unavailable):
            await reader
        assert [end.error_reason for end in rank.ends()] == ["DRAINING"]
        await rank.all_free()
