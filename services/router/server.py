"""Translates between protobuf and the router core; every decision is in `Router`."""

from __future__ import annotations

import contextlib

from headrace.observe.context import traceparent_var
from headrace.protocol.inference import FinalSummary
from headrace.rpc.status import time_left_s
from headrace.v1 import inference_pb2_grpc, router_pb2, router_pb2_grpc
from headrace.wire import inference as inference_wire
from headrace.wire import router as router_wire
from services.router.core import Router

SERVICES = ("headrace.v1.InferenceService", "headrace.v1.RouterService")


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """headrace.v1.InferenceService."""

    def __init__(self, core: Router, default_deadline_s: float):
        self._core, self._default_deadline_s = core, default_deadline_s

    async def Generate(self, request, context):
        async def send_id(request_id: str) -> None:
            await context.send_initial_metadata((("headrace-request-id", request_id),))

        left_s = time_left_s(context, self._default_deadline_s)
        command = inference_wire.generate_from_pb(request)
        events = self._core.generate(command, left_s, send_id, traceparent_var.get())
        async with contextlib.aclosing(events) as answer:
            async for event in answer:
                if event.final is not None:
                    context.set_trailing_metadata(_trailers(event.request_id, event.final))
                yield inference_wire.generate_event_to_pb(event)

    async def GetModel(self, request, context):
        return inference_wire.model_to_pb(self._core.model())


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """headrace.v1.RouterService."""

    def __init__(self, core: Router):
        self._core = core

    async def ListWorkers(self, request, context):
        views = [router_wire.worker_view_to_pb(view) for view in self._core.workers()]
        return router_pb2.ListWorkersResponse(workers=views)

    async def GetRouterLedger(self, request, context):
        return router_wire.router_ledger_to_pb(self._core.ledger())


def _trailers(request_id: str, final: FinalSummary) -> tuple[tuple[str, str], ...]:
    """The stage times once more, for clients that read no message: `name=start+duration` in seconds, comma-separated."""
    stages = ",".join([f"{stage.name}={stage.start_s:.6f}+{stage.duration_s:.6f}" for stage in final.stages])
    return (("headrace-request-id", request_id), ("headrace-stages", stages[:4096]))


def register(core: Router, default_deadline_s: float):
    """What `start_server` calls to add both services."""

    def add(server) -> None:
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(InferenceServicer(core, default_deadline_s), server)
        router_pb2_grpc.add_RouterServiceServicer_to_server(RouterServicer(core), server)

    return add
