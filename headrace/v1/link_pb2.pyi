import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from headrace.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LinkHello(_message.Message):
    __slots__ = ("oldest_version", "newest_version", "features", "sender", "receiver_epoch", "link_id", "received_through", "beat_interval", "info")
    OLDEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    NEWEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    LINK_ID_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_THROUGH_FIELD_NUMBER: _ClassVar[int]
    BEAT_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    oldest_version: int
    newest_version: int
    features: _containers.RepeatedScalarFieldContainer[str]
    sender: _common_pb2.WorkerIdentity
    receiver_epoch: str
    link_id: str
    received_through: int
    beat_interval: _duration_pb2.Duration
    info: _common_pb2.WorkerInfo
    def __init__(self, oldest_version: _Optional[int] = ..., newest_version: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ..., sender: _Optional[_Union[_common_pb2.WorkerIdentity, _Mapping]] = ..., receiver_epoch: _Optional[str] = ..., link_id: _Optional[str] = ..., received_through: _Optional[int] = ..., beat_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., info: _Optional[_Union[_common_pb2.WorkerInfo, _Mapping]] = ...) -> None: ...

class LinkHeader(_message.Message):
    __slots__ = ("hello", "first_number", "acknowledged_through", "progress")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    FIRST_NUMBER_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_THROUGH_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    hello: LinkHello
    first_number: int
    acknowledged_through: int
    progress: _common_pb2.WorkerProgress
    def __init__(self, hello: _Optional[_Union[LinkHello, _Mapping]] = ..., first_number: _Optional[int] = ..., acknowledged_through: _Optional[int] = ..., progress: _Optional[_Union[_common_pb2.WorkerProgress, _Mapping]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("code", "reason", "message", "field", "retry_after", "retryable")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: str
    message: str
    field: str
    retry_after: _duration_pb2.Duration
    retryable: bool
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., retry_after: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., retryable: _Optional[bool] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
