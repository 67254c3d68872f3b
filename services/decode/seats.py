"""Which blocks a reservation needs, which sample holds which, and what the writer owes. Arithmetic only.

L prompt tokens, B rows a block. The first L // B blocks hold whole prompt blocks and are shared by all samples; the rest of
each sample's sequence is its own. A prompt whose last block is partial is written once, into the first sample's sequence,
and copied into the others' at commit; once tokens were delivered the sequences differ and each is written.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.errors import InvalidRequest, ManifestMismatch
from headrace.protocol import MAX_SAMPLES, CommitCommand, ReserveCommand, SequenceManifest, TargetSequence


@dataclass(frozen=True)
class SeatPlan:
    """How many blocks: `num_shared` for all samples and `num_own` for each."""

    command: ReserveCommand
    block_size: int
    num_shared: int
    num_own: int

    @property
    def num_blocks(self) -> int:
        return self.num_shared + self.num_own * len(self.command.sample_indices)


def plan_seats(command: ReserveCommand, block_size: int, max_context_tokens: int) -> SeatPlan:
    """Room for prompt + max_tokens of each sample, or up to the context limit where the engine stops.

    Raises InvalidRequest for a prompt that no context can hold, and for samples and counts that mean nothing.
    """
    _check_samples(command)
    prompt, written = command.prompt_tokens, command.prompt_tokens + max(command.delivered_counts)
    if written > max_context_tokens:
        raise InvalidRequest(
            f"prompt_tokens: {prompt} prompt and {max(command.delivered_counts)} delivered tokens are above the "
            f"context of {max_context_tokens}",
            field="prompt_tokens",
        )
    rows = max(written, min(prompt + command.sampling.max_tokens, max_context_tokens))
    shared = prompt // block_size
    return SeatPlan(command, block_size, shared, -(-rows // block_size) - shared)


def _check_samples(command: ReserveCommand) -> None:
    indices = command.sample_indices
    if indices[0] < 0 or any(a >= b for a, b in itertools.pairwise(indices)):
        raise InvalidRequest(f"sample_indices: {indices} must ascend from 0 or above", field="sample_indices")
    if len(indices) > MAX_SAMPLES:
        raise InvalidRequest(f"sample_indices: {len(indices)}, at most {MAX_SAMPLES}", field="sample_indices")
    if min(command.delivered_counts) < 0:
        raise InvalidRequest("delivered_token_counts: must be 0 or more", field="delivered_token_counts")
    if command.sampling.max_tokens < 1:
        raise InvalidRequest("sampling.max_tokens: a decode leg needs at least 1", field="sampling.max_tokens")


class Seats:
    """Blocks of one reservation and who still holds them. Each block is given back exactly once."""

    def __init__(self, plan: SeatPlan, blocks: tuple[int, ...]):
        assert len(blocks) == plan.num_blocks
        self.plan = plan
        self._shared = blocks[: plan.num_shared]
        self._own = {
            sample: blocks[plan.num_shared + index * plan.num_own : plan.num_shared + (index + 1) * plan.num_own]
            for index, sample in enumerate(plan.command.sample_indices)
        }
        self._all_shared, self._all_own = self._shared, dict(self._own)

    def table(self, sample_index: int) -> tuple[int, ...]:
        """Block table of a sample's sequence, from position 0 on."""
        return self._all_shared + self._all_own[sample_index]

    def held(self) -> tuple[int, ...]:
        """Blocks not given back yet."""
        return self._shared + tuple(block for blocks in self._own.values() for block in blocks)

    def own(self, sample_index: int) -> tuple[int, ...]:
        """Blocks only this sample uses; empty once given back."""
        return self._own.get(sample_index, ())

    def open_samples(self) -> tuple[int, ...]:
        """Samples that still hold their seat."""
        return tuple(self._own)

    def leave(self, sample_index: int) -> tuple[int, ...]:
        """Blocks to free because a sample is over: its own, and the shared ones with the last sample."""
        blocks = self._own.pop(sample_index, ())
        if not self._own:
            blocks, self._shared = blocks + self._shared, ()
        return blocks

    def leave_all(self) -> tuple[int, ...]:
        """Blocks to free because the request is over."""
        blocks = self.held()
        self._own, self._shared = {}, ()
        return blocks

    def sequences(self) -> tuple[TargetSequence, ...]:
        """What the writer owes."""
        command = self.plan.command
        first = command.sample_indices[0]
        if not any(command.delivered_counts):
            return (TargetSequence(first, 0, command.prompt_tokens, self.table(first)),)
        starts = [0] + [self.plan.num_shared * self.plan.block_size] * (len(command.sample_indices) - 1)
        return tuple(
            TargetSequence(sample, start, command.prompt_tokens + delivered - start, self.table(sample))
            for sample, delivered, start in zip(command.sample_indices, command.delivered_counts, starts, strict=True)
        )

    def copies(self, samples: tuple[int, ...]) -> list[tuple[int, int, int]]:
        """(source block, target block, rows) that give each of `samples` the prompt's partial last block."""
        command = self.plan.command
        rows = command.prompt_tokens % self.plan.block_size
        if not rows or any(command.delivered_counts):
            return []
        source = self._all_own[command.sample_indices[0]][0]
        return [(source, self._all_own[s][0], rows) for s in samples if s != command.sample_indices[0]]


# --- what a commit must prove ----------------------------------------------------------------------------------------


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
    checksums: Callable[[Sequence[int], int, int], Sequence[int]],
) -> None:
    """Recomputes every checksum from the pool; runs in a worker thread. Raises ManifestMismatch naming the layer.

    checksums(blocks, first_row, num_rows)  of those token positions of the sequence in `blocks`, one a layer
    """
    for proof, sequence in zip(manifest, sequences, strict=True):
        found = checksums(sequence.block_ids, sequence.first_row, sequence.num_rows)
        for layer, (entry, value) in enumerate(zip(proof.layers, found, strict=True)):
            if value != entry.checksum:
                raise ManifestMismatch(f"sample {proof.sample_index}, layer {layer}: the rows are not those pushed")
