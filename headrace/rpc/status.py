"""Errors of ours to gRPC statuses and back, and what an interceptor does around every handler.

An error leaves a server as a status by the table of `headrace.wire.link`. Its reason, field and retry hint travel as google.rpc
messages in `grpc-status-details-bin`, and once more as `headrace-reason`, `headrace-field` and `headrace-retry-after-ms` for clients
that read no details; `error_from_rpc` makes the same error again. The request id and the trace parent of unary calls stand in context
variables while a handler runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from headrace import errors
from headrace.observe.context import request_id_var, traceparent_var
from headrace.v1 import inference_pb2
from headrace.wire.common import DEFAULT_TIME_LEFT_S
from headrace.wire.elements import check_elements
from headrace.wire.link import MAX_ERROR_TEXT, code_of, error_of

log = logging.getLogger(__name__)

DOMAIN = "headrace"
"""Of google.rpc.ErrorInfo."""
DETAILS_KEY = "grpc-status-details-bin"
CHECKED = {
    "/headrace.v1.InferenceService/Generate": functools.partial(
        check_elements, inference_pb2.GenerateRequest.DESCRIPTOR
    )
}
"""Calls of strangers whose bytes are looked at before they are parsed."""
_STATUS_BY_CODE = {status.value[0]: status for status in grpc.StatusCode}


def status_of(error: errors.HeadraceError) -> grpc.StatusCode:
    """The status that stands for an error."""
    return _STATUS_BY_CODE[code_of(error)]


def details_of(error: errors.HeadraceError) -> status_pb2.Status:
    """An error as google.rpc messages."""
    details = [
        error_details_pb2.ErrorInfo(
            reason=error.reason, domain=DOMAIN, metadata={"retryable": "true" if error.retryable else "false"}
        )
    ]
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=_text(error))
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(error.retry_after_s * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=code_of(error), message=_text(error))
    for detail in details:
        status.details.add().Pack(detail)
    return status


def _text(error: errors.HeadraceError) -> str:
    return (error.message or error.reason)[:MAX_ERROR_TEXT]


def _trailers(error: errors.HeadraceError) -> tuple[tuple[str, str | bytes], ...]:
    trailers: list[tuple[str, str | bytes]] = [("headrace-reason", error.reason)]
    if error.field:
        trailers.append(("headrace-field", error.field))
    if error.retry_after_s:
        trailers.append(("headrace-retry-after-ms", str(int(error.retry_after_s * 1000))))
    trailers.append((DETAILS_KEY, details_of(error).SerializeToString()))
    return tuple(trailers)


async def _abort(context: grpc.aio.ServicerContext, error: BaseException) -> None:
    error = errors.unwrap(error)
    if isinstance(error, TimeoutError):
        error = errors.DeadlineExceeded("the deadline passed")
    if not isinstance(error, errors.HeadraceError):
        log.error("unexpected error in a handler", exc_info=error)
        error = errors.InternalError(f"unexpected {type(error).__name__}; the server's log has the rest")
    await context.abort(status_of(error), _text(error), _trailers(error))


def error_from_rpc(error: grpc.RpcError) -> errors.HeadraceError:
    """The error a server raised, or the nearest one for a status that gRPC itself made."""
    metadata = {key: value for key, value in (error.trailing_metadata() or ())}  # type: ignore[attr-defined]
    code = error.code()  # type: ignore[attr-defined]
    told = _from_details(metadata.get(DETAILS_KEY, b""))
    if told is not None:
        return told
    return error_of(
        code.value[0],
        str(metadata.get("headrace-reason", "")),
        error.details() or code.name,  # type: ignore[attr-defined]
        field=str(metadata.get("headrace-field", "")),
        retry_after_s=int(metadata.get("headrace-retry-after-ms", 0)) / 1000,
    )


def _from_details(data: str | bytes) -> errors.HeadraceError | None:
    """The error in the details; None when there are none of ours."""
    try:
        status = status_pb2.Status.FromString(data if isinstance(data, bytes) else data.encode())
    except Exception:  # bytes of somebody else
        return None
    info = _unpack(status.details, error_details_pb2.ErrorInfo)
    if info is None or info.domain != DOMAIN:
        return None
    bad, retry = (
        _unpack(status.details, error_details_pb2.BadRequest),
        _unpack(status.details, error_details_pb2.RetryInfo),
    )
    return error_of(
        status.code,
        info.reason,
        status.message,
        field=bad.field_violations[0].field if bad is not None and bad.field_violations else "",
        retry_after_s=retry.retry_delay.ToMilliseconds() / 1000 if retry is not None else 0.0,
        retryable=info.metadata.get("retryable") == "true",
    )


def _unpack(details: Any, kind: type) -> Any | None:
    for detail in details:
        message = kind()
        if isinstance(detail, any_pb2.Any) and detail.Unpack(message):
            return message
    return None


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Errors to statuses; request id and trace parent into context variables."""

    async def intercept_service(self, continuation, handler_call_details):
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        metadata = dict(handler_call_details.invocation_metadata or ())
        decode = _tolerant(handler.request_deserializer, CHECKED.get(handler_call_details.method))
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
        if handler.stream_stream:
            return grpc.stream_stream_rpc_method_handler(
                _wrap_stream(handler.stream_stream, metadata, _decoded), decode, handler.response_serializer
            )
        return handler


def _enter(metadata: dict[str, Any]) -> None:
    request_id_var.set(str(metadata.get("headrace-request-id", "")))
    traceparent_var.set(str(metadata.get("traceparent", "")))


class _Undecodable:
    """Stands for a request that cannot be read: gRPC itself would answer UNKNOWN and log a traceback."""

    def __init__(self, error: errors.InvalidRequest):
        self.error = error


def _tolerant(deserialize, check):
    """`check(data)` looks at the bytes before anything is made of them, and raises InvalidRequest."""

    def call(data):
        try:
            if check is not None:
                check(data)
            return deserialize(data)
        except errors.InvalidRequest as error:
            return _Undecodable(error)
        except Exception:
            text = "request: the bytes are not a message of this call"
            return _Undecodable(errors.InvalidRequest(text, field="request"))

    return call if deserialize is not None else None


def _check_decoded(request) -> None:
    if isinstance(request, _Undecodable):
        raise request.error


def _one_decoded(request):
    _check_decoded(request)
    return request


async def _decoded(requests):
    async for request in requests:
        yield _one_decoded(request)


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


def _wrap_stream(method, metadata, decoded=_one_decoded):
    async def call(request, context):
        _enter(metadata)
        try:
            async with contextlib.aclosing(method(decoded(request), context)) as responses:
                async for response in responses:
                    yield response
        except (asyncio.CancelledError, GeneratorExit, grpc.aio.AbortError):
            raise
        except BaseException as error:
            await _abort(context, error)

    return call


def time_left_s(context: grpc.aio.ServicerContext, default_s: float = DEFAULT_TIME_LEFT_S) -> float:
    """What is left of the caller's deadline, seconds; `default_s` when the caller set none."""
    left = context.time_remaining()
    return default_s if left is None else max(0.0, left)
