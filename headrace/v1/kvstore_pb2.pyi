import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from headrace.v1 import common_pb2 as _common_pb2
from headrace.v1 import link_pb2 as _link_pb2
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

class OpenCatalogueLinkRequest(_message.Message):
    __slots__ = ("header", "items")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    header: _link_pb2.LinkHeader
    items: _containers.RepeatedCompositeFieldContainer[CatalogueCommand]
    def __init__(self, header: _Optional[_Union[_link_pb2.LinkHeader, _Mapping]] = ..., items: _Optional[_Iterable[_Union[CatalogueCommand, _Mapping]]] = ...) -> None: ...

class CatalogueCommand(_message.Message):
    __slots__ = ("publish", "withdraw")
    PUBLISH_FIELD_NUMBER: _ClassVar[int]
    WITHDRAW_FIELD_NUMBER: _ClassVar[int]
    publish: PublishCommand
    withdraw: WithdrawCommand
    def __init__(self, publish: _Optional[_Union[PublishCommand, _Mapping]] = ..., withdraw: _Optional[_Union[WithdrawCommand, _Mapping]] = ...) -> None: ...

class OpenCatalogueLinkResponse(_message.Message):
    __slots__ = ("header", "items")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    header: _link_pb2.LinkHeader
    items: _containers.RepeatedCompositeFieldContainer[CatalogueAnswer]
    def __init__(self, header: _Optional[_Union[_link_pb2.LinkHeader, _Mapping]] = ..., items: _Optional[_Iterable[_Union[CatalogueAnswer, _Mapping]]] = ...) -> None: ...

class CatalogueAnswer(_message.Message):
    __slots__ = ("command_number", "done", "failure")
    COMMAND_NUMBER_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    command_number: int
    done: _link_pb2.Done
    failure: _link_pb2.Failure
    def __init__(self, command_number: _Optional[int] = ..., done: _Optional[_Union[_link_pb2.Done, _Mapping]] = ..., failure: _Optional[_Union[_link_pb2.Failure, _Mapping]] = ...) -> None: ...

class PublishCommand(_message.Message):
    __slots__ = ("keys", "time_to_live", "tier")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_LIVE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    time_to_live: _duration_pb2.Duration
    tier: _common_pb2.CacheTier
    def __init__(self, keys: _Optional[bytes] = ..., time_to_live: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., tier: _Optional[_Union[_common_pb2.CacheTier, str]] = ...) -> None: ...

class WithdrawCommand(_message.Message):
    __slots__ = ("keys", "all")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    all: bool
    def __init__(self, keys: _Optional[bytes] = ..., all: _Optional[bool] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    def __init__(self, keys: _Optional[bytes] = ...) -> None: ...

class PrefixHolder(_message.Message):
    __slots__ = ("worker", "store", "block_count", "tier")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    worker: _common_pb2.WorkerIdentity
    store: str
    block_count: int
    tier: _common_pb2.CacheTier
    def __init__(self, worker: _Optional[_Union[_common_pb2.WorkerIdentity, _Mapping]] = ..., store: _Optional[str] = ..., block_count: _Optional[int] = ..., tier: _Optional[_Union[_common_pb2.CacheTier, str]] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("holders",)
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    holders: _containers.RepeatedCompositeFieldContainer[PrefixHolder]
    def __init__(self, holders: _Optional[_Iterable[_Union[PrefixHolder, _Mapping]]] = ...) -> None: ...

class AcquireRequest(_message.Message):
    __slots__ = ("keys", "holder", "time_to_live")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_LIVE_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    holder: _common_pb2.WorkerIdentity
    time_to_live: _duration_pb2.Duration
    def __init__(self, keys: _Optional[bytes] = ..., holder: _Optional[_Union[_common_pb2.WorkerIdentity, _Mapping]] = ..., time_to_live: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

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
    __slots__ = ("change", "worker", "keys", "all", "number", "is_snapshot", "tier")
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    IS_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    change: CatalogueChange
    worker: _common_pb2.WorkerIdentity
    keys: bytes
    all: bool
    number: int
    is_snapshot: bool
    tier: _common_pb2.CacheTier
    def __init__(self, change: _Optional[_Union[CatalogueChange, str]] = ..., worker: _Optional[_Union[_common_pb2.WorkerIdentity, _Mapping]] = ..., keys: _Optional[bytes] = ..., all: _Optional[bool] = ..., number: _Optional[int] = ..., is_snapshot: _Optional[bool] = ..., tier: _Optional[_Union[_common_pb2.CacheTier, str]] = ...) -> None: ...
