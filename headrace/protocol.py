"""What the services say to one another, as plain values. `wire.py` turns them into protobuf and back.

Field meanings and limits stand in `protos/headrace/v1/*.proto`; units are suffixes here (`_s`, `_bytes`). Token ids are
tuples of int. Nothing in this file imports torch, grpc or protobuf.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

MAX_SAMPLES = 16
"""Most samples of one prompt."""


class FinishReason(enum.IntEnum):
    """Why a sample ended; NONE while it runs. Values are those of the proto enum."""

    NONE = 0
    EOS = 1
    STOP = 2
    LENGTH = 3
    CANCELLED = 4


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen, with every default filled in (the router does that)."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    n: int = 1
    max_tokens: int = 256
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def has_penalties(self) -> bool:
        """Whether choosing a token needs to know the earlier ones."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True)
class WorkerIdentity:
    """An address (`host:port`) and the random epoch of the process behind it."""

    address: str
    epoch: str


@dataclass(frozen=True)
class KvLayout:
    """What both ends of a KV transfer must agree on."""

    layer_count: int
    row_dim: int
    dtype: str
    block_size: int
    rope_order: str
    model_fingerprint: str

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits over all fields."""
        import hashlib

        return hashlib.blake2b(repr(self).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class WorkerInfo:
    """What a worker says about itself. `role` is `prefill` or `decode`."""

    identity: WorkerIdentity
    role: str
    model: str
    layout: KvLayout
    block_count: int
    max_context_tokens: int
    max_batch_tokens: int = 0
    max_batch_size: int = 0
    exact: bool = True
    transfer: str = "mooncake"


@dataclass(frozen=True)
class BlockLedger:
    """Blocks of one pool by owner state; the sum is the pool."""

    free: int
    cached: int = 0
    reserved: int = 0
    running: int = 0
    quarantined: int = 0

    @property
    def held(self) -> int:
        """Blocks that must come back once nothing runs."""
        return self.reserved + self.running + self.quarantined


@dataclass(frozen=True)
class PrefillLedger:
    """Snapshot of a prefill rank."""

    blocks: BlockLedger
    queued_requests: int = 0
    queued_tokens: int = 0
    running_requests: int = 0
    batches: int = 0


@dataclass(frozen=True)
class DecodeLedger:
    """Snapshot of a decode rank."""

    blocks: BlockLedger
    waiting_requests: int = 0
    reserved_requests: int = 0
    running_requests: int = 0
    quarantined_requests: int = 0
    steps: int = 0
    fences: int = 0
    open_streams: int = 0


@dataclass(frozen=True)
class Stage:
    """One stage of a request: span name, offset and duration in seconds, tokens, bytes."""

    name: str
    start_s: float
    duration_s: float
    tokens: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Usage:
    """Token counts of one request, each counted once."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    attempts: int = 1


@dataclass(frozen=True)
class TargetDescriptor:
    """How rows are written into a decode rank's pool: strides and sizes in bytes, counts in layers and blocks."""

    backend: str
    session: str
    base_address: int
    layer_stride_bytes: int
    block_stride_bytes: int
    row_bytes: int
    block_size: int
    num_layers: int
    num_blocks: int


@dataclass(frozen=True)
class TargetSequence:
    """Rows [first_row, first_row + num_rows) of one sample's sequence, owed by the writer; `block_ids` from position 0."""

    sample_index: int
    first_row: int
    num_rows: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class Reservation:
    """A decode rank's promise of room to one writer."""

    reservation_id: str
    decode: WorkerIdentity
    target: TargetDescriptor
    sequences: tuple[TargetSequence, ...]
    layout_fingerprint: str
    held_prefix_tokens: int
    expires_in_s: float


@dataclass(frozen=True)
class ReserveCommand:
    """Asks for room for one attempt; tuples `sample_indices` and `delivered_counts` run in parallel."""

    request_id: str
    attempt: int
    writer: WorkerIdentity
    prompt_tokens: int
    sample_indices: tuple[int, ...]
    delivered_counts: tuple[int, ...]
    sampling: SamplingParams
    stream_interval: int
    router: WorkerIdentity
    handle: int
    decode_epoch: str


@dataclass(frozen=True)
class PrefillCommand:
    """One attempt at one prompt. `delivered` maps a sample to the output tokens the client already has."""

    request_id: str
    attempt: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    sample_indices: tuple[int, ...]
    delivered: dict[int, tuple[int, ...]]
    reservation: Reservation | None
    cache_salt: str
    prefill_epoch: str


@dataclass(frozen=True)
class FirstToken:
    """The token a prefill sampled for one sample, at output position `position`."""

    sample_index: int
    position: int
    token_id: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()
    finish_reason: FinishReason = FinishReason.NONE


@dataclass(frozen=True)
class FirstTokens:
    """Prefill event: tokens of all samples."""

    tokens: tuple[FirstToken, ...]
    cached_tokens: int
    computed_tokens: int


@dataclass(frozen=True)
class Committed:
    """Prefill event: the attempt is done."""

    pushed_bytes: int
    stages: tuple[Stage, ...]


@dataclass(frozen=True)
class PrefillFailed:
    """Prefill event: the attempt is lost."""

    reason: str
    message: str
    retryable: bool


PrefillEvent = FirstTokens | Committed | PrefillFailed


class StopState(enum.IntEnum):
    """Whether late writes of a reservation are impossible."""

    DRAINED = 1
    UNKNOWN = 2


@dataclass(frozen=True)
class LayerManifest:
    """Rows written into one layer and their 64-bit checksum (signed)."""

    num_rows: int
    checksum: int


@dataclass(frozen=True)
class SequenceManifest:
    """Proof of one pushed sequence, a LayerManifest per layer."""

    sample_index: int
    first_row: int
    layers: tuple[LayerManifest, ...]


@dataclass(frozen=True)
class SampleState:
    """Every output token of a sample so far; the last one is prefill's."""

    sample_index: int
    output_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class CommitCommand:
    """Hands a prompt's rows over to decode."""

    reservation_id: str
    request_id: str
    attempt: int
    writer_epoch: str
    manifest: tuple[SequenceManifest, ...]
    samples: tuple[SampleState, ...]
    prompt_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class TokenRecord:
    """Tokens of one sample in one frame. `logprobs` is None when not asked for; `top` has one tuple per token."""

    handle: int
    sample_index: int
    first_position: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    top: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclass(frozen=True)
class SampleEnd:
    """The end of a sample on decode. `error_reason` is empty when it ended well."""

    handle: int
    sample_index: int
    finish_reason: FinishReason
    error_reason: str = ""
    stages: tuple[Stage, ...] = ()


@dataclass(frozen=True)
class TokenFrame:
    """One message of a router's token stream."""

    frame_number: int
    records: tuple[TokenRecord, ...] = ()
    ends: tuple[SampleEnd, ...] = ()


@dataclass(frozen=True)
class TokenLogprob:
    """One generated token, its log-probability and the likeliest alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class ChatMessage:
    """One turn: role is `system`, `user` or `assistant`."""

    role: str
    content: str


@dataclass(frozen=True)
class GenerateCommand:
    """A public request as it came in. Exactly one of `text`, `chat`, `token_ids` is not None.

    `sampling` holds only what the client set, by field name of SamplingParams; the router fills in the rest.
    """

    text: str | None = None
    chat: tuple[ChatMessage, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    sampling: dict[str, object] = field(default_factory=dict)
    request_id: str = ""
    stream_interval: int = 0
    final_only: bool = False
    cache_salt: str = ""
    priority: int = 0


@dataclass(frozen=True)
class SampleDelta:
    """New tokens and text of one sample."""

    sample_index: int
    first_position: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason = FinishReason.NONE
    matched_stop: str = ""


@dataclass(frozen=True)
class FinalSummary:
    """The end of an answer; times in seconds since acceptance."""

    usage: Usage
    stages: tuple[Stage, ...]
    seed: int
    trace_id: str
    time_to_first_token_s: float
    duration_s: float


@dataclass(frozen=True)
class GenerateEvent:
    """One message of an answer; `final` only in the last."""

    request_id: str
    deltas: tuple[SampleDelta, ...] = ()
    final: FinalSummary | None = None


@dataclass(frozen=True)
class ModelInfo:
    """What a router serves. `default_sampling` maps field names of SamplingParams to the checkpoint's defaults."""

    model: str
    max_context_tokens: int
    vocabulary_size: int
    default_sampling: dict[str, object]
    has_chat_template: bool


@dataclass(frozen=True)
class WorkerView:
    """One worker as a router sees it."""

    info: WorkerInfo
    ready: bool
    in_flight: int
    queued_tokens: int
    why_not_ready: str = ""


@dataclass(frozen=True)
class RouterLedger:
    """Snapshot of a router."""

    queued_requests: int = 0
    queued_tokens: int = 0
    running_requests: int = 0
    open_handles: int = 0


@dataclass(frozen=True)
class PrefixHolder:
    """A worker that holds the first `num_blocks` blocks of a prompt."""

    worker: WorkerIdentity
    num_blocks: int
