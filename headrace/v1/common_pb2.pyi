import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_EOS: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]

class NumberFormat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NUMBER_FORMAT_UNSPECIFIED: _ClassVar[NumberFormat]
    NUMBER_FORMAT_FP32: _ClassVar[NumberFormat]
    NUMBER_FORMAT_BF16: _ClassVar[NumberFormat]
    NUMBER_FORMAT_FP8: _ClassVar[NumberFormat]
    NUMBER_FORMAT_NVFP4: _ClassVar[NumberFormat]

class RopeOrder(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROPE_ORDER_UNSPECIFIED: _ClassVar[RopeOrder]
    ROPE_ORDER_INTERLEAVED: _ClassVar[RopeOrder]
    ROPE_ORDER_HALVES: _ClassVar[RopeOrder]

class TransferBackend(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSFER_BACKEND_UNSPECIFIED: _ClassVar[TransferBackend]
    TRANSFER_BACKEND_MOONCAKE: _ClassVar[TransferBackend]
    TRANSFER_BACKEND_LOCAL: _ClassVar[TransferBackend]
    TRANSFER_BACKEND_GRPC: _ClassVar[TransferBackend]

class WorkerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_ROLE_UNSPECIFIED: _ClassVar[WorkerRole]
    WORKER_ROLE_PREFILL: _ClassVar[WorkerRole]
    WORKER_ROLE_DECODE: _ClassVar[WorkerRole]

class CacheTier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CACHE_TIER_UNSPECIFIED: _ClassVar[CacheTier]
    CACHE_TIER_DEVICE: _ClassVar[CacheTier]
    CACHE_TIER_HOST: _ClassVar[CacheTier]
    CACHE_TIER_DISK: _ClassVar[CacheTier]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_EOS: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason
NUMBER_FORMAT_UNSPECIFIED: NumberFormat
NUMBER_FORMAT_FP32: NumberFormat
NUMBER_FORMAT_BF16: NumberFormat
NUMBER_FORMAT_FP8: NumberFormat
NUMBER_FORMAT_NVFP4: NumberFormat
ROPE_ORDER_UNSPECIFIED: RopeOrder
ROPE_ORDER_INTERLEAVED: RopeOrder
ROPE_ORDER_HALVES: RopeOrder
TRANSFER_BACKEND_UNSPECIFIED: TransferBackend
TRANSFER_BACKEND_MOONCAKE: TransferBackend
TRANSFER_BACKEND_LOCAL: TransferBackend
TRANSFER_BACKEND_GRPC: TransferBackend
WORKER_ROLE_UNSPECIFIED: WorkerRole
WORKER_ROLE_PREFILL: WorkerRole
WORKER_ROLE_DECODE: WorkerRole
CACHE_TIER_UNSPECIFIED: CacheTier
CACHE_TIER_DEVICE: CacheTier
CACHE_TIER_HOST: CacheTier
CACHE_TIER_DISK: CacheTier

class LogitBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "n", "max_tokens", "min_tokens", "stop_token_ids", "stop", "ignore_eos", "logprobs", "eos_token_ids")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[LogitBias]
    seed: int
    n: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    stop: _containers.RepeatedScalarFieldContainer[str]
    ignore_eos: bool
    logprobs: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[LogitBias, _Mapping]]] = ..., seed: _Optional[int] = ..., n: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., stop: _Optional[_Iterable[str]] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_token_count", "cached_token_count", "computed_token_count", "generated_token_count", "attempt_count", "stored_token_count")
    PROMPT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_COUNT_FIELD_NUMBER: _ClassVar[int]
    STORED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    prompt_token_count: int
    cached_token_count: int
    computed_token_count: int
    generated_token_count: int
    attempt_count: int
    stored_token_count: int
    def __init__(self, prompt_token_count: _Optional[int] = ..., cached_token_count: _Optional[int] = ..., computed_token_count: _Optional[int] = ..., generated_token_count: _Optional[int] = ..., attempt_count: _Optional[int] = ..., stored_token_count: _Optional[int] = ...) -> None: ...

class Stage(_message.Message):
    __slots__ = ("name", "start", "duration", "token_count", "byte_count")
    NAME_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    BYTE_COUNT_FIELD_NUMBER: _ClassVar[int]
    name: str
    start: _duration_pb2.Duration
    duration: _duration_pb2.Duration
    token_count: int
    byte_count: int
    def __init__(self, name: _Optional[str] = ..., start: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., token_count: _Optional[int] = ..., byte_count: _Optional[int] = ...) -> None: ...

class WorkerIdentity(_message.Message):
    __slots__ = ("address", "epoch")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    address: str
    epoch: str
    def __init__(self, address: _Optional[str] = ..., epoch: _Optional[str] = ...) -> None: ...

class KvRegion(_message.Message):
    __slots__ = ("name", "layer_count", "row_width", "format", "window_token_count")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LAYER_COUNT_FIELD_NUMBER: _ClassVar[int]
    ROW_WIDTH_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    name: str
    layer_count: int
    row_width: int
    format: NumberFormat
    window_token_count: int
    def __init__(self, name: _Optional[str] = ..., layer_count: _Optional[int] = ..., row_width: _Optional[int] = ..., format: _Optional[_Union[NumberFormat, str]] = ..., window_token_count: _Optional[int] = ...) -> None: ...

class KvLayout(_message.Message):
    __slots__ = ("regions", "block_size", "rope_order", "model_fingerprint", "numeric_profile")
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    ROPE_ORDER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUMERIC_PROFILE_FIELD_NUMBER: _ClassVar[int]
    regions: _containers.RepeatedCompositeFieldContainer[KvRegion]
    block_size: int
    rope_order: RopeOrder
    model_fingerprint: str
    numeric_profile: str
    def __init__(self, regions: _Optional[_Iterable[_Union[KvRegion, _Mapping]]] = ..., block_size: _Optional[int] = ..., rope_order: _Optional[_Union[RopeOrder, str]] = ..., model_fingerprint: _Optional[str] = ..., numeric_profile: _Optional[str] = ...) -> None: ...

class BlockLedger(_message.Message):
    __slots__ = ("free", "cached", "reserved", "running", "quarantined")
    FREE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    free: int
    cached: int
    reserved: int
    running: int
    quarantined: int
    def __init__(self, free: _Optional[int] = ..., cached: _Optional[int] = ..., reserved: _Optional[int] = ..., running: _Optional[int] = ..., quarantined: _Optional[int] = ...) -> None: ...

class EpGroup(_message.Message):
    __slots__ = ("id", "epoch", "rank", "size")
    ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    id: str
    epoch: str
    rank: int
    size: int
    def __init__(self, id: _Optional[str] = ..., epoch: _Optional[str] = ..., rank: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("identity", "role", "model", "layout", "block_count", "max_context_tokens", "max_batch_tokens", "max_batch_size", "exact", "transfer", "group", "vocabulary_size")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    identity: WorkerIdentity
    role: WorkerRole
    model: str
    layout: KvLayout
    block_count: int
    max_context_tokens: int
    max_batch_tokens: int
    max_batch_size: int
    exact: bool
    transfer: TransferBackend
    group: EpGroup
    vocabulary_size: int
    def __init__(self, identity: _Optional[_Union[WorkerIdentity, _Mapping]] = ..., role: _Optional[_Union[WorkerRole, str]] = ..., model: _Optional[str] = ..., layout: _Optional[_Union[KvLayout, _Mapping]] = ..., block_count: _Optional[int] = ..., max_context_tokens: _Optional[int] = ..., max_batch_tokens: _Optional[int] = ..., max_batch_size: _Optional[int] = ..., exact: _Optional[bool] = ..., transfer: _Optional[_Union[TransferBackend, str]] = ..., group: _Optional[_Union[EpGroup, _Mapping]] = ..., vocabulary_size: _Optional[int] = ...) -> None: ...

class WorkerProgress(_message.Message):
    __slots__ = ("serving", "completed_step_count", "completed_layer_count", "pending_step_count", "pause_reason", "queued_request_count", "queued_token_count", "running_request_count", "available_block_count")
    SERVING_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_LAYER_COUNT_FIELD_NUMBER: _ClassVar[int]
    PENDING_STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    PAUSE_REASON_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUEST_COUNT_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUEST_COUNT_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    serving: bool
    completed_step_count: int
    completed_layer_count: int
    pending_step_count: int
    pause_reason: str
    queued_request_count: int
    queued_token_count: int
    running_request_count: int
    available_block_count: int
    def __init__(self, serving: _Optional[bool] = ..., completed_step_count: _Optional[int] = ..., completed_layer_count: _Optional[int] = ..., pending_step_count: _Optional[int] = ..., pause_reason: _Optional[str] = ..., queued_request_count: _Optional[int] = ..., queued_token_count: _Optional[int] = ..., running_request_count: _Optional[int] = ..., available_block_count: _Optional[int] = ...) -> None: ...
