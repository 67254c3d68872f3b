"""headrace.v1.DecodeService: links go to `DecodeLinks`, the few calls are answered from the core."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from headrace.errors import InvalidRequest
from headrace.v1 import decode_pb2, decode_pb2_grpc
from headrace.wire import common as common_wire
from headrace.wire import decode as decode_wire
from services.decode.core import Decoder
from services.decode.links import DecodeLinks

SERVICE = "headrace.v1.DecodeService"

WriteRows = Callable[[str, int, int, bytes], int]
"""(session, layer, target row, payload) -> bytes written; blocking. Only the `grpc` transfer has one."""


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """Translates; every decision is in `Decoder`."""

    def __init__(self, core: Decoder, links: DecodeLinks, write_rows: WriteRows | None = None):
        self._core, self._links, self._write_rows = core, links, write_rows

    async def OpenDecodeLink(self, request_iterator, context):
        async with contextlib.aclosing(self._links.commands.serve(request_iterator, context)) as messages:
            async for message in messages:
                yield message

    async def OpenTokenLink(self, request_iterator, context):
        async with contextlib.aclosing(self._links.tokens.serve(request_iterator, context)) as messages:
            async for message in messages:
                yield message

    async def OpenWriterLink(self, request_iterator, context):
        async with contextlib.aclosing(self._links.writers.serve(request_iterator, context)) as messages:
            async for message in messages:
                yield message

    async def WriteRows(self, request_iterator, context):
        if self._write_rows is None:
            raise InvalidRequest("rows are not written by message here: another transfer is in use", field="session")
        written = 0
        async for chunk in request_iterator:
            written += await asyncio.to_thread(
                self._write_rows, chunk.session, chunk.layer, chunk.target_row, chunk.payload
            )
        return decode_pb2.WriteRowsResponse(byte_count=written)

    async def GetDecodeInfo(self, request, context):
        return decode_pb2.GetDecodeInfoResponse(info=common_wire.worker_info_to_pb(self._core.info))

    async def GetDecodeLedger(self, request, context):
        return decode_wire.decode_ledger_to_pb(self._core.ledger())


def register(core: Decoder, links: DecodeLinks, write_rows: WriteRows | None = None):
    """What `rpc.start_server` calls to add this service."""
    return lambda server: decode_pb2_grpc.add_DecodeServiceServicer_to_server(
        DecodeServicer(core, links, write_rows), server
    )
