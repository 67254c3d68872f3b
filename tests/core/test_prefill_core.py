"""The prefill core at its door and over the life of an attempt, against fakes."""

from __future__ import annotations

import asyncio

import pytest
from prefill_fakes import BLOCKS, INFO, LAYERS, TARGET, Asked, Bench, Router, attempt, command

from headrace.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unavailable
from headrace.protocol.common import FinishReason
from headrace.protocol.decode import BeginCommand, CommitCommand
from headrace.protocol.prefill import Committed, FirstTokens


def test_an_attempt_pushes_every_layer_then_commits_and_gives_every_block_back():
    async def scenario():
        bench = Bench(prefix_cache=False)
        async with bench.open() as core:
            events, _ = await attempt(bench, core, command(10))
            assert [type(event) for event in events] == [FirstTokens, Committed]
            assert events[1].pushed_bytes == 10 * LAYERS * TARGET.row_bytes
            commit = bench.decode.commits[0]
            assert [layer.num_rows for layer in commit.manifest[0].layers] == [10] * LAYERS
            assert [layer.checksum for layer in commit.manifest[0].layers] == [10, 1010]
            assert commit.samples[0].output_token_ids == (70,)
            assert bench.decode.begins == ["r1"]
            ledger = await bench.settled(core)
            assert ledger.blocks.free == BLOCKS and ledger.batches == 1
            assert {stage.name for stage in events[1].stages} >= {"prefill.forward", "prefill.push", "decode.commit"}

    asyncio.run(scenario())


def test_delivered_tokens_are_input_and_the_next_position_is_sampled():
    async def scenario():
        bench = Bench(prefix_cache=False)
        async with bench.open() as core:
            events, job = await attempt(bench, core, command(10, delivered={0: (91, 92)}))
            assert job.sequences[0].token_ids[-2:] == [91, 92]
            assert events[0].tokens[0].position == 2
            assert bench.decode.commits[0].samples[0].output_token_ids == (91, 92, 70)
            await bench.settled(core)

    asyncio.run(scenario())


def test_a_prefix_that_is_still_here_is_not_computed_again_but_pushed_whole():
    async def scenario():
        bench = Bench()
        async with bench.open() as core:
            await attempt(bench, core, command(10))
            await bench.settled(core)
            events, job = await attempt(bench, core, command(10, attempt=2))
            assert events[0].cached_tokens == 8 and events[0].computed_tokens == 2
            assert job.sequences[0].first_computed == 8
            assert events[1].pushed_bytes == 10 * LAYERS * TARGET.row_bytes
            assert len(bench.pool.registered_keys()) == 2
            await bench.settled(core)

    asyncio.run(scenario())


def test_another_salt_finds_nothing_of_the_first():
    async def scenario():
        bench = Bench()
        async with bench.open() as core:
            await attempt(bench, core, command(10))
            events, _ = await attempt(bench, core, command(10, attempt=2, cache_salt="tenant-b"))
            assert events[0].cached_tokens == 0
            await bench.settled(core)

    asyncio.run(scenario())


def test_an_end_at_the_first_token_commits_nothing():
    async def scenario():
        bench = Bench(prefix_cache=False)
        async with bench.open() as core:
            events, _ = await attempt(bench, core, command(5), finish=FinishReason.EOS)
            assert isinstance(events[-1], Committed) and not bench.decode.commits
            await bench.settled(core)

    asyncio.run(scenario())


def test_without_a_reservation_nothing_is_pushed():
    async def scenario():
        bench = Bench(prefix_cache=False)
        async with bench.open() as core:
            events, _ = await attempt(bench, core, command(5, reservation=False))
            assert isinstance(events[-1], Committed) and not bench.source.pushes
            await bench.settled(core)

    asyncio.run(scenario())


LEAVING = {
    "the router cancels": lambda core, bench: core.cancel(bench.router, "q", 1),
    "the router's link is lost": lambda core, bench: core.leave(bench.router),
}


@pytest.mark.parametrize("leaving", LEAVING)
@pytest.mark.parametrize("state", ["beginning", "waiting for a batch", "computing", "pushing", "committing"])
def test_leaving_in_each_state_gives_every_block_back(state, leaving):
    async def scenario():
        bench = Bench(prefix_cache=False)
        if state == "pushing":
            bench.source.gate.clear()
        if state == "beginning":
            bench.decode.silent.add(BeginCommand)
        if state == "committing":
            bench.decode.silent.add(CommitCommand)
        async with bench.open() as core:
            asked, job = Asked(bench, core, command(6)), None
            if state == "computing":
                job = await bench.job()
                job.on_start()
            elif state in ("pushing", "committing"):
                await bench.run_job()
            await asyncio.sleep(0.05)
            assert not asked.is_over and core.ledger().blocks.held == 2
            LEAVING[leaving](core, bench)
            assert (await asked.all())[-1].reason == "CANCELLED"
            if job is not None:
                assert core.ledger().blocks.held, "the engine still computes into these blocks"
                job.on_error(asyncio.CancelledError())
            if state == "pushing":
                await asyncio.sleep(0.02)
                assert core.ledger().blocks.held, "the transfer thread still reads these blocks"
            bench.source.gate.set()
            await bench.settled(core)
            assert bool(bench.batcher.cancelled) is (state in ("waiting for a batch", "computing"))

    asyncio.run(scenario())


def test_nobody_ends_the_attempt_of_another_router():
    async def scenario():
        bench = Bench(prefix_cache=False)
        async with bench.open() as core:
            asked = Asked(bench, core, command(6))
            core.leave(Router())
            core.cancel(Router(), "q", 1)
            core.cancel(bench.router, "q", 2)
            await bench.run_job()
            assert isinstance((await asked.all())[-1], Committed)
            await bench.settled(core)

    asyncio.run(scenario())


def test_a_prompt_waits_for_blocks_and_gets_them_when_another_ends():
    async def scenario():
        bench = Bench(prefix_cache=False)
        async with bench.open() as core:
            first = Asked(bench, core, command(90, reservation=False))
            second = Asked(bench, core, command(60, reservation=False, attempt=2))
            await asyncio.sleep(0.05)
            assert len(bench.batcher.jobs) == 1
            bench.batcher.run()
            await first.all()
            await bench.run_job()
            await second.all()
            await bench.settled(core)

    asyncio.run(scenario())


def test_what_cannot_be_is_refused_before_anything_is_held():
    async def scenario():
        bench = Bench(max_queue_tokens=20)
        async with bench.open() as core:
            for order in (
                command(101),
                command(0, reservation=False),
                command(samples=(0, 0)),
                command(samples=(-1,)),
                command(samples=(), reservation=False),
                command(samples=tuple(range(17))),
                command(delivered={3: (1,)}),
                command(delivered={0: (INFO.vocabulary_size,)}),
                command(prompt_token_ids=(1, -2)),
                command(prompt_token_ids=(1, INFO.vocabulary_size)),
            ):
                with pytest.raises(InvalidRequest):
                    Asked(bench, core, order)
            waiting = Asked(bench, core, command(15, reservation=False))
            await asyncio.sleep(0.02)
            bench.batcher.queued_tokens = 15
            with pytest.raises(Overloaded):
                Asked(bench, core, command(10, attempt=2))
            bench.batcher.queued_tokens = 0
            bench.batcher.run()
            await waiting.all()
            await bench.settled(core)

    asyncio.run(scenario())


def test_a_rank_that_drains_refuses_and_lets_running_prompts_end():
    async def scenario():
        bench = Bench(prefix_cache=False)
        async with bench.open() as core:
            asked = Asked(bench, core, command(6))
            draining = asyncio.create_task(core.drain(100.0))
            await asyncio.sleep(0.02)
            with pytest.raises(Unavailable) as caught:
                Asked(bench, core, command(6, attempt=2))
            assert caught.value.reason == "DRAINING" and not core.progress().serving
            await bench.run_job()
            assert isinstance((await asked.all())[-1], Committed)
            await bench.settled(core)
            await bench.clock.advance(0.1)
            await asyncio.wait_for(draining, 5)

    asyncio.run(scenario())


def test_a_core_that_closes_ends_what_runs_and_gets_every_block_back():
    async def scenario():
        bench = Bench(prefix_cache=False)
        bench.decode.silent.add(CommitCommand)
        async with bench.open() as core:
            asked = Asked(bench, core, command(6))
            await bench.run_job()
            await asyncio.sleep(0.02)
        assert asked.events[-1].reason == "UNAVAILABLE" and bench.pool.ledger().held == 0

    asyncio.run(scenario())


def test_a_beat_tells_what_has_been_done_and_what_waits():
    async def scenario():
        bench = Bench(prefix_cache=False)
        async with bench.open() as core:
            first = Asked(bench, core, command(90, reservation=False))
            second = Asked(bench, core, command(60, reservation=False, attempt=2))
            await asyncio.sleep(0.02)
            told = core.progress()
            assert (told.queued_requests, told.queued_tokens, told.running_requests) == (2, 60, 0)
            assert told.available_blocks == BLOCKS - 23 and told.serving and told.completed_layers == 0
            await bench.run_job()
            await first.all()
            await bench.run_job()
            await second.all()
            await bench.settled(core)
            told = core.progress()
            assert (told.completed_steps, told.completed_layers, told.available_blocks) == (2, 2 * LAYERS, BLOCKS)

    asyncio.run(scenario())


def test_larger_priorities_get_blocks_earlier():
    async def scenario():
        bench = Bench(prefix_cache=False)
        async with bench.open() as core:
            running = Asked(bench, core, command(90, reservation=False))
            later = Asked(bench, core, command(60, reservation=False, attempt=2))
            sooner = Asked(bench, core, command(60, reservation=False, attempt=3, priority=5))
            await bench.run_job()
            await running.all()
            assert (await bench.run_job()).key.startswith("q/3/")
            await sooner.all()
            await bench.run_job()
            await later.all()
            await bench.settled(core)

    asyncio.run(scenario())


def test_the_deadline_ends_an_attempt_with_a_reason():
    async def scenario():
        bench = Bench(prefix_cache=False)
        async with bench.open() as core:
            asked = Asked(bench, core, command(6, time_left_s=1.5))
            await asyncio.sleep(0)
            await bench.clock.advance(1.0)
            assert not asked.is_over
            await bench.clock.advance(1.0)
            events = await asked.all()
            assert isinstance(events[-1], DeadlineExceeded) and not events[-1].retryable
            await bench.settled(core)

    asyncio.run(scenario())


def test_a_repeated_attempt_does_not_reach_the_first_ones_job():
    async def scenario():
        bench, other = Bench(prefix_cache=False), Router()
        async with bench.open() as core:
            Asked(bench, core, command(6, reservation=False))
            running = await bench.job()
            running.on_start()
            bench.router, first_router = other, bench.router
            second = Asked(bench, core, command(6, reservation=False))
            core.leave(first_router)
            await asyncio.sleep(0.02)
            assert core.ledger().blocks.running == 4, "one computes, one waits: both hold their two blocks"
            running.on_error(asyncio.CancelledError())
            await bench.run_job()
            assert isinstance((await second.all())[-1], Committed)
            await bench.settled(core)

    asyncio.run(scenario())


def test_a_prompt_that_the_engine_refuses_holds_nothing():
    async def scenario():
        bench = Bench(prefix_cache=False)

        def refuse(job):
            raise InvalidRequest("prompt_token_ids: must be 0 to 8191", field="prompt_token_ids")

        bench.batcher.add = refuse
        async with bench.open() as core:
            events = await Asked(bench, core, command(6)).all()
            assert (events[-1].reason, events[-1].retryable) == ("INVALID_REQUEST", False)
            await bench.settled(core)

    asyncio.run(scenario())


def test_a_forward_that_failed_may_be_tried_elsewhere():
    async def scenario():
        bench = Bench(prefix_cache=False)
        async with bench.open() as core:
            asked = Asked(bench, core, command(6))
            (await bench.job()).on_error(RuntimeError("out of memory"))
            events = await asked.all()
            assert (events[-1].reason, events[-1].retryable) == ("FORWARD_FAILED", True)
            await bench.settled(core)

    asyncio.run(scenario())
