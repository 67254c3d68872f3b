"""What an item of a link costs beside a bare message of grpc.aio, both ends in one process: `python -m bench.link_cost`.

CPU microseconds of the process, an item; a question and its answer count as one. `together` questions are asked in one turn of the loop.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator

import grpc

from headrace.clock import SystemClock
from headrace.errors import HeadraceError
from headrace.protocol.common import WorkerIdentity
from headrace.protocol.decode import ReleaseCommand
from headrace.protocol.link import Done
from headrace.rpc.links import DECODE_LINK, Link, LinkOpener, LinkServer, LinkSettings
from headrace.rpc.server import start_server
from headrace.v1 import decode_pb2, decode_pb2_grpc

TOGETHER = (1, 16)
OPENER, SERVER = WorkerIdentity("127.0.0.1:1", "a" * 16), WorkerIdentity("127.0.0.1:2", "b" * 16)
COMMAND = ReleaseCommand("q" * 32, 1)


class Answering:
    """A handler that answers every command with Done."""

    def on_item(self, link: Link, number: int, body: object) -> None:
        link.answer(number, Done())

    def on_open(self, link: Link) -> None: ...

    def on_broken(self, link: Link) -> None: ...

    def on_progress(self, link: Link) -> None: ...

    def on_lost(self, link: Link, error: HeadraceError) -> None: ...


class Echo(decode_pb2_grpc.DecodeServiceServicer):
    """A bare bidirectional stream that answers every message with an empty one."""

    async def OpenDecodeLink(self, request_iterator, context):
        async for _ in request_iterator:
            yield decode_pb2.OpenDecodeLinkResponse()


class Linked(decode_pb2_grpc.DecodeServiceServicer):
    """The same call as a link."""

    def __init__(self) -> None:
        self.links = LinkServer(DECODE_LINK, SERVER, lambda link: Answering(), SystemClock(), LinkSettings())

    async def OpenDecodeLink(self, request_iterator, context):
        async for message in self.links.serve(request_iterator, context):
            yield message


async def bare_us(count: int) -> float:
    """A message there and one back, one after another."""
    server = grpc.aio.server()
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(Echo(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    message = decode_pb2.OpenDecodeLinkRequest()
    message.items.add().release.request_id = COMMAND.request_id
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = decode_pb2_grpc.DecodeServiceStub(channel).OpenDecodeLink()
        begun = time.process_time()
        for _ in range(count):
            await call.write(message)
            await call.read()
        spent = time.process_time() - begun
        call.cancel()
    await server.stop(None)
    return spent / count * 1e6


@contextlib.asynccontextmanager
async def open_link() -> AsyncIterator[Link]:
    """The opener's end of a link to a server in this process."""
    served = Linked()
    server = await start_server(
        "127.0.0.1", 0, lambda to: decode_pb2_grpc.add_DecodeServiceServicer_to_server(served, to), ()
    )
    async with asyncio.TaskGroup() as tasks:
        keeper = LinkOpener(
            DECODE_LINK, server.address, OPENER, SERVER.epoch, Answering(), SystemClock(), LinkSettings()
        )
        running = [tasks.create_task(served.links.run())]
        await asyncio.sleep(0)
        running.append(tasks.create_task(keeper.run()))
        while not keeper.link.is_open:
            await asyncio.sleep(0.01)
        yield keeper.link
        for task in running:
            task.cancel()
    await server.stop(None)


async def link_us(count: int, together: int) -> float:
    """A command and its answer over a link."""
    async with open_link() as link:
        answered, all_answered = 0, asyncio.Event()

        def on_answer(said: object) -> None:
            nonlocal answered
            answered += 1
            if answered % together == 0:
                all_answered.set()

        begun = time.process_time()
        for _ in range(count // together):
            all_answered.clear()
            for _ in range(together):
                link.send(COMMAND, on_answer=on_answer)
            await all_answered.wait()
        return (time.process_time() - begun) / answered * 1e6


async def measure(count: int) -> dict[str, object]:
    """All figures, microseconds of CPU."""
    links = {str(together): round(await link_us(count, together), 1) for together in TOGETHER}
    return {"count": count, "bare_us": round(await bare_us(count), 1), "link_us": links}


def main() -> None:
    """Prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000)
    print(json.dumps(asyncio.run(measure(parser.parse_args().count))))


if __name__ == "__main__":
    main()
