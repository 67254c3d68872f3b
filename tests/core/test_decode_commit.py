"""A commit must prove itself, and comes from the writer that the promise names."""

from __future__ import annotations

import asyncio
import dataclasses
import threading

import pytest
from decode_fakes import VOCABULARY_SIZE, WRITER, decode_rank, run, settle, until

from headrace import errors
from headrace.protocol import decode as p


def _flip(rank, reservation):
    block = reservation.sequences[0].block_ids[0]
    rank.rows.values[1, block * 4] ^= 1


@run
async def test_a_flipped_byte_is_found_and_may_be_pushed_again():
    async with decode_rank() as rank:
        command = rank.command()
        reservation = await rank.reserve(command)
        commit = rank.commit_command(command, reservation, rank.push(reservation))
        _flip(rank, reservation)
        with pytest.raises(errors.ManifestMismatch, match="layer 1"):
            await rank.commit(commit)
        assert not rank.engine.batch
        assert rank.core.ledger().reserved_requests == 1
        rank.push(reservation)
        await rank.commit(commit)
        await rank.step(3)
        await rank.all_free()


@run
async def test_a_dropped_layer_or_missing_rows_are_found():
    async with decode_rank() as rank:
        command = rank.command()
        reservation = await rank.reserve(command)
        (proof,) = rank.push(reservation)
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
                await rank.commit(rank.commit_command(command, reservation, manifest))
        await rank.commit(rank.commit_command(command, reservation, (proof,)))
        rank.release()
        await rank.all_free()


@run
async def test_a_commit_of_other_samples_or_lengths_is_refused():
    async with decode_rank() as rank:
        command = rank.command()
        reservation = await rank.reserve(command)
        good = rank.commit_command(command, reservation, rank.push(reservation))
        for change in (
            {"samples": ()},
            {"samples": (p.SampleState(1, (5,)),)},
            {"samples": (p.SampleState(0, (5, 6)),)},
            {"prompt_token_ids": (1, 2)},
        ):
            with pytest.raises(errors.InvalidRequest):
                await rank.commit(dataclasses.replace(good, **change))
        await rank.commit(good)
        rank.release()
        await rank.all_free()


@run
async def test_a_commit_of_an_ended_or_unknown_reservation_is_stale():
    async with decode_rank() as rank:
        command = rank.command()
        reservation = await rank.reserve(command)
        commit = rank.commit_command(command, reservation, rank.push(reservation))
        with pytest.raises(errors.StaleAttempt):
            await rank.commit(dataclasses.replace(commit, attempt=2))
        rank.release()
        for _ in range(2):
            with pytest.raises(errors.StaleAttempt):
                await rank.commit(commit)
            await rank.all_free()
        with pytest.raises(errors.StaleAttempt):
            rank.core.renew(reservation.reservation_id, WRITER.epoch)
        await rank.clock.advance(100.0)
        with pytest.raises(errors.StaleAttempt):
            await rank.commit(commit)
        assert not rank.engine.batch


@run
async def test_only_the_writer_that_was_named_may_begin_renew_and_commit():
    async with decode_rank() as rank:
        command = rank.command()
        reservation = await rank.reserve(command)
        with pytest.raises(errors.StaleEpoch):
            rank.core.begin(reservation.reservation_id, "another")
        commit = rank.commit_command(command, reservation, rank.push(reservation))
        with pytest.raises(errors.StaleEpoch):
            await rank.commit(commit, writer_epoch="another")
        with pytest.raises(errors.StaleEpoch):
            rank.core.renew(reservation.reservation_id, "another")
        rank.release()
        await rank.all_free()


@run
async def test_a_writer_that_is_lost_during_a_commit_does_not_stop_it():
    async with decode_rank() as rank:
        command = rank.command()
        reservation = await rank.reserve(command)
        commit = rank.commit_command(command, reservation, rank.push(reservation))
        rank.rows.slow = threading.Event()
        rank.core.commit(commit, WRITER.epoch, lambda said: None)  # its link is lost: nobody hears the answer
        await settle()
        rank.rows.slow.set()
        await until(lambda: rank.engine.batch)
        assert await rank.commit(commit) == 0.0
        rank.release()
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
        commit = rank.commit_command(command, reservation, rank.push(reservation))
        with pytest.raises(errors.Unavailable, match="fault"):
            await rank.commit(commit)
        await rank.commit(commit)
        rank.release()
        await rank.all_free()


@run
async def test_a_promise_is_good_for_one_begin_and_nothing_is_committed_before():
    async with decode_rank() as rank:
        command = rank.command()
        promise = await rank.reserve(command)
        commit = rank.commit_command(command, promise, rank.rows.push(promise))
        with pytest.raises(errors.InvalidRequest) as early:
            await rank.commit(commit)
        assert early.value.reason == "NOT_BEGUN"
        assert rank.core.renew(promise.reservation_id, WRITER.epoch) == 10.0
        assert rank.core.begin(promise.reservation_id, WRITER.epoch) == 10.0
        with pytest.raises(errors.StaleAttempt) as used:
            rank.core.begin(promise.reservation_id, WRITER.epoch)
        assert used.value.reason == "PROMISE_USED"
        await rank.commit(commit)
        with pytest.raises(errors.StaleAttempt):
            rank.core.begin(promise.reservation_id, WRITER.epoch)
        await rank.step(3)
        await rank.all_free()
        with pytest.raises(errors.StaleAttempt):
            rank.core.begin(promise.reservation_id, WRITER.epoch)


@run
async def test_an_old_promise_cannot_be_begun_once_its_blocks_are_anothers():
    async with decode_rank(num_blocks=3) as rank:
        old = await rank.reserve(rank.command())
        rank.release()
        new = await rank.reserve(rank.command("new"))
        assert set(new.sequences[0].block_ids) == set(old.sequences[0].block_ids)
        with pytest.raises(errors.StaleAttempt):
            rank.core.begin(old.reservation_id, WRITER.epoch)
        rank.release("new")
        await rank.all_free()
        assert not rank.writer.asked


@run
async def test_token_ids_outside_the_vocabulary_are_refused():
    async with decode_rank() as rank:
        command = rank.command()
        promise = await rank.reserve(command)
        good = rank.commit_command(command, promise, rank.push(promise))
        for wrong in (-1, VOCABULARY_SIZE):
            for field, change in (
                ("prompt_token_ids", {"prompt_token_ids": (*good.prompt_token_ids[:-1], wrong)}),
                ("samples.output_token_ids", {"samples": (p.SampleState(0, (wrong,)),)}),
            ):
                with pytest.raises(errors.InvalidRequest) as caught:
                    await rank.commit(dataclasses.replace(good, **change))
                assert caught.value.field == field
        assert not rank.engine.batch
        await rank.commit(good)
        rank.release()
        await rank.all_free()


@run
async def test_nothing_is_read_from_the_pool_for_a_manifest_whose_counts_are_wrong():
    async with decode_rank() as rank:
        command = rank.command()
        promise = await rank.reserve(command)
        (proof,) = rank.push(promise)
        rank.rows.checksum = lambda *_: pytest.fail("rows were read")
        short = dataclasses.replace(proof, layers=(dataclasses.replace(proof.layers[0], num_rows=5), *proof.layers[1:]))
        with pytest.raises(errors.ManifestMismatch):
            await rank.commit(rank.commit_command(command, promise, (short,)))
        rank.release()
        await rank.all_free()
