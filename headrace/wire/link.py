"""protobuf <-> our values: `link.proto`, and what is the same for the items of every link.

An item is a message with one `oneof body` and, where it may answer something, a `command_number`. `ItemCodec` turns such a message
into a body and back by a table of bodies; failures are errors of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace import errors
from headrace.errors import HeadraceError, InternalError, InvalidRequest
from headrace.protocol.link import Done, LinkHello
from headrace.v1 import link_pb2
from headrace.wire.common import (
    duration_from_pb,
    duration_to_pb,
    identity_from_pb,
    identity_to_pb,
    worker_info_from_pb,
    worker_info_to_pb,
)

MAX_ERROR_TEXT = 600
"""Characters of an error's message that travel: metadata above 8 KiB may be refused, and a character may take 12 B."""

CODES: dict[type[HeadraceError], int] = {
    errors.HeadraceError: 2,  # UNKNOWN
    errors.CallerError: 3,  # INVALID_ARGUMENT
    errors.InvalidRequest: 3,
    errors.AlreadyExists: 6,  # ALREADY_EXISTS
    errors.NotFound: 5,  # NOT_FOUND
    errors.RetryLater: 14,  # UNAVAILABLE
    errors.Overloaded: 8,  # RESOURCE_EXHAUSTED
    errors.Unavailable: 14,
    errors.StaleEpoch: 9,  # FAILED_PRECONDITION
    errors.StaleAttempt: 10,  # ABORTED
    errors.DeadlineExceeded: 4,  # DEADLINE_EXCEEDED
    errors.Cancelled: 1,  # CANCELLED
    errors.TransferError: 14,
    errors.ManifestMismatch: 15,  # DATA_LOSS
    errors.OurFault: 13,  # INTERNAL
    errors.ConfigError: 3,
    errors.CheckpointError: 9,
    errors.LayoutMismatch: 9,
    errors.IncompatiblePeer: 9,
    errors.InternalError: 13,
}
"""The canonical status code (google.rpc.Code) of every error."""

_BY_REASON = {kind.reason: kind for kind in CODES if "reason" in vars(kind)} | {
    "PROTOCOL_VERSION": errors.IncompatiblePeer,
    "BEAT_INTERVAL": errors.IncompatiblePeer,
}
_BY_CODE = {
    3: errors.InvalidRequest,
    6: errors.AlreadyExists,
    5: errors.NotFound,
    8: errors.Overloaded,
    14: errors.Unavailable,
    10: errors.StaleAttempt,
    4: errors.DeadlineExceeded,
    1: errors.Cancelled,
    15: errors.ManifestMismatch,
    12: errors.InvalidRequest,  # UNIMPLEMENTED
}


# --- failures --------------------------------------------------------------------------------------------------------


def code_of(error: HeadraceError) -> int:
    """The canonical status code of an error."""
    return next(CODES[kind] for kind in type(error).__mro__ if kind in CODES)


def error_of(
    code: int,
    reason: str,
    message: str = "",
    *,
    field: str = "",
    retry_after_s: float = 0.0,
    retryable: bool | None = None,
) -> HeadraceError:
    """The error that the other side raised, or the nearest one for a status that gRPC itself made (empty `reason`)."""
    kind = _BY_REASON.get(reason) or _BY_CODE.get(code, InternalError)
    return kind(message, reason=reason or None, field=field, retry_after_s=retry_after_s, retryable=retryable)


def failure_to_pb(error: HeadraceError) -> link_pb2.Failure:
    """Why a command failed."""
    message = link_pb2.Failure(
        code=code_of(error),
        reason=error.reason,
        message=error.message[:MAX_ERROR_TEXT],
        field=error.field,
        retryable=error.retryable,
    )
    if error.retry_after_s:
        message.retry_after.CopyFrom(duration_to_pb(error.retry_after_s))
    return message


def failure_from_pb(message: link_pb2.Failure) -> HeadraceError:
    """The error of ours that it stands for."""
    return error_of(
        message.code,
        message.reason,
        message.message,
        field=message.field,
        retry_after_s=duration_from_pb(message.retry_after),
        retryable=message.retryable,
    )


# --- hello -----------------------------------------------------------------------------------------------------------


def hello_to_pb(value: LinkHello) -> link_pb2.LinkHello:
    """What a side says first."""
    message = link_pb2.LinkHello(
        oldest_version=value.oldest_version,
        newest_version=value.newest_version,
        features=value.features,
        sender=identity_to_pb(value.sender),
        receiver_epoch=value.receiver_epoch,
        link_id=value.link_id,
        received_through=value.received_through,
        beat_interval=duration_to_pb(value.beat_interval_s),
    )
    if value.info is not None:
        message.info.CopyFrom(worker_info_to_pb(value.info))
    return message


def hello_from_pb(message: link_pb2.LinkHello) -> LinkHello:
    """What a side says first. Whether both fit together is the link's business."""
    if not message.sender.epoch or not message.link_id or message.received_through < 0:
        raise InvalidRequest("hello: sender, link_id and received_through must be set", field="header.hello")
    return LinkHello(
        sender=identity_from_pb(message.sender),
        link_id=message.link_id,
        beat_interval_s=duration_from_pb(message.beat_interval),
        receiver_epoch=message.receiver_epoch,
        received_through=message.received_through,
        info=worker_info_from_pb(message.info) if message.HasField("info") else None,
        oldest_version=message.oldest_version,
        newest_version=message.newest_version,
        features=tuple(message.features),
    )


# --- items -----------------------------------------------------------------------------------------------------------


def done_to_pb(value: Done) -> link_pb2.Done:
    """Carried out."""
    return link_pb2.Done()


def done_from_pb(message: link_pb2.Done) -> Done:
    """Carried out."""
    return Done()


Body = tuple[str, Callable[[Any], Any], Callable[[Any], Any]]
"""(field of the oneof, value -> message, message -> value)."""
DONE: Body = ("done", done_to_pb, done_from_pb)
FAILURE: Body = ("failure", failure_to_pb, failure_from_pb)


class ItemCodec:
    """Items of one direction of a link: messages with a `oneof body`, by a table from types of bodies to fields."""

    def __init__(self, message_class: type, bodies: dict[type, Body]):
        self._class = message_class
        self._to = {kind: (field, to_pb) for kind, (field, to_pb, _) in bodies.items()}
        self._from = {field: from_pb for field, _, from_pb in bodies.values()}
        self.carries_answers = any(field.name == "command_number" for field in message_class.DESCRIPTOR.fields)  # type: ignore[attr-defined]
        self.carries_failures = HeadraceError in bodies

    def to_pb(self, body: object, command_number: int = 0) -> Any:
        """The item; `command_number` says which command it answers. Raises InternalError for what this direction cannot carry."""
        kind = HeadraceError if isinstance(body, HeadraceError) else type(body)
        if kind not in self._to or (command_number and not self.carries_answers):
            raise InternalError(f"{type(body).__name__} is no item of {self._class.__name__}")
        field, to_pb = self._to[kind]
        item = self._class(**{field: to_pb(body)})
        if command_number:
            item.command_number = command_number
        return item

    def command_number(self, item: Any) -> int:
        """The command that this item answers; 0 when it answers none."""
        return item.command_number if self.carries_answers else 0

    def from_pb(self, item: Any) -> object:
        """The body. Raises InvalidRequest, naming the field, when it cannot mean one."""
        field = item.WhichOneof("body")
        if field is None:
            raise InvalidRequest(f"{self._class.__name__} without a body", field="body")
        return self._from[field](getattr(item, field))

    def set_time_left(self, item: Any, seconds: float) -> None:
        """Writes what is left of the deadline into a command that has such a field."""
        body = getattr(item, item.WhichOneof("body"))
        if "time_left" in body.DESCRIPTOR.fields_by_name:
            body.time_left.CopyFrom(duration_to_pb(max(seconds, 0.001)))
