"""Which blocks a reservation needs, which sample holds which, and what the writer owes. Arithmetic only.

How many blocks is `headrace/cache/seats.py`'s business. A prompt whose last block is partial is written once, into the first
sample's sequence, and copied into the others' at commit; once tokens were delivered the sequences differ and each is written.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from headrace.cache.seats import blocks_for, decode_length, shared_blocks
from headrace.errors import InvalidRequest
from headrace.protocol.common import MAX_SAMPLES
from headrace.protocol.decode import ReserveCommand, TargetSequence


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
    prompt, delivered = command.prompt_tokens, max(command.delivered_counts)
    if prompt + delivered > max_context_tokens:
        raise InvalidRequest(
            f"prompt_tokens: {prompt} prompt and {delivered} delivered tokens are above the context of {max_context_tokens}",
            field="prompt_tokens",
        )
    rows = decode_length(prompt, command.sampling.max_tokens, delivered, max_context_tokens)
    shared = shared_blocks(prompt, block_size)
    return SeatPlan(command, block_size, shared, blocks_for(rows, block_size) - shared)


def _check_samples(command: ReserveCommand) -> None:
    indices = command.sample_indices
    if not indices or indices[0] < 0 or any(a >= b for a, b in itertools.pairwise(indices)):
        raise InvalidRequest(f"sample_indices: {indices} must ascend from 0 or above", field="sample_indices")
    if len(indices) > MAX_SAMPLES:
        raise InvalidRequest(f"sample_indices: {len(indices)}, at most {MAX_SAMPLES}", field="sample_indices")
    if len(command.delivered_counts) != len(indices) or min(command.delivered_counts) < 0:
        raise InvalidRequest("delivered_token_counts: one for each sample, 0 or more", field="delivered_token_counts")
    if command.prompt_tokens < 1:
        raise InvalidRequest("prompt_token_count: must be 1 or more", field="prompt_token_count")
    if command.sampling.max_tokens < 1:
        raise InvalidRequest("sampling.max_tokens: a decode leg needs at least 1", field="sampling.max_tokens")
    if command.stream_interval < 1:
        raise InvalidRequest("stream_interval: must be 1 or more", field="stream_interval")


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
