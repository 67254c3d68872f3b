"""protobuf <-> our values: `router.proto`."""

from __future__ import annotations

from headrace.protocol import router as p
from headrace.v1 import router_pb2
from headrace.wire.common import progress_from_pb, progress_to_pb, worker_info_from_pb, worker_info_to_pb


def worker_view_to_pb(value: p.WorkerView) -> router_pb2.WorkerView:
    """A worker as the router sees it."""
    message = router_pb2.WorkerView(
        info=worker_info_to_pb(value.info),
        ready=value.ready,
        in_flight_count=value.in_flight,
        queued_token_count=value.queued_tokens,
        why_not_ready=value.why_not_ready,
    )
    if value.progress is not None:
        message.progress.CopyFrom(progress_to_pb(value.progress))
    return message


def worker_view_from_pb(message: router_pb2.WorkerView) -> p.WorkerView:
    """A worker as the router sees it."""
    return p.WorkerView(
        worker_info_from_pb(message.info),
        message.ready,
        message.in_flight_count,
        message.queued_token_count,
        message.why_not_ready,
        progress_from_pb(message.progress) if message.HasField("progress") else None,
    )


def router_ledger_to_pb(value: p.RouterLedger) -> router_pb2.GetRouterLedgerResponse:
    """Requests in flight."""
    return router_pb2.GetRouterLedgerResponse(
        queued_request_count=value.queued_requests,
        queued_token_count=value.queued_tokens,
        running_request_count=value.running_requests,
        open_handle_count=value.open_handles,
    )


def router_ledger_from_pb(message: router_pb2.GetRouterLedgerResponse) -> p.RouterLedger:
    """Requests in flight."""
    return p.RouterLedger(
        message.queued_request_count,
        message.queued_token_count,
        message.running_request_count,
        message.open_handle_count,
    )
