"""Links over real gRPC: hello and versions, order through broken connections, silence, loss, and what the other side hears."""

from __future__ import annotations

import asyncio
import contextlib
import time

import grpc
import pytest

from headrace.clock import Deadline, SystemClock
from headrace.errors import HeadraceError, IncompatiblePeer, InvalidRequest, StaleEpoch, Unavailable
from headrace.protocol.common import (
    KvLayout,
    KvRegion,
    NumberFormat,
    RopeOrder,
    WorkerIdentity,
    WorkerInfo,
    WorkerProgress,
    WorkerRole,
)
from headrace.protocol.decode import BeginCommand, CommitCommand, Renewed, StopCommand, Stopped, StopState
from headrace.protocol.link import LinkHello
from headrace.rpc.channel import open_channel
from headrace.rpc.links import PREFILL_LINK, WRITER_LINK, LinkOpener, LinkServer, LinkSettings
from headrace.rpc.server import start_server
from headrace.rpc.status import error_from_rpc
from headrace.v1 import decode_pb2, decode_pb2_grpc
from headrace.wire.link import hello_to_pb
from tests.link_fakes import OPENER, Recorder, in_loop

CLOCK = SystemClock()
BEAT_S = 0.1
SETTINGS = LinkSettings.from_beat(BEAT_S)
EPOCH = "d" * 16
SERVICE = "headrace.v1.DecodeService"


class Writers(decode_pb2_grpc.DecodeServiceServicer):
    """A decode rank of which only the writer link is served."""

    def __init__(self, links: LinkServer):
        self._links = links

    async def OpenWriterLink(self, request_iterator, context):
        async for message in self._links.serve(request_iterator, context):
            yield message


class Rank:
    """A served writer link, its address, and a way there that can be cut or stopped."""

    def __init__(self, info: WorkerInfo | None = None, settings: LinkSettings = SETTINGS, on_body=None):
        self.handler = Recorder(on_body)
        self.links = LinkServer(
            WRITER_LINK,
            WorkerIdentity("", EPOCH),
            lambda link: self.handler,
            CLOCK,
            settings,
            info=info,
            progress=lambda: WorkerProgress(completed_steps=3),
        )

    @contextlib.asynccontextmanager
    async def open(self):
        register = decode_pb2_grpc.add_DecodeServiceServicer_to_server
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(self.links.run())
            server = await start_server("127.0.0.1", 0, lambda inner: register(Writers(self.links), inner), [SERVICE])
            self.server = server
            async with Way(server.address).open() as self.way:
                try:
                    yield self
                finally:
                    self.links.close(Unavailable("over", reason="DRAINING"))
                    running.cancel()
                    await server.stop(0.2)


class Way:
    """Passes bytes on to `address`; `cut` breaks every connection, `stop` lets nothing through any more and tells nobody."""

    def __init__(self, address: str):
        self._there = address
        self._moving = asyncio.Event()
        self._moving.set()
        self._writers: list[asyncio.StreamWriter] = []
        self.address = ""
        self.is_refusing = False

    @contextlib.asynccontextmanager
    async def open(self):
        async with await asyncio.start_server(self._accept, "127.0.0.1", 0) as listening:
            self.address = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
            yield self
            self._moving.set()
            self.cut()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def stop(self) -> None:
        self._moving.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_refusing:
            writer.transport.abort()
            return
        there_reader, there_writer = await asyncio.open_connection(*self._there.split(":"))
        self._writers += [writer, there_writer]
        await asyncio.gather(self._pass_on(reader, there_writer), self._pass_on(there_reader, writer))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                await self._moving.wait()
                writer.write(data)


@contextlib.asynccontextmanager
async def opened(
    rank: Rank, handler=None, *, address: str = "", epoch: str = EPOCH, settings=SETTINGS, kind=WRITER_LINK
):
    """An opener that runs, straight to the rank or by `address`."""
    opener = LinkOpener(kind, address or rank.server.address, OPENER, epoch, handler or Recorder(), CLOCK, settings)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(opener.run())
        try:
            yield opener.link
        finally:
            running.cancel()


async def until(condition, timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def answering(link, number, body) -> None:
    link.answer(number, Renewed(3.0) if isinstance(body, BeginCommand) else Stopped(StopState.DRAINED))


def some_info() -> WorkerInfo:
    layout = KvLayout((KvRegion("latent", 2, 8, NumberFormat.FP32),), 16, RopeOrder.INTERLEAVED, "f00d", "exact-1")
    return WorkerInfo(WorkerIdentity("a:1", EPOCH), WorkerRole.DECODE, "tiny", layout, 64, 512, vocabulary_size=300)


# --- hello -----------------------------------------------------------------------------------------------------------


@in_loop
async def test_a_hello_says_who_serves_and_how_it_is():
    async with Rank(some_info()).open() as rank, opened(rank, epoch="") as link:
        await until(lambda: link.is_open)
        assert link.info == some_info() and link.progress == WorkerProgress(completed_steps=3)
        assert link.peer.epoch == EPOCH and rank.links.find(OPENER.epoch).peer == OPENER


@in_loop
async def test_both_sides_ask_and_are_answered():
    async with Rank(on_body=answering).open() as rank, opened(rank, Recorder(answering)) as link:
        deadline = Deadline.after(CLOCK, 5)
        assert await link.ask(BeginCommand("r"), deadline) == Renewed(3.0)
        served = rank.links.find(OPENER.epoch)
        assert await served.ask(StopCommand("r", 1.0), deadline) == Stopped(StopState.DRAINED)


async def refused(rank: Rank, **how) -> HeadraceError:
    handler = Recorder()
    async with opened(rank, handler, **how):
        await until(lambda: handler.lost is not None)
    assert handler.told == ["lost"]
    return handler.lost


@in_loop
async def test_another_process_at_the_address_is_refused_by_epoch():
    async with Rank().open() as rank:
        assert isinstance(await refused(rank, epoch="e" * 16), StaleEpoch)


@in_loop
async def test_another_beat_is_refused_with_both_numbers():
    async with Rank().open() as rank:
        error = await refused(rank, settings=LinkSettings.from_beat(0.2))
        assert isinstance(error, IncompatiblePeer) and error.reason == "BEAT_INTERVAL"
        assert "0.1" in error.message and "0.2" in error.message


async def said_to(rank: Rank, *messages: decode_pb2.OpenWriterLinkRequest | bytes) -> HeadraceError:
    """The error that ends a writer link with these messages from us."""
    async with open_channel(rank.server.address, own_connection=True) as channel:
        call = channel.stream_stream(
            WRITER_LINK.method, request_serializer=lambda x: x if isinstance(x, bytes) else x.SerializeToString()
        )(iter(messages))
        with pytest.raises(grpc.RpcError) as caught:
            async for _ in call:
                pass
        return error_from_rpc(caught.value)


def hello(**changes) -> decode_pb2.OpenWriterLinkRequest:
    values = dict(sender=OPENER, link_id="a" * 16, beat_interval_s=BEAT_S, receiver_epoch=EPOCH)
    message = decode_pb2.OpenWriterLinkRequest()
    message.header.hello.CopyFrom(hello_to_pb(LinkHello(**(values | changes))))
    return message


@in_loop
async def test_a_protocol_version_of_another_range_is_refused_and_the_range_is_named():
    async with Rank().open() as rank:
        error = await said_to(rank, hello(oldest_version=7, newest_version=9))
        assert isinstance(error, IncompatiblePeer) and error.reason == "PROTOCOL_VERSION"
        assert "2 to 2" in error.message and "7 to 9" in error.message


@in_loop
async def test_a_range_that_overlaps_is_spoken_in_the_version_of_both():
    async with Rank().open() as rank, open_channel(rank.server.address, own_connection=True) as channel:
        method = channel.stream_stream(
            WRITER_LINK.method,
            request_serializer=decode_pb2.OpenWriterLinkRequest.SerializeToString,
            response_deserializer=decode_pb2.OpenWriterLinkResponse.FromString,
        )
        call = method()
        await call.write(hello(oldest_version=1, newest_version=9))
        answer = await call.read()
        assert (answer.header.hello.oldest_version, answer.header.hello.newest_version) == (2, 2)
        call.cancel()


@in_loop
async def test_a_program_of_version_1_which_knows_no_hello_is_told_that_its_calls_are_gone():
    async with Rank().open() as rank, open_channel(rank.server.address) as channel:
        for method in ("Reserve", "Commit", "Renew", "Release"):
            with pytest.raises(grpc.RpcError) as caught:
                await channel.unary_unary(f"/{SERVICE}/{method}")(b"")
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@in_loop
async def test_a_server_without_such_a_link_is_of_another_version():
    async with Rank().open() as rank:
        error = await refused(rank, kind=PREFILL_LINK)
        assert isinstance(error, IncompatiblePeer) and error.reason == "PROTOCOL_VERSION"


@in_loop
async def test_what_is_no_hello_is_refused_by_field():
    async with Rank().open() as rank:
        for first in (decode_pb2.OpenWriterLinkRequest(), hello(link_id=""), b"\xff\xff"):
            error = await said_to(rank, first)
            assert isinstance(error, InvalidRequest), error


@in_loop
async def test_a_link_that_the_server_does_not_know_cannot_be_resumed():
    async with Rank().open() as rank:
        assert (await said_to(rank, hello(received_through=5))).reason == "LINK_LOST"


@in_loop
async def test_nobody_listening_loses_a_new_link_at_once():
    handler = Recorder()
    async with Rank().open() as rank, opened(rank, handler, address="127.0.0.1:9"):
        await until(lambda: handler.lost is not None, 3.0)
        assert isinstance(handler.lost, Unavailable)


# --- connections that break ------------------------------------------------------------------------------------------


@in_loop
async def test_order_survives_connections_that_break_again_and_again():
    at_opener = Recorder()
    async with Rank().open() as rank, opened(rank, at_opener, address=rank.way.address) as link:
        await until(lambda: link.is_open)
        served = rank.links.find(OPENER.epoch)
        for round_ in range(6):
            for index in range(100):
                link.send(BeginCommand(f"{round_}-{index}"))
                served.send(StopCommand(f"{round_}-{index}", 1.0))
                if index % 20 == 0:
                    await asyncio.sleep(0.001)
            rank.way.cut()
            await until(lambda: link.is_open)
        names = [f"{round_}-{index}" for round_ in range(6) for index in range(100)]
        await until(lambda: len(rank.handler.items) >= 600 and len(at_opener.items) >= 600)
        assert [body.reservation_id for body in rank.handler.items] == names
        assert [body.reservation_id for body in at_opener.items] == names
        await until(lambda: not link.unacknowledged_bytes and not served.unacknowledged_bytes)
        assert rank.links.find(OPENER.epoch) is served, "it is one link all the time"


@in_loop
async def test_silence_breaks_a_connection_at_both_ends_and_then_loses_the_link():
    at_opener = Recorder()
    async with Rank().open() as rank, opened(rank, at_opener, address=rank.way.address) as link:
        await until(lambda: link.is_open)
        heard: list[object] = []
        link.send(BeginCommand("r"), on_answer=heard.append)
        await asyncio.sleep(5 * BEAT_S)
        assert link.is_open and not at_opener.told.count("broken"), "beats keep a quiet link open"
        rank.way.stop()
        rank.way.is_refusing = True
        began = time.monotonic()
        await until(lambda: not link.is_open)
        assert 2 * BEAT_S < time.monotonic() - began < 8 * BEAT_S and not link.is_lost
        await until(lambda: link.is_lost and rank.handler.lost is not None)
        assert [getattr(error, "reason", "") for error in heard] == ["LINK_LOST"]
        assert rank.links.links() == []


@in_loop
async def test_a_server_that_ends_its_links_says_why():
    at_opener = Recorder()
    async with Rank().open() as rank, opened(rank, at_opener) as link:
        await until(lambda: link.is_open)
        rank.links.close(Unavailable("this rank stops", reason="DRAINING"))
        await until(lambda: at_opener.lost is not None)
        assert (at_opener.lost.reason, at_opener.lost.message) == ("DRAINING", "this rank stops")
        assert (await refused(rank)).reason == "DRAINING"


@in_loop
async def test_a_command_of_megabytes_arrives_whole():
    commit = CommitCommand("r", "q", 1, (), (), tuple(range(600_000)))
    async with Rank(on_body=answering).open() as rank, opened(rank) as link:
        with pytest.raises(InvalidRequest) as caught:
            await link.ask(commit, Deadline.after(CLOCK, 10))
        assert caught.value.field == "samples", "it was read, and refused for what it lacks"


@in_loop
async def test_no_task_and_no_link_is_left_when_an_opener_goes_away():
    async with Rank().open() as rank:
        async with opened(rank) as link:
            await until(lambda: link.is_open)
        assert link.is_lost
        await until(lambda: rank.links.links() == [])
        assert rank.handler.lost is not None
