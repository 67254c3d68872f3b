"""The decode service over real gRPC in one process, with a fake engine behind it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from dataclasses import dataclass

import numpy as np
import pytest
from decode_fakes import DECODE, ROUTER, WRITER, Rank, decode_rank, until

from headrace import errors, rpc
from headrace import protocol as p
from headrace.client import DecodeClient
from headrace.clock import SystemClock
from headrace.transfer.base import RowRun
from headrace.transfer.grpc import GrpcSource, GrpcTarget, RowChunk
from headrace.v1 import decode_pb2, decode_pb2_grpc
from services.decode import server

TIMEOUT_S = 5.0


def run(function):
    """An async test, run to its end."""

    @functools.wraps(function)
    def test():
        asyncio.run(asyncio.wait_for(function(), 60))

    return test


@dataclass
class Served:
    """A rank behind a server, a client of it, and the frames that a connected router has got."""

    rank: Rank
    client: DecodeClient
    channel: object
    frames: list[p.TokenFrame]

    @contextlib.asynccontextmanager
    async def router(self, resume_after=0, router=ROUTER):
        async def read():
            async for frame in self.client.stream_tokens(router, DECODE.epoch, resume_after):
                self.frames.append(frame)

        before = len(self.frames)
        reader = asyncio.ensure_future(read())
        await until(lambda: len(self.frames) > before or reader.done())
        try:
            yield reader
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def start(self, request_id="r", **options):
        command = self.rank.command(request_id, **options)
        reservation = await self.client.reserve(command, TIMEOUT_S)
        manifest = self.rank.rows.push(reservation)
        await self.client.commit(self.rank.commit_command(command, reservation, manifest), TIMEOUT_S)
        return command, reservation

    async def free(self):
        async with asyncio.timeout(TIMEOUT_S):
            while (ledger := await self.client.ledger()).blocks.held:
                await asyncio.sleep(0.01)
        assert ledger.blocks.free == self.rank.pool.num_blocks
        assert not ledger.waiting_requests and not ledger.reserved_requests and not ledger.quarantined_requests


@contextlib.asynccontextmanager
async def served(write_rows=None, **options):
    async with decode_rank(connected=False, clock=SystemClock(), **options) as rank:
        grpc_server = await rpc.start_server("127.0.0.1", 0, server.register(rank.core, write_rows), (server.SERVICE,))
        channel = rpc.open_channel(grpc_server.address, own_connection=True)
        try:
            yield Served(rank, DecodeClient(channel), channel, [])
        finally:
            await channel.close()
            await grpc_server.stop(None)


@run
async def test_a_request_travels_from_reserve_to_its_last_frame():
    async with served() as mesh, mesh.router():
        command, reservation = await mesh.start(n=2, max_tokens=5, stream_interval=2, logprobs=2)
        assert reservation.decode == DECODE and reservation.target.backend == "local"
        assert (await mesh.client.ledger()).running_requests == 1
        for _ in range(4):
            mesh.rank.engine.step()
            await asyncio.sleep(0.01)
        await until(lambda: sum(len(frame.ends) for frame in mesh.frames) == 2)
        tokens: dict[int, list[int]] = {0: [], 1: []}
        for record in (record for frame in mesh.frames for record in frame.records):
            assert record.handle == command.handle
            assert record.first_position == 1 + len(tokens[record.sample_index])
            assert record.logprobs == (-0.5,) * len(record.token_ids)
            assert record.top[0] == ((1, -0.5), (2, -1.5))
            tokens[record.sample_index].extend(record.token_ids)
        assert tokens == {0: [101, 102, 103, 104], 1: [101, 102, 103, 104]}
        last = mesh.frames[-1].ends[-1]
        assert last.finish_reason is p.FinishReason.LENGTH
        assert [stage.name for stage in last.stages] == ["decode.queue", "decode.generate"]
        assert [frame.frame_number for frame in mesh.frames] == list(range(1, len(mesh.frames) + 1))
        await mesh.free()


@run
async def test_errors_arrive_as_what_they_are():
    async with served(num_blocks=4) as mesh:
        with pytest.raises(errors.Unavailable) as caught:
            await mesh.client.reserve(mesh.rank.command(), TIMEOUT_S)
        assert caught.value.reason == "NO_TOKEN_STREAM"
        async with mesh.router():
            with pytest.raises(errors.InvalidRequest) as refused:
                await mesh.client.reserve(mesh.rank.command(max_tokens=50), TIMEOUT_S)
            assert refused.value.field == "sampling.max_tokens"
            with pytest.raises(errors.StaleEpoch):
                await mesh.client.reserve(mesh.rank.command(decode_epoch="old"), TIMEOUT_S)
            with pytest.raises(errors.StaleAttempt):
                await mesh.client.renew("no-such-reservation", WRITER.epoch, TIMEOUT_S)
            command = mesh.rank.command("a")
            reservation = await mesh.client.reserve(command, TIMEOUT_S)
            with pytest.raises(errors.ManifestMismatch):
                await mesh.client.commit(mesh.rank.commit_command(command, reservation, ()), TIMEOUT_S)
            with pytest.raises(errors.Overloaded) as crowded:
                await mesh.client.reserve(mesh.rank.command("b"), 0.5)
            assert crowded.value.retry_after_s > 0
            assert await mesh.client.renew(reservation.reservation_id, WRITER.epoch, TIMEOUT_S) == 10.0
            await mesh.client.release("a", 1, DECODE.epoch, (), TIMEOUT_S)
            await mesh.free()


@run
async def test_a_reserve_call_that_is_cancelled_leaves_nothing():
    async with served(num_blocks=3) as mesh, mesh.router():
        await mesh.client.reserve(mesh.rank.command("a"), TIMEOUT_S)
        leaving = asyncio.ensure_future(mesh.client.reserve(mesh.rank.command("b"), TIMEOUT_S))
        await until(lambda: mesh.rank.core.ledger().waiting_requests == 1)
        leaving.cancel()
        await until(lambda: mesh.rank.core.ledger().waiting_requests == 0)
        await mesh.client.release("a", 1, DECODE.epoch, (), TIMEOUT_S)
        await mesh.free()


@run
async def test_a_broken_connection_resumes_and_a_lost_one_ends_its_requests():
    async with served(stream_resume_s=0.5) as mesh:
        async with mesh.router():
            await mesh.start(max_tokens=9)
            mesh.rank.engine.step()
            await until(lambda: mesh.frames[-1].records)
        mesh.rank.engine.step()
        await until(lambda: mesh.rank.core.ledger().open_streams == 0)
        async with mesh.router(resume_after=mesh.frames[-1].frame_number):
            mesh.rank.engine.step()
            await until(lambda: mesh.frames[-1].records and mesh.frames[-1].records[0].first_position == 3)
        assert [r.first_position for frame in mesh.frames for r in frame.records] == [1, 2, 3]
        await mesh.free()


@run
async def test_a_stream_for_an_earlier_life_is_refused():
    async with served() as mesh:
        with pytest.raises(errors.StaleEpoch):
            async for _ in mesh.client.stream_tokens(ROUTER, "an-earlier-life"):
                pass
        with pytest.raises(errors.InvalidRequest):
            async for _ in mesh.client.stream_tokens(p.WorkerIdentity("x:1", ""), DECODE.epoch):
                pass


@run
async def test_sixteen_requests_at_once_share_frames_and_leave_nothing():
    async with served(num_blocks=64) as mesh, mesh.router():
        await asyncio.gather(*(mesh.start(f"r{index}", max_tokens=4) for index in range(16)))
        before = len(mesh.frames)
        for _ in range(3):
            mesh.rank.engine.step()
            await asyncio.sleep(0.02)
        await until(lambda: sum(len(frame.ends) for frame in mesh.frames) == 16)
        assert len(mesh.frames) - before <= 3
        await mesh.free()


@run
async def test_rows_travel_in_messages_when_the_grpc_transfer_is_in_use():
    torch = pytest.importorskip("torch")
    pool = torch.zeros(2, 4, 4, 8)
    target = GrpcTarget(pool, "placeholder:1")
    async with served(write_rows=target.write) as mesh:
        stub = decode_pb2_grpc.DecodeServiceStub(mesh.channel)
        rows = torch.arange(2 * 4 * 4 * 8, dtype=torch.float32).view(2, 4, 4, 8)

        def send(_address, chunks):
            sent: list[RowChunk] = list(chunks)
            messages = [
                decode_pb2.WriteRowsRequest(
                    session=c.session, layer=c.layer, target_row=c.target_row, payload=c.payload
                )
                for c in sent
            ]
            call = asyncio.run_coroutine_threadsafe(rpc.call_unary(stub.WriteRows, iter(messages), TIMEOUT_S), loop)
            return call.result(TIMEOUT_S).byte_count

        loop = asyncio.get_running_loop()
        source = GrpcSource(rows, send)
        written = await asyncio.to_thread(source.push, target.descriptor(), 1, [RowRun(3, 5, 6)])
        assert written == 6 * 8 * 4
        assert np.array_equal(pool[1].flatten(0, 1)[5:11].numpy(), rows[1].flatten(0, 1)[3:9].numpy())
        old = target.descriptor()
        target.fence()
        with pytest.raises(errors.TransferError):
            await asyncio.to_thread(source.push, old, 1, [RowRun(3, 5, 6)])
    async with served() as mesh:
        stub = decode_pb2_grpc.DecodeServiceStub(mesh.channel)
        with pytest.raises(errors.InvalidRequest):
            await rpc.call_unary(stub.WriteRows, iter([decode_pb2.WriteRowsRequest()]), TIMEOUT_S)
