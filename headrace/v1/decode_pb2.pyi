import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from headrace.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

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
    backend: str
    session: str
    base_address: int
    layer_stride_bytes: int
    block_stride_bytes: int
    row_bytes: int
    block_size: int
    layer_count: int
    block_count: int
    def __init__(self, backend: _Optional[str] = ..., session: _Optional[str] = ..., base_address: _Optional[int] = ..., layer_stride_bytes: _Optional[int] = ..., block_stride_bytes: _Optional[int] = ..., row_bytes: _Optional[int] = ..., block_size: _Optional[int] = ..., layer_count: _Optional[int] = ..., block_count: _Optional[int] = ...) -> None: ...

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

class Reservation(_message.Message):
    __slots__ = ("reservation_id", "decode", "target", "sequences", "layout_fingerprint", "held_prefix_token_count", "expires_in")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    HELD_PREFIX_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_FIELD_NUMBER: _ClassVar[int]
    reservation_id: str
    decode: _common_pb2.WorkerIdentity
    target: TransferTarget
    sequences: _containers.RepeatedCompositeFieldContainer[TargetSequence]
    layout_fingerprint: str
    held_prefix_token_count: int
    expires_in: _duration_pb2.Duration
    def __init__(self, reservation_id: _Optional[str] = ..., decode: _Optional[_Union[_common_pb2.WorkerIdentity, _Mapping]] = ..., target: _Optional[_Union[TransferTarget, _Mapping]] = ..., sequences: _Optional[_Iterable[_Union[TargetSequence, _Mapping]]] = ..., layout_fingerprint: _Optional[str] = ..., held_prefix_token_count: _Optional[int] = ..., expires_in: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "writer", "prompt_token_count", "delivered_token_counts", "sample_indices", "sampling", "stream_interval", "router", "handle", "decode_epoch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDICES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STREAM_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    DECODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    writer: _common_pb2.WorkerIdentity
    prompt_token_count: int
    delivered_token_counts: _containers.RepeatedScalarFieldContainer[int]
    sample_indices: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.SamplingParams
    stream_interval: int
    router: _common_pb2.WorkerIdentity
    handle: int
    decode_epoch: str
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., writer: _Optional[_Union[_common_pb2.WorkerIdentity, _Mapping]] = ..., prompt_token_count: _Optional[int] = ..., delivered_token_counts: _Optional[_Iterable[int]] = ..., sample_indices: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., stream_interval: _Optional[int] = ..., router: _Optional[_Union[_common_pb2.WorkerIdentity, _Mapping]] = ..., handle: _Optional[int] = ..., decode_epoch: _Optional[str] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("reservation",)
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    reservation: Reservation
    def __init__(self, reservation: _Optional[_Union[Reservation, _Mapping]] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("reservation_id", "writer_epoch")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    WRITER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    reservation_id: str
    writer_epoch: str
    def __init__(self, reservation_id: _Optional[str] = ..., writer_epoch: _Optional[str] = ...) -> None: ...

class RenewResponse(_message.Message):
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

class CommitRequest(_message.Message):
    __slots__ = ("reservation_id", "request_id", "attempt", "writer_epoch", "manifest", "samples", "prompt_token_ids")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    WRITER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    reservation_id: str
    request_id: str
    attempt: int
    writer_epoch: str
    manifest: _containers.RepeatedCompositeFieldContainer[SequenceManifest]
    samples: _containers.RepeatedCompositeFieldContainer[SampleState]
    prompt_token_ids: bytes
    def __init__(self, reservation_id: _Optional[str] = ..., request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., writer_epoch: _Optional[str] = ..., manifest: _Optional[_Iterable[_Union[SequenceManifest, _Mapping]]] = ..., samples: _Optional[_Iterable[_Union[SampleState, _Mapping]]] = ..., prompt_token_ids: _Optional[bytes] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("commit_duration",)
    COMMIT_DURATION_FIELD_NUMBER: _ClassVar[int]
    commit_duration: _duration_pb2.Duration
    def __init__(self, commit_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "decode_epoch", "sample_indices")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DECODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDICES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    decode_epoch: str
    sample_indices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., decode_epoch: _Optional[str] = ..., sample_indices: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StreamTokensRequest(_message.Message):
    __slots__ = ("router", "decode_epoch", "resume_after_frame")
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    DECODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    RESUME_AFTER_FRAME_FIELD_NUMBER: _ClassVar[int]
    router: _common_pb2.WorkerIdentity
    decode_epoch: str
    resume_after_frame: int
    def __init__(self, router: _Optional[_Union[_common_pb2.WorkerIdentity, _Mapping]] = ..., decode_epoch: _Optional[str] = ..., resume_after_frame: _Optional[int] = ...) -> None: ...

class SampleEnd(_message.Message):
    __slots__ = ("handle", "sample_index", "finish_reason", "error_reason", "stages")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_REASON_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    handle: int
    sample_index: int
    finish_reason: _common_pb2.FinishReason
    error_reason: str
    stages: _containers.RepeatedCompositeFieldContainer[_common_pb2.Stage]
    def __init__(self, handle: _Optional[int] = ..., sample_index: _Optional[int] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., error_reason: _Optional[str] = ..., stages: _Optional[_Iterable[_Union[_common_pb2.Stage, _Mapping]]] = ...) -> None: ...

class StreamTokensResponse(_message.Message):
    __slots__ = ("frame_number", "handles", "sample_indices", "first_positions", "token_counts", "token_ids", "logprobs", "top_counts", "top_token_ids", "top_logprobs", "ends")
    FRAME_NUMBER_FIELD_NUMBER: _ClassVar[int]
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
    frame_number: int
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
    def __init__(self, frame_number: _Optional[int] = ..., handles: _Optional[bytes] = ..., sample_indices: _Optional[bytes] = ..., first_positions: _Optional[bytes] = ..., token_counts: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., top_counts: _Optional[bytes] = ..., top_token_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ..., ends: _Optional[_Iterable[_Union[SampleEnd, _Mapping]]] = ...) -> None: ...

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
    __slots__ = ("blocks", "waiting_request_count", "reserved_request_count", "running_request_count", "quarantined_request_count", "step_count", "fence_count", "open_stream_count")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUEST_COUNT_FIELD_NUMBER: _ClassVar[int]
    RESERVED_REQUEST_COUNT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUEST_COUNT_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_REQUEST_COUNT_FIELD_NUMBER: _ClassVar[int]
    STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    FENCE_COUNT_FIELD_NUMBER: _ClassVar[int]
    OPEN_STREAM_COUNT_FIELD_NUMBER: _ClassVar[int]
    blocks: _common_pb2.BlockLedger
    waiting_request_count: int
    reserved_request_count: int
    running_request_count: int
    quarantined_request_count: int
    step_count: int
    fence_count: int
    open_stream_count: int
    def __init__(self, blocks: _Optional[_Union[_common_pb2.BlockLedger, _Mapping]] = ..., waiting_request_count: _Optional[int] = ..., reserved_request_count: _Optional[int] = ..., running_request_count: _Optional[int] = ..., quarantined_request_count: _Optional[int] = ..., step_count: _Optional[int] = ..., fence_count: _Optional[int] = ..., open_stream_count: _Optional[int] = ...) -> None: ...
