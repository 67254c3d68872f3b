"""From steps to frames, and what happens to requests whose router reads too slowly, breaks off or is lost."""

from __future__ import annotations

import asyncio

import pytest
from decode_fakes import ROUTER, decode_rank, run, settle, until

from headrace import errors
from headrace.protocol import common
from services.decode.tokens import FRAME_BYTES, record_bytes


async def settled(future):
    """The error that an answer is."""
    with pytest.raises(errors.HeadraceError) as caught:
        await future
    return caught.value


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
        before = len(rank.link.frames)
        for _ in range(4):
            rank.engine.step()
        await settle()
        assert len(rank.link.frames) == before + 1
        assert [token for r in rank.records() for token in r.token_ids] == [101, 102, 103, 104]
        await rank.all_free()


@run
async def test_a_broken_link_that_is_resumed_has_lost_nothing():
    async with decode_rank() as rank:
        command, _ = await rank.start(max_tokens=8)
        await rank.step(2)
        rank.link.is_open = False
        await rank.step(2)
        await rank.clock.advance(4.0)
        assert rank.core.ledger().open_links == 0 and rank.core.ledger().running_requests == 1
        rank.link.is_open = True
        rank.core.token_link_opened(rank.link)
        await rank.step(3)
        assert [t for r in rank.records() for t in r.token_ids] == list(range(101, 108))
        assert len(rank.ends()) == 1
        await rank.all_free()


@run
async def test_a_lost_link_ends_everything_of_its_router():
    for decode_link in (False, True):
        async with decode_rank(num_blocks=9) as rank:
            await rank.start("running")
            await rank.reserve(rank.command("reserved"))
            waiting = rank.reserving(rank.command("waiting", prompt=20, max_tokens=8))
            await settle()
            error = errors.Unavailable("it did not come back", reason="LINK_LOST")
            if decode_link:
                rank.core.router_lost(ROUTER, error)
            else:
                rank.lose(rank.link, error)
                assert isinstance(await settled(rank.reserving(rank.command("new"))), errors.Unavailable)
            await rank.all_free()
            assert (await settled(waiting)).reason == "LINK_LOST"
            rank.link = rank.connect()
            await rank.start("after")
            await rank.step(3)
            assert [end.error_reason for end in rank.ends()] == [""]
            await rank.all_free()


@run
async def test_a_lost_link_of_one_router_process_leaves_another_at_its_address_alone():
    async with decode_rank() as rank:
        other = common.WorkerIdentity(ROUTER.address, "router-epoch-two")
        link = rank.connect(other)
        await rank.start("mine")
        await rank.start("other", router=other)
        assert rank.core.ledger().open_links == 2
        rank.lose(rank.link)
        await until(lambda: rank.core.ledger().running_requests == 1)
        await rank.step(3)
        assert [end.error_reason for frame in link.frames for end in frame.ends] == [""]
        await rank.all_free()


@run
async def test_a_new_token_link_of_an_epoch_ends_what_was_sent_over_the_old_one():
    async with decode_rank() as rank:
        await rank.start("old")
        new = rank.connect()
        await rank.all_free()
        await rank.start("new")
        rank.lose(rank.link)  # told late
        assert rank.core.ledger().running_requests == 1
        await rank.step(3)
        assert [end.error_reason for frame in new.frames for end in frame.ends] == [""]
        await rank.all_free()


@run
async def test_a_request_whose_reader_stalls_ends_alone():
    async with decode_rank(num_blocks=600, max_context=2400, request_credit_bytes=4096) as rank:
        rank.link.reads = False
        stalled, _ = await rank.start("stalled", max_tokens=2000, logprobs=2)
        modest, _ = await rank.start("modest", max_tokens=130)
        for _ in range(130):
            rank.engine.step()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        await settle()
        ends = {end.handle: end for end in rank.ends()}
        assert ends[stalled.handle].error_reason == "READER_STALLED" and ends[stalled.handle].output_tokens == 0
        assert (ends[modest.handle].error_reason, ends[modest.handle].output_tokens) == ("", 130)
        await rank.all_free()


@run
async def test_a_reader_that_keeps_up_has_all_the_credit_it_needs():
    async with decode_rank(num_blocks=600, max_context=2400, request_credit_bytes=256) as rank:
        rank.link.reads = False
        await rank.start(max_tokens=200)
        for _ in range(200):
            await rank.step()
            rank.link.acknowledged_through = len(rank.link.frames)
            rank.link.unacknowledged_bytes = 0
        assert [end.output_tokens for end in rank.ends()] == [200]
        await rank.all_free()


@run
async def test_a_large_frame_is_split_at_its_records():
    async with decode_rank(num_blocks=40, max_context=1000, request_credit_bytes=1 << 30) as rank:
        for index in range(3):
            await rank.start(f"r{index}", max_tokens=31, stream_interval=1000, logprobs=20)
        rank.engine.top = tuple((token, -1.0) for token in range(400))
        for _ in range(30):
            rank.engine.step()
        await settle()
        sizes = [sum(record_bytes(record) for record in frame.records) for frame in rank.link.frames]
        assert len(rank.link.frames) == 2 and max(sizes) <= FRAME_BYTES
        assert sum(sizes) > FRAME_BYTES
        assert {r.handle: len(r.token_ids) for r in rank.records()} == {1: 30, 2: 30, 3: 30}
        assert len(rank.ends()) == 3
        await rank.all_free()


@run
async def test_a_step_whose_output_cannot_be_handled_ends_its_requests_with_a_reason():
    async with decode_rank() as rank:
        broken, _ = await rank.start("broken", max_tokens=9)
        whole, _ = await rank.start("whole", max_tokens=3)
        (bad,) = (
            running.samples[0] for running in rank.core._outputs._running.values() if running.request.name == "broken"
        )
        bad._tokens = None
        await rank.step(2)
        ends = {end.handle: end for end in rank.ends()}
        assert (ends[broken.handle].error_reason, ends[whole.handle].error_reason) == ("OUTPUT_FAILED", "")
        assert [r.token_ids for r in rank.records() if r.handle == whole.handle] == [(101,), (102,)]
        await rank.all_free()


@run
async def test_a_step_that_cannot_be_read_ends_everything_that_runs():
    async with decode_rank() as rank:
        for name in ("a", "b"):
            await rank.start(name, max_tokens=9)

        class Unreadable(list):
            def __getitem__(self, place):
                raise RuntimeError("a column is missing")

        rank.engine.on_step(Unreadable([1]))
        await settle()
        assert [end.error_reason for end in rank.ends()] == ["OUTPUT_FAILED"] * 2
        await rank.all_free()
        await rank.start("after")
        await rank.step(3)
        assert rank.ends()[-1].error_reason == ""
        await rank.all_free()


@run
async def test_a_frame_that_cannot_be_sent_ends_its_requests_and_is_not_forgotten():
    async with decode_rank() as rank:
        lost, _ = await rank.start("lost", max_tokens=9)
        rank.link.fails = [ValueError("a field is out of range")]
        await rank.step()
        assert [(end.handle, end.error_reason) for end in rank.ends()] == [(lost.handle, "OUTPUT_FAILED")]
        await rank.all_free()
        ended, _ = await rank.start("ended", max_tokens=2)
        rank.link.fails = [ValueError("a field is out of range")]
        await rank.step()
        assert (rank.ends()[-1].handle, rank.ends()[-1].error_reason) == (ended.handle, "OUTPUT_FAILED")
        await rank.start("nothing can be sent")
        rank.link.fails = [ValueError("a field is out of range")] * 2
        await rank.step()
        assert rank.link.is_lost  # its router must not wait for ever
        rank.release("nothing can be sent")
        await rank.all_free()


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
