"""Links over real gRPC, through a TCP proxy that breaks them: hello, refusals, resuming, silence, loss, independence."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc
import pytest

from headrace.clock import Deadline, SystemClock
from headrace.errors import HeadraceError, Unavailable
from headrace.protocol.common import WorkerIdentity
from headrace.protocol.decode import (
    BeginCommand,
    ReleaseCommand,
    RenewCommand,
    Renewed,
    StopCommand,
    Stopped,
    StopState,
    TokenFrame,
    TokenRecord,
)
from headrace.protocol.link import NEWEST_VERSION, OLDEST_VERSION, Done
from headrace.rpc.links import DECODE_LINK, TOKEN_LINK, WRITER_LINK, LinkKind, LinkOpener, LinkServer, LinkSettings
from headrace.rpc.server import start_server
from headrace.rpc.status import error_from_rpc
from headrace.v1 import decode_pb2, decode_pb2_grpc
from tests.link_fakes import OPENER, SERVER, Recorder, in_loop
from tests.tcp_proxy import TcpProxy

CLOCK = SystemClock()
QUICK = LinkSettings.from_beat(0.25)  # a busy host stands still for a third of a second now and then
SLOW = LinkSettings.from_beat(1.0)


class Served(decode_pb2_grpc.DecodeServiceServicer):
    """The three link calls of a decode rank, and a recorder behind each."""

    def __init__(self, settings: LinkSettings, identity: WorkerIdentity = SERVER):
        self.at: dict[LinkKind, Recorder] = {}
        self.links: dict[LinkKind, LinkServer] = {}
        for kind in (DECODE_LINK, TOKEN_LINK, WRITER_LINK):
            self.at[kind] = Recorder(answers)
            self.links[kind] = LinkServer(kind, identity, lambda link: self.at[link.kind], CLOCK, settings)

    async def OpenDecodeLink(self, request_iterator, context):
        async for message in self.links[DECODE_LINK].serve(request_iterator, context):
            yield message

    async def OpenTokenLink(self, request_iterator, context):
        async for message in self.links[TOKEN_LINK].serve(request_iterator, context):
            yield message

    async def OpenWriterLink(self, request_iterator, context):
        async for message in self.links[WRITER_LINK].serve(request_iterator, context):
            yield message


def answers(link, number, body) -> None:
    """What a rank would say at once."""
    if isinstance(body, ReleaseCommand):
        link.answer(number, Done())
    elif isinstance(body, BeginCommand):
        link.answer(number, Renewed(10.0))
    elif isinstance(body, StopCommand):
        link.answer(number, Stopped(StopState.DRAINED))


@dataclass
class Mesh:
    """One served rank, a proxy before it, and openers of links to it."""

    served: Served
    proxy: TcpProxy
    address: str
    tasks: asyncio.TaskGroup
    settings: LinkSettings
    running: list[asyncio.Task[None]] = field(default_factory=list)

    def open(
        self,
        kind: LinkKind,
        handler: Recorder,
        *,
        peer_epoch: str = SERVER.epoch,
        address: str = "",
        settings: LinkSettings | None = None,
    ) -> LinkOpener:
        """A link through the proxy, unless `address` says another way."""
        opener = LinkOpener(
            kind, address or self.proxy.address, OPENER, peer_epoch, handler, CLOCK, settings or self.settings
        )
        self.running.append(self.tasks.create_task(opener.run()))
        return opener


@contextlib.asynccontextmanager
async def mesh(settings: LinkSettings = QUICK) -> AsyncIterator[Mesh]:
    """A served rank at a real port."""
    served = Served(settings)
    server = await start_server(
        "127.0.0.1", 0, lambda to: decode_pb2_grpc.add_DecodeServiceServicer_to_server(served, to), ()
    )
    async with TcpProxy.open(server.address) as proxy, asyncio.TaskGroup() as tasks:
        result = Mesh(served, proxy, server.address, tasks, settings)
        result.running += [tasks.create_task(links.run()) for links in served.links.values()]
        await asyncio.sleep(0)
        try:
            yield result
        finally:
            for task in result.running:
                task.cancel()
            await server.stop(None)


async def until(condition: Callable[[], object], what: str, seconds: float = 10.0) -> None:
    """Waits for a condition that other tasks make true."""
    end = CLOCK.now() + seconds
    while not condition():
        assert CLOCK.now() < end, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.005)


def soon() -> Deadline:
    return Deadline.after(CLOCK, 5.0)


@in_loop
async def test_both_sides_of_a_stream_ask_and_are_answered():
    async with mesh() as m:
        opener = m.open(WRITER_LINK, Recorder(answers))
        assert await opener.link.ask(BeginCommand("r1"), soon()) == Renewed(10.0)
        there = m.served.links[WRITER_LINK].find(OPENER.epoch)
        assert await there.ask(StopCommand("r1", 1.0), soon()) == Stopped(StopState.DRAINED)
        assert (opener.link.peer.epoch, there.peer) == (SERVER.epoch, OPENER)


async def refused_hello(address: str, **changes: object) -> tuple[HeadraceError, grpc.StatusCode]:
    """What a server says to a hello with these fields."""
    message = decode_pb2.OpenDecodeLinkRequest()
    hello = message.header.hello
    hello.oldest_version = hello.newest_version = NEWEST_VERSION
    hello.sender.address, hello.sender.epoch = OPENER.address, OPENER.epoch
    hello.receiver_epoch, hello.link_id = SERVER.epoch, "a" * 16
    hello.beat_interval.FromMilliseconds(250)
    for name, value in changes.items():
        setattr(hello, name, value)
    async with grpc.aio.insecure_channel(address) as channel:
        call = decode_pb2_grpc.DecodeServiceStub(channel).OpenDecodeLink(iter([message]), timeout=5)
        with pytest.raises(grpc.RpcError) as caught:
            async for _ in call:
                pass
        return error_from_rpc(caught.value), caught.value.code()


@pytest.mark.parametrize("version", [1, NEWEST_VERSION + 1])
def test_a_hello_of_another_protocol_version_is_refused_and_hears_the_range(version):
    @in_loop
    async def test():
        async with mesh() as m:
            error, code = await refused_hello(m.address, oldest_version=version, newest_version=version)
            assert (code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "PROTOCOL_VERSION")
            assert f"versions {OLDEST_VERSION} to {NEWEST_VERSION} are spoken here" in error.message
            assert not error.retryable

    test()


@in_loop
async def test_a_newer_side_that_still_speaks_our_version_is_served():
    async with mesh() as m:
        message = decode_pb2.OpenDecodeLinkRequest()
        hello = message.header.hello
        hello.oldest_version, hello.newest_version = OLDEST_VERSION, NEWEST_VERSION + 5
        hello.sender.address, hello.sender.epoch, hello.link_id = OPENER.address, OPENER.epoch, "a" * 16
        hello.beat_interval.FromMilliseconds(250)
        async with grpc.aio.insecure_channel(m.address) as channel:
            call = decode_pb2_grpc.DecodeServiceStub(channel).OpenDecodeLink(timeout=5)
            await call.write(message)
            chosen = (await call.read()).header.hello
            assert (chosen.oldest_version, chosen.newest_version) == (NEWEST_VERSION, NEWEST_VERSION)
            call.cancel()


@in_loop
async def test_calls_of_protocol_version_1_are_unimplemented():
    async with mesh() as m, grpc.aio.insecure_channel(m.address) as channel:
        for method in ("Reserve", "Release", "Commit", "Renew"):
            call = channel.unary_unary(f"/headrace.v1.DecodeService/{method}")
            with pytest.raises(grpc.RpcError) as caught:
                await call(b"", timeout=5)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED, method


@in_loop
async def test_hellos_that_fit_nothing_here_are_refused_by_reason():
    async with mesh() as m:
        error, code = await refused_hello(m.address, receiver_epoch="f" * 16)
        assert (code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "STALE_EPOCH")
        error, code = await refused_hello(m.address, received_through=3)
        assert (code, error.reason) == (grpc.StatusCode.ABORTED, "LINK_LOST")
        error, code = await refused_hello(m.address, link_id="")
        assert (code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "header.hello")
    async with mesh(SLOW) as m:
        error, code = await refused_hello(m.address)
        assert (code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "BEAT_INTERVAL")


@in_loop
async def test_an_opener_that_means_another_process_loses_its_link_at_once():
    async with mesh(SLOW) as m:
        handler = Recorder()
        told: list[object] = []
        opener = m.open(DECODE_LINK, handler, peer_epoch="f" * 16)
        opener.link.send(ReleaseCommand("q", 1), on_answer=told.append)
        await until(lambda: opener.link.is_lost, "the link is lost", 3.0)
        assert handler.lost.reason == "STALE_EPOCH"
        assert [error.reason for error in told] == ["LINK_LOST"]


@in_loop
async def test_connections_that_break_lose_nothing_and_repeat_nothing():
    async with mesh() as m:
        handler = Recorder()
        opener = m.open(WRITER_LINK, handler)
        await until(lambda: opener.link.is_open, "the link is open")
        there = m.served.links[WRITER_LINK].find(OPENER.epoch)
        answered: list[object] = []
        for part in range(6):
            for index in range(40):
                opener.link.send(RenewCommand(f"{part} {index}"))
                opener.link.send(BeginCommand(f"{part} {index}"), on_answer=answered.append)
                there.send(StopCommand(f"{part} {index}", 1.0))
                if index % 10 == 0:
                    await asyncio.sleep(0.002)
            m.proxy.cut()
            await until(lambda: opener.link.is_open, "the link is open again")
        names = [f"{part} {index}" for part in range(6) for index in range(40)]
        at_server = m.served.at[WRITER_LINK]
        await until(lambda: len(handler.items) >= 240 and len(at_server.items) >= 480, "all arrive")
        await until(lambda: len(answered) >= 240, "all are answered")
        assert [body.reservation_id for body in handler.items] == names
        assert [body.reservation_id for body in at_server.items[::2]] == names
        assert at_server.numbers == list(range(1, 481))
        assert answered == [Renewed(10.0)] * 240
        assert m.proxy.connections >= 4
        assert handler.lost is None and at_server.lost is None


@in_loop
async def test_silence_is_found_after_three_beats_and_the_link_goes_on():
    async with mesh() as m:
        handler = Recorder(answers)
        opener = m.open(WRITER_LINK, handler)
        await until(lambda: opener.link.is_open, "the link is open")
        m.proxy.freeze()
        begun = CLOCK.now()
        waiting = m.tasks.create_task(opener.link.ask(BeginCommand("r"), soon()))
        await until(lambda: not opener.link.is_open, "the opener finds silence")
        assert 2 * QUICK.beat_s < CLOCK.now() - begun < 5.0
        at_server = m.served.at[WRITER_LINK]
        await until(lambda: "broken" in at_server.told, "the server finds silence")
        m.proxy.thaw()
        assert await waiting == Renewed(10.0)
        assert at_server.items == [BeginCommand("r")]
        assert handler.told[:3] == ["open", "broken", "open"]


@in_loop
async def test_a_link_that_cannot_be_resumed_in_time_is_lost_at_both_ends():
    async with mesh() as m:
        handler, told = Recorder(), []
        opener = m.open(WRITER_LINK, handler)
        await until(lambda: opener.link.is_open, "the link is open")
        there = m.served.links[WRITER_LINK].find(OPENER.epoch)
        m.proxy.close()
        opener.link.send(BeginCommand("r"), on_answer=told.append)
        there.send(StopCommand("r", 1.0), on_answer=told.append)
        await until(lambda: opener.link.is_lost and there.is_lost, "both ends give up")
        assert [error.reason for error in told] == ["LINK_LOST", "LINK_LOST"]
        assert [said.reason for said in (handler.lost, m.served.at[WRITER_LINK].lost)] == ["LINK_LOST", "LINK_LOST"]
        assert m.served.links[WRITER_LINK].find(OPENER.epoch) is None


@in_loop
async def test_a_link_that_was_never_there_is_lost_at_once():
    async with mesh(SLOW) as m:
        handler = Recorder()
        opener = m.open(DECODE_LINK, handler, address="127.0.0.1:1")
        await until(lambda: opener.link.is_lost, "the link is lost", 8.0)
        assert handler.lost.retryable and "open" not in handler.told


def frame(handle: int, num_tokens: int) -> TokenFrame:
    return TokenFrame((TokenRecord(handle, 0, 0, tuple(range(num_tokens))),), ())


@in_loop
async def test_a_token_link_that_nobody_reads_delays_no_command_and_is_lost_with_a_reason():
    async with (
        mesh(LinkSettings.from_beat(1.0, max_queued_bytes=8 * 1024 * 1024)) as m,
        TcpProxy.open(m.address) as slow,
    ):
        tokens = m.open(TOKEN_LINK, Recorder(), address=slow.address)
        commands = m.open(DECODE_LINK, Recorder())
        await until(lambda: tokens.link.is_open and commands.link.is_open, "both links are open")
        there = m.served.links[TOKEN_LINK].find(OPENER.epoch)
        slow.freeze()
        for index in range(30):
            there.send(frame(index, 50_000))
        begun = CLOCK.now()
        for index in range(20):
            await commands.link.ask(ReleaseCommand(f"q{index}", 1), soon())
        assert CLOCK.now() - begun < 2.5  # before the frozen link is found to be silent
        assert there.unacknowledged_bytes >= 30 * 50_000 * 4
        with pytest.raises(HeadraceError) as caught:
            for index in range(30):
                there.send(frame(index, 50_000))
        assert caught.value.reason == "LINK_LOST"
        assert m.served.at[TOKEN_LINK].lost.reason == "READER_STALLED"
        assert await commands.link.ask(ReleaseCommand("q", 1), soon()) == Done()


@in_loop
async def test_frames_of_any_size_arrive_whole_and_in_order():
    async with mesh(SLOW) as m:
        handler = Recorder()
        opener = m.open(TOKEN_LINK, handler)
        await until(lambda: opener.link.is_open, "the link is open")
        there = m.served.links[TOKEN_LINK].find(OPENER.epoch)
        sizes = [1, 70_000, 2, 3, 65_536, 200_000, 1] * 5
        for index, size in enumerate(sizes):
            there.send(frame(index, size))
        await until(lambda: len(handler.items) == len(sizes), "all frames arrive")
        assert [(f.records[0].handle, len(f.records[0].token_ids)) for f in handler.items] == list(enumerate(sizes))
        await until(lambda: there.unacknowledged_bytes == 0, "all are acknowledged", 2.0)


@in_loop
async def test_a_new_link_of_a_process_replaces_its_older_one():
    async with mesh() as m:
        first, second = Recorder(), Recorder()
        older = m.open(DECODE_LINK, first)
        await until(lambda: older.link.is_open, "the first link is open")
        newer = m.open(DECODE_LINK, second)
        assert await newer.link.ask(ReleaseCommand("q", 1), soon()) == Done()
        await until(lambda: older.link.is_lost, "the first link is lost")
        assert first.lost.reason == "LINK_LOST"
        assert m.served.links[DECODE_LINK].find(OPENER.epoch).link_id == newer.link.link_id
        assert not newer.link.is_lost


@in_loop
async def test_a_server_that_closes_its_links_says_why():
    async with mesh(SLOW) as m:
        handler = Recorder()
        opener = m.open(DECODE_LINK, handler)
        await until(lambda: opener.link.is_open, "the link is open")
        m.served.links[DECODE_LINK].close(Unavailable("it drains", reason="DRAINING"))
        await until(lambda: opener.link.is_lost, "the opener hears", 2.0)
        assert handler.lost.reason == "DRAINING"
