"""Every pair of functions in wire.py is a round trip, also through bytes."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import types
import typing

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace import protocol as p
from headrace import wire
from headrace.errors import InvalidRequest
from headrace.v1 import common_pb2, decode_pb2, inference_pb2, prefill_pb2

QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
INT32 = st.integers(0, 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
FLOAT32 = st.floats(width=32, allow_nan=False)
SECONDS = st.integers(0, 10**12).map(lambda nanos: nanos / 1e9)
TEXT = st.text(max_size=8)
WORD = st.text(min_size=1, max_size=8)
TOP = st.lists(st.tuples(INT32, FLOAT32), max_size=2).map(tuple)

# Fields whose values the type alone does not describe: (class, field) -> strategy.
SPECIAL = {
    (p.SamplingParams, "logit_bias"): TOP,
    (p.SamplingParams, "seed"): INT64,
    (p.SamplingParams, "logprobs"): st.none() | st.integers(0, 20),
    (p.SamplingParams, "n"): st.integers(1, 8),
    (p.ReserveCommand, "request_id"): WORD,
    (p.ReserveCommand, "attempt"): st.integers(1, 9),
    (p.ReserveCommand, "prompt_tokens"): st.integers(1, 9999),
    (p.ReserveCommand, "stream_interval"): st.integers(1, 100),
    (p.PrefillCommand, "request_id"): WORD,
    (p.PrefillCommand, "attempt"): st.integers(1, 9),
    (p.PrefillCommand, "prompt_token_ids"): st.lists(INT32, min_size=1, max_size=5).map(tuple),
    (p.PrefillCommand, "sample_indices"): st.lists(INT32, min_size=1, max_size=3).map(tuple),
    (p.PrefillCommand, "delivered"): st.dictionaries(INT32, st.lists(INT32, max_size=3).map(tuple), max_size=2),
    (p.CommitCommand, "reservation_id"): WORD,
    (p.LayerManifest, "checksum"): INT64,
    (p.FinalSummary, "seed"): INT64,
    (p.TargetDescriptor, "base_address"): st.integers(0, 2**63 - 1),
}
GIVEN = st.fixed_dictionaries(
    {},
    optional={
        "temperature": FLOAT32,
        "top_k": INT32,
        "seed": INT64,
        "logprobs": st.integers(0, 20),
        "n": st.integers(1, 8),
        "min_tokens": st.integers(1, 9),
        "ignore_eos": st.just(True),
        "stop": st.lists(WORD, min_size=1, max_size=2).map(tuple),
        "stop_token_ids": st.lists(INT32, min_size=1, max_size=2).map(tuple),
        "logit_bias": st.lists(st.tuples(INT32, FLOAT32), min_size=1, max_size=2).map(tuple),
    },
)


def of_type(kind: object) -> st.SearchStrategy:
    """Values of a field's type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return st.lists(of_type(arguments[0]), max_size=3).map(tuple)
        return st.tuples(*map(of_type, arguments))
    if origin is types.UnionType:
        return st.one_of(*map(of_type, arguments))
    if kind in (types.NoneType, None):
        return st.none()
    if dataclasses.is_dataclass(kind):
        return of_class(kind)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return st.sampled_from(kind)
    if kind == dict[str, object]:
        return GIVEN
    return {bool: st.booleans(), int: INT32, float: FLOAT32, str: TEXT}[kind]  # type: ignore[index]


def of_class(kind: type) -> st.SearchStrategy:
    """Values of a protocol class, every field drawn."""
    hints = typing.get_type_hints(kind)
    fields = {}
    for entry in dataclasses.fields(kind):
        if (kind, entry.name) in SPECIAL:
            fields[entry.name] = SPECIAL[kind, entry.name]
        elif entry.name.endswith("_s") and hints[entry.name] is float:
            fields[entry.name] = SECONDS
        else:
            fields[entry.name] = of_type(hints[entry.name])
    return st.builds(kind, **fields)


def matching_columns(command: p.ReserveCommand) -> p.ReserveCommand:
    """The two parallel tuples of a ReserveCommand at one length."""
    indices = command.sample_indices or (0,)
    counts = (*command.delivered_counts, 0, 0, 0)[: len(indices)]
    return dataclasses.replace(command, sample_indices=indices, delivered_counts=counts)


def with_samples(command: p.CommitCommand) -> p.CommitCommand:
    """A CommitCommand with at least one sample."""
    return dataclasses.replace(command, samples=command.samples or (p.SampleState(0, (1,)),))


@st.composite
def frames(draw) -> p.TokenFrame:
    """Token frames; every record has one log-probability a token, and equally many alternatives, or none."""
    records = []
    for _ in range(draw(st.integers(0, 4))):
        ids = tuple(draw(st.lists(INT32, min_size=1, max_size=4)))
        logprobs, top = None, ()
        if draw(st.booleans()):
            logprobs = tuple(draw(FLOAT32) for _ in ids)
            width = draw(st.integers(0, 2))
            top = tuple(tuple((draw(INT32), draw(FLOAT32)) for _ in range(width)) for _ in ids)
        records.append(p.TokenRecord(draw(st.integers(0, 2**40)), draw(INT32), draw(INT32), ids, logprobs, top))
    return p.TokenFrame(
        draw(st.integers(0, 2**40)), tuple(records), tuple(draw(st.lists(of_class(p.SampleEnd), max_size=2)))
    )


def prompts(command: p.GenerateCommand) -> p.GenerateCommand:
    """A GenerateCommand with exactly one form of prompt."""
    if command.token_ids is not None:
        return dataclasses.replace(command, text=None, chat=None)
    if command.chat is not None:
        return dataclasses.replace(command, text=None)
    return dataclasses.replace(command, text=command.text or "")


# name of the pair -> values; `<name>_to_pb` and `<name>_from_pb` are looked up in wire.
PAIRS = {
    "sampling": of_class(p.SamplingParams),
    "identity": of_class(p.WorkerIdentity),
    "layout": of_class(p.KvLayout),
    "worker_info": of_class(p.WorkerInfo),
    "block_ledger": of_class(p.BlockLedger),
    "stage": of_class(p.Stage),
    "target": of_class(p.TargetDescriptor),
    "reservation": of_class(p.Reservation),
    "reserve": of_class(p.ReserveCommand).map(matching_columns),
    "commit": of_class(p.CommitCommand).map(with_samples),
    "frame": frames(),
    "decode_ledger": of_class(p.DecodeLedger),
    "prefill": of_class(p.PrefillCommand),
    "prefill_event": of_type(p.PrefillEvent),
    "prefill_ledger": of_class(p.PrefillLedger),
    "generate": of_class(p.GenerateCommand).map(prompts),
    "usage": of_class(p.Usage),
    "generate_event": of_class(p.GenerateEvent),
    "model": of_class(p.ModelInfo),
    "worker_view": of_class(p.WorkerView),
    "router_ledger": of_class(p.RouterLedger),
    "holders": st.lists(of_class(p.PrefixHolder), max_size=3).map(tuple),
    "duration": SECONDS,
}


def test_no_pair_is_forgotten():
    names = {name for name, function in inspect.getmembers(wire, inspect.isfunction) if not name.startswith("_")}
    pairs = {name.removesuffix("_to_pb") for name in names if name.endswith("_to_pb")}
    # What a client set has no `_from_pb`: the other direction is sampling_given.
    assert pairs - {"sampling_given"} == set(PAIRS)
    assert {f"{name}_from_pb" for name in PAIRS} <= names


@pytest.mark.parametrize("name", PAIRS)
def test_what_goes_out_comes_back(name):
    to_pb, from_pb = getattr(wire, f"{name}_to_pb"), getattr(wire, f"{name}_from_pb")

    @QUICK
    @given(PAIRS[name])
    def round_trip(value):
        message = to_pb(value)
        again = type(message).FromString(message.SerializeToString())
        assert plain(from_pb(again)) == plain(value)

    round_trip()


def plain(value):
    """Values in which single and double precision compare equal, and top-level None fields too."""
    if dataclasses.is_dataclass(value):
        return type(value), {entry.name: plain(getattr(value, entry.name)) for entry in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(plain(item) for item in value)
    if isinstance(value, float):
        return np.float32(value).item()
    return value


@QUICK
@given(GIVEN)
def test_what_a_client_set_comes_back_and_nothing_else(given_fields):
    message = wire.sampling_given_to_pb(given_fields)
    assert plain(wire.sampling_given(type(message).FromString(message.SerializeToString()))) == plain(given_fields)


@QUICK
@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=50))
def test_packed_ids_are_little_endian_int32(ids):
    data = wire.pack_ids(ids)
    assert data == b"".join(int(i).to_bytes(4, "little", signed=True) for i in ids)
    assert wire.unpack_ids(data, "ids") == tuple(ids)


def frame(**columns) -> decode_pb2.StreamTokensResponse:
    """One record of two tokens, with some columns replaced."""
    whole = dict(
        handles=bytes(8),
        sample_indices=bytes(4),
        first_positions=bytes(4),
        token_counts=wire.pack_ids([2]),
        token_ids=bytes(8),
    )
    return decode_pb2.StreamTokensResponse(**(whole | columns))


def first_token(**fields) -> prefill_pb2.PrefillResponse:
    """A prefill's first tokens: one, with these fields."""
    return prefill_pb2.PrefillResponse(first_tokens=prefill_pb2.FirstTokens(tokens=[prefill_pb2.FirstToken(**fields)]))


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: wire.unpack_ids(b"12345", "prompt_token_ids"), "prompt_token_ids"),
        (lambda: wire.reserve_from_pb(decode_pb2.ReserveRequest()), "request_id"),
        (lambda: wire.reserve_from_pb(decode_pb2.ReserveRequest(request_id="r")), "attempt"),
        (lambda: wire.reserve_from_pb(decode_pb2.ReserveRequest(request_id="r", attempt=1)), "prompt_token_count"),
        (
            lambda: wire.reserve_from_pb(
                decode_pb2.ReserveRequest(
                    request_id="r", attempt=1, prompt_token_count=1, sample_indices=[0, 1], delivered_token_counts=[0]
                )
            ),
            "delivered_token_counts",
        ),
        (lambda: wire.commit_from_pb(decode_pb2.CommitRequest()), "reservation_id"),
        (lambda: wire.commit_from_pb(decode_pb2.CommitRequest(reservation_id="r")), "samples"),
        (lambda: wire.prefill_from_pb(prefill_pb2.PrefillRequest(request_id="r", attempt=1)), "prompt_token_ids"),
        (lambda: wire.prefill_event_from_pb(prefill_pb2.PrefillResponse()), "event"),
        (lambda: wire.prefill_event_from_pb(first_token(top_token_ids=[1, 2], top_logprobs=[-0.5])), "top_logprobs"),
        (lambda: wire.prefill_event_from_pb(first_token(finish_reason=99)), "finish_reason"),
        (lambda: wire.frame_from_pb(frame(ends=[decode_pb2.SampleEnd(finish_reason=99)])), "finish_reason"),
        (lambda: wire.frame_from_pb(frame(token_ids=b"")), "columns"),
        (lambda: wire.frame_from_pb(frame(token_ids=b"123")), "columns"),
        (lambda: wire.frame_from_pb(frame(handles=bytes(16))), "columns"),
        (lambda: wire.frame_from_pb(frame(token_counts=wire.pack_ids([-1]), token_ids=b"")), "columns"),
        (lambda: wire.frame_from_pb(frame(top_counts=wire.pack_ids([0]))), "columns"),
        (lambda: wire.frame_from_pb(frame(top_counts=wire.pack_ids([1]), logprobs=bytes(8))), "columns"),
        (lambda: wire.frame_from_pb(frame(top_token_ids=bytes(4))), "columns"),
    ],
)
def test_a_message_that_means_nothing_is_refused_by_field(call, field):
    with pytest.raises(InvalidRequest) as caught:
        call()
    assert caught.value.field == field


def test_an_empty_prompt_is_told_from_no_prompt():
    none = wire.generate_from_pb(inference_pb2.GenerateRequest())
    assert (none.text, none.chat, none.token_ids) == (None, None, None)
    assert wire.generate_from_pb(inference_pb2.GenerateRequest(text="")).text == ""
    assert wire.generate_from_pb(wire.generate_to_pb(p.GenerateCommand(token_ids=()))).token_ids == ()
    assert wire.generate_from_pb(wire.generate_to_pb(p.GenerateCommand(chat=()))).chat == ()


def test_enums_have_the_same_numbers_on_both_sides():
    wanted = {f"FINISH_REASON_{reason.name}": reason.value for reason in p.FinishReason if reason}
    assert dict(common_pb2.FinishReason.items()) == {"FINISH_REASON_UNSPECIFIED": 0, **wanted}
    states = {f"STOP_STATE_{state.name}": state.value for state in p.StopState}
    assert dict(prefill_pb2.StopState.items()) == {"STOP_STATE_UNSPECIFIED": 0, **states}
