"""Every pair of functions in headrace/wire is a round trip, also through bytes; so is every item of every link."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import inspect
import types
import typing

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace import errors
from headrace.errors import HeadraceError, InternalError, InvalidRequest
from headrace.protocol import common, decode, inference, kvstore, link, prefill, router
from headrace.rpc.links import CATALOGUE_LINK, DECODE_LINK, PREFILL_LINK, TOKEN_LINK, WRITER_LINK
from headrace.v1 import common_pb2, decode_pb2, inference_pb2, kvstore_pb2, link_pb2, prefill_pb2
from headrace.wire import common as common_wire
from headrace.wire import decode as decode_wire
from headrace.wire import inference as inference_wire
from headrace.wire import kvstore as kvstore_wire
from headrace.wire import link as link_wire
from headrace.wire import prefill as prefill_wire
from headrace.wire import router as router_wire
from headrace.wire import tokens as tokens_wire

WIRES = (common_wire, link_wire, decode_wire, tokens_wire, prefill_wire, kvstore_wire, inference_wire, router_wire)
QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
INT32 = st.integers(0, 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
FLOAT32 = st.floats(width=32, allow_nan=False)
SECONDS = st.integers(0, 10**12).map(lambda nanos: nanos / 1e9)
KEYS = st.lists(st.binary(min_size=16, max_size=16), max_size=3).map(tuple)
TEXT = st.text(max_size=8)
WORD = st.text(min_size=1, max_size=8)
TOP = st.lists(st.tuples(INT32, FLOAT32), max_size=2).map(tuple)

# Fields whose values the type alone does not describe: (class, field) -> strategy.
SPECIAL = {
    (common.SamplingParams, "logit_bias"): TOP,
    (common.EpGroup, "size"): st.integers(1, 64),
    (link.LinkHello, "link_id"): WORD,
    (link.LinkHello, "sender"): st.builds(common.WorkerIdentity, TEXT, WORD),
    (decode.ReleaseCommand, "request_id"): WORD,
    (decode.BeginCommand, "reservation_id"): WORD,
    (decode.RenewCommand, "reservation_id"): WORD,
    (decode.StopCommand, "reservation_id"): WORD,
    (decode.ReserveCommand, "prefix_keys"): KEYS,
    (decode.ReserveCommand, "time_left_s"): st.just(common_wire.DEFAULT_TIME_LEFT_S),
    (prefill.PrefillCommand, "time_left_s"): st.just(common_wire.DEFAULT_TIME_LEFT_S),
    (prefill.CancelPrefillCommand, "request_id"): WORD,
    (prefill.HeldPrefixes, "added"): KEYS,
    (prefill.HeldPrefixes, "removed"): KEYS,
    (kvstore.PublishCommand, "keys"): KEYS,
    (kvstore.WithdrawCommand, "keys"): KEYS,
    (kvstore.WithdrawCommand, "all"): st.just(False),
    (kvstore.CatalogueChange, "keys"): KEYS,
    (kvstore.CatalogueChange, "kind"): st.sampled_from(("PUBLISHED", "WITHDRAWN", "LOST")),
    (common.SamplingParams, "seed"): INT64,
    (common.SamplingParams, "logprobs"): st.none() | st.integers(0, 20),
    (common.SamplingParams, "n"): st.integers(1, 8),
    (decode.ReserveCommand, "request_id"): WORD,
    (decode.ReserveCommand, "attempt"): st.integers(1, 9),
    (decode.ReserveCommand, "prompt_tokens"): st.integers(1, 9999),
    (decode.ReserveCommand, "stream_interval"): st.integers(1, 100),
    (prefill.PrefillCommand, "request_id"): WORD,
    (prefill.PrefillCommand, "attempt"): st.integers(1, 9),
    (prefill.PrefillCommand, "prompt_token_ids"): st.lists(INT32, min_size=1, max_size=5).map(tuple),
    (prefill.PrefillCommand, "sample_indices"): st.lists(INT32, min_size=1, max_size=3).map(tuple),
    (prefill.PrefillCommand, "delivered"): st.dictionaries(INT32, st.lists(INT32, max_size=3).map(tuple), max_size=2),
    (decode.CommitCommand, "reservation_id"): WORD,
    (decode.LayerManifest, "checksum"): INT64,
    (inference.FinalSummary, "seed"): INT64,
    (decode.TargetDescriptor, "base_address"): st.integers(0, 2**63 - 1),
}
SAMPLING = common.SamplingParams()
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
    return {bool: st.booleans(), int: INT32, float: FLOAT32, str: TEXT, bytes: st.binary(max_size=8)}[kind]  # type: ignore[index]


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


def matching_columns(command: decode.ReserveCommand) -> decode.ReserveCommand:
    """The two parallel tuples of a ReserveCommand at one length."""
    indices = command.sample_indices or (0,)
    counts = (*command.delivered_counts, 0, 0, 0)[: len(indices)]
    return dataclasses.replace(command, sample_indices=indices, delivered_counts=counts)


def with_samples(command: decode.CommitCommand) -> decode.CommitCommand:
    """A CommitCommand with at least one sample."""
    return dataclasses.replace(command, samples=command.samples or (decode.SampleState(0, (1,)),))


@st.composite
def frames(draw) -> decode.TokenFrame:
    """Token frames; every record has one log-probability a token, and equally many alternatives, or none."""
    records = []
    for _ in range(draw(st.integers(0, 4))):
        ids = tuple(draw(st.lists(INT32, min_size=1, max_size=4)))
        logprobs, top = None, ()
        if draw(st.booleans()):
            logprobs = tuple(draw(FLOAT32) for _ in ids)
            width = draw(st.integers(0, 2))
            top = tuple(tuple((draw(INT32), draw(FLOAT32)) for _ in range(width)) for _ in ids)
        records.append(decode.TokenRecord(draw(st.integers(0, 2**40)), draw(INT32), draw(INT32), ids, logprobs, top))
    return decode.TokenFrame(tuple(records), tuple(draw(st.lists(of_class(decode.SampleEnd), max_size=2))))


@st.composite
def failures(draw) -> HeadraceError:
    """Errors of any class; one whose class has no reason of its own travels with the reason that it was given."""
    kinds = [kind for kind in link_wire.CODES if "reason" in vars(kind)]
    return draw(st.sampled_from(kinds))(
        draw(TEXT), field=draw(TEXT), retry_after_s=draw(SECONDS), retryable=draw(st.booleans())
    )


def prompts(command: inference.GenerateCommand) -> inference.GenerateCommand:
    """A GenerateCommand with exactly one form of prompt."""
    if command.token_ids is not None:
        return dataclasses.replace(command, text=None, chat=None)
    if command.chat is not None:
        return dataclasses.replace(command, text=None)
    return dataclasses.replace(command, text=command.text or "")


# name of the pair -> values; `<name>_to_pb` and `<name>_from_pb` are looked up in the modules of headrace/wire.
PAIRS = {
    "sampling": of_class(common.SamplingParams),
    "identity": of_class(common.WorkerIdentity),
    "layout": of_class(common.KvLayout),
    "worker_info": of_class(common.WorkerInfo),
    "progress": of_class(common.WorkerProgress),
    "block_ledger": of_class(common.BlockLedger),
    "stage": of_class(common.Stage),
    "usage": of_class(common.Usage),
    "duration": SECONDS,
    "keys": KEYS,
    "hello": of_class(link.LinkHello),
    "failure": failures(),
    "done": of_class(link.Done),
    "target": of_class(decode.TargetDescriptor),
    "promise": of_class(decode.Promise),
    "reservation": of_class(decode.Reservation),
    "reserve": of_class(decode.ReserveCommand).map(matching_columns),
    "release": of_class(decode.ReleaseCommand),
    "begin": of_class(decode.BeginCommand),
    "renew": of_class(decode.RenewCommand),
    "renewed": of_class(decode.Renewed),
    "commit": of_class(decode.CommitCommand).map(with_samples),
    "commit_accepted": of_class(decode.CommitAccepted),
    "stop": of_class(decode.StopCommand),
    "stopped": of_class(decode.Stopped),
    "frame": frames(),
    "decode_ledger": of_class(decode.DecodeLedger),
    "prefill": of_class(prefill.PrefillCommand),
    "cancel": of_class(prefill.CancelPrefillCommand),
    "first_tokens": of_class(prefill.FirstTokens),
    "committed": of_class(prefill.Committed),
    "held": of_class(prefill.HeldPrefixes),
    "prefill_ledger": of_class(prefill.PrefillLedger),
    "publish": of_class(kvstore.PublishCommand),
    "withdraw": of_class(kvstore.WithdrawCommand),
    "holders": st.lists(of_class(kvstore.PrefixHolder), max_size=3).map(tuple),
    "change": of_class(kvstore.CatalogueChange),
    "generate": of_class(inference.GenerateCommand).map(prompts),
    "generate_event": of_class(inference.GenerateEvent),
    "model": of_class(inference.ModelInfo),
    "worker_view": of_class(router.WorkerView),
    "router_ledger": of_class(router.RouterLedger),
}


def functions() -> dict[str, typing.Callable]:
    """Every public function of headrace/wire, by name."""
    return {
        name: function
        for module in WIRES
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if not name.startswith("_") and function.__module__ == module.__name__
    }


def test_no_pair_is_forgotten():
    names = set(functions())
    pairs = {name.removesuffix("_to_pb") for name in names if name.endswith("_to_pb")}
    # What a client set has no `_from_pb`: the other direction is sampling_given.
    assert pairs - {"sampling_given"} == set(PAIRS)
    assert {f"{name}_from_pb" for name in PAIRS} <= names


@pytest.mark.parametrize("name", PAIRS)
def test_what_goes_out_comes_back(name):
    to_pb, from_pb = functions()[f"{name}_to_pb"], functions()[f"{name}_from_pb"]

    @QUICK
    @given(PAIRS[name])
    def round_trip(value):
        message = to_pb(value)
        again = message if isinstance(message, bytes) else type(message).FromString(message.SerializeToString())
        assert plain(from_pb(again)) == plain(value)

    round_trip()


@QUICK
@given(of_class(decode.Promise))
def test_a_promise_comes_back_from_its_bytes_which_are_always_the_same(promise):
    data = decode_wire.promise_to_bytes(promise)
    assert decode_wire.promise_from_bytes(data) == promise and decode_wire.promise_to_bytes(promise) == data


# --- items of links --------------------------------------------------------------------------------------------------

ITEMS = {
    DECODE_LINK.from_opener: ("reserve", "release"),
    DECODE_LINK.from_server: ("reservation", "done", "failure"),
    TOKEN_LINK.from_server: ("frame",),
    WRITER_LINK.from_opener: ("begin", "renew", "commit", "stopped", "failure"),
    WRITER_LINK.from_server: ("renewed", "commit_accepted", "stop", "failure"),
    PREFILL_LINK.from_opener: ("prefill", "cancel"),
    PREFILL_LINK.from_server: ("first_tokens", "committed", "held", "failure"),
    CATALOGUE_LINK.from_opener: ("publish", "withdraw"),
    CATALOGUE_LINK.from_server: ("done", "failure"),
}


def test_every_body_of_every_item_is_named_here():
    for direction, names in ITEMS.items():
        item = direction.message.DESCRIPTOR.fields_by_name["items"].message_type
        oneofs = item.oneofs_by_name
        assert len(oneofs["body"].fields if oneofs else [item]) == len(names), item.name


@pytest.mark.parametrize(
    ("direction", "name"),
    [(direction, name) for direction, names in ITEMS.items() for name in names],
    ids=lambda x: x if isinstance(x, str) else x.message.__name__,
)
def test_an_item_of_a_link_comes_back_with_the_command_that_it_answers(direction, name):
    codec = direction.items

    @QUICK
    @given(PAIRS[name], st.integers(1, 2**60))
    def round_trip(value, number):
        number = number if codec.carries_answers else 0
        message = direction.message()
        message.items.append(codec.to_pb(value, number))
        (item,) = direction.message.FromString(message.SerializeToString()).items
        assert plain(codec.from_pb(item)) == plain(value) and codec.command_number(item) == number

    round_trip()


def test_a_command_without_time_left_gets_the_default_and_a_late_one_almost_none():
    command = matching_columns(decode.ReserveCommand("q", 1, common.WorkerIdentity("", ""), 1, (), (), SAMPLING, 1, 1))
    codec = DECODE_LINK.from_opener.items
    item = codec.to_pb(command)
    assert codec.from_pb(item).time_left_s == common_wire.DEFAULT_TIME_LEFT_S
    for left_s, told_s in ((3.5, 3.5), (0.0, 0.001), (-1.0, 0.001)):
        codec.set_time_left(item, left_s)
        assert codec.from_pb(item).time_left_s == told_s


def test_what_a_direction_cannot_carry_is_our_own_mistake():
    for value, direction in (
        (link.Done(), DECODE_LINK.from_opener),
        (decode.TokenFrame(), DECODE_LINK.from_server),
        (link.Done(), TOKEN_LINK.from_server),
    ):
        with pytest.raises(InternalError):
            direction.items.to_pb(value)
    with pytest.raises(InternalError):
        DECODE_LINK.from_opener.items.to_pb(decode.ReleaseCommand("q", 1), 5)


def test_every_error_has_a_code_of_google_rpc():
    assert set(link_wire.CODES) == {
        kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, HeadraceError)
    }


def plain(value):
    """Values in which single and double precision compare equal, and errors of equal fields too."""
    if isinstance(value, HeadraceError):
        return type(value), plain([value.message, value.reason, value.field, value.retry_after_s, value.retryable])
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
    message = common_wire.sampling_given_to_pb(given_fields)
    assert plain(common_wire.sampling_given(type(message).FromString(message.SerializeToString()))) == plain(
        given_fields
    )


@QUICK
@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=50))
def test_packed_ids_are_little_endian_int32(ids):
    data = common_wire.pack_ids(ids)
    assert data == b"".join(int(i).to_bytes(4, "little", signed=True) for i in ids)
    assert common_wire.unpack_ids(data, "ids") == tuple(ids)


def frame(**columns) -> decode_pb2.TokenFrame:
    """One record of two tokens, with some columns replaced."""
    whole = dict(
        handles=bytes(8),
        sample_indices=bytes(4),
        first_positions=bytes(4),
        token_counts=common_wire.pack_ids([2]),
        token_ids=bytes(8),
    )
    return decode_pb2.TokenFrame(**(whole | columns))


def first_token(**fields) -> prefill_pb2.FirstTokens:
    """A prefill's first tokens: one, with these fields."""
    return prefill_pb2.FirstTokens(tokens=[prefill_pb2.FirstToken(**fields)])


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: common_wire.unpack_ids(b"12345", "prompt_token_ids"), "prompt_token_ids"),
        (lambda: decode_wire.reserve_from_pb(decode_pb2.ReserveCommand()), "request_id"),
        (lambda: decode_wire.reserve_from_pb(decode_pb2.ReserveCommand(request_id="r")), "attempt"),
        (
            lambda: decode_wire.reserve_from_pb(decode_pb2.ReserveCommand(request_id="r", attempt=1)),
            "prompt_token_count",
        ),
        (
            lambda: decode_wire.reserve_from_pb(
                decode_pb2.ReserveCommand(
                    request_id="r", attempt=1, prompt_token_count=1, sample_indices=[0, 1], delivered_token_counts=[0]
                )
            ),
            "delivered_token_counts",
        ),
        (lambda: decode_wire.commit_from_pb(decode_pb2.CommitCommand()), "reservation_id"),
        (lambda: decode_wire.commit_from_pb(decode_pb2.CommitCommand(reservation_id="r")), "samples"),
        (
            lambda: prefill_wire.prefill_from_pb(prefill_pb2.PrefillCommand(request_id="r", attempt=1)),
            "prompt_token_ids",
        ),
        (lambda: prefill_wire.PREFILL_EVENTS.from_pb(prefill_pb2.PrefillEvent()), "body"),
        (lambda: link_wire.hello_from_pb(link_pb2.LinkHello()), "header.hello"),
        (lambda: common_wire.keys_from_pb(bytes(17)), "keys"),
        (lambda: prefill_wire.held_from_pb(prefill_pb2.HeldPrefixes(removed_keys=b"1")), "removed_keys"),
        (lambda: kvstore_wire.withdraw_from_pb(kvstore_pb2.WithdrawCommand(keys=bytes(16), all=True)), "keys"),
        (lambda: decode_wire.stopped_from_pb(decode_pb2.Stopped()), "state"),
        (lambda: decode_wire.promise_from_bytes(b"\xff"), "reservation.promise"),
        (lambda: common_wire.layout_from_pb(common_pb2.KvLayout(rope_order=9)), "layout.rope_order"),
        (
            lambda: prefill_wire.first_tokens_from_pb(first_token(top_token_ids=[1, 2], top_logprobs=[-0.5])),
            "top_logprobs",
        ),
        (lambda: prefill_wire.first_tokens_from_pb(first_token(finish_reason=99)), "finish_reason"),
        (lambda: tokens_wire.frame_from_pb(frame(ends=[decode_pb2.SampleEnd(finish_reason=99)])), "finish_reason"),
        (lambda: tokens_wire.frame_from_pb(frame(token_ids=b"")), "columns"),
        (lambda: tokens_wire.frame_from_pb(frame(token_ids=b"123")), "columns"),
        (lambda: tokens_wire.frame_from_pb(frame(handles=bytes(16))), "columns"),
        (lambda: tokens_wire.frame_from_pb(frame(token_counts=common_wire.pack_ids([-1]), token_ids=b"")), "columns"),
        (lambda: tokens_wire.frame_from_pb(frame(top_counts=common_wire.pack_ids([0]))), "columns"),
        (lambda: tokens_wire.frame_from_pb(frame(top_counts=common_wire.pack_ids([1]), logprobs=bytes(8))), "columns"),
        (lambda: tokens_wire.frame_from_pb(frame(top_token_ids=bytes(4))), "columns"),
    ],
)
def test_a_message_that_means_nothing_is_refused_by_field(call, field):
    with pytest.raises(InvalidRequest) as caught:
        call()
    assert caught.value.field == field


def test_an_empty_prompt_is_told_from_no_prompt():
    none = inference_wire.generate_from_pb(inference_pb2.GenerateRequest())
    assert (none.text, none.chat, none.token_ids) == (None, None, None)
    assert inference_wire.generate_from_pb(inference_pb2.GenerateRequest(text="")).text == ""
    assert (
        inference_wire.generate_from_pb(
            inference_wire.generate_to_pb(inference.GenerateCommand(token_ids=()))
        ).token_ids
        == ()
    )
    assert inference_wire.generate_from_pb(inference_wire.generate_to_pb(inference.GenerateCommand(chat=()))).chat == ()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (common.FinishReason, common_pb2.FinishReason),
        (common.NumberFormat, common_pb2.NumberFormat),
        (common.RopeOrder, common_pb2.RopeOrder),
        (common.TransferBackend, common_pb2.TransferBackend),
        (common.WorkerRole, common_pb2.WorkerRole),
        (common.CacheTier, common_pb2.CacheTier),
        (decode.StopState, decode_pb2.StopState),
    ],
    ids=lambda kind: getattr(kind, "__name__", ""),
)
def test_enums_have_the_same_numbers_on_both_sides(ours, theirs):
    prefix = theirs.Name(0).removesuffix("UNSPECIFIED")
    named = {prefix + member.name: member.value for member in ours if member}
    assert dict(theirs.items()) == {f"{prefix}UNSPECIFIED": 0, **named}


def test_the_fingerprint_of_a_layout_is_over_the_bytes_that_the_proto_specifies():
    def number(value: int) -> bytes:
        return value.to_bytes(8, "little", signed=True)

    def text(value: str) -> bytes:
        return number(len(value.encode())) + value.encode()

    layout = common.KvLayout(
        (
            common.KvRegion("latent", 61, 576, common.NumberFormat.BF16),
            common.KvRegion("kéy", 3, 128, common.NumberFormat.FP8, 4096),
        ),
        64,
        common.RopeOrder.HALVES,
        "f00d",
        "exact-1",
    )
    regions = text("latent") + b"".join(map(number, (61, 576, 2, 0))) + text("kéy")
    regions += b"".join(map(number, (3, 128, 3, 4096)))
    data = b"headrace-kv-layout-1" + number(2) + regions + number(64) + number(2) + text("f00d") + text("exact-1")
    assert layout.fingerprint == hashlib.sha256(data).hexdigest() and layout.layer_count == 64
    assert layout.fingerprint != dataclasses.replace(layout, numeric_profile="").fingerprint
