"""protobuf <-> our values: the token frames of `decode.proto`, one numpy array a column and nothing per token in protobuf."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.errors import InternalError, InvalidRequest
from headrace.protocol import decode as p
from headrace.v1 import decode_pb2
from headrace.wire.common import finish_reason_from_pb, stage_to_pb, stages_from_pb


def _column(values: Sequence[float], dtype: str) -> bytes:
    return np.asarray(values, dtype=dtype).tobytes()


def frame_to_pb(value: p.TokenFrame) -> decode_pb2.TokenFrame:
    """A frame as columns; one numpy array a column, nothing per token in protobuf."""
    records = value.records
    message = decode_pb2.TokenFrame(
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


def _add_logprob_columns(message: decode_pb2.TokenFrame, records: Sequence[p.TokenRecord]) -> None:
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
        output_token_count=value.output_tokens,
    )


def frame_from_pb(message: decode_pb2.TokenFrame) -> p.TokenFrame:
    """A frame from its columns. Columns whose lengths do not fit together are refused."""
    try:
        records = _records_from_pb(message)
    except (ValueError, RuntimeError) as error:  # RuntimeError: a column ended early
        raise InvalidRequest("columns of a frame do not fit together", field="columns") from error
    ends = tuple(
        p.SampleEnd(
            end.handle,
            end.sample_index,
            finish_reason_from_pb(end.finish_reason),
            end.error_reason,
            stages_from_pb(end.stages),
            end.output_token_count,
        )
        for end in message.ends
    )
    return p.TokenFrame(records, ends)


def _records_from_pb(message: decode_pb2.TokenFrame) -> tuple[p.TokenRecord, ...]:
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


class _LogprobReader:
    """Walks the three log-probability columns record by record."""

    def __init__(self, message: decode_pb2.TokenFrame):
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


class FrameCodec:
    """Items of a token link: frames themselves. Has the methods of ItemCodec; frames answer nothing and have no deadline."""

    carries_answers = False
    carries_failures = False

    def to_pb(self, body: object, command_number: int = 0) -> decode_pb2.TokenFrame:
        """The item."""
        if not isinstance(body, p.TokenFrame):
            raise InternalError(f"{type(body).__name__} is no item of a token link")
        return frame_to_pb(body)

    def command_number(self, item: decode_pb2.TokenFrame) -> int:
        """None."""
        return 0

    def from_pb(self, item: decode_pb2.TokenFrame) -> p.TokenFrame:
        """The frame."""
        return frame_from_pb(item)

    def set_time_left(self, item: decode_pb2.TokenFrame, seconds: float) -> None:
        """Frames have none."""
