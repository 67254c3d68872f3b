"""What every service does around its own rpcs: serve, health, signals, drain, errors to statuses, and channels.

Errors raised by a core leave a server as a status by the table below, with the reason in trailing metadata
(`headrace-reason`, `headrace-field`, `headrace-retry-after-ms`), and `error_from_rpc` makes the same error again on the
other side. The request id and the trace parent travel in metadata and stand in context variables while a handler runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from headrace import errors
from headrace.clock import first_of
from headrace.observe.context import request_id_var, traceparent_var

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Largest message accepted on any channel. A prompt at the largest context stays far below it."""
MAX_ERROR_TEXT = 600
"""Characters of an error's message that travel: metadata above 8 KiB may be refused, and a character may take 12 B."""
DEFAULT_TIMEOUT_S = 120.0
"""For calls whose caller set no deadline."""

STATUS: dict[type[errors.HeadraceError], grpc.StatusCode] = {
    errors.HeadraceError: grpc.StatusCode.UNKNOWN,
    errors.CallerError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.RetryLater: grpc.StatusCode.UNAVAILABLE,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.StaleEpoch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.StaleAttempt: grpc.StatusCode.ABORTED,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.TransferError: grpc.StatusCode.UNAVAILABLE,
    errors.ManifestMismatch: grpc.StatusCode.DATA_LOSS,
    errors.OurFault: grpc.StatusCode.INTERNAL,
    errors.ConfigError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.CheckpointError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.LayoutMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.InternalError: grpc.StatusCode.INTERNAL,
}

_BY_REASON = {kind.reason: kind for kind in STATUS if "reason" in vars(kind)}
_BY_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
    grpc.StatusCode.ALREADY_EXISTS: errors.AlreadyExists,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Overloaded,
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.ABORTED: errors.StaleAttempt,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.CANCELLED: errors.Cancelled,
    grpc.StatusCode.DATA_LOSS: errors.ManifestMismatch,
    grpc.StatusCode.UNIMPLEMENTED: errors.InvalidRequest,
}

_COMMON_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
    # What finds a frozen peer is the ping time-out, not keepalive_timeout_ms (60 s without it).
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),
)
SERVER_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
)
CHANNEL_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also the time-out of an attempt to connect: a busy host needs more than a moment to greet back.
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


def new_epoch() -> str:
    """16 random hexadecimal digits: the identity of one life of a process."""
    return secrets.token_hex(8)


# --- errors ----------------------------------------------------------------------------------------------------------


def _trailers(error: errors.HeadraceError) -> tuple[tuple[str, str], ...]:
    trailers = [("headrace-reason", error.reason)]
    if error.field:
        trailers.append(("headrace-field", error.field))
    if error.retry_after_s:
        trailers.append(("headrace-retry-after-ms", str(int(error.retry_after_s * 1000))))
    return tuple(trailers)


async def _abort(context: grpc.aio.ServicerContext, error: BaseException) -> None:
    error = errors.unwrap(error)
    if isinstance(error, TimeoutError):
        error = errors.DeadlineExceeded("the deadline passed")
    if not isinstance(error, errors.HeadraceError):
        log.error("unexpected error in a handler", exc_info=error)
        error = errors.InternalError(f"unexpected {type(error).__name__}; the server's log has the rest")
    status = next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)
    await context.abort(status, (error.message or error.reason)[:MAX_ERROR_TEXT], _trailers(error))


def error_from_rpc(error: grpc.RpcError) -> errors.HeadraceError:
    """The error a server raised, or the nearest one for a status that gRPC itself made."""
    metadata = {key: value for key, value in (error.trailing_metadata() or ())}  # type: ignore[attr-defined]
    reason = str(metadata.get("headrace-reason", ""))
    code = error.code()  # type: ignore[attr-defined]
    kind = _BY_REASON.get(reason) or _BY_STATUS.get(code, errors.InternalError)
    return kind(
        error.details() or code.name,  # type: ignore[attr-defined]
        reason=reason or None,
        field=str(metadata.get("headrace-field", "")),
        retry_after_s=int(metadata.get("headrace-retry-after-ms", 0)) / 1000,
    )


class _Interceptor(grpc.aio.ServerInterceptor):
    """Errors to statuses; request id and trace parent into context variables."""

    async def intercept_service(self, continuation, handler_call_details):
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        metadata = dict(handler_call_details.invocation_metadata or ())
        decode = _tolerant(handler.request_deserializer)
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(
                _wrap_unary(handler.unary_unary, metadata), decode, handler.response_serializer
            )
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(
                _wrap_stream(handler.unary_stream, metadata), decode, handler.response_serializer
            )
        if handler.stream_unary:
            return grpc.stream_unary_rpc_method_handler(
                _wrap_unary(handler.stream_unary, metadata), handler.request_deserializer, handler.response_serializer
            )
        return handler


def _enter(metadata: dict[str, Any]) -> None:
    request_id_var.set(str(metadata.get("headrace-request-id", "")))
    traceparent_var.set(str(metadata.get("traceparent", "")))


class _Undecodable:
    """Stands for a request whose bytes are no message: gRPC itself would answer UNKNOWN and log a traceback."""


def _tolerant(deserialize):
    def call(data):
        try:
            return deserialize(data)
        except Exception:
            return _Undecodable()

    return call if deserialize is not None else None


def _check_decoded(request) -> None:
    if isinstance(request, _Undecodable):
        raise errors.InvalidRequest("request: the bytes are not a message of this call", field="request")


def _wrap_unary(method, metadata):
    async def call(request, context):
        _enter(metadata)
        try:
            _check_decoded(request)
            return await method(request, context)
        except asyncio.CancelledError:
            raise
        except grpc.aio.AbortError:
            raise
        except BaseException as error:
            await _abort(context, error)

    return call


def _wrap_stream(method, metadata):
    async def call(request, context):
        _enter(metadata)
        try:
            _check_decoded(request)
            async with contextlib.aclosing(method(request, context)) as responses:
                async for response in responses:
                    yield response
        except (asyncio.CancelledError, GeneratorExit, grpc.aio.AbortError):
            raise
        except BaseException as error:
            await _abort(context, error)

    return call


def time_left_s(context: grpc.aio.ServicerContext, default_s: float = DEFAULT_TIMEOUT_S) -> float:
    """What is left of the caller's deadline, seconds; `default_s` when the caller set none."""
    left = context.time_remaining()
    return default_s if left is None else max(0.0, left)


# --- serving ---------------------------------------------------------------------------------------------------------


@dataclass
class Server:
    """A running gRPC server with health and reflection. `address` is what others dial."""

    grpc_server: grpc.aio.Server
    health: health_aio.HealthServicer
    address: str
    service_names: tuple[str, ...]

    async def set_serving(self, serving: bool) -> None:
        """Says SERVING or NOT_SERVING for every service here and for the server as a whole."""
        state = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self.service_names):
            await self.health.set(name, state)

    async def stop(self, grace_s: float | None) -> None:
        """Refuses new calls and waits at most `grace_s` for running ones; None cancels them."""
        await self.grpc_server.stop(grace_s)


async def start_server(
    host: str,
    port: int,
    register: Callable[[grpc.aio.Server], None],
    service_names: Sequence[str],
    *,
    share_port: bool = False,
) -> Server:
    """Starts a server on `host:port` (0 picks a free port), NOT_SERVING until `set_serving(True)`.

    `register(server)` adds the servicers. Raises ConfigError when the port is taken.
    """
    options = (*SERVER_OPTIONS, ("grpc.so_reuseport", 1 if share_port else 0))
    server = grpc.aio.server(interceptors=[_Interceptor()], options=options)
    register(server)
    health = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    names = (*service_names, "grpc.health.v1.Health", reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise errors.ConfigError(f"cannot listen on {host}:{port}: the port is taken", field="port") from error
    result = Server(server, health, f"{host}:{bound}", tuple(service_names))
    await result.set_serving(False)
    await server.start()
    return result


async def serve_until_signal(
    server: Server,
    drain: Callable[[float], Awaitable[None]],
    grace_s: float,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Serves until SIGTERM or SIGINT, then NOT_SERVING, `drain(grace_s)`, stop. A second signal stops at once.

    `on_ready` is called when signals are heard: whoever is told then may send one at once.
    """
    stop = asyncio.Event()
    hurry = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        on_ready()
        await stop.wait()
        await server.set_serving(False)
        await first_of(_bounded(drain, grace_s), hurry.wait())
        await server.stop(None if hurry.is_set() else 1.0)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _bounded(drain: Callable[[float], Awaitable[None]], grace_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace_s):
            await drain(grace_s)


# --- calling ---------------------------------------------------------------------------------------------------------


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
