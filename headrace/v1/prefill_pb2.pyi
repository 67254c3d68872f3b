import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from headrace.v1 import common_pb2 as _common_pb2
from headrace.v1 import decode_pb2 as _decode_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StopState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STOP_STATE_UNSPECIFIED: _ClassVar[StopState]
    STOP_STATE_DRAINED: _ClassVar[StopState]
    STOP_STATE_UNKNOWN: _ClassVar[StopState]
STOP_STATE_UNSPECIFIED: StopState
STOP_STATE_DRAINED: StopState
STOP_STATE_UNKNOWN: StopState

class DeliveredTokens(_message.Message):
    __slots__ = ("sample_index", "token_ids")
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    token_ids: bytes
    def __init__(self, sample_index: _Optional[int] = ..., token_ids: _Optional[bytes] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "prompt_token_ids", "sampling", "sample_indices", "delivered", "reservation", "cache_salt", "prefill_epoch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDICES_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_EPOCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    prompt_token_ids: bytes
    sampling: _common_pb2.SamplingParams
    sample_indices: _containers.RepeatedScalarFieldContainer[int]
    delivered: _containers.RepeatedCompositeFieldContainer[DeliveredTokens]
    reservation: _decode_pb2.Reservation
    cache_salt: str
    prefill_epoch: str
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., prompt_token_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., sample_indices: _Optional[_Iterable[int]] = ..., delivered: _Optional[_Iterable[_Union[DeliveredTokens, _Mapping]]] = ..., reservation: _Optional[_Union[_decode_pb2.Reservation, _Mapping]] = ..., cache_salt: _Optional[str] = ..., prefill_epoch: _Optional[str] = ...) -> None: ...

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

class PrefillFailed(_message.Message):
    __slots__ = ("reason", "message", "retryable")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    retryable: bool
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ..., retryable: _Optional[bool] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("first_tokens", "committed", "failed")
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    first_tokens: FirstTokens
    committed: Committed
    failed: PrefillFailed
    def __init__(self, first_tokens: _Optional[_Union[FirstTokens, _Mapping]] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ..., failed: _Optional[_Union[PrefillFailed, _Mapping]] = ...) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ("reservation_id", "writer_epoch", "wait")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    WRITER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    reservation_id: str
    writer_epoch: str
    wait: _duration_pb2.Duration
    def __init__(self, reservation_id: _Optional[str] = ..., writer_epoch: _Optional[str] = ..., wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class StopResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: StopState
    def __init__(self, state: _Optional[_Union[StopState, str]] = ...) -> None: ...

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
