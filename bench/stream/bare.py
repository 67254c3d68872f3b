"""Nothing but grpc.aio: what a call and a message cost when no one does anything, alone and as a chain of the mesh's hops.

    python -m bench.stream.bare                         serves Stream, Reserve, Commit
    python -m bench.stream.bare --decode A              and Prefill, as a prefill rank
    python -m bench.stream.bare --decode A --prefill B  and Relay, as a router

A request says how many messages it wants; each is as long as one with a token of the mesh.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import AsyncIterator

import grpc

MESSAGE = bytes(48)


async def stream(request: bytes, context) -> AsyncIterator[bytes]:
    """As many messages as asked for."""
    for _ in range(int(request)):
        yield MESSAGE


async def answer(request: bytes, context) -> bytes:
    """A unary call: Reserve or Commit."""
    return MESSAGE


def prefill(decode: grpc.aio.Channel):
    """The first token at once, the hand-over to decode, the end."""
    commit = decode.unary_unary("/bench.Bare/Commit")

    async def events(request: bytes, context) -> AsyncIterator[bytes]:
        yield MESSAGE
        await commit(MESSAGE)
        yield MESSAGE

    return events


def relay(decode: grpc.aio.Channel, prefill_rank: grpc.aio.Channel):
    """Reserves on decode, asks for a prefill, passes the first token on, then the other messages."""
    reserve = decode.unary_unary("/bench.Bare/Reserve")
    begin = prefill_rank.unary_stream("/bench.Bare/Prefill")

    async def tokens(request: bytes, context) -> AsyncIterator[bytes]:
        await reserve(MESSAGE)
        is_first = True
        async for message in begin(MESSAGE):
            if is_first:
                yield message
            is_first = False
        for _ in range(int(request) - 1):
            yield MESSAGE

    return tokens


async def main(decode_address: str, prefill_address: str) -> None:
    """Serves until it is ended."""
    methods = {
        "Stream": grpc.unary_stream_rpc_method_handler(stream),
        "Reserve": grpc.unary_unary_rpc_method_handler(answer),
        "Commit": grpc.unary_unary_rpc_method_handler(answer),
    }
    if decode_address:
        decode = grpc.aio.insecure_channel(decode_address)
        methods["Prefill"] = grpc.unary_stream_rpc_method_handler(prefill(decode))
        if prefill_address:
            rank = grpc.aio.insecure_channel(prefill_address)
            methods["Relay"] = grpc.unary_stream_rpc_method_handler(relay(decode, rank))
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Bare", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps({"address": f"127.0.0.1:{port}", "pid": os.getpid()}), flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--decode", default="")
    parser.add_argument("--prefill", default="")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.decode, arguments.prefill))
