"""protobuf <-> our values: the token frames of `decode.proto`, packed by `struct`, and nothing per token in protobuf. Most frames have a few
records of few tokens: there `struct` costs two thirds of numpy."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from typing import Any

from headrace.errors import InternalError, InvalidRequest
from headrace.protocol import decode as p
from headrace.v1 import decode_pb2
from headrace.wire.common import add_stages, finish_reason_from_pb, stages_from_pb


def _column(values: Sequence[float], code: str) -> bytes:
    """Packed little-endian; `code` is a letter of `struct`."""
    return struct.pack(f"<{len(values)}{code}", *values)


def _values(column: bytes, code: str, size: int) -> tuple[Any, ...]:
    """What stands in a column. Raises struct.error when it holds no whole number of values."""
    return struct.unpack(f"<{len(column) // size}{code}", column)


def frame_to_pb(value: p.TokenFrame) -> decode_pb2.TokenFrame:
    """A frame as columns; a few calls a column, nothing per token in protobuf."""
    records = value.records
    message = decode_pb2.TokenFrame(
        handles=_column([x.handle for x in records], "q"),
        sample_indices=_column([x.sample_index for x in records], "i"),
        first_positions=_column([x.first_position for x in records], "i"),
        token_counts=_column([len(x.token_ids) for x in records], "i"),
        token_ids=_column([token for x in records for token in x.token_ids], "i"),
    )
    for end in value.ends:
        _add_end(message, end)
    if any([x.logprobs is not None for x in records]):
        _add_logprob_columns(message, records)
    return message


def _add_logprob_columns(message: decode_pb2.TokenFrame, records: Sequence[p.TokenRecord]) -> None:
    counts = [-1 if x.logprobs is None else (len(x.top[0]) if x.top else 0) for x in records]
    alternatives = [pair for x in records if x.logprobs is not None for top in x.top for pair in top]
    message.top_counts = _column(counts, "i")
    message.logprobs = _column([value for x in records for value in x.logprobs or ()], "f")
    message.top_token_ids = _column([token for token, _ in alternatives], "i")
    message.top_logprobs = _column([value for _, value in alternatives], "f")


def _add_end(message: decode_pb2.TokenFrame, value: p.SampleEnd) -> None:
    end = message.ends.add(
        handle=value.handle,
        sample_index=value.sample_index,
        finish_reason=int(value.finish_reason),
        error_reason=value.error_reason,
        output_token_count=value.output_tokens,
    )
    add_stages(end.stages, value.stages)


def frame_from_pb(message: decode_pb2.TokenFrame) -> p.TokenFrame:
    """A frame from its columns. Columns whose lengths do not fit together are refused."""
    try:
        records = _records_from_pb(message)
    except (ValueError, struct.error, RuntimeError) as error:  # RuntimeError: a column ended early
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
    handles = _values(message.handles, "q", 8)
    samples = _values(message.sample_indices, "i", 4)
    firsts = _values(message.first_positions, "i", 4)
    counts = _values(message.token_counts, "i", 4)
    ids = _values(message.token_ids, "i", 4)
    if sum(counts) != len(ids) or min(counts, default=0) < 0:
        raise ValueError(f"{counts} tokens a record, {len(ids)} in all")
    ends = itertools.accumulate(counts)
    tokens = [ids[end - count : end] for count, end in zip(counts, ends, strict=True)]
    if message.top_counts or message.logprobs or message.top_token_ids or message.top_logprobs:
        return _with_logprobs(message, list(zip(handles, samples, firsts, tokens, strict=True)))
    if not len(handles) == len(samples) == len(firsts) == len(tokens):
        raise ValueError("columns of different lengths")
    return tuple(map(p.TokenRecord, handles, samples, firsts, tokens))


def _with_logprobs(
    message: decode_pb2.TokenFrame, rows: Sequence[tuple[int, int, int, tuple[int, ...]]]
) -> tuple[p.TokenRecord, ...]:
    top_counts = _values(message.top_counts, "i", 4) or (-1,) * len(rows)
    take = _LogprobReader(message)
    records = [
        p.TokenRecord(*row, *take(len(row[3]), top_count)) for row, top_count in zip(rows, top_counts, strict=True)
    ]
    take.check_end()
    return tuple(records)


class _LogprobReader:
    """Walks the three log-probability columns record by record."""

    def __init__(self, message: decode_pb2.TokenFrame):
        self._logprobs = iter(_values(message.logprobs, "f", 4))
        ids = _values(message.top_token_ids, "i", 4)
        self._top = iter(zip(ids, _values(message.top_logprobs, "f", 4), strict=True))

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
