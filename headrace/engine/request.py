"""What is asked of an engine and what it answers, as plain values. No torch here.

An output *position* is the index of a token in a sample's output: 0 for the token prefill draws of a fresh prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.protocol.common import FinishReason, SamplingParams
from headrace.protocol.prefill import FirstToken


def _nothing(*_: object) -> None:
    """The callback nobody asked for."""


@dataclass
class PrefillSequence:
    """Rows to compute for one sample.

    token_ids        prompt and delivered tokens
    block_table      a block for each `block_size` tokens, from position 0 on
    first_computed   rows before it are in the pool already, or are computed by an earlier sequence of the same job;
                     below len(token_ids)
    """

    sample_index: int
    token_ids: list[int]
    block_table: list[int]
    first_computed: int = 0

    @property
    def num_computed(self) -> int:
        """Rows this sequence computes; at least 1."""
        return len(self.token_ids) - self.first_computed


@dataclass
class PrefillJob:
    """One attempt at one prompt, with the functions that hear of its progress. They run in the engine thread.

    `sample_indices` and `delivered_counts` run in parallel. A sample without a sequence of its own draws from the
    logits of the first sequence: with nothing delivered there is one sequence for all samples.

    on_start()              its batch begins
    on_layer(layer, ready)  all rows of a layer are in the pool, or will be once the device gets there: `ready()` waits for
                            that, in whichever thread calls it. Later layers still compute
    on_tokens(tokens)       one FirstToken a sample, none when max_tokens is 0; nothing is called after it
    on_error(error)         instead of on_tokens; when either is called no forward touches the job's blocks any more
    """

    key: str
    sequences: list[PrefillSequence]
    sampling: SamplingParams
    sample_indices: tuple[int, ...] = (0,)
    delivered_counts: tuple[int, ...] = (0,)
    prompt_length: int = 0
    on_start: Callable[[], None] = field(default=_nothing)
    on_layer: Callable[[int, Callable[[], None]], None] = field(default=_nothing)
    on_tokens: Callable[[list[FirstToken]], None] = field(default=_nothing)
    on_error: Callable[[Exception], None] = field(default=_nothing)

    def __post_init__(self) -> None:
        if not self.prompt_length:
            self.prompt_length = len(self.sequences[0].token_ids) - self.delivered_counts[0]

    @property
    def num_computed(self) -> int:
        """Tokens its forward takes."""
        return sum(sequence.num_computed for sequence in self.sequences)


@dataclass
class DecodeSequence:
    """A sample that decode steps. Rows of all tokens but the last are in the pool; the last is fed by the next step.

    `output_token_ids` is not empty and is not written to by the engine. `block_table` has room for every row to come.
    """

    handle: int
    sample_index: int
    sampling: SamplingParams
    prompt_token_ids: tuple[int, ...]
    output_token_ids: list[int]
    block_table: list[int]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token that a step drew. `logprob` is None when none was asked for."""

    handle: int
    sample_index: int
    position: int
    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    finish_reason: FinishReason


def finish_reason(
    token_id: int, sampling: SamplingParams, position: int, total_length: int, max_context: int
) -> FinishReason:
    """Whether a sample ends with this token, for prefill's first token and decode's alike.

    position      index of the token in the output
    total_length  prompt and output tokens, this one included
    max_context   tokens the model can attend to

    End tokens count from position `min_tokens` on (the sampler masks them before). EOS, then STOP, then LENGTH.
    """
    if position >= sampling.min_tokens:
        if token_id in sampling.eos_token_ids and not sampling.ignore_eos:
            return FinishReason.EOS
        if token_id in sampling.stop_token_ids:
            return FinishReason.STOP
    if position + 1 >= sampling.max_tokens or total_length >= max_context:
        return FinishReason.LENGTH
    return FinishReason.NONE
