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

class StopState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STOP_STATE_UNSPECIFIED: _ClassVar[StopState]
    STOP_STATE_DRAINED: _ClassVar[StopState]
    STOP_STATE_UNKNOWN: _ClassVar[StopState]
STOP_STATE_UNSPECIFIED: StopState
STOP_STATE_DRAINED: StopState
STOP_STATE_UNKNOWN: StopState

class OpenDecodeLinkRequest(_message.Message):
    __slots__ = ("header", "items")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    header: _link_pb2.LinkHeader
    items: _containers.RepeatedCompositeFieldContainer[DecodeCommand]
    def __init__(self, header: _Optional[_Union[_link_pb2.LinkHeader, _Mapping]] = ..., items: _Optional[_Iterable[_Union[DecodeCommand, _Mapping]]] = ...) -> None: ...

class DecodeCommand(_message.Message):
    __slots__ = ("reserve", "release")
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    reserve: ReserveCommand
    release: ReleaseCommand
    def __init__(self, reserve: _Optional[_Union[ReserveCommand, _Mapping]] = ..., release: _Optional[_Union[ReleaseCommand, _Mapping]] = ...) -> None: ...

class OpenDecodeLinkResponse(_message.Message):
    __slots__ = ("header", "items")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    header: _link_pb2.LinkHeader
    items: _containers.RepeatedCompositeFieldContainer[DecodeAnswer]
    def __init__(self, header: _Optional[_Union[_link_pb2.LinkHeader, _Mapping]] = ..., items: _Optional[_Iterable[_Union[DecodeAnswer, _Mapping]]] = ...) -> None: ...

class DecodeAnswer(_message.Message):
    __slots__ = ("command_number", "reserved", "done", "failure")
    COMMAND_NUMBER_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    command_number: int
    reserved: Reservation
    done: _link_pb2.Done
    failure: _link_pb2.Failure
    def __init__(self, command_number: _Optional[int] = ..., reserved: _Optional[_Union[Reservation, _Mapping]] = ..., done: _Optional[_Union[_link_pb2.Done, _Mapping]] = ..., failure: _Optional[_Union[_link_pb2.Failure, _Mapping]] = ...) -> None: ...

class OpenTokenLinkRequest(_message.Message):
    __slots__ = ("header",)
    HEADER_FIELD_NUMBER: _ClassVar[int]
    header: _link_pb2.LinkHeader
    def __init__(self, header: _Optional[_Union[_link_pb2.LinkHeader, _Mapping]] = ...) -> None: ...

class OpenTokenLinkResponse(_message.Message):
    __slots__ = ("header", "items")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    header: _link_pb2.LinkHeader
    items: _containers.RepeatedCompositeFieldContainer[TokenFrame]
    def __init__(self, header: _Optional[_Union[_link_pb2.LinkHeader, _Mapping]] = ..., items: _Optional[_Iterable[_Union[TokenFrame, _Mapping]]] = ...) -> None: ...

class OpenWriterLinkRequest(_message.Message):
    __slots__ = ("header", "items")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    header: _link_pb2.LinkHeader
    items: _containers.RepeatedCompositeFieldContainer[WriterItem]
    def __init__(self, header: _Optional[_Union[_link_pb2.LinkHeader, _Mapping]] = ..., items: _Optional[_Iterable[_Union[WriterItem, _Mapping]]] = ...) -> None: ...

class WriterItem(_message.Message):
    __slots__ = ("command_number", "begin", "renew", "commit", "stopped", "failure")
    COMMAND_NUMBER_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    command_number: int
    begin: BeginCommand
    renew: RenewCommand
    commit: CommitCommand
    stopped: Stopped
    failure: _link_pb2.Failure
    def __init__(self, command_number: _Optional[int] = ..., begin: _Optional[_Union[BeginCommand, _Mapping]] = ..., renew: _Optional[_Union[RenewCommand, _Mapping]] = ..., commit: _Optional[_Union[CommitCommand, _Mapping]] = ..., stopped: _Optional[_Union[Stopped, _Mapping]] = ..., failure: _Optional[_Union[_link_pb2.Failure, _Mapping]] = ...) -> None: ...

class OpenWriterLinkResponse(_message.Message):
    __slots__ = ("header", "items")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    header: _link_pb2.LinkHeader
    items: _containers.RepeatedCompositeFieldContainer[WriteControlItem]
    def __init__(self, header: _Optional[_Union[_link_pb2.LinkHeader, _Mapping]] = ..., items: _Optional[_Iterable[_Union[WriteControlItem, _Mapping]]] = ...) -> None: ...

class WriteControlItem(_message.Message):
    __slots__ = ("command_number", "renewed", "committed", "failure", "stop")
    COMMAND_NUMBER_FIELD_NUMBER: _ClassVar[int]
    RENEWED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    command_number: int
    renewed: Renewed
    committed: CommitAccepted
    failure: _link_pb2.Failure
    stop: StopCommand
    def __init__(self, command_number: _Optional[int] = ..., renewed: _Optional[_Union[Renewed, _Mapping]] = ..., committed: _Optional[_Union[CommitAccepted, _Mapping]] = ..., failure: _Optional[_Union[_link_pb2.Failure, _Mapping]] = ..., stop: _Optional[_Union[StopCommand, _Mapping]] = ...) -> None: ...

class TransferTarget(_message.Message):
    __slots__ = ("backend", "session", "base_address", "layer_stride_bytes", "block_stride_bytes", "row_bytes", "block_size", "layer_count", "block_count")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    BASE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LAYER_STRIDE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_STRIDE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROW_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    LAYER_COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    backend: _common_pb2.TransferBackend
    session: str
    base_address: int
    layer_stride_bytes: int
    block_stride_bytes: int
    row_bytes: int
    block_size: int
    layer_count: int
    block_count: int
    def __init__(self, backend: _Optional[_Union[_common_pb2.TransferBackend, str]] = ..., session: _Optional[str] = ..., base_address: _Optional[int] = ..., layer_stride_bytes: _Optional[int] = ..., block_stride_bytes: _Optional[int] = ..., row_bytes: _Optional[int] = ..., block_size: _Optional[int] = ..., layer_count: _Optional[int] = ..., block_count: _Optional[int] = ...) -> None: ...

class TargetSequence(_message.Message):
    __slots__ = ("sample_index", "first_row", "row_count", "block_ids")
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROW_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    first_row: int
    row_count: int
    block_ids: bytes
    def __init__(self, sample_index: _Optional[int] = ..., first_row: _Optional[int] = ..., row_count: _Optional[int] = ..., block_ids: _Optional[bytes] = ...) -> None: ...

class Promise(_message.Message):
    __slots__ = ("reservation_id", "request_id", "attempt", "decode", "writer", "target", "sequences", "layout_fingerprint")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    reservation_id: str
    request_id: str
    attempt: int
    decode: _common_pb2.WorkerIdentity
    writer: _common_pb2.WorkerIdentity
    target: TransferTarget
    sequences: _containers.RepeatedCompositeFieldContainer[TargetSequence]
    layout_fingerprint: str
    def __init__(self, reservation_id: _Optional[str] = ..., request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., decode: _Optional[_Union[_common_pb2.WorkerIdentity, _Mapping]] = ..., writer: _Optional[_Union[_common_pb2.WorkerIdentity, _Mapping]] = ..., target: _Optional[_Union[TransferTarget, _Mapping]] = ..., sequences: _Optional[_Iterable[_Union[TargetSequence, _Mapping]]] = ..., layout_fingerprint: _Optional[str] = ...) -> None: ...

class Reservation(_message.Message):
    __slots__ = ("promise", "code", "expires_in")
    PROMISE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_FIELD_NUMBER: _ClassVar[int]
    promise: bytes
    code: bytes
    expires_in: _duration_pb2.Duration
    def __init__(self, promise: _Optional[bytes] = ..., code: _Optional[bytes] = ..., expires_in: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ReserveCommand(_message.Message):
    __slots__ = ("request_id", "attempt", "writer", "prompt_token_count", "delivered_token_counts", "sample_indices", "sampling", "stream_interval", "handle", "time_left", "priority", "prefix_keys", "cache_salt", "trace_parent", "display_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDICES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STREAM_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PREFIX_KEYS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TRACE_PARENT_FIELD_NUMBER: _ClassVar[int]
    DISPLAY_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    writer: _common_pb2.WorkerIdentity
    prompt_token_count: int
    delivered_token_counts: _containers.RepeatedScalarFieldContainer[int]
    sample_indices: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.SamplingParams
    stream_interval: int
    handle: int
    time_left: _duration_pb2.Duration
    priority: int
    prefix_keys: bytes
    cache_salt: str
    trace_parent: str
    display_id: str
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., writer: _Optional[_Union[_common_pb2.WorkerIdentity, _Mapping]] = ..., prompt_token_count: _Optional[int] = ..., delivered_token_counts: _Optional[_Iterable[int]] = ..., sample_indices: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., stream_interval: _Optional[int] = ..., handle: _Optional[int] = ..., time_left: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., priority: _Optional[int] = ..., prefix_keys: _Optional[bytes] = ..., cache_salt: _Optional[str] = ..., trace_parent: _Optional[str] = ..., display_id: _Optional[str] = ...) -> None: ...

class ReleaseCommand(_message.Message):
    __slots__ = ("request_id", "attempt", "sample_indices")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDICES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    sample_indices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., sample_indices: _Optional[_Iterable[int]] = ...) -> None: ...

class BeginCommand(_message.Message):
    __slots__ = ("reservation_id",)
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    reservation_id: str
    def __init__(self, reservation_id: _Optional[str] = ...) -> None: ...

class RenewCommand(_message.Message):
    __slots__ = ("reservation_id",)
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    reservation_id: str
    def __init__(self, reservation_id: _Optional[str] = ...) -> None: ...

class Renewed(_message.Message):
    __slots__ = ("expires_in",)
    EXPIRES_IN_FIELD_NUMBER: _ClassVar[int]
    expires_in: _duration_pb2.Duration
    def __init__(self, expires_in: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class LayerManifest(_message.Message):
    __slots__ = ("row_count", "checksum")
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    row_count: int
    checksum: int
    def __init__(self, row_count: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class SequenceManifest(_message.Message):
    __slots__ = ("sample_index", "first_row", "layers")
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROW_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    first_row: int
    layers: _containers.RepeatedCompositeFieldContainer[LayerManifest]
    def __init__(self, sample_index: _Optional[int] = ..., first_row: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[LayerManifest, _Mapping]]] = ...) -> None: ...

class SampleState(_message.Message):
    __slots__ = ("sample_index", "output_token_ids")
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    output_token_ids: bytes
    def __init__(self, sample_index: _Optional[int] = ..., output_token_ids: _Optional[bytes] = ...) -> None: ...

class CommitCommand(_message.Message):
    __slots__ = ("reservation_id", "request_id", "attempt", "manifest", "samples", "prompt_token_ids")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    reservation_id: str
    request_id: str
    attempt: int
    manifest: _containers.RepeatedCompositeFieldContainer[SequenceManifest]
    samples: _containers.RepeatedCompositeFieldContainer[SampleState]
    prompt_token_ids: bytes
    def __init__(self, reservation_id: _Optional[str] = ..., request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., manifest: _Optional[_Iterable[_Union[SequenceManifest, _Mapping]]] = ..., samples: _Optional[_Iterable[_Union[SampleState, _Mapping]]] = ..., prompt_token_ids: _Optional[bytes] = ...) -> None: ...

class CommitAccepted(_message.Message):
    __slots__ = ("commit_duration",)
    COMMIT_DURATION_FIELD_NUMBER: _ClassVar[int]
    commit_duration: _duration_pb2.Duration
    def __init__(self, commit_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class StopCommand(_message.Message):
    __slots__ = ("reservation_id", "wait")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    reservation_id: str
    wait: _duration_pb2.Duration
    def __init__(self, reservation_id: _Optional[str] = ..., wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Stopped(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: StopState
    def __init__(self, state: _Optional[_Union[StopState, str]] = ...) -> None: ...

class SampleEnd(_message.Message):
    __slots__ = ("handle", "sample_index", "finish_reason", "error_reason", "stages", "output_token_count")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_REASON_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    handle: int
    sample_index: int
    finish_reason: _common_pb2.FinishReason
    error_reason: str
    stages: _containers.RepeatedCompositeFieldContainer[_common_pb2.Stage]
    output_token_count: int
    def __init__(self, handle: _Optional[int] = ..., sample_index: _Optional[int] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., error_reason: _Optional[str] = ..., stages: _Optional[_Iterable[_Union[_common_pb2.Stage, _Mapping]]] = ..., output_token_count: _Optional[int] = ...) -> None: ...

class TokenFrame(_message.Message):
    __slots__ = ("handles", "sample_indices", "first_positions", "token_counts", "token_ids", "logprobs", "top_counts", "top_token_ids", "top_logprobs", "ends")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDICES_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    handles: bytes
    sample_indices: bytes
    first_positions: bytes
    token_counts: bytes
    token_ids: bytes
    logprobs: bytes
    top_counts: bytes
    top_token_ids: bytes
    top_logprobs: bytes
    ends: _containers.RepeatedCompositeFieldContainer[SampleEnd]
    def __init__(self, handles: _Optional[bytes] = ..., sample_indices: _Optional[bytes] = ..., first_positions: _Optional[bytes] = ..., token_counts: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., top_counts: _Optional[bytes] = ..., top_token_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ..., ends: _Optional[_Iterable[_Union[SampleEnd, _Mapping]]] = ...) -> None: ...

class WriteRowsRequest(_message.Message):
    __slots__ = ("session", "layer", "target_row", "payload")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    TARGET_ROW_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    session: str
    layer: int
    target_row: int
    payload: bytes
    def __init__(self, session: _Optional[str] = ..., layer: _Optional[int] = ..., target_row: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class WriteRowsResponse(_message.Message):
    __slots__ = ("byte_count",)
    BYTE_COUNT_FIELD_NUMBER: _ClassVar[int]
    byte_count: int
    def __init__(self, byte_count: _Optional[int] = ...) -> None: ...

class GetDecodeInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetDecodeInfoResponse(_message.Message):
    __slots__ = ("info",)
    INFO_FIELD_NUMBER: _ClassVar[int]
    info: _common_pb2.WorkerInfo
    def __init__(self, info: _Optional[_Union[_common_pb2.WorkerInfo, _Mapping]] = ...) -> None: ...

class GetDecodeLedgerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetDecodeLedgerResponse(_message.Message):
    __slots__ = ("blocks", "waiting_request_count", "reserved_request_count", "running_request_count", "quarantined_request_count", "step_count", "fence_count", "open_link_count")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUEST_COUNT_FIELD_NUMBER: _ClassVar[int]
    RESERVED_REQUEST_COUNT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUEST_COUNT_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_REQUEST_COUNT_FIELD_NUMBER: _ClassVar[int]
    STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    FENCE_COUNT_FIELD_NUMBER: _ClassVar[int]
    OPEN_LINK_COUNT_FIELD_NUMBER: _ClassVar[int]
    blocks: _common_pb2.BlockLedger
    waiting_request_count: int
    reserved_request_count: int
    running_request_count: int
    quarantined_request_count: int
    step_count: int
    fence_count: int
    open_link_count: int
    def __init__(self, blocks: _Optional[_Union[_common_pb2.BlockLedger, _Mapping]] = ..., waiting_request_count: _Optional[int] = ..., reserved_request_count: _Optional[int] = ..., running_request_count: _Optional[int] = ..., quarantined_request_count: _Optional[int] = ..., step_count: _Optional[int] = ..., fence_count: _Optional[int] = ..., open_link_count: _Optional[int] = ...) -> None: ...
