"""Translates between protobuf and the decode core; every decision is in `Decoder`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from headrace import rpc, wire
from headrace.errors import InvalidRequest
from headrace.v1 import decode_pb2, decode_pb2_grpc
from services.decode.core import Decoder

SERVICE = "headrace.v1.DecodeService"
ANSWER_MARGIN_S = 0.1
"""Kept of the caller's deadline, so that "no room" arrives as such and not as a deadline."""

WriteRows = Callable[[str, int, int, bytes], int]
"""(session, layer, target row, payload) -> bytes written; blocking. Only the `grpc` transfer has one."""


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """headrace.v1.DecodeService."""

    def __init__(self, core: Decoder, write_rows: WriteRows | None = None):
        self._core, self._write_rows = core, write_rows

    async def Reserve(self, request, context):
        time_left_s = max(0.0, rpc.time_left_s(context) - ANSWER_MARGIN_S)
        reservation = await self._core.reserve(wire.reserve_from_pb(request), time_left_s)
        return decode_pb2.ReserveResponse(reservation=wire.reservation_to_pb(reservation))

    async def Renew(self, request, context):
        expires_in_s = self._core.renew(request.reservation_id, request.writer_epoch)
        return decode_pb2.RenewResponse(expires_in=wire.duration_to_pb(expires_in_s))

    async def Commit(self, request, context):
        duration_s = await self._core.commit(wire.commit_from_pb(request))
        return decode_pb2.CommitResponse(commit_duration=wire.duration_to_pb(duration_s))

    async def Release(self, request, context):
        self._core.release(request.request_id, request.attempt, request.decode_epoch, tuple(request.sample_indices))
        return decode_pb2.ReleaseResponse()

    async def StreamTokens(self, request, context):
        router = wire.identity_from_pb(request.router)
        if not router.epoch:
            raise InvalidRequest("router: it has no epoch", field="router")
        stream = self._core.stream_tokens(router, request.decode_epoch, request.resume_after_frame)
        async with contextlib.aclosing(stream) as frames:
            async for frame in frames:
                yield wire.frame_to_pb(frame)

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
        return decode_pb2.GetDecodeInfoResponse(info=wire.worker_info_to_pb(self._core.info()))

    async def GetDecodeLedger(self, request, context):
        return wire.decode_ledger_to_pb(self._core.ledger())


def register(core: Decoder, write_rows: WriteRows | None = None):
    """What `rpc.start_server` calls to add this service."""
    return lambda server: decode_pb2_grpc.add_DecodeServiceServicer_to_server(DecodeServicer(core, write_rows), server)
