"""What a decode rank promised, checked before anything is done with it: a promise that was altered, belongs to another attempt or
writer, or names memory that cannot be, never reaches the thread that writes."""

from __future__ import annotations

from headrace.errors import InvalidRequest, LayoutMismatch, StaleEpoch
from headrace.protocol.common import KvLayout, NumberFormat, WorkerInfo
from headrace.protocol.decode import Promise, TargetDescriptor, TargetSequence
from headrace.protocol.prefill import PrefillCommand
from headrace.rpc.promises import MeshKeys, verify
from services.prefill.sequences import sequence_lengths

BITS = {NumberFormat.FP32: 32, NumberFormat.BF16: 16, NumberFormat.FP8: 8, NumberFormat.NVFP4: 4}
ADDRESS_END = 1 << 63


def read_promise(command: PrefillCommand, info: WorkerInfo, keys: MeshKeys) -> Promise | None:
    """The promise that the command carries, None when it carries none.

    Raises InvalidRequest for one that is forged, absurd or not about this attempt, StaleEpoch for one made to another process,
    LayoutMismatch for one of a rank whose rows look different.
    """
    if command.reservation is None:
        return None
    promise = verify(command.reservation, keys)
    if promise.writer.epoch != info.identity.epoch:
        raise StaleEpoch(f"the promise was made to writer {promise.writer.epoch}")
    if (promise.request_id, promise.attempt) != (command.request_id, command.attempt):
        raise _absurd(f"it was made for attempt {promise.attempt} of {promise.request_id}")
    if promise.layout_fingerprint != info.layout.fingerprint:
        raise LayoutMismatch(f"decode rank {promise.decode.address} has another KV layout than {info.layout}")
    if not promise.reservation_id or not promise.decode.address or not promise.decode.epoch:
        raise _absurd("it does not say who promised what")
    _check_target(promise.target, info)
    _check_sequences(promise, command)
    return promise


def row_bytes(layout: KvLayout) -> int:
    """Bytes of one token's row in one layer. Every layer has rows of one width today."""
    (region,) = layout.regions
    return region.row_width * BITS[region.format] // 8


def _check_target(target: TargetDescriptor, info: WorkerInfo) -> None:
    layout = info.layout
    if target.backend != info.transfer:
        raise LayoutMismatch(
            f"the decode rank is written through {target.backend.name}, this rank has {info.transfer.name}"
        )
    block_bytes = layout.block_size * row_bytes(layout)
    layer_bytes = target.num_blocks * block_bytes
    said = (
        target.row_bytes,
        target.block_size,
        target.num_layers,
        target.block_stride_bytes,
        target.layer_stride_bytes,
    )
    owed = (row_bytes(layout), layout.block_size, layout.layer_count, block_bytes, layer_bytes)
    if said != owed or target.num_blocks < 1:
        raise _absurd("rows, blocks and layers of its target are not those of this layout")
    if target.base_address < 0 or target.base_address + layout.layer_count * layer_bytes >= ADDRESS_END:
        raise _absurd("its target lies outside any memory")
    if not target.session:
        raise _absurd("its target names no session")


def _check_sequences(promise: Promise, command: PrefillCommand) -> None:
    lengths = sequence_lengths(command)
    if [sequence.sample_index for sequence in promise.sequences] != list(command.sample_indices[: len(lengths)]):
        raise _absurd(f"its sequences are not those of samples {command.sample_indices[: len(lengths)]}")
    for sequence, length in zip(promise.sequences, lengths, strict=True):
        _check_sequence(sequence, length, promise.target)


def _check_sequence(sequence: TargetSequence, length: int, target: TargetDescriptor) -> None:
    if sequence.first_row < 0 or sequence.num_rows < 0 or sequence.first_row + sequence.num_rows != length:
        raise _absurd(f"rows {sequence.first_row} and {sequence.num_rows} more of a sequence of {length}")
    blocks = sequence.block_ids
    if len(blocks) * target.block_size < length or len(set(blocks)) != len(blocks):
        raise _absurd(f"{len(blocks)} blocks, or fewer, for a sequence of {length}")
    if min(blocks) < 0 or max(blocks) >= target.num_blocks:
        raise _absurd(f"a block that is not one of {target.num_blocks}")


def _absurd(what: str) -> InvalidRequest:
    return InvalidRequest(f"reservation: {what}", field="reservation", reason="PROMISE_INVALID")
