from headrace.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerView(_message.Message):
    __slots__ = ("info", "ready", "in_flight_count", "queued_token_count", "why_not_ready", "progress")
    INFO_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_COUNT_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    WHY_NOT_READY_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    info: _common_pb2.WorkerInfo
    ready: bool
    in_flight_count: int
    queued_token_count: int
    why_not_ready: str
    progress: _common_pb2.WorkerProgress
    def __init__(self, info: _Optional[_Union[_common_pb2.WorkerInfo, _Mapping]] = ..., ready: _Optional[bool] = ..., in_flight_count: _Optional[int] = ..., queued_token_count: _Optional[int] = ..., why_not_ready: _Optional[str] = ..., progress: _Optional[_Union[_common_pb2.WorkerProgress, _Mapping]] = ...) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerView]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerView, _Mapping]]] = ...) -> None: ...

class GetRouterLedgerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetRouterLedgerResponse(_message.Message):
    __slots__ = ("queued_request_count", "queued_token_count", "running_request_count", "open_handle_count")
    QUEUED_REQUEST_COUNT_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUEST_COUNT_FIELD_NUMBER: _ClassVar[int]
    OPEN_HANDLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    queued_request_count: int
    queued_token_count: int
    running_request_count: int
    open_handle_count: int
    def __init__(self, queued_request_count: _Optional[int] = ..., queued_token_count: _Optional[int] = ..., running_request_count: _Optional[int] = ..., open_handle_count: _Optional[int] = ...) -> None: ...
