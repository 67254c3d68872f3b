"""What prefill ranks and their routers say, as plain values: `protos/headrace/v1/prefill.proto`."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.protocol.common import BlockLedger, FinishReason, SamplingParams, Stage
from headrace.protocol.decode import Reservation


@dataclass(frozen=True)
class PrefillCommand:
    """One attempt at one prompt. `delivered` maps a sample to the output tokens the client already has."""

    request_id: str
    attempt: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    sample_indices: tuple[int, ...]
    delivered: dict[int, tuple[int, ...]]
    reservation: Reservation | None = None
    cache_salt: str = ""
    time_left_s: float = 0.0
    priority: int = 0
    trace_parent: str = ""
    display_id: str = ""


@dataclass(frozen=True)
class CancelPrefillCommand:
    """The router needs no more of an attempt. Answered by nothing."""

    request_id: str
    attempt: int


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
    """Answer to a PrefillCommand that is not the last: tokens of all samples."""

    tokens: tuple[FirstToken, ...]
    cached_tokens: int
    computed_tokens: int


@dataclass(frozen=True)
class Committed:
    """Last answer to a PrefillCommand: the attempt is done."""

    pushed_bytes: int
    stages: tuple[Stage, ...]


@dataclass(frozen=True)
class HeldPrefixes:
    """Keys of blocks that a prefill rank can use again, in the order of events; a snapshot replaces what was said before."""

    is_snapshot: bool = False
    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class PrefillLedger:
    """Snapshot of a prefill rank."""

    blocks: BlockLedger
    queued_requests: int = 0
    queued_tokens: int = 0
    running_requests: int = 0
    batches: int = 0
