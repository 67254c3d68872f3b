"""What decode ranks, their routers and their writers say, as plain values: `protos/headrace/v1/decode.proto`."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from headrace.protocol.common import BlockLedger, FinishReason, SamplingParams, Stage, TransferBackend, WorkerIdentity


class StopState(enum.IntEnum):
    """Whether late writes of a reservation are impossible."""

    DRAINED = 1
    UNKNOWN = 2


@dataclass(frozen=True)
class TargetDescriptor:
    """How rows are written into a decode rank's pool: strides and sizes in bytes, counts in layers and blocks."""

    backend: TransferBackend
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
class Promise:
    """What a decode rank promises to one writer; it travels signed, in a Reservation."""

    reservation_id: str
    request_id: str
    attempt: int
    decode: WorkerIdentity
    writer: WorkerIdentity
    target: TargetDescriptor
    sequences: tuple[TargetSequence, ...]
    layout_fingerprint: str


@dataclass(frozen=True)
class Reservation:
    """A promise as bytes and the code over exactly those bytes; routers carry it without reading it."""

    promise: bytes
    code: bytes
    expires_in_s: float


@dataclass(frozen=True)
class ReserveCommand:
    """Asks for room for one attempt; `sample_indices` and `delivered_counts` run in parallel. `time_left_s` is set by the link."""

    request_id: str
    attempt: int
    writer: WorkerIdentity
    prompt_tokens: int
    sample_indices: tuple[int, ...]
    delivered_counts: tuple[int, ...]
    sampling: SamplingParams
    stream_interval: int
    handle: int
    time_left_s: float = 0.0
    priority: int = 0
    prefix_keys: tuple[bytes, ...] = ()
    cache_salt: str = ""
    trace_parent: str = ""
    display_id: str = ""


@dataclass(frozen=True)
class ReleaseCommand:
    """Ends attempts up to `attempt`; empty `sample_indices` ends all samples."""

    request_id: str
    attempt: int
    sample_indices: tuple[int, ...] = ()


@dataclass(frozen=True)
class BeginCommand:
    """From the writer, before its first write: uses the promise up."""

    reservation_id: str


@dataclass(frozen=True)
class RenewCommand:
    """From the writer, before the promise expires."""

    reservation_id: str


@dataclass(frozen=True)
class Renewed:
    """Begun or renewed; expires so long from now."""

    expires_in_s: float


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
    manifest: tuple[SequenceManifest, ...]
    samples: tuple[SampleState, ...]
    prompt_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class CommitAccepted:
    """The request steps from now on."""

    commit_duration_s: float


@dataclass(frozen=True)
class StopCommand:
    """From the decode rank to a writer: no write of this reservation starts from now on."""

    reservation_id: str
    wait_s: float


@dataclass(frozen=True)
class Stopped:
    """The writer's answer."""

    state: StopState


class TokenRecord(NamedTuple):
    """Tokens of one sample in one frame. `logprobs` is None when not asked for; `top` has one tuple per token.

    The one value that is made for every token: a tuple is made several times faster than a frozen dataclass.
    """

    handle: int
    sample_index: int
    first_position: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    top: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclass(frozen=True)
class SampleEnd:
    """The end of a sample on decode. `error_reason` is empty when it ended well; `output_tokens` counts all of its output."""

    handle: int
    sample_index: int
    finish_reason: FinishReason
    error_reason: str = ""
    stages: tuple[Stage, ...] = ()
    output_tokens: int = 0


@dataclass(frozen=True)
class TokenFrame:
    """An item of a token link: what one step brought to one router."""

    records: tuple[TokenRecord, ...] = ()
    ends: tuple[SampleEnd, ...] = ()


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
    open_links: int = 0
