"""A decode rank over fakes: the good way, its spans and its life, with the ledger back at zero."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from decode_fakes import DECODE, NUM_LAYERS, WRITER, decode_rank, run, settle

from headrace import errors
from headrace.config import TelemetryConfig
from headrace.observe import telemetry
from headrace.protocol import common


@run
async def test_a_request_is_reserved_committed_stepped_and_freed():
    async with decode_rank() as rank:
        command, promise = await rank.start(max_tokens=4)
        assert (promise.request_id, promise.attempt) == ("r", 1)
        assert (promise.decode, promise.writer) == (DECODE, WRITER)
        assert rank.core.ledger().running_requests == 1
        assert rank.core.ledger().blocks.running == 3  # 6 + 4 tokens in blocks of 4
        await rank.step(3)
        assert [(r.handle, r.first_position, r.token_ids) for r in rank.records()] == [
            (command.handle, position, (100 + position,)) for position in (1, 2, 3)
        ]
        (end,) = rank.ends()
        assert (end.handle, end.sample_index, end.finish_reason, end.error_reason, end.output_tokens) == (
            command.handle, 0, common.FinishReason.LENGTH, "", 4,
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
        await rank.commit(rank.commit_command(command, reservation, rank.push(reservation)))
        await rank.step()
        assert sorted((r.sample_index, r.first_position) for r in rank.records()) == [(0, 4), (1, 2)]
        await rank.step(6)
        # delivered ones, prefill's and ours: whoever has fewer knows that some are missing
        assert {end.sample_index: end.output_tokens for end in rank.ends()} == {0: 8, 1: 8}
        await rank.all_free()


@run
async def test_a_sample_that_ended_at_its_first_token_gives_its_seat_back_at_commit():
    async with decode_rank() as rank:
        command = rank.command(n=2)
        reservation = await rank.reserve(command)
        commit = rank.commit_command(command, reservation, rank.push(reservation))
        await rank.commit(dataclasses.replace(commit, samples=commit.samples[1:]))
        assert rank.core.ledger().blocks.running == 1 + 2
        await rank.step(3)
        assert {r.sample_index for r in rank.records()} == {1}
        await rank.all_free()


@run
async def test_repeated_reserve_and_commit_get_the_first_answer():
    async with decode_rank() as rank:
        command = rank.command()
        answer = await rank.reserving(command)
        assert answer.expires_in_s == 10.0
        first = await rank.reserve(command)
        assert await rank.reserving(command) == answer
        commit = rank.commit_command(command, first, rank.push(first))
        both = await asyncio.gather(rank.commit(commit), rank.commit(commit))
        assert both[0] == both[1] == await rank.commit(commit)
        assert len(rank.engine.batch) == 1
        await rank.step(3)
        await rank.all_free()
        assert await rank.commit(commit) == both[0]
        with pytest.raises(errors.StaleAttempt):
            await rank.reserve(command)


def test_every_stage_of_a_request_is_a_span_of_its_callers_trace(tmp_path):
    router = f"00-{'ab' * 16}-{'1' * 16}-01"
    telemetry.setup("decode", "epoch", TelemetryConfig(), tmp_path)

    async def one_request():
        async with decode_rank() as rank:
            # the router's name for what its client calls r
            await rank.start("r~0a1b", max_tokens=4, trace_parent=router, display_id="r")
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
    assert set(spans) == {"decode.reserve", "decode.commit", "decode.queue", "decode.generate"}
    assert {span.parent_id for span in spans.values()} == {"1" * 16}
    assert {span.trace_id for span in spans.values()} == {"ab" * 16}
    assert {span.attributes["request_id"] for span in spans.values()} == {"r"}
    generate = spans["decode.generate"]
    assert (generate.attributes["steps"], generate.attributes["itl_mean_s"]) == (3, 0.5)
    assert abs(generate.duration_s - end.stages[1].duration_s) < 1e-3 and end.stages[1].duration_s == 1.5


@run
async def test_beats_say_how_far_the_rank_has_come_and_what_it_has_left():
    async with decode_rank(num_blocks=9) as rank:
        idle = rank.core.progress()
        assert idle.serving and idle.available_blocks == 9 and not idle.pending_steps and not idle.pause_reason
        await rank.start("running")
        await rank.reserve(rank.command("reserved"))
        waiting = rank.reserving(rank.command("waiting", prompt=7, max_tokens=8))
        await rank.step(2)
        busy = rank.core.progress()
        assert (busy.completed_steps, busy.completed_layers, busy.pending_steps) == (2, 2 * NUM_LAYERS, 1)
        assert (busy.running_requests, busy.queued_requests, busy.queued_tokens, busy.available_blocks) == (1, 1, 7, 3)
        for name in ("waiting", "reserved", "running"):
            rank.release(name)
        assert isinstance(waiting.exception(), errors.Cancelled)
        await rank.all_free()
        await rank.core.drain(1.0)
        assert not rank.core.progress().serving


@run
async def test_draining_refuses_new_requests_and_honours_promises():
    async with decode_rank(num_blocks=6) as rank:
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
        await rank.commit(rank.commit_command(promised, reservation, rank.push(reservation)))
        await rank.step(2)
        assert not draining.done()
        await rank.step()
        await draining
        assert [end.finish_reason for end in rank.ends()] == [common.FinishReason.LENGTH] * 2
        await rank.all_free()


@run
async def test_draining_hands_back_what_outlives_the_grace():
    for impatient in (False, True):
        await _drain_with_a_request_that_goes_on(impatient)


async def _drain_with_a_request_that_goes_on(impatient):
    async with decode_rank() as rank:
        await rank.start()
        draining = asyncio.ensure_future(rank.core.drain(5.0))
        await settle()
        if impatient:
            draining.cancel()
            await asyncio.gather(draining, return_exceptions=True)
        else:
            await rank.clock.advance(6.0)
            await draining
        assert [end.error_reason for end in rank.ends()] == ["DRAINING"]
        await rank.all_free()
