"""protobuf <-> our values: `prefill.proto`."""

from __future__ import annotations

from headrace.errors import HeadraceError
from headrace.protocol import prefill as p
from headrace.v1 import prefill_pb2
from headrace.wire.common import (
    add_stages,
    block_ledger_from_pb,
    block_ledger_to_pb,
    finish_reason_from_pb,
    keys_from_pb,
    keys_to_pb,
    need,
    pack_ids,
    sampling_from_pb,
    sampling_to_pb,
    stages_from_pb,
    time_left_from_pb,
    unpack_ids,
)
from headrace.wire.decode import reservation_from_pb, reservation_to_pb
from headrace.wire.link import FAILURE, ItemCodec


def prefill_to_pb(value: p.PrefillCommand) -> prefill_pb2.PrefillCommand:
    """One attempt at one prompt. The link writes `time_left` at each sending."""
    message = prefill_pb2.PrefillCommand(
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
        priority=value.priority,
        trace_parent=value.trace_parent,
        display_id=value.display_id,
    )
    if value.reservation is not None:
        message.reservation.CopyFrom(reservation_to_pb(value.reservation))
    return message


def prefill_from_pb(message: prefill_pb2.PrefillCommand) -> p.PrefillCommand:
    """One attempt at one prompt."""
    need(message.request_id, "request_id")
    need(message.attempt >= 1, "attempt")
    need(message.prompt_token_ids, "prompt_token_ids")
    need(len(message.sample_indices) >= 1, "sample_indices")
    return p.PrefillCommand(
        request_id=message.request_id,
        attempt=message.attempt,
        prompt_token_ids=unpack_ids(message.prompt_token_ids, "prompt_token_ids"),
        sampling=sampling_from_pb(message.sampling),
        sample_indices=tuple(message.sample_indices),
        delivered={x.sample_index: unpack_ids(x.token_ids, "delivered.token_ids") for x in message.delivered},
        reservation=reservation_from_pb(message.reservation) if message.HasField("reservation") else None,
        cache_salt=message.cache_salt,
        time_left_s=time_left_from_pb(message),
        priority=message.priority,
        trace_parent=message.trace_parent,
        display_id=message.display_id,
    )


def cancel_to_pb(value: p.CancelPrefillCommand) -> prefill_pb2.CancelPrefillCommand:
    """Ends an attempt."""
    return prefill_pb2.CancelPrefillCommand(request_id=value.request_id, attempt=value.attempt)


def cancel_from_pb(message: prefill_pb2.CancelPrefillCommand) -> p.CancelPrefillCommand:
    """Ends an attempt."""
    need(message.request_id, "request_id")
    return p.CancelPrefillCommand(message.request_id, message.attempt)


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
    need(len(message.top_token_ids) == len(message.top_logprobs), "top_logprobs")
    return p.FirstToken(
        sample_index=message.sample_index,
        position=message.position,
        token_id=message.token_id,
        logprob=message.logprob,
        top=tuple(zip(message.top_token_ids, message.top_logprobs, strict=False)),
        finish_reason=finish_reason_from_pb(message.finish_reason),
    )


def first_tokens_to_pb(value: p.FirstTokens) -> prefill_pb2.FirstTokens:
    """Tokens of all samples."""
    return prefill_pb2.FirstTokens(
        tokens=[_first_token_to_pb(token) for token in value.tokens],
        cached_token_count=value.cached_tokens,
        computed_token_count=value.computed_tokens,
    )


def first_tokens_from_pb(message: prefill_pb2.FirstTokens) -> p.FirstTokens:
    """Tokens of all samples."""
    tokens = tuple(_first_token_from_pb(token) for token in message.tokens)
    return p.FirstTokens(tokens, message.cached_token_count, message.computed_token_count)


def committed_to_pb(value: p.Committed) -> prefill_pb2.Committed:
    """The attempt is done."""
    message = prefill_pb2.Committed(pushed_byte_count=value.pushed_bytes)
    add_stages(message.stages, value.stages)
    return message


def committed_from_pb(message: prefill_pb2.Committed) -> p.Committed:
    """The attempt is done."""
    return p.Committed(message.pushed_byte_count, stages_from_pb(message.stages))


def held_to_pb(value: p.HeldPrefixes) -> prefill_pb2.HeldPrefixes:
    """What prefixes a rank holds."""
    return prefill_pb2.HeldPrefixes(
        is_snapshot=value.is_snapshot, added_keys=keys_to_pb(value.added), removed_keys=keys_to_pb(value.removed)
    )


def held_from_pb(message: prefill_pb2.HeldPrefixes) -> p.HeldPrefixes:
    """What prefixes a rank holds."""
    return p.HeldPrefixes(
        message.is_snapshot,
        keys_from_pb(message.added_keys, "added_keys"),
        keys_from_pb(message.removed_keys, "removed_keys"),
    )


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


PREFILL_COMMANDS = ItemCodec(
    prefill_pb2.PrefillLinkCommand,
    {
        p.PrefillCommand: ("prefill", prefill_to_pb, prefill_from_pb),
        p.CancelPrefillCommand: ("cancel", cancel_to_pb, cancel_from_pb),
    },
)
PREFILL_EVENTS = ItemCodec(
    prefill_pb2.PrefillEvent,
    {
        p.FirstTokens: ("first_tokens", first_tokens_to_pb, first_tokens_from_pb),
        p.Committed: ("committed", committed_to_pb, committed_from_pb),
        p.HeldPrefixes: ("held_prefixes", held_to_pb, held_from_pb),
        HeadraceError: FAILURE,
    },
)
