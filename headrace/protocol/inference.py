"""What clients and routers say, as plain values: `protos/headrace/v1/inference.proto`."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.protocol.common import FinishReason, Stage, Usage


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
