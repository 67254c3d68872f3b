import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from headrace.v1 import common_pb2 as _common_pb2
from headrace.v1 import decode_pb2 as _decode_pb2
from headrace.v1 import link_pb2 as _link_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OpenPrefillLinkRequest(_message.Message):
    __slots__ = ("header", "items")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    header: _link_pb2.LinkHeader
    items: _containers.RepeatedCompositeFieldContainer[PrefillLinkCommand]
    def __init__(self, header: _Optional[_Union[_link_pb2.LinkHeader, _Mapping]] = ..., items: _Optional[_Iterable[_Union[PrefillLinkCommand, _Mapping]]] = ...) -> None: ...

class PrefillLinkCommand(_message.Message):
    __slots__ = ("prefill", "cancel")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    prefill: PrefillCommand
    cancel: CancelPrefillCommand
    def __init__(self, prefill: _Optional[_Union[PrefillCommand, _Mapping]] = ..., cancel: _Optional[_Union[CancelPrefillCommand, _Mapping]] = ...) -> None: ...

class OpenPrefillLinkResponse(_message.Message):
    __slots__ = ("header", "items")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    header: _link_pb2.LinkHeader
    items: _containers.RepeatedCompositeFieldContainer[PrefillEvent]
    def __init__(self, header: _Optional[_Union[_link_pb2.LinkHeader, _Mapping]] = ..., items: _Optional[_Iterable[_Union[PrefillEvent, _Mapping]]] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("command_number", "first_tokens", "committed", "failure", "held_prefixes")
    COMMAND_NUMBER_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    HELD_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    command_number: int
    first_tokens: FirstTokens
    committed: Committed
    failure: _link_pb2.Failure
    held_prefixes: HeldPrefixes
    def __init__(self, command_number: _Optional[int] = ..., first_tokens: _Optional[_Union[FirstTokens, _Mapping]] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ..., failure: _Optional[_Union[_link_pb2.Failure, _Mapping]] = ..., held_prefixes: _Optional[_Union[HeldPrefixes, _Mapping]] = ...) -> None: ...

class HeldPrefixes(_message.Message):
    __slots__ = ("is_snapshot", "added_keys", "removed_keys")
    IS_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    ADDED_KEYS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_KEYS_FIELD_NUMBER: _ClassVar[int]
    is_snapshot: bool
    added_keys: bytes
    removed_keys: bytes
    def __init__(self, is_snapshot: _Optional[bool] = ..., added_keys: _Optional[bytes] = ..., removed_keys: _Optional[bytes] = ...) -> None: ...

class DeliveredTokens(_message.Message):
    __slots__ = ("sample_index", "token_ids")
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    token_ids: bytes
    def __init__(self, sample_index: _Optional[int] = ..., token_ids: _Optional[bytes] = ...) -> None: ...

class PrefillCommand(_message.Message):
    __slots__ = ("request_id", "attempt", "prompt_token_ids", "sampling", "sample_indices", "delivered", "reservation", "cache_salt", "time_left", "priority", "trace_parent", "display_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDICES_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TRACE_PARENT_FIELD_NUMBER: _ClassVar[int]
    DISPLAY_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    prompt_token_ids: bytes
    sampling: _common_pb2.SamplingParams
    sample_indices: _containers.RepeatedScalarFieldContainer[int]
    delivered: _containers.RepeatedCompositeFieldContainer[DeliveredTokens]
    reservation: _decode_pb2.Reservation
    cache_salt: str
    time_left: _duration_pb2.Duration
    priority: int
    trace_parent: str
    display_id: str
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., prompt_token_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., sample_indices: _Optional[_Iterable[int]] = ..., delivered: _Optional[_Iterable[_Union[DeliveredTokens, _Mapping]]] = ..., reservation: _Optional[_Union[_decode_pb2.Reservation, _Mapping]] = ..., cache_salt: _Optional[str] = ..., time_left: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., priority: _Optional[int] = ..., trace_parent: _Optional[str] = ..., display_id: _Optional[str] = ...) -> None: ...

class CancelPrefillCommand(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("sample_index", "position", "token_id", "logprob", "top_token_ids", "top_logprobs", "finish_reason")
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    position: int
    token_id: int
    logprob: float
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    finish_reason: _common_pb2.FinishReason
    def __init__(self, sample_index: _Optional[int] = ..., position: _Optional[int] = ..., token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ...) -> None: ...

class FirstTokens(_message.Message):
    __slots__ = ("tokens", "cached_token_count", "computed_token_count")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[FirstToken]
    cached_token_count: int
    computed_token_count: int
    def __init__(self, tokens: _Optional[_Iterable[_Union[FirstToken, _Mapping]]] = ..., cached_token_count: _Optional[int] = ..., computed_token_count: _Optional[int] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("pushed_byte_count", "stages")
    PUSHED_BYTE_COUNT_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    pushed_byte_count: int
    stages: _containers.RepeatedCompositeFieldContainer[_common_pb2.Stage]
    def __init__(self, pushed_byte_count: _Optional[int] = ..., stages: _Optional[_Iterable[_Union[_common_pb2.Stage, _Mapping]]] = ...) -> None: ...

class GetPrefillInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetPrefillInfoResponse(_message.Message):
    __slots__ = ("info",)
    INFO_FIELD_NUMBER: _ClassVar[int]
    info: _common_pb2.WorkerInfo
    def __init__(self, info: _Optional[_Union[_common_pb2.WorkerInfo, _Mapping]] = ...) -> None: ...

class GetPrefillLedgerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetPrefillLedgerResponse(_message.Message):
    __slots__ = ("blocks", "queued_request_count", "queued_token_count", "running_request_count", "batch_count")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUEST_COUNT_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUEST_COUNT_FIELD_NUMBER: _ClassVar[int]
    BATCH_COUNT_FIELD_NUMBER: _ClassVar[int]
    blocks: _common_pb2.BlockLedger
    queued_request_count: int
    queued_token_count: int
    running_request_count: int
    batch_count: int
    def __init__(self, blocks: _Optional[_Union[_common_pb2.BlockLedger, _Mapping]] = ..., queued_request_count: _Optional[int] = ..., queued_token_count: _Optional[int] = ..., running_request_count: _Optional[int] = ..., batch_count: _Optional[int] = ...) -> None: ...
