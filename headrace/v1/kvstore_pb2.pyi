import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from headrace.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CatalogueChange(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CATALOGUE_CHANGE_UNSPECIFIED: _ClassVar[CatalogueChange]
    CATALOGUE_CHANGE_PUBLISHED: _ClassVar[CatalogueChange]
    CATALOGUE_CHANGE_WITHDRAWN: _ClassVar[CatalogueChange]
    CATALOGUE_CHANGE_LOST: _ClassVar[CatalogueChange]
CATALOGUE_CHANGE_UNSPECIFIED: CatalogueChange
CATALOGUE_CHANGE_PUBLISHED: CatalogueChange
CATALOGUE_CHANGE_WITHDRAWN: CatalogueChange
CATALOGUE_CHANGE_LOST: CatalogueChange

class LookupRequest(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, keys: _Optional[_Iterable[str]] = ...) -> None: ...

class PrefixHolder(_message.Message):
    __slots__ = ("worker", "block_count")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    worker: _common_pb2.WorkerIdentity
    block_count: int
    def __init__(self, worker: _Optional[_Union[_common_pb2.WorkerIdentity, _Mapping]] = ..., block_count: _Optional[int] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("holders",)
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    holders: _containers.RepeatedCompositeFieldContainer[PrefixHolder]
    def __init__(self, holders: _Optional[_Iterable[_Union[PrefixHolder, _Mapping]]] = ...) -> None: ...

class PublishRequest(_message.Message):
    __slots__ = ("worker", "keys", "time_to_live")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_LIVE_FIELD_NUMBER: _ClassVar[int]
    worker: _common_pb2.WorkerIdentity
    keys: _containers.RepeatedScalarFieldContainer[str]
    time_to_live: _duration_pb2.Duration
    def __init__(self, worker: _Optional[_Union[_common_pb2.WorkerIdentity, _Mapping]] = ..., keys: _Optional[_Iterable[str]] = ..., time_to_live: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class PublishResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WithdrawRequest(_message.Message):
    __slots__ = ("worker", "keys")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    worker: _common_pb2.WorkerIdentity
    keys: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker: _Optional[_Union[_common_pb2.WorkerIdentity, _Mapping]] = ..., keys: _Optional[_Iterable[str]] = ...) -> None: ...

class WithdrawResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AcquireRequest(_message.Message):
    __slots__ = ("keys", "holder", "time_to_live")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_LIVE_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[str]
    holder: _common_pb2.WorkerIdentity
    time_to_live: _duration_pb2.Duration
    def __init__(self, keys: _Optional[_Iterable[str]] = ..., holder: _Optional[_Union[_common_pb2.WorkerIdentity, _Mapping]] = ..., time_to_live: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class AcquireResponse(_message.Message):
    __slots__ = ("lease_id", "key_count")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_COUNT_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    key_count: int
    def __init__(self, lease_id: _Optional[str] = ..., key_count: _Optional[int] = ...) -> None: ...

class ReleaseLeaseRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class ReleaseLeaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("change", "worker", "keys")
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    change: CatalogueChange
    worker: _common_pb2.WorkerIdentity
    keys: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, change: _Optional[_Union[CatalogueChange, str]] = ..., worker: _Optional[_Union[_common_pb2.WorkerIdentity, _Mapping]] = ..., keys: _Optional[_Iterable[str]] = ...) -> None: ...
