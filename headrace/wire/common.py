"""protobuf <-> our values, both directions side by side: `common.proto`, and the scalars and columns that all files share.

`x_to_pb(value)` makes a message; `x_from_pb(message)` makes a value and raises InvalidRequest, naming the field, when the
message cannot mean one. Packed columns are little-endian int32, int64 or float32.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from google.protobuf.duration_pb2 import Duration

from headrace.errors import InvalidRequest
from headrace.protocol.common import (
    BlockLedger,
    EpGroup,
    FinishReason,
    KvLayout,
    KvRegion,
    NumberFormat,
    RopeOrder,
    SamplingParams,
    Stage,
    TransferBackend,
    Usage,
    WorkerIdentity,
    WorkerInfo,
    WorkerProgress,
    WorkerRole,
)
from headrace.v1 import common_pb2

KEY_BYTES = 16
"""Bytes of a block key."""
DEFAULT_TIME_LEFT_S = 120.0
"""For commands and calls whose sender set no deadline."""

_OPTIONAL_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_tokens",
    "logprobs",
)

EnumT = TypeVar("EnumT", bound=enum.IntEnum)


# --- scalars and columns ---------------------------------------------------------------------------------------------


def need(condition: object, field: str) -> None:
    """Raises InvalidRequest that names `field` unless the condition holds."""
    if not condition:
        raise InvalidRequest(f"{field} is missing or out of range", field=field)


def enum_from_pb(kind: type[EnumT], value: int, field: str) -> EnumT:
    """The member of ours with this number."""
    try:
        return kind(value)
    except ValueError as error:
        raise InvalidRequest(f"{field}: {value} is unknown here", field=field) from error


def pack_ids(ids: Sequence[int]) -> bytes:
    """Ids as little-endian int32."""
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(data: bytes, field: str) -> tuple[int, ...]:
    """The inverse of `pack_ids`; `field` names the column in the error."""
    if len(data) % 4:
        raise InvalidRequest(f"{field}: {len(data)} bytes are no whole number of int32", field=field)
    return tuple(np.frombuffer(data, dtype="<i4").tolist())


def keys_to_pb(keys: Sequence[bytes]) -> bytes:
    """Block keys one after another."""
    return b"".join(keys)


def keys_from_pb(data: bytes, field: str = "keys") -> tuple[bytes, ...]:
    """The inverse of `keys_to_pb`."""
    if len(data) % KEY_BYTES:
        raise InvalidRequest(f"{field}: {len(data)} bytes are no whole number of {KEY_BYTES}-byte keys", field=field)
    return tuple(data[start : start + KEY_BYTES] for start in range(0, len(data), KEY_BYTES))


def duration_to_pb(seconds: float) -> Duration:
    """Seconds as a protobuf Duration."""
    nanos = round(seconds * 1e9)
    return Duration(seconds=nanos // 1_000_000_000, nanos=nanos % 1_000_000_000)


def set_duration(message: Duration, seconds: float) -> None:
    """Writes seconds into a Duration that belongs to another message; 0 leaves it present and empty."""
    nanos = round(seconds * 1e9)
    if nanos == 0:
        message.SetInParent()
    elif 0 < nanos < 1_000_000_000:
        message.nanos = nanos
    else:
        message.FromNanoseconds(nanos)


def duration_from_pb(message: Duration) -> float:
    """A protobuf Duration in seconds."""
    return message.seconds + message.nanos * 1e-9


def time_left_from_pb(message: Any) -> float:
    """Seconds left of a command's deadline; DEFAULT_TIME_LEFT_S when its sender set none."""
    return duration_from_pb(message.time_left) if message.HasField("time_left") else DEFAULT_TIME_LEFT_S


def finish_reason_from_pb(value: int) -> FinishReason:
    """Why a sample ended."""
    return enum_from_pb(FinishReason, value, "finish_reason")


# --- sampling --------------------------------------------------------------------------------------------------------


def sampling_to_pb(value: SamplingParams) -> common_pb2.SamplingParams:
    """A resolved SamplingParams, every field set."""
    message = common_pb2.SamplingParams(
        n=value.n,
        min_tokens=value.min_tokens,
        stop_token_ids=value.stop_token_ids,
        stop=value.stop,
        ignore_eos=value.ignore_eos,
        eos_token_ids=value.eos_token_ids,
        logit_bias=[common_pb2.LogitBias(token_id=token, bias=bias) for token, bias in value.logit_bias],
    )
    for name in _OPTIONAL_SAMPLING:
        if getattr(value, name) is not None:
            setattr(message, name, getattr(value, name))
    return message


def sampling_given(message: common_pb2.SamplingParams) -> dict[str, object]:
    """Only the fields a client set, by name of SamplingParams. Ranges are checked where defaults are known: the router."""
    given: dict[str, object] = {name: getattr(message, name) for name in _OPTIONAL_SAMPLING if message.HasField(name)}
    for name, empty in (("n", 0), ("min_tokens", 0), ("ignore_eos", False)):
        if getattr(message, name) != empty:
            given[name] = getattr(message, name)
    for name in ("stop_token_ids", "stop"):
        if getattr(message, name):
            given[name] = tuple(getattr(message, name))
    if message.logit_bias:
        given["logit_bias"] = tuple((entry.token_id, entry.bias) for entry in message.logit_bias)
    return given


def sampling_given_to_pb(given: dict[str, object]) -> common_pb2.SamplingParams:
    """A client's SamplingParams message from the fields it wants to set."""
    fields = dict(given)
    bias = fields.pop("logit_bias", ())
    message = common_pb2.SamplingParams(**{name: value for name, value in fields.items() if value is not None})
    for token, value in bias:  # type: ignore[attr-defined]
        message.logit_bias.add(token_id=token, bias=value)
    return message


def sampling_from_pb(message: common_pb2.SamplingParams) -> SamplingParams:
    """A resolved SamplingParams between services."""
    return SamplingParams(**sampling_given(message), eos_token_ids=tuple(message.eos_token_ids))  # type: ignore[arg-type]


# --- workers ---------------------------------------------------------------------------------------------------------


def identity_to_pb(value: WorkerIdentity) -> common_pb2.WorkerIdentity:
    """Address and epoch."""
    return common_pb2.WorkerIdentity(address=value.address, epoch=value.epoch)


def identity_from_pb(message: common_pb2.WorkerIdentity) -> WorkerIdentity:
    """Address and epoch."""
    return WorkerIdentity(message.address, message.epoch)


def layout_to_pb(value: KvLayout) -> common_pb2.KvLayout:
    """Layout of a pool."""
    return common_pb2.KvLayout(
        regions=[
            common_pb2.KvRegion(
                name=region.name,
                layer_count=region.layer_count,
                row_width=region.row_width,
                format=int(region.format),  # type: ignore[arg-type]
                window_token_count=region.window_tokens,
            )
            for region in value.regions
        ],
        block_size=value.block_size,
        rope_order=int(value.rope_order),  # type: ignore[arg-type]
        model_fingerprint=value.model_fingerprint,
        numeric_profile=value.numeric_profile,
    )


def layout_from_pb(message: common_pb2.KvLayout) -> KvLayout:
    """Layout of a pool."""
    return KvLayout(
        regions=tuple(
            KvRegion(
                region.name,
                region.layer_count,
                region.row_width,
                enum_from_pb(NumberFormat, region.format, "layout.regions.format"),
                region.window_token_count,
            )
            for region in message.regions
        ),
        block_size=message.block_size,
        rope_order=enum_from_pb(RopeOrder, message.rope_order, "layout.rope_order"),
        model_fingerprint=message.model_fingerprint,
        numeric_profile=message.numeric_profile,
    )


def worker_info_to_pb(value: WorkerInfo) -> common_pb2.WorkerInfo:
    """What a worker says of itself."""
    group = value.group
    return common_pb2.WorkerInfo(
        identity=identity_to_pb(value.identity),
        role=int(value.role),  # type: ignore[arg-type]
        model=value.model,
        layout=layout_to_pb(value.layout),
        block_count=value.block_count,
        max_context_tokens=value.max_context_tokens,
        max_batch_tokens=value.max_batch_tokens,
        max_batch_size=value.max_batch_size,
        exact=value.exact,
        transfer=int(value.transfer),  # type: ignore[arg-type]
        group=common_pb2.EpGroup(id=group.id, epoch=group.epoch, rank=group.rank, size=group.size),
        vocabulary_size=value.vocabulary_size,
    )


def worker_info_from_pb(message: common_pb2.WorkerInfo) -> WorkerInfo:
    """What a worker says of itself."""
    group = message.group
    return WorkerInfo(
        identity=identity_from_pb(message.identity),
        role=enum_from_pb(WorkerRole, message.role, "info.role"),
        model=message.model,
        layout=layout_from_pb(message.layout),
        block_count=message.block_count,
        max_context_tokens=message.max_context_tokens,
        max_batch_tokens=message.max_batch_tokens,
        max_batch_size=message.max_batch_size,
        exact=message.exact,
        transfer=enum_from_pb(TransferBackend, message.transfer, "info.transfer"),
        group=EpGroup(group.id, group.epoch, group.rank, max(1, group.size)),
        vocabulary_size=message.vocabulary_size,
    )


def progress_to_pb(value: WorkerProgress) -> common_pb2.WorkerProgress:
    """How a worker is."""
    return common_pb2.WorkerProgress(
        serving=value.serving,
        completed_step_count=value.completed_steps,
        completed_layer_count=value.completed_layers,
        pending_step_count=value.pending_steps,
        pause_reason=value.pause_reason,
        queued_request_count=value.queued_requests,
        queued_token_count=value.queued_tokens,
        running_request_count=value.running_requests,
        available_block_count=value.available_blocks,
    )


def progress_from_pb(message: common_pb2.WorkerProgress) -> WorkerProgress:
    """How a worker is."""
    return WorkerProgress(
        serving=message.serving,
        completed_steps=message.completed_step_count,
        completed_layers=message.completed_layer_count,
        pending_steps=message.pending_step_count,
        pause_reason=message.pause_reason,
        queued_requests=message.queued_request_count,
        queued_tokens=message.queued_token_count,
        running_requests=message.running_request_count,
        available_blocks=message.available_block_count,
    )


def block_ledger_to_pb(value: BlockLedger) -> common_pb2.BlockLedger:
    """Blocks by owner state."""
    return common_pb2.BlockLedger(
        free=value.free,
        cached=value.cached,
        reserved=value.reserved,
        running=value.running,
        quarantined=value.quarantined,
    )


def block_ledger_from_pb(message: common_pb2.BlockLedger) -> BlockLedger:
    """Blocks by owner state."""
    return BlockLedger(message.free, message.cached, message.reserved, message.running, message.quarantined)


# --- stages and usage ------------------------------------------------------------------------------------------------


def stage_to_pb(value: Stage, message: common_pb2.Stage | None = None) -> common_pb2.Stage:
    """One stage, written into `message` when one is given."""
    if message is None:
        message = common_pb2.Stage()
    message.name = value.name
    set_duration(message.start, value.start_s)
    set_duration(message.duration, value.duration_s)
    if value.tokens:
        message.token_count = value.tokens
    if value.bytes:
        message.byte_count = value.bytes
    return message


def add_stages(messages: Any, stages: Sequence[Stage]) -> None:
    """Appends stages to a repeated field, in place: there are some twenty a request."""
    for stage in stages:
        stage_to_pb(stage, messages.add())


def stage_from_pb(message: common_pb2.Stage) -> Stage:
    """One stage."""
    return Stage(
        message.name,
        duration_from_pb(message.start),
        duration_from_pb(message.duration),
        message.token_count,
        message.byte_count,
    )


def stages_from_pb(messages: Sequence[common_pb2.Stage]) -> tuple[Stage, ...]:
    """Stages in order."""
    return tuple(stage_from_pb(message) for message in messages)


def usage_to_pb(value: Usage) -> common_pb2.Usage:
    """Token counts."""
    return common_pb2.Usage(
        prompt_token_count=value.prompt_tokens,
        cached_token_count=value.cached_tokens,
        computed_token_count=value.computed_tokens,
        generated_token_count=value.generated_tokens,
        attempt_count=value.attempts,
        stored_token_count=value.stored_tokens,
    )


def usage_from_pb(message: common_pb2.Usage) -> Usage:
    """Token counts."""
    return Usage(
        message.prompt_token_count,
        message.cached_token_count,
        message.computed_token_count,
        message.generated_token_count,
        message.attempt_count,
        message.stored_token_count,
    )
