"""The decode service over real links in one process, with a fake engine behind it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest
from decode_fakes import DECODE, ROUTER, WRITER, Rank, decode_rank, run, until
from decode_peers import TIMEOUT_S, Router, ask, opened, router_of, writer_of

from headrace import errors
from headrace.clock import SystemClock
from headrace.protocol import common
from headrace.protocol import decode as p
from headrace.rpc import channel as channels
from headrace.rpc import server as servers
from headrace.rpc.clients import DecodeClient
from headrace.rpc.links import DECODE_LINK, TOKEN_LINK, LinkSettings
from headrace.rpc.promises import MeshKeys, sign, verify
from headrace.transfer.base import RowRun
from headrace.transfer.grpc import GrpcSource, GrpcTarget, RowChunk
from headrace.v1 import decode_pb2, decode_pb2_grpc
from services.decode import server
from services.decode.links import DecodeLinks, Writers

SETTINGS = LinkSettings.from_beat(1.0)
SHORT = LinkSettings.from_beat(0.1)
ROUTER_TWO = common.WorkerIdentity(ROUTER.address, "router-epoch-two")
WRITER_TWO = common.WorkerIdentity("127.0.0.1:7009", "writer-epoch-two")
KEYS = MeshKeys((b"k" * 32,))


@dataclass
class Served:
    """A rank behind a server, and a client for operators."""

    rank: Rank
    address: str
    links: DecodeLinks
    client: DecodeClient
    channel: object
    settings: LinkSettings

    def router(self, own=ROUTER):
        return router_of(self.address, own, DECODE.epoch, self.settings)

    def writer(self, own=WRITER):
        return writer_of(self.address, own, DECODE.epoch, self.settings)

    async def start(self, router: Router, writer, request_id="r", **options):
        command = self.rank.command(request_id, **options)
        promise = verify(await router.reserve(command), KEYS)
        await writer.ask(p.BeginCommand(promise.reservation_id))
        await writer.ask(self.rank.commit_command(command, promise, self.rank.rows.push(promise)))
        return command, promise

    async def step(self, times=1):
        for _ in range(times):
            self.rank.engine.step()
            await asyncio.sleep(0.01)

    async def free(self):
        async with asyncio.timeout(TIMEOUT_S):
            while (ledger := await self.client.ledger()).blocks.held:
                await asyncio.sleep(0.01)
        assert ledger.blocks.free == self.rank.pool.num_blocks
        assert not ledger.waiting_requests and not ledger.reserved_requests and not ledger.quarantined_requests


@contextlib.asynccontextmanager
async def served(write_rows=None, settings=SETTINGS, **options):
    clock = SystemClock()
    writers = Writers(clock)
    async with decode_rank(connected=False, clock=clock, sign=signed, stop_writer=writers.stop, **options) as rank:
        async with DecodeLinks.open(rank.core, writers, SystemClock(), settings) as links:
            register = server.register(rank.core, links, write_rows)
            grpc_server = await servers.start_server("127.0.0.1", 0, register, (server.SERVICE,))
            channel = channels.open_channel(grpc_server.address, own_connection=True)
            try:
                yield Served(rank, grpc_server.address, links, DecodeClient(channel), channel, settings)
            finally:
                await channel.close()
                await grpc_server.stop(None)


def signed(promise, expires_in_s):
    return sign(promise, expires_in_s, keys=KEYS)


@run
async def test_a_request_travels_from_reserve_to_its_last_frame():
    async with served() as mesh, mesh.router() as router, mesh.writer() as writer:
        command, promise = await mesh.start(router, writer, n=2, max_tokens=5, stream_interval=2, logprobs=2)
        assert promise.decode == DECODE and promise.target.backend is common.TransferBackend.LOCAL
        assert (await mesh.client.ledger()).running_requests == 1
        await mesh.step(4)
        await router.until_ended(2)
        tokens: dict[int, list[int]] = {0: [], 1: []}
        for record in router.records():
            assert record.handle == command.handle
            assert record.first_position == 1 + len(tokens[record.sample_index])
            assert record.logprobs == (-0.5,) * len(record.token_ids)
            assert record.top[0] == ((1, -0.5), (2, -1.5))
            tokens[record.sample_index].extend(record.token_ids)
        assert tokens == {0: [101, 102, 103, 104], 1: [101, 102, 103, 104]}
        last = router.ends()[-1]
        assert last.finish_reason is common.FinishReason.LENGTH
        assert [stage.name for stage in last.stages] == ["decode.queue", "decode.generate"]
        assert {end.output_tokens for end in router.ends()} == {5}
        await mesh.free()


@run
async def test_errors_arrive_as_what_they_are():
    async with served(num_blocks=4) as mesh, mesh.writer() as writer, mesh.writer(WRITER_TWO) as another:
        async with mesh.router() as router:
            with pytest.raises(errors.InvalidRequest) as refused:
                await router.reserve(mesh.rank.command(max_tokens=50))
            assert refused.value.field == "sampling.max_tokens"
            with pytest.raises(errors.StaleAttempt):
                await writer.ask(p.RenewCommand("no-such-reservation"))
            command = mesh.rank.command("a")
            promise = verify(await router.reserve(command), KEYS)
            with pytest.raises(errors.StaleEpoch):
                await another.ask(p.BeginCommand(promise.reservation_id))
            assert (await writer.ask(p.BeginCommand(promise.reservation_id))).expires_in_s == 10.0
            with pytest.raises(errors.StaleAttempt) as used:
                await writer.ask(p.BeginCommand(promise.reservation_id))
            assert used.value.reason == "PROMISE_USED"
            with pytest.raises(errors.ManifestMismatch):
                await writer.ask(mesh.rank.commit_command(command, promise, ()))
            with pytest.raises(errors.Overloaded) as crowded:
                await router.reserve(mesh.rank.command("b"), timeout_s=1.0)
            assert crowded.value.retry_after_s > 0
            assert (await writer.ask(p.RenewCommand(promise.reservation_id))).expires_in_s == 10.0
            await router.release("a")
            await mesh.free()
            assert writer.stopped == [promise.reservation_id]


@run
async def test_a_promise_is_signed_and_a_forged_one_does_not_verify():
    async with served() as mesh, mesh.router() as router:
        reservation = await router.reserve(mesh.rank.command())
        assert verify(reservation, KEYS).writer == WRITER
        changed = dataclasses.replace(reservation, promise=reservation.promise + b"\x00")
        with pytest.raises(errors.InvalidRequest) as forged:
            verify(changed, KEYS)
        assert forged.value.reason == "PROMISE_FORGED"
        await router.release("r")
        await mesh.free()


@run
async def test_reserve_without_a_token_link_is_refused():
    async with served() as mesh, opened(DECODE_LINK, mesh.address, ROUTER, DECODE.epoch) as (link, _):
        with pytest.raises(errors.Unavailable) as caught:
            await ask(link, mesh.rank.command())
        assert caught.value.reason == "NO_TOKEN_LINK"


@run
async def test_a_release_ends_a_reserve_that_waits():
    async with served(num_blocks=3) as mesh, mesh.router() as router:
        await router.reserve(mesh.rank.command("a"))
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(fails_with(errors.Cancelled, router.reserve(mesh.rank.command("b"))))
            await until(lambda: mesh.rank.core.ledger().waiting_requests == 1)
            await router.release("b")
            await waiting
        await router.release("a")
        await mesh.free()


async def fails_with(kind, work):
    with pytest.raises(kind):
        await work


@run
async def test_a_router_that_is_gone_for_good_has_lost_its_requests():
    async with served(settings=SHORT) as mesh, mesh.writer() as writer:
        async with mesh.router() as router:
            await mesh.start(router, writer, max_tokens=9)
            await mesh.step()
            assert mesh.rank.core.ledger().open_links == 1
        await until(lambda: mesh.rank.core.ledger().open_links == 0)
        await mesh.free()
        async with mesh.router() as router:
            await mesh.start(router, writer, "after", max_tokens=3)
            await mesh.step(2)
            await router.until_ended(1)
        await mesh.free()


@run
async def test_two_router_processes_at_one_address_both_live():
    async with served() as mesh, mesh.writer() as writer, mesh.router() as one, mesh.router(ROUTER_TWO) as two:
        await mesh.start(one, writer, "same", max_tokens=3, handle=1)
        await mesh.start(two, writer, "same", max_tokens=3, handle=1)
        await mesh.step(2)
        for router in (one, two):
            await router.until_ended(1)
            assert [record.token_ids for record in router.records()] == [(101,), (102,)]
        await mesh.free()


@run
async def test_a_link_for_an_earlier_life_is_refused():
    async with served() as mesh:
        with pytest.raises(errors.StaleEpoch):
            async with opened(TOKEN_LINK, mesh.address, ROUTER, "an-earlier-life"):
                pass


@run
async def test_a_writer_that_is_silent_or_gone_is_fenced():
    async with served(quarantine_max_s=0.3) as mesh, mesh.router() as router:
        async with mesh.writer() as writer:
            writer.answer = None
            promise = verify(await router.reserve(mesh.rank.command()), KEYS)
            await writer.ask(p.BeginCommand(promise.reservation_id))
            await router.release("r")
            await mesh.free()
            assert mesh.rank.target.fences == 1
            gone = verify(await router.reserve(mesh.rank.command("gone")), KEYS)
            await writer.ask(p.BeginCommand(gone.reservation_id))
        await router.release("gone")
        await mesh.free()
        assert mesh.rank.target.fences == 2


@run
async def test_beats_carry_progress_and_say_when_the_rank_drains():
    async with served(settings=SHORT) as mesh, mesh.router() as router, mesh.writer() as writer:
        assert router.commands.info == mesh.rank.core.info
        await mesh.start(router, writer, max_tokens=3)
        await until(lambda: router.commands.progress is not None and router.commands.progress.running_requests == 1)
        assert router.commands.progress.serving
        async with asyncio.TaskGroup() as tasks:
            draining = tasks.create_task(mesh.rank.core.drain(5.0))
            await until(lambda: not router.commands.progress.serving)
            assert not draining.done()
            await mesh.step(2)
            await router.until_ended(1)
        assert router.ends()[0].error_reason == ""
        await mesh.free()


@run
async def test_sixteen_requests_at_once_share_frames_and_leave_nothing():
    async with served(num_blocks=64) as mesh, mesh.router() as router, mesh.writer() as writer:
        await asyncio.gather(*(mesh.start(router, writer, f"r{index}", max_tokens=4) for index in range(16)))
        for _ in range(3):
            mesh.rank.engine.step()
            await asyncio.sleep(0.02)
        await router.until_ended(16)
        assert len(router.frames) <= 3
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
            call = asyncio.run_coroutine_threadsafe(
                channels.call_unary(stub.WriteRows, iter(messages), TIMEOUT_S), loop
            )
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
            await channels.call_unary(stub.WriteRows, iter([decode_pb2.WriteRowsRequest()]), TIMEOUT_S)
