"""Translates between protobuf and the prefill core; every decision is in `Prefiller`."""

from __future__ import annotations

from headrace import rpc, wire
from headrace.protocol import StopState
from headrace.v1 import prefill_pb2, prefill_pb2_grpc
from services.prefill.core import Prefiller

SERVICE = "headrace.v1.PrefillService"

_STOP_STATES = {
    StopState.DRAINED: prefill_pb2.STOP_STATE_DRAINED,
    StopState.UNKNOWN: prefill_pb2.STOP_STATE_UNKNOWN,
}


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """headrace.v1.PrefillService."""

    def __init__(self, core: Prefiller):
        self._core = core

    async def Prefill(self, request, context):
        command = wire.prefill_from_pb(request)
        async for event in self._core.prefill(command, rpc.time_left_s(context)):
            yield wire.prefill_event_to_pb(event)

    async def Stop(self, request, context):
        wait_s = min(wire.duration_from_pb(request.wait), rpc.time_left_s(context))
        state = await self._core.stop(request.reservation_id, request.writer_epoch, wait_s)
        return prefill_pb2.StopResponse(state=_STOP_STATES[state])

    async def GetPrefillInfo(self, request, context):
        return prefill_pb2.GetPrefillInfoResponse(info=wire.worker_info_to_pb(self._core.info))

    async def GetPrefillLedger(self, request, context):
        return wire.prefill_ledger_to_pb(self._core.ledger())


def register(core: Prefiller):
    """What `rpc.start_server` calls to add this service."""
    return lambda server: prefill_pb2_grpc.add_PrefillServiceServicer_to_server(PrefillServicer(core), server)
