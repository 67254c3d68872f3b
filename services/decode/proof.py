"""What a commit must prove: that it speaks of what was reserved, and that every row has arrived. No state.

The cheap checks come first: nothing is read from the pool for a manifest whose counts are wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.errors import InvalidRequest, ManifestMismatch
from headrace.protocol.decode import CommitCommand, ReserveCommand, SequenceManifest, TargetSequence
from services.decode.interfaces import Checksums


def check_commit(command: CommitCommand, reserve: ReserveCommand) -> None:
    """Raises InvalidRequest unless the commit speaks of the samples and lengths that were reserved."""
    if len(command.prompt_token_ids) != reserve.prompt_tokens:
        raise InvalidRequest(
            f"prompt_token_ids: {len(command.prompt_token_ids)} ids for a prompt of {reserve.prompt_tokens}",
            field="prompt_token_ids",
        )
    if not command.samples:
        raise InvalidRequest("samples: at least one must go on", field="samples")
    delivered = dict(zip(reserve.sample_indices, reserve.delivered_counts, strict=True))
    for sample in command.samples:
        expected = delivered.pop(sample.sample_index, None)
        if expected is None or len(sample.output_token_ids) != expected + 1:
            raise InvalidRequest(
                f"samples: sample {sample.sample_index} with {len(sample.output_token_ids)} output tokens was not reserved",
                field="samples",
            )


def check_counts(
    manifest: tuple[SequenceManifest, ...], sequences: tuple[TargetSequence, ...], num_layers: int
) -> None:
    """Every sequence, every layer, every row accounted for. Raises ManifestMismatch naming the first that is not."""
    if len(manifest) != len(sequences):
        raise ManifestMismatch(f"{len(manifest)} sequences in the manifest, {len(sequences)} were reserved")
    for proof, sequence in zip(manifest, sequences, strict=True):
        if (proof.sample_index, proof.first_row) != (sequence.sample_index, sequence.first_row):
            raise ManifestMismatch(f"sample {proof.sample_index} from row {proof.first_row}, expected {sequence}")
        if len(proof.layers) != num_layers:
            raise ManifestMismatch(f"sample {proof.sample_index}: {len(proof.layers)} layers of {num_layers}")
        for layer, entry in enumerate(proof.layers):
            if entry.num_rows != sequence.num_rows:
                raise ManifestMismatch(
                    f"sample {proof.sample_index}, layer {layer}: {entry.num_rows} rows of {sequence.num_rows}"
                )


def check_rows(
    manifest: tuple[SequenceManifest, ...],
    sequences: tuple[TargetSequence, ...],
    checksums: Checksums,
) -> None:
    """Recomputes every checksum from the pool; runs in a worker thread. Raises ManifestMismatch naming the layer.

    checksums(blocks, first_row, num_rows)  of those token positions of the sequence in `blocks`, one a layer
    """
    for proof, sequence in zip(manifest, sequences, strict=True):
        found = checksums(sequence.block_ids, sequence.first_row, sequence.num_rows)
        for layer, (entry, value) in enumerate(zip(proof.layers, found, strict=True)):
            if value != entry.checksum:
                raise ManifestMismatch(f"sample {proof.sample_index}, layer {layer}: the rows are not those pushed")


def check_token_ids(command: CommitCommand, vocabulary_size: int) -> None:
    """Every id is one that the model has a row for. Raises InvalidRequest naming the field; runs in a worker thread."""
    _check_ids("prompt_token_ids", command.prompt_token_ids, vocabulary_size)
    for sample in command.samples:
        _check_ids("samples.output_token_ids", sample.output_token_ids, vocabulary_size)


def _check_ids(field: str, token_ids: Sequence[int], vocabulary_size: int) -> None:
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocabulary_size:
        raise InvalidRequest(f"{field}: an id outside the vocabulary of {vocabulary_size}", field=field)
