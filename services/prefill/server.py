"""Translates between protobuf and the prefill rank; every decision is in `Prefiller`, every command comes over its links."""

from __future__ import annotations

from headrace.v1 import prefill_pb2, prefill_pb2_grpc
from headrace.wire import common as common_wire
from headrace.wire import prefill as prefill_wire
from services.prefill.assembly import Opened

SERVICE = "headrace.v1.PrefillService"


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """headrace.v1.PrefillService."""

    def __init__(self, opened: Opened):
        self._core, self._links = opened.core, opened.links

    async def OpenPrefillLink(self, request_iterator, context):
        async for message in self._links.serve(request_iterator, context):
            yield message

    async def GetPrefillInfo(self, request, context):
        return prefill_pb2.GetPrefillInfoResponse(info=common_wire.worker_info_to_pb(self._core.info))

    async def GetPrefillLedger(self, request, context):
        return prefill_wire.prefill_ledger_to_pb(self._core.ledger())


def register(opened: Opened):
    """What `rpc.start_server` calls to add this service."""
    return lambda server: prefill_pb2_grpc.add_PrefillServiceServicer_to_server(PrefillServicer(opened), server)
