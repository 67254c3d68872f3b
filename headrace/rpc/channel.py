"""Channels and calls: what every client of a service does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.errors import HeadraceError, IncompatiblePeer, Unavailable
from headrace.observe.context import request_id_var, traceparent_var
from headrace.rpc.kinds import LinkKind
from headrace.rpc.status import DETAILS_KEY, error_from_rpc

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Largest message accepted on any channel. A prompt at the largest context stays far below it."""

COMMON_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
    # What finds a frozen peer is the ping time-out, not keepalive_timeout_ms (60 s without it).
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),
)
CHANNEL_OPTIONS = (
    *COMMON_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also the time-out of an attempt to connect: a busy host needs more than a moment to greet back.
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


def open_channel(address: str, *, own_connection: bool = False) -> grpc.aio.Channel:
    """A channel with keep-alive that finds a frozen peer in 7 s and quick reconnects. Belongs to the running loop."""
    options = CHANNEL_OPTIONS
    if own_connection:
        options = (*options, ("grpc.use_local_subchannel_pool", 1))
    return grpc.aio.insecure_channel(address, options=options)


def open_blocking_channel(address: str) -> grpc.Channel:
    """The same for synchronous clients."""
    return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)


def call_metadata() -> tuple[tuple[str, str], ...]:
    """Request id and trace parent of the running context, for the next hop."""
    pairs = (("headrace-request-id", request_id_var.get()), ("traceparent", traceparent_var.get()))
    return tuple((key, value) for key, value in pairs if value)


async def call_unary(method, request, timeout_s: float):
    """Calls a unary method with a deadline and metadata; raises our errors."""
    try:
        return await method(request, timeout=timeout_s, metadata=call_metadata())
    except grpc.RpcError as error:
        raise error_from_rpc(error) from error


async def call_stream(method, request, timeout_s: float | None) -> AsyncIterator[Any]:
    """Iterates a response stream; leaving the loop in any way cancels the call. Raises our errors."""
    call = method(request, timeout=timeout_s, metadata=call_metadata())
    try:
        async for message in call:
            yield message
    except grpc.RpcError as error:
        raise error_from_rpc(error) from error
    finally:
        call.cancel()


@contextlib.asynccontextmanager
async def dial(kind: LinkKind, address: str, messages: AsyncIterator[Any]) -> AsyncIterator[AsyncIterator[Any]]:
    """A stream of a link over a connection of its own; see headrace.rpc.links.Dial."""
    async with open_channel(address, own_connection=True) as channel:
        method = channel.stream_stream(
            kind.method,
            request_serializer=kind.from_opener.message.SerializeToString,  # type: ignore[attr-defined]
            response_deserializer=kind.from_server.message.FromString,  # type: ignore[attr-defined]
        )
        call = method(messages)
        try:
            yield _answers(call)
        finally:
            call.cancel()


async def _answers(call: Any) -> AsyncIterator[Any]:
    try:
        async for message in call:
            yield message
    except grpc.RpcError as error:
        raise _end_of_stream(error) from error
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        raise Unavailable("the stream was cancelled", reason="CONNECTION_LOST") from None


def _end_of_stream(error: Any) -> HeadraceError:
    """What the server said when it ended the stream, or CONNECTION_LOST when it could say nothing."""
    if any(key in (DETAILS_KEY, "headrace-reason") for key, _ in error.trailing_metadata() or ()):
        return error_from_rpc(error)
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return IncompatiblePeer(f"no such link is served there: {error.details()}", reason="PROTOCOL_VERSION")
    return Unavailable(error.details() or error.code().name, reason="CONNECTION_LOST")


async def is_serving(address: str, service: str = "", timeout_s: float = 1.0) -> bool:
    """Whether `address` answers the health question with SERVING within `timeout_s`."""
    async with open_channel(address) as channel:
        return await check_health(channel, service, timeout_s)


async def check_health(channel: grpc.aio.Channel, service: str = "", timeout_s: float = 1.0) -> bool:
    """The same over a channel that is open."""
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
    except grpc.RpcError:
        return False
    return answer.status == health_pb2.HealthCheckResponse.SERVING
