"""Until when late writes are possible: writers that answer, are silent, or do not know; and the fence."""

from __future__ import annotations

import asyncio
import threading

from decode_fakes import decode_rank, run, settle, until

from headrace.protocol import decode as p


@run
async def test_an_unknown_answer_fences_at_once_and_frees():
    async with decode_rank() as rank:
        other_command = rank.command("other")
        other = await rank.writing(other_command)
        await rank.writing(rank.command())
        rank.writer.answer = p.StopState.UNKNOWN
        rank.release()
        await until(lambda: rank.core.ledger().blocks.quarantined == 0)
        assert rank.core.ledger().fences == rank.target.fences == 1
        fresh = await rank.writing(rank.command("fresh"))
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
        await rank.writing(rank.command())
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
            await rank.writing(rank.command())
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
        await rank.writing(rank.command())
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
        await rank.writing(rank.command())
        rank.writer.answer = p.StopState.UNKNOWN
        rank.release()
        await asyncio.sleep(0.05)
        assert rank.core.ledger().blocks.quarantined == 3
        rank.target.broken = False
        await rank.clock.advance(1.5)
        await until(lambda: rank.core.ledger().fences == 1)
        await rank.all_free()
