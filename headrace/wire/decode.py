"""protobuf <-> our values: `decode.proto` without token frames."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from headrace.errors import HeadraceError, InvalidRequest
from headrace.protocol import decode as p
from headrace.protocol.common import TransferBackend
from headrace.protocol.link import Done
from headrace.v1 import decode_pb2
from headrace.wire.common import (
    block_ledger_from_pb,
    block_ledger_to_pb,
    duration_from_pb,
    duration_to_pb,
    enum_from_pb,
    identity_from_pb,
    identity_to_pb,
    keys_from_pb,
    keys_to_pb,
    need,
    pack_ids,
    sampling_from_pb,
    sampling_to_pb,
    time_left_from_pb,
    unpack_ids,
)
from headrace.wire.link import DONE, FAILURE, ItemCodec


def target_to_pb(value: p.TargetDescriptor) -> decode_pb2.TransferTarget:
    """Where rows go."""
    return decode_pb2.TransferTarget(
        backend=int(value.backend),  # type: ignore[arg-type]
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
        backend=enum_from_pb(TransferBackend, message.backend, "target.backend"),
        session=message.session,
        base_address=message.base_address,
        layer_stride_bytes=message.layer_stride_bytes,
        block_stride_bytes=message.block_stride_bytes,
        row_bytes=message.row_bytes,
        block_size=message.block_size,
        num_layers=message.layer_count,
        num_blocks=message.block_count,
    )


# --- promises --------------------------------------------------------------------------------------------------------


def promise_to_pb(value: p.Promise) -> decode_pb2.Promise:
    """What a writer may do."""
    return decode_pb2.Promise(
        reservation_id=value.reservation_id,
        request_id=value.request_id,
        attempt=value.attempt,
        decode=identity_to_pb(value.decode),
        writer=identity_to_pb(value.writer),
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
    )


def promise_from_pb(message: decode_pb2.Promise) -> p.Promise:
    """What a writer may do."""
    return p.Promise(
        reservation_id=message.reservation_id,
        request_id=message.request_id,
        attempt=message.attempt,
        decode=identity_from_pb(message.decode),
        writer=identity_from_pb(message.writer),
        target=target_from_pb(message.target),
        sequences=tuple(
            p.TargetSequence(
                sequence.sample_index,
                sequence.first_row,
                sequence.row_count,
                unpack_ids(sequence.block_ids, "promise.sequences.block_ids"),
            )
            for sequence in message.sequences
        ),
        layout_fingerprint=message.layout_fingerprint,
    )


def promise_to_bytes(value: p.Promise) -> bytes:
    """A promise as it travels and is signed."""
    return promise_to_pb(value).SerializeToString(deterministic=True)


def promise_from_bytes(data: bytes) -> p.Promise:
    """The inverse of `promise_to_bytes`. Raises InvalidRequest for bytes that are no promise."""
    try:
        return promise_from_pb(decode_pb2.Promise.FromString(data))
    except DecodeError as error:
        raise InvalidRequest("reservation.promise: the bytes are no promise", field="reservation.promise") from error


def reservation_to_pb(value: p.Reservation) -> decode_pb2.Reservation:
    """A promise of room, signed."""
    return decode_pb2.Reservation(promise=value.promise, code=value.code, expires_in=duration_to_pb(value.expires_in_s))


def reservation_from_pb(message: decode_pb2.Reservation) -> p.Reservation:
    """A promise of room; the promise itself is not read."""
    return p.Reservation(message.promise, message.code, duration_from_pb(message.expires_in))


# --- commands of routers ---------------------------------------------------------------------------------------------


def reserve_to_pb(value: p.ReserveCommand) -> decode_pb2.ReserveCommand:
    """Asks for room. The link writes `time_left` at each sending."""
    return decode_pb2.ReserveCommand(
        request_id=value.request_id,
        attempt=value.attempt,
        writer=identity_to_pb(value.writer),
        prompt_token_count=value.prompt_tokens,
        delivered_token_counts=value.delivered_counts,
        sample_indices=value.sample_indices,
        sampling=sampling_to_pb(value.sampling),
        stream_interval=value.stream_interval,
        handle=value.handle,
        priority=value.priority,
        prefix_keys=keys_to_pb(value.prefix_keys),
        cache_salt=value.cache_salt,
        trace_parent=value.trace_parent,
        display_id=value.display_id,
    )


def reserve_from_pb(message: decode_pb2.ReserveCommand) -> p.ReserveCommand:
    """Asks for room; refuses counts that cannot be."""
    need(message.request_id, "request_id")
    need(message.attempt >= 1, "attempt")
    need(message.prompt_token_count >= 1, "prompt_token_count")
    need(len(message.sample_indices) >= 1, "sample_indices")
    need(len(message.delivered_token_counts) == len(message.sample_indices), "delivered_token_counts")
    return p.ReserveCommand(
        request_id=message.request_id,
        attempt=message.attempt,
        writer=identity_from_pb(message.writer),
        prompt_tokens=message.prompt_token_count,
        sample_indices=tuple(message.sample_indices),
        delivered_counts=tuple(message.delivered_token_counts),
        sampling=sampling_from_pb(message.sampling),
        stream_interval=max(1, message.stream_interval),
        handle=message.handle,
        time_left_s=time_left_from_pb(message),
        priority=message.priority,
        prefix_keys=keys_from_pb(message.prefix_keys, "prefix_keys"),
        cache_salt=message.cache_salt,
        trace_parent=message.trace_parent,
        display_id=message.display_id,
    )


def release_to_pb(value: p.ReleaseCommand) -> decode_pb2.ReleaseCommand:
    """Ends a request."""
    return decode_pb2.ReleaseCommand(
        request_id=value.request_id, attempt=value.attempt, sample_indices=value.sample_indices
    )


def release_from_pb(message: decode_pb2.ReleaseCommand) -> p.ReleaseCommand:
    """Ends a request."""
    need(message.request_id, "request_id")
    return p.ReleaseCommand(message.request_id, message.attempt, tuple(message.sample_indices))


# --- between writer and decode rank ----------------------------------------------------------------------------------


def begin_to_pb(value: p.BeginCommand) -> decode_pb2.BeginCommand:
    """Writes are about to start."""
    return decode_pb2.BeginCommand(reservation_id=value.reservation_id)


def begin_from_pb(message: decode_pb2.BeginCommand) -> p.BeginCommand:
    """Writes are about to start."""
    need(message.reservation_id, "reservation_id")
    return p.BeginCommand(message.reservation_id)


def renew_to_pb(value: p.RenewCommand) -> decode_pb2.RenewCommand:
    """Puts off the expiry."""
    return decode_pb2.RenewCommand(reservation_id=value.reservation_id)


def renew_from_pb(message: decode_pb2.RenewCommand) -> p.RenewCommand:
    """Puts off the expiry."""
    need(message.reservation_id, "reservation_id")
    return p.RenewCommand(message.reservation_id)


def renewed_to_pb(value: p.Renewed) -> decode_pb2.Renewed:
    """Begun or renewed."""
    return decode_pb2.Renewed(expires_in=duration_to_pb(value.expires_in_s))


def renewed_from_pb(message: decode_pb2.Renewed) -> p.Renewed:
    """Begun or renewed."""
    return p.Renewed(duration_from_pb(message.expires_in))


def _manifest_to_pb(value: p.SequenceManifest) -> decode_pb2.SequenceManifest:
    return decode_pb2.SequenceManifest(
        sample_index=value.sample_index,
        first_row=value.first_row,
        layers=[decode_pb2.LayerManifest(row_count=x.num_rows, checksum=x.checksum) for x in value.layers],
    )


def _manifest_from_pb(message: decode_pb2.SequenceManifest) -> p.SequenceManifest:
    layers = tuple(p.LayerManifest(layer.row_count, layer.checksum) for layer in message.layers)
    return p.SequenceManifest(message.sample_index, message.first_row, layers)


def commit_to_pb(value: p.CommitCommand) -> decode_pb2.CommitCommand:
    """The hand-over."""
    return decode_pb2.CommitCommand(
        reservation_id=value.reservation_id,
        request_id=value.request_id,
        attempt=value.attempt,
        manifest=[_manifest_to_pb(entry) for entry in value.manifest],
        samples=[
            decode_pb2.SampleState(sample_index=x.sample_index, output_token_ids=pack_ids(x.output_token_ids))
            for x in value.samples
        ],
        prompt_token_ids=pack_ids(value.prompt_token_ids),
    )


def commit_from_pb(message: decode_pb2.CommitCommand) -> p.CommitCommand:
    """The hand-over."""
    need(message.reservation_id, "reservation_id")
    need(len(message.samples) >= 1, "samples")
    return p.CommitCommand(
        reservation_id=message.reservation_id,
        request_id=message.request_id,
        attempt=message.attempt,
        manifest=tuple(_manifest_from_pb(entry) for entry in message.manifest),
        samples=tuple(
            p.SampleState(x.sample_index, unpack_ids(x.output_token_ids, "samples.output_token_ids"))
            for x in message.samples
        ),
        prompt_token_ids=unpack_ids(message.prompt_token_ids, "prompt_token_ids"),
    )


def commit_accepted_to_pb(value: p.CommitAccepted) -> decode_pb2.CommitAccepted:
    """The request steps from now on."""
    return decode_pb2.CommitAccepted(commit_duration=duration_to_pb(value.commit_duration_s))


def commit_accepted_from_pb(message: decode_pb2.CommitAccepted) -> p.CommitAccepted:
    """The request steps from now on."""
    return p.CommitAccepted(duration_from_pb(message.commit_duration))


def stop_to_pb(value: p.StopCommand) -> decode_pb2.StopCommand:
    """Every write of a reservation must end."""
    return decode_pb2.StopCommand(reservation_id=value.reservation_id, wait=duration_to_pb(value.wait_s))


def stop_from_pb(message: decode_pb2.StopCommand) -> p.StopCommand:
    """Every write of a reservation must end."""
    need(message.reservation_id, "reservation_id")
    return p.StopCommand(message.reservation_id, duration_from_pb(message.wait))


def stopped_to_pb(value: p.Stopped) -> decode_pb2.Stopped:
    """Whether late writes are impossible."""
    return decode_pb2.Stopped(state=int(value.state))  # type: ignore[arg-type]


def stopped_from_pb(message: decode_pb2.Stopped) -> p.Stopped:
    """Whether late writes are impossible."""
    return p.Stopped(enum_from_pb(p.StopState, message.state, "state"))


# --- ledger ----------------------------------------------------------------------------------------------------------


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
        open_link_count=value.open_links,
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
        open_links=message.open_link_count,
    )


# --- items of links --------------------------------------------------------------------------------------------------

DECODE_COMMANDS = ItemCodec(
    decode_pb2.DecodeCommand,
    {
        p.ReserveCommand: ("reserve", reserve_to_pb, reserve_from_pb),
        p.ReleaseCommand: ("release", release_to_pb, release_from_pb),
    },
)
DECODE_ANSWERS = ItemCodec(
    decode_pb2.DecodeAnswer,
    {p.Reservation: ("reserved", reservation_to_pb, reservation_from_pb), Done: DONE, HeadraceError: FAILURE},
)
WRITER_ITEMS = ItemCodec(
    decode_pb2.WriterItem,
    {
        p.BeginCommand: ("begin", begin_to_pb, begin_from_pb),
        p.RenewCommand: ("renew", renew_to_pb, renew_from_pb),
        p.CommitCommand: ("commit", commit_to_pb, commit_from_pb),
        p.Stopped: ("stopped", stopped_to_pb, stopped_from_pb),
        HeadraceError: FAILURE,
    },
)
WRITE_CONTROL_ITEMS = ItemCodec(
    decode_pb2.WriteControlItem,
    {
        p.Renewed: ("renewed", renewed_to_pb, renewed_from_pb),
        p.CommitAccepted: ("committed", commit_accepted_to_pb, commit_accepted_from_pb),
        p.StopCommand: ("stop", stop_to_pb, stop_from_pb),
        HeadraceError: FAILURE,
    },
)
