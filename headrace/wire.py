"""protobuf <-> our dataclasses, both directions side by side.

`x_to_pb(value)` makes a message; `x_from_pb(message)` makes a value and raises InvalidRequest, naming the field, when the
message cannot mean one. Packed columns are little-endian int32, int64 or float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from google.protobuf.duration_pb2 import Duration

from headrace import protocol as p
from headrace.errors import InvalidRequest
from headrace.v1 import common_pb2, decode_pb2, inference_pb2, kvstore_pb2, prefill_pb2, router_pb2

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


# --- scalars and columns ---------------------------------------------------------------------------------------------


def pack_ids(ids: Sequence[int]) -> bytes:
    """Ids as little-endian int32."""
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(data: bytes, field: str) -> tuple[int, ...]:
    """The inverse of `pack_ids`; `field` names the column in the error."""
    if len(data) % 4:
        raise InvalidRequest(f"{field}: {len(data)} bytes are no whole number of int32", field=field)
    return tuple(np.frombuffer(data, dtype="<i4").tolist())


def duration_to_pb(seconds: float) -> Duration:
    """Seconds as a protobuf Duration."""
    nanos = round(seconds * 1e9)
    return Duration(seconds=nanos // 1_000_000_000, nanos=nanos % 1_000_000_000)


def duration_from_pb(message: Duration) -> float:
    """A protobuf Duration in seconds."""
    return message.seconds + message.nanos * 1e-9


# --- common ----------------------------------------------------------------------------------------------------------


def sampling_to_pb(value: p.SamplingParams) -> common_pb2.SamplingParams:
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


def sampling_from_pb(message: common_pb2.SamplingParams) -> p.SamplingParams:
    """A resolved SamplingParams between services."""
    return p.SamplingParams(**sampling_given(message), eos_token_ids=tuple(message.eos_token_ids))  # type: ignore[arg-type]


def identity_to_pb(value: p.WorkerIdentity) -> common_pb2.WorkerIdentity:
    """Address and epoch."""
    return common_pb2.WorkerIdentity(address=value.address, epoch=value.epoch)


def identity_from_pb(message: common_pb2.WorkerIdentity) -> p.WorkerIdentity:
    """Address and epoch."""
    return p.WorkerIdentity(message.address, message.epoch)


def layout_to_pb(value: p.KvLayout) -> common_pb2.KvLayout:
    """Layout of a pool."""
    return common_pb2.KvLayout(
        layer_count=value.layer_count,
        row_dim=value.row_dim,
        dtype=value.dtype,
        block_size=value.block_size,
        rope_order=value.rope_order,
        model_fingerprint=value.model_fingerprint,
    )


def layout_from_pb(message: common_pb2.KvLayout) -> p.KvLayout:
    """Layout of a pool."""
    return p.KvLayout(
        layer_count=message.layer_count,
        row_dim=message.row_dim,
        dtype=message.dtype,
        block_size=message.block_size,
        rope_order=message.rope_order,
        model_fingerprint=message.model_fingerprint,
    )


def worker_info_to_pb(value: p.WorkerInfo) -> common_pb2.WorkerInfo:
    """What a worker says of itself."""
    return common_pb2.WorkerInfo(
        identity=identity_to_pb(value.identity),
        role=value.role,
        model=value.model,
        layout=layout_to_pb(value.layout),
        block_count=value.block_count,
        max_context_tokens=value.max_context_tokens,
        max_batch_tokens=value.max_batch_tokens,
        max_batch_size=value.max_batch_size,
        exact=value.exact,
        transfer=value.transfer,
    )


def worker_info_from_pb(message: common_pb2.WorkerInfo) -> p.WorkerInfo:
    """What a worker says of itself."""
    return p.WorkerInfo(
        identity=identity_from_pb(message.identity),
        role=message.role,
        model=message.model,
        layout=layout_from_pb(message.layout),
        block_count=message.block_count,
        max_context_tokens=message.max_context_tokens,
        max_batch_tokens=message.max_batch_tokens,
        max_batch_size=message.max_batch_size,
        exact=message.exact,
        transfer=message.transfer,
    )


def block_ledger_to_pb(value: p.BlockLedger) -> common_pb2.BlockLedger:
    """Blocks by owner state."""
    return common_pb2.BlockLedger(
        free=value.free,
        cached=value.cached,
        reserved=value.reserved,
        running=value.running,
        quarantined=value.quarantined,
    )


def block_ledger_from_pb(message: common_pb2.BlockLedger) -> p.BlockLedger:
    """Blocks by owner state."""
    return p.BlockLedger(message.free, message.cached, message.reserved, message.running, message.quarantined)


def stage_to_pb(value: p.Stage) -> common_pb2.Stage:
    """One stage."""
    return common_pb2.Stage(
        name=value.name,
        start=duration_to_pb(value.start_s),
        duration=duration_to_pb(value.duration_s),
        token_count=value.tokens,
        byte_count=value.bytes,
    )


def stage_from_pb(message: common_pb2.Stage) -> p.Stage:
    """One stage."""
    return p.Stage(
        message.name,
        duration_from_pb(message.start),
        duration_from_pb(message.duration),
        message.token_count,
        message.byte_count,
    )


def _stages_from_pb(messages: Sequence[common_pb2.Stage]) -> tuple[p.Stage, ...]:
    return tuple(stage_from_pb(message) for message in messages)


# --- decode ----------------------------------------------------------------------------------------------------------


def target_to_pb(value: p.TargetDescriptor) -> decode_pb2.TransferTarget:
    """Where rows go."""
    return decode_pb2.TransferTarget(
        backend=value.backend,
        session=value.session,
        base_address=value.base_address,
        layer_stride_bytes=value.layer_stride_bytes,
        block_stride_bytes=value.block_stride_bytes,
        row_bytes=value.row_bytes,
        block_size=value.block_size,
        layer_count=value.num_layers,
        block_count=value.num_blocks,
    )


def target_from_pb(message: decode_pb2.TransferTarget) -> p.TargetDescriptor:
    """Where rows go."""
    return p.TargetDescriptor(
        backend=message.backend,
        session=message.session,
        base_address=message.base_address,
        layer_stride_bytes=message.layer_stride_bytes,
        block_stride_bytes=message.block_stride_bytes,
        row_bytes=message.row_bytes,
        block_size=message.block_size,
        num_layers=message.layer_count,
        num_blocks=message.block_count,
    )


def reservation_to_pb(value: p.Reservation) -> decode_pb2.Reservation:
    """A promise of room."""
    return decode_pb2.Reservation(
        reservation_id=value.reservation_id,
        decode=identity_to_pb(value.decode),
        target=target_to_pb(value.target),
        sequences=[
            decode_pb2.TargetSequence(
                sample_index=sequence.sample_index,
                first_row=sequence.first_row,
                row_count=sequence.num_rows,
                block_ids=pack_ids(sequence.block_ids),
            )
            for sequence in value.sequences
        ],
        layout_fingerprint=value.layout_fingerprint,
        held_prefix_token_count=value.held_prefix_tokens,
        expires_in=duration_to_pb(value.expires_in_s),
    )


def reservation_from_pb(message: decode_pb2.Reservation) -> p.Reservation:
    """A promise of room."""
    return p.Reservation(
        reservation_id=message.reservation_id,
        decode=identity_from_pb(message.decode),
        target=target_from_pb(message.target),
        sequences=tuple(
            p.TargetSequence(
                sequence.sample_index,
                sequence.first_row,
                sequence.row_count,
                unpack_ids(sequence.block_ids, "reservation.sequences.block_ids"),
            )
            for sequence in message.sequences
        ),
        layout_fingerprint=message.layout_fingerprint,
        held_prefix_tokens=message.held_prefix_token_count,
        expires_in_s=duration_from_pb(message.expires_in),
    )


def reserve_to_pb(value: p.ReserveCommand) -> decode_pb2.ReserveRequest:
    """Asks for room."""
    return decode_pb2.ReserveRequest(
        request_id=value.request_id,
        attempt=value.attempt,
        writer=identity_to_pb(value.writer),
        prompt_token_count=value.prompt_tokens,
        delivered_token_counts=value.delivered_counts,
        sample_indices=value.sample_indices,
        sampling=sampling_to_pb(value.sampling),
        stream_interval=value.stream_interval,
        router=identity_to_pb(value.router),
        handle=value.handle,
        decode_epoch=value.decode_epoch,
    )


def reserve_from_pb(message: decode_pb2.ReserveRequest) -> p.ReserveCommand:
    """Asks for room; refuses counts that cannot be."""
    _need(message.request_id, "request_id")
    _need(message.attempt >= 1, "attempt")
    _need(message.prompt_token_count >= 1, "prompt_token_count")
    _need(len(message.sample_indices) >= 1, "sample_indices")
    _need(len(message.delivered_token_counts) == len(message.sample_indices), "delivered_token_counts")
    return p.ReserveCommand(
        request_id=message.request_id,
        attempt=message.attempt,
        writer=identity_from_pb(message.writer),
        prompt_tokens=message.prompt_token_count,
        sample_indices=tuple(message.sample_indices),
        delivered_counts=tuple(message.delivered_token_counts),
        sampling=sampling_from_pb(message.sampling),
        stream_interval=max(1, message.stream_interval),
        router=identity_from_pb(message.router),
        handle=message.handle,
        decode_epoch=message.decode_epoch,
    )


def _manifest_to_pb(value: p.SequenceManifest) -> decode_pb2.SequenceManifest:
    return decode_pb2.SequenceManifest(
        sample_index=value.sample_index,
        first_row=value.first_row,
        layers=[decode_pb2.LayerManifest(row_count=x.num_rows, checksum=x.checksum) for x in value.layers],
    )


def _manifest_from_pb(message: decode_pb2.SequenceManifest) -> p.SequenceManifest:
    layers = tuple(p.LayerManifest(layer.row_count, layer.checksum) for layer in message.layers)
    return p.SequenceManifest(message.sample_index, message.first_row, layers)


def commit_to_pb(value: p.CommitCommand) -> decode_pb2.CommitRequest:
    """The hand-over."""
    return decode_pb2.CommitRequest(
        reservation_id=value.reservation_id,
        request_id=value.request_id,
        attempt=value.attempt,
        writer_epoch=value.writer_epoch,
        manifest=[_manifest_to_pb(entry) for entry in value.manifest],
        samples=[
            decode_pb2.SampleState(sample_index=x.sample_index, output_token_ids=pack_ids(x.output_token_ids))
            for x in value.samples
        ],
        prompt_token_ids=pack_ids(value.prompt_token_ids),
    )


def commit_from_pb(message: decode_pb2.CommitRequest) -> p.CommitCommand:
    """The hand-over."""
    _need(message.reservation_id, "reservation_id")
    _need(len(message.samples) >= 1, "samples")
    return p.CommitCommand(
        reservation_id=message.reservation_id,
        request_id=message.request_id,
        attempt=message.attempt,
        writer_epoch=message.writer_epoch,
        manifest=tuple(_manifest_from_pb(entry) for entry in message.manifest),
        samples=tuple(
            p.SampleState(x.sample_index, unpack_ids(x.output_token_ids, "samples.output_token_ids"))
            for x in message.samples
        ),
        prompt_token_ids=unpack_ids(message.prompt_token_ids, "prompt_token_ids"),
    )


def _column(values: Sequence[float], dtype: str) -> bytes:
    return np.asarray(values, dtype=dtype).tobytes()


def frame_to_pb(value: p.TokenFrame) -> decode_pb2.StreamTokensResponse:
    """A frame as columns; one numpy array a column, nothing per token in protobuf."""
    records = value.records
    message = decode_pb2.StreamTokensResponse(
        frame_number=value.frame_number,
        handles=_column([x.handle for x in records], "<i8"),
        sample_indices=_column([x.sample_index for x in records], "<i4"),
        first_positions=_column([x.first_position for x in records], "<i4"),
        token_counts=_column([len(x.token_ids) for x in records], "<i4"),
        token_ids=_column([token for x in records for token in x.token_ids], "<i4"),
        ends=[_end_to_pb(end) for end in value.ends],
    )
    if any(x.logprobs is not None for x in records):
        _add_logprob_columns(message, records)
    return message


def _add_logprob_columns(message: decode_pb2.StreamTokensResponse, records: Sequence[p.TokenRecord]) -> None:
    counts = [-1 if x.logprobs is None else (len(x.top[0]) if x.top else 0) for x in records]
    alternatives = [pair for x in records if x.logprobs is not None for top in x.top for pair in top]
    message.top_counts = _column(counts, "<i4")
    message.logprobs = _column([value for x in records for value in x.logprobs or ()], "<f4")
    message.top_token_ids = _column([token for token, _ in alternatives], "<i4")
    message.top_logprobs = _column([value for _, value in alternatives], "<f4")


def _end_to_pb(value: p.SampleEnd) -> decode_pb2.SampleEnd:
    return decode_pb2.SampleEnd(
        handle=value.handle,
        sample_index=value.sample_index,
        finish_reason=int(value.finish_reason),  # type: ignore[arg-type]
        error_reason=value.error_reason,
        stages=[stage_to_pb(stage) for stage in value.stages],
    )


def frame_from_pb(message: decode_pb2.StreamTokensResponse) -> p.TokenFrame:
    """A frame from its columns. Columns whose lengths do not fit together are refused."""
    try:
        records = _records_from_pb(message)
    except (ValueError, RuntimeError) as error:  # RuntimeError: a column ended early
        raise InvalidRequest(f"columns of frame {message.frame_number} do not fit together", field="columns") from error
    ends = tuple(
        p.SampleEnd(
            end.handle,
            end.sample_index,
            _finish_reason(end.finish_reason),
            end.error_reason,
            _stages_from_pb(end.stages),
        )
        for end in message.ends
    )
    return p.TokenFrame(message.frame_number, records, ends)


def _records_from_pb(message: decode_pb2.StreamTokensResponse) -> tuple[p.TokenRecord, ...]:
    handles = np.frombuffer(message.handles, "<i8").tolist()
    samples = np.frombuffer(message.sample_indices, "<i4").tolist()
    firsts = np.frombuffer(message.first_positions, "<i4").tolist()
    counts = np.frombuffer(message.token_counts, "<i4").tolist()
    ids = np.frombuffer(message.token_ids, "<i4").tolist()
    top_counts = np.frombuffer(message.top_counts, "<i4").tolist() or [-1] * len(handles)
    if sum(counts) != len(ids) or min(counts, default=0) < 0:
        raise ValueError(f"{counts} tokens a record, {len(ids)} in all")
    take = _LogprobReader(message)
    records, offset = [], 0
    for handle, sample, first, count, top_count in zip(handles, samples, firsts, counts, top_counts, strict=True):
        logprobs, top = take(count, top_count)
        records.append(p.TokenRecord(handle, sample, first, tuple(ids[offset : offset + count]), logprobs, top))
        offset += count
    take.check_end()
    return tuple(records)


def _finish_reason(value: int) -> p.FinishReason:
    try:
        return p.FinishReason(value)
    except ValueError as error:
        raise InvalidRequest(f"finish_reason: {value} is unknown here", field="finish_reason") from error


class _LogprobReader:
    """Walks the three log-probability columns record by record."""

    def __init__(self, message: decode_pb2.StreamTokensResponse):
        self._logprobs = iter(np.frombuffer(message.logprobs, "<f4").tolist())
        ids = np.frombuffer(message.top_token_ids, "<i4").tolist()
        self._top = iter(zip(ids, np.frombuffer(message.top_logprobs, "<f4").tolist(), strict=True))

    def __call__(self, count: int, top_count: int):
        if top_count < 0:
            return None, ()
        logprobs = tuple(next(self._logprobs) for _ in range(count))  # RuntimeError when the column ends early
        top = tuple(tuple(next(self._top) for _ in range(top_count)) for _ in range(count))
        return logprobs, top

    def check_end(self) -> None:
        """Raises ValueError when something is left in a column."""
        if next(self._logprobs, None) is not None or next(self._top, None) is not None:
            raise ValueError("log-probabilities of no record")


def decode_ledger_to_pb(value: p.DecodeLedger) -> decode_pb2.GetDecodeLedgerResponse:
    """Snapshot of a decode rank."""
    return decode_pb2.GetDecodeLedgerResponse(
        blocks=block_ledger_to_pb(value.blocks),
        waiting_request_count=value.waiting_requests,
        reserved_request_count=value.reserved_requests,
        running_request_count=value.running_requests,
        quarantined_request_count=value.quarantined_requests,
        step_count=value.steps,
        fence_count=value.fences,
        open_stream_count=value.open_streams,
    )


def decode_ledger_from_pb(message: decode_pb2.GetDecodeLedgerResponse) -> p.DecodeLedger:
    """Snapshot of a decode rank."""
    return p.DecodeLedger(
        blocks=block_ledger_from_pb(message.blocks),
        waiting_requests=message.waiting_request_count,
        reserved_requests=message.reserved_request_count,
        running_requests=message.running_request_count,
        quarantined_requests=message.quarantined_request_count,
        steps=message.step_count,
        fences=message.fence_count,
        open_streams=message.open_stream_count,
    )


# --- prefill ---------------------------------------------------------------------------------------------------------


def prefill_to_pb(value: p.PrefillCommand) -> prefill_pb2.PrefillRequest:
    """One attempt at one prompt."""
    message = prefill_pb2.PrefillRequest(
        request_id=value.request_id,
        attempt=value.attempt,
        prompt_token_ids=pack_ids(value.prompt_token_ids),
        sampling=sampling_to_pb(value.sampling),
        sample_indices=value.sample_indices,
        delivered=[
            prefill_pb2.DeliveredTokens(sample_index=sample, token_ids=pack_ids(ids))
            for sample, ids in value.delivered.items()
        ],
        cache_salt=value.cache_salt,
        prefill_epoch=value.prefill_epoch,
    )
    if value.reservation is not None:
        message.reservation.CopyFrom(reservation_to_pb(value.reservation))
    return message


def prefill_from_pb(message: prefill_pb2.PrefillRequest) -> p.PrefillCommand:
    """One attempt at one prompt."""
    _need(message.request_id, "request_id")
    _need(message.attempt >= 1, "attempt")
    _need(message.prompt_token_ids, "prompt_token_ids")
    _need(len(message.sample_indices) >= 1, "sample_indices")
    return p.PrefillCommand(
        request_id=message.request_id,
        attempt=message.attempt,
        prompt_token_ids=unpack_ids(message.prompt_token_ids, "prompt_token_ids"),
        sampling=sampling_from_pb(message.sampling),
        sample_indices=tuple(message.sample_indices),
        delivered={x.sample_index: unpack_ids(x.token_ids, "delivered.token_ids") for x in message.delivered},
        reservation=reservation_from_pb(message.reservation) if message.HasField("reservation") else None,
        cache_salt=message.cache_salt,
        prefill_epoch=message.prefill_epoch,
    )


def _first_token_to_pb(value: p.FirstToken) -> prefill_pb2.FirstToken:
    return prefill_pb2.FirstToken(
        sample_index=value.sample_index,
        position=value.position,
        token_id=value.token_id,
        logprob=value.logprob,
        top_token_ids=[token for token, _ in value.top],
        top_logprobs=[logprob for _, logprob in value.top],
        finish_reason=int(value.finish_reason),  # type: ignore[arg-type]
    )


def _first_token_from_pb(message: prefill_pb2.FirstToken) -> p.FirstToken:
    _need(len(message.top_token_ids) == len(message.top_logprobs), "top_logprobs")
    return p.FirstToken(
        sample_index=message.sample_index,
        position=message.position,
        token_id=message.token_id,
        logprob=message.logprob,
        top=tuple(zip(message.top_token_ids, message.top_logprobs, strict=False)),
        finish_reason=_finish_reason(message.finish_reason),
    )


def prefill_event_to_pb(value: p.PrefillEvent) -> prefill_pb2.PrefillResponse:
    """An event of an attempt."""
    if isinstance(value, p.FirstTokens):
        first = prefill_pb2.FirstTokens(
            tokens=[_first_token_to_pb(token) for token in value.tokens],
            cached_token_count=value.cached_tokens,
            computed_token_count=value.computed_tokens,
        )
        return prefill_pb2.PrefillResponse(first_tokens=first)
    if isinstance(value, p.Committed):
        stages = [stage_to_pb(stage) for stage in value.stages]
        return prefill_pb2.PrefillResponse(
            committed=prefill_pb2.Committed(pushed_byte_count=value.pushed_bytes, stages=stages)
        )
    failed = prefill_pb2.PrefillFailed(reason=value.reason, message=value.message, retryable=value.retryable)
    return prefill_pb2.PrefillResponse(failed=failed)


def prefill_event_from_pb(message: prefill_pb2.PrefillResponse) -> p.PrefillEvent:
    """An event of an attempt."""
    kind = message.WhichOneof("event")
    if kind == "first_tokens":
        first = message.first_tokens
        tokens = tuple(_first_token_from_pb(token) for token in first.tokens)
        return p.FirstTokens(tokens, first.cached_token_count, first.computed_token_count)
    if kind == "committed":
        return p.Committed(message.committed.pushed_byte_count, _stages_from_pb(message.committed.stages))
    if kind == "failed":
        return p.PrefillFailed(message.failed.reason, message.failed.message, message.failed.retryable)
    raise InvalidRequest("event: a prefill response without an event", field="event")


def prefill_ledger_to_pb(value: p.PrefillLedger) -> prefill_pb2.GetPrefillLedgerResponse:
    """Snapshot of a prefill rank."""
    return prefill_pb2.GetPrefillLedgerResponse(
        blocks=block_ledger_to_pb(value.blocks),
        queued_request_count=value.queued_requests,
        queued_token_count=value.queued_tokens,
        running_request_count=value.running_requests,
        batch_count=value.batches,
    )


def prefill_ledger_from_pb(message: prefill_pb2.GetPrefillLedgerResponse) -> p.PrefillLedger:
    """Snapshot of a prefill rank."""
    return p.PrefillLedger(
        blocks=block_ledger_from_pb(message.blocks),
        queued_requests=message.queued_request_count,
        queued_tokens=message.queued_token_count,
        running_requests=message.running_request_count,
        batches=message.batch_count,
    )


# --- inference -------------------------------------------------------------------------------------------------------


def generate_to_pb(value: p.GenerateCommand) -> inference_pb2.GenerateRequest:
    """A public request."""
    message = inference_pb2.GenerateRequest(
        sampling=sampling_given_to_pb(value.sampling),
        request_id=value.request_id,
        stream_interval=value.stream_interval,
        final_only=value.final_only,
        cache_salt=value.cache_salt,
        priority=value.priority,
    )
    if value.text is not None:
        message.text = value.text
    if value.chat is not None:
        message.chat.SetInParent()
        message.chat.messages.extend(inference_pb2.ChatMessage(role=x.role, content=x.content) for x in value.chat)
    if value.token_ids is not None:
        message.tokens.SetInParent()
        message.tokens.token_ids.extend(value.token_ids)
    return message


def generate_from_pb(message: inference_pb2.GenerateRequest) -> p.GenerateCommand:
    """A public request; limits are the router's business."""
    kind = message.WhichOneof("prompt")
    turns = tuple(p.ChatMessage(turn.role, turn.content) for turn in message.chat.messages)
    return p.GenerateCommand(
        text=message.text if kind == "text" else None,
        chat=turns if kind == "chat" else None,
        token_ids=tuple(message.tokens.token_ids) if kind == "tokens" else None,
        sampling=sampling_given(message.sampling),
        request_id=message.request_id,
        stream_interval=message.stream_interval,
        final_only=message.final_only,
        cache_salt=message.cache_salt,
        priority=message.priority,
    )


def _token_logprob_to_pb(value: p.TokenLogprob) -> inference_pb2.TokenLogprob:
    top = [inference_pb2.TopLogprob(token_id=token, logprob=logprob) for token, logprob in value.top]
    return inference_pb2.TokenLogprob(token_id=value.token_id, logprob=value.logprob, top=top)


def _delta_to_pb(value: p.SampleDelta) -> inference_pb2.SampleDelta:
    return inference_pb2.SampleDelta(
        sample_index=value.sample_index,
        first_position=value.first_position,
        token_ids=value.token_ids,
        text=value.text,
        logprobs=[_token_logprob_to_pb(entry) for entry in value.logprobs],
        finish_reason=int(value.finish_reason),  # type: ignore[arg-type]
        matched_stop=value.matched_stop,
    )


def _delta_from_pb(message: inference_pb2.SampleDelta) -> p.SampleDelta:
    return p.SampleDelta(
        sample_index=message.sample_index,
        first_position=message.first_position,
        token_ids=tuple(message.token_ids),
        text=message.text,
        logprobs=tuple(
            p.TokenLogprob(x.token_id, x.logprob, tuple((top.token_id, top.logprob) for top in x.top))
            for x in message.logprobs
        ),
        finish_reason=_finish_reason(message.finish_reason),
        matched_stop=message.matched_stop,
    )


def usage_to_pb(value: p.Usage) -> common_pb2.Usage:
    """Token counts."""
    return common_pb2.Usage(
        prompt_token_count=value.prompt_tokens,
        cached_token_count=value.cached_tokens,
        computed_token_count=value.computed_tokens,
        generated_token_count=value.generated_tokens,
        attempt_count=value.attempts,
    )


def usage_from_pb(message: common_pb2.Usage) -> p.Usage:
    """Token counts."""
    return p.Usage(
        message.prompt_token_count,
        message.cached_token_count,
        message.computed_token_count,
        message.generated_token_count,
        message.attempt_count,
    )


def generate_event_to_pb(value: p.GenerateEvent) -> inference_pb2.GenerateResponse:
    """A part of an answer."""
    message = inference_pb2.GenerateResponse(
        request_id=value.request_id, deltas=[_delta_to_pb(delta) for delta in value.deltas]
    )
    if value.final is not None:
        final = value.final
        message.final.CopyFrom(
            inference_pb2.FinalSummary(
                usage=usage_to_pb(final.usage),
                stages=[stage_to_pb(stage) for stage in final.stages],
                seed=final.seed,
                trace_id=final.trace_id,
                time_to_first_token=duration_to_pb(final.time_to_first_token_s),
                duration=duration_to_pb(final.duration_s),
            )
        )
    return message


def generate_event_from_pb(message: inference_pb2.GenerateResponse) -> p.GenerateEvent:
    """A part of an answer."""
    final = None
    if message.HasField("final"):
        final = p.FinalSummary(
            usage=usage_from_pb(message.final.usage),
            stages=_stages_from_pb(message.final.stages),
            seed=message.final.seed,
            trace_id=message.final.trace_id,
            time_to_first_token_s=duration_from_pb(message.final.time_to_first_token),
            duration_s=duration_from_pb(message.final.duration),
        )
    deltas = tuple(_delta_from_pb(delta) for delta in message.deltas)
    return p.GenerateEvent(message.request_id, deltas, final)


def model_to_pb(value: p.ModelInfo) -> inference_pb2.GetModelResponse:
    """The model and its limits."""
    return inference_pb2.GetModelResponse(
        model=value.model,
        max_context_tokens=value.max_context_tokens,
        vocabulary_size=value.vocabulary_size,
        default_sampling=sampling_given_to_pb(value.default_sampling),
        has_chat_template=value.has_chat_template,
    )


def model_from_pb(message: inference_pb2.GetModelResponse) -> p.ModelInfo:
    """The model and its limits."""
    return p.ModelInfo(
        model=message.model,
        max_context_tokens=message.max_context_tokens,
        vocabulary_size=message.vocabulary_size,
        default_sampling=sampling_given(message.default_sampling),
        has_chat_template=message.has_chat_template,
    )


# --- router, kvstore -------------------------------------------------------------------------------------------------


def worker_view_to_pb(value: p.WorkerView) -> router_pb2.WorkerView:
    """A worker as the router sees it."""
    return router_pb2.WorkerView(
        info=worker_info_to_pb(value.info),
        ready=value.ready,
        in_flight_count=value.in_flight,
        queued_token_count=value.queued_tokens,
        why_not_ready=value.why_not_ready,
    )


def worker_view_from_pb(message: router_pb2.WorkerView) -> p.WorkerView:
    """A worker as the router sees it."""
    return p.WorkerView(
        worker_info_from_pb(message.info),
        message.ready,
        message.in_flight_count,
        message.queued_token_count,
        message.why_not_ready,
    )


def router_ledger_to_pb(value: p.RouterLedger) -> router_pb2.GetRouterLedgerResponse:
    """Requests in flight."""
    return router_pb2.GetRouterLedgerResponse(
        queued_request_count=value.queued_requests,
        queued_token_count=value.queued_tokens,
        running_request_count=value.running_requests,
        open_handle_count=value.open_handles,
    )


def router_ledger_from_pb(message: router_pb2.GetRouterLedgerResponse) -> p.RouterLedger:
    """Requests in flight."""
    return p.RouterLedger(
        message.queued_request_count,
        message.queued_token_count,
        message.running_request_count,
        message.open_handle_count,
    )


def holders_to_pb(holders: Sequence[p.PrefixHolder]) -> kvstore_pb2.LookupResponse:
    """Who holds how much of a prefix."""
    return kvstore_pb2.LookupResponse(
        holders=[kvstore_pb2.PrefixHolder(worker=identity_to_pb(x.worker), block_count=x.num_blocks) for x in holders]
    )


def holders_from_pb(message: kvstore_pb2.LookupResponse) -> tuple[p.PrefixHolder, ...]:
    """Who holds how much of a prefix."""
    return tuple(p.PrefixHolder(identity_from_pb(x.worker), x.block_count) for x in message.holders)


def _need(condition: object, field: str) -> None:
    if not condition:
        raise InvalidRequest(f"{field} is missing or out of range", field=field)
