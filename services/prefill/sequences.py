"""What a prefill attempt computes: the prompt alone the first time, prompt and delivered tokens per sample after that."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.cache.seats import shared_blocks
from headrace.engine.request import PrefillSequence
from headrace.errors import InvalidRequest
from headrace.protocol.common import MAX_SAMPLES
from headrace.protocol.prefill import PrefillCommand


def sequence_lengths(command: PrefillCommand) -> list[int]:
    """Tokens of each sequence: the prompt alone on a first attempt, else prompt and delivered tokens per sample."""
    prompt = len(command.prompt_token_ids)
    if not any(command.delivered.values()):
        return [prompt]
    return [prompt + len(command.delivered.get(sample, ())) for sample in command.sample_indices]


def check_command(command: PrefillCommand, vocabulary_size: int) -> None:
    """Raises InvalidRequest, naming the field, for samples and ids that mean nothing."""
    samples = command.sample_indices
    if not 1 <= len(samples) <= MAX_SAMPLES or min(samples) < 0 or len(set(samples)) != len(samples):
        raise InvalidRequest(
            f"sample_indices: {len(samples)} of them; 1 to {MAX_SAMPLES}, distinct, 0 or above", field="sample_indices"
        )
    if not set(command.delivered) <= set(samples):
        raise InvalidRequest("delivered: a sample that is not in sample_indices", field="delivered")
    if not command.prompt_token_ids:
        raise InvalidRequest("prompt_token_ids: empty", field="prompt_token_ids")
    _check_ids(command.prompt_token_ids, "prompt_token_ids", vocabulary_size)
    for ids in command.delivered.values():
        _check_ids(ids, "delivered.token_ids", vocabulary_size)


def _check_ids(ids: Sequence[int], field: str, vocabulary_size: int) -> None:
    if ids and (min(ids) < 0 or max(ids) >= vocabulary_size):
        raise InvalidRequest(f"{field}: must be 0 to {vocabulary_size - 1}", field=field)


def sequences_of(
    command: PrefillCommand, blocks: Sequence[tuple[int, ...]], cached: int, size: int
) -> list[PrefillSequence]:
    """One sequence per block table. The first computes all but `cached` tokens, the others only what they do not share."""
    shared = shared_blocks(len(command.prompt_token_ids), size) * size
    sequences = []
    for index, table in enumerate(blocks):
        sample = command.sample_indices[index]
        ids = [*command.prompt_token_ids, *command.delivered.get(sample, ())]
        if len(blocks) == 1 and not any(command.delivered.values()):
            ids = list(command.prompt_token_ids)
        first = cached if index == 0 else shared
        sequences.append(PrefillSequence(sample, ids, list(table), min(first, len(ids) - 1)))
    return sequences
