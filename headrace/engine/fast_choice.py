"""What fast mode computes with on a CPU: one real step of the loaded checkpoint decides, not the kind of processor.

A trial is a model of a few of the checkpoint's layers (`Family.trial`) over the candidate's dtype and kernels; it decodes, replayed
where the engine would replay, and prefills a few batches on one thread. The candidate that computes as exact mode does (fp32, our C
kernels where they build) stays unless another is faster in every phase: fast mode is never slower than exact.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from headrace.cache.latent import LatentPool
from headrace.engine.steps.replayed import RecordedSteps
from headrace.model.base import Candidate, Family, ForwardBatch, Model, ModelOptions, Phase, Stepping
from headrace.observe import logs

log = logs.get(__name__)

PHASES: Mapping[str, tuple[Phase, int]] = {
    "decode of 1": ("decode", 1),
    "decode of 16": ("decode", 16),
    "prefill of 128": ("prefill", 128),
}
"""What is timed: the phase, and how many samples (decode, one new token each) or tokens (prefill, one prompt) it has."""
MARGIN = 0.9
"""Another candidate must take at most this share of the first one's time, in every phase: timings of a busy host differ by so much."""
REPEATS = 4
PHASE_LIMIT_S = 0.5
"""No further repeat of a phase once it has taken so long."""
_BLOCK_SIZE = 16
_CONTEXT = 65
"""Rows a decoding sample attends to."""

_CHOSEN: dict[str, Choice] = {}
"""What fast mode took in this process, by checkpoint, what was asked for and threads."""

Seconds = Mapping[str, float]
"""Seconds of the fastest repeat by phase."""


@dataclass(frozen=True)
class Choice:
    """What was taken, and what every candidate took."""

    taken: Candidate
    seconds: Mapping[Candidate, Seconds]

    def table(self) -> str:
        """For the start-up table and the log: milliseconds of each candidate by phase, or that there was one."""
        rows = (
            f"{candidate}: " + ", ".join(f"{phase} {1000 * took:.2f} ms" for phase, took in seconds.items())
            for candidate, seconds in self.seconds.items()
        )
        return "; ".join(rows) or "nothing: one candidate"


def choose(candidates: Sequence[Candidate], measure: Callable[[Candidate], Seconds]) -> Choice:
    """The first candidate, or the fastest of those that beat it by MARGIN in every phase. One candidate is not measured."""
    assert candidates, "somebody computes"
    if len(candidates) == 1:
        return Choice(candidates[0], {})
    seconds = {candidate: measure(candidate) for candidate in candidates}
    first = seconds[candidates[0]]
    better = [x for x in candidates[1:] if all(seconds[x][phase] <= MARGIN * first[phase] for phase in first)]
    return Choice(min(better, key=lambda x: sum(seconds[x].values()), default=candidates[0]), seconds)


def chosen(family: Family, directory: Path, device: torch.device, options: ModelOptions) -> ModelOptions:
    """The options with dtype and kernels filled in for fast mode on a CPU; timed once a process. Raises BackendUnavailable."""
    key = repr((directory.absolute(), device, options, torch.get_num_threads()))
    if key not in _CHOSEN:

        def measure(one: Candidate) -> Seconds:
            return time_steps(family.trial(directory, device, replace(options, dtype=one.dtype, kernels=one.kernels)))

        made = _CHOSEN[key] = choose(family.candidates(directory, device, options), measure)
        log.info("fast mode chosen", taken=str(made.taken), timed=made.table())
    made = _CHOSEN[key]
    return replace(options, dtype=made.taken.dtype, kernels=made.taken.kernels, timed=made.table())


@torch.no_grad()
def time_steps(model: Model) -> dict[str, float]:
    """Seconds of the fastest repeat of each phase, on one thread: on a busy host two threads wait for each other, and then time
    says nothing about the format."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {name: _fastest(model, phase, count) for name, (phase, count) in PHASES.items()}
    finally:
        torch.set_num_threads(threads)


def _fastest(model: Model, phase: Phase, count: int) -> float:
    batch, pool = _batch(model, phase, count)
    recorded = RecordedSteps(model) if model.stepping is Stepping.REPLAYED and phase == "decode" else None

    def step() -> None:
        if recorded is not None:
            recorded.logits(batch, pool)
        else:
            model.forward(batch, pool, phase=phase)

    step()  # packs, allocates, records
    times: list[float] = []
    while len(times) < REPEATS and sum(times) < PHASE_LIMIT_S:
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return min(times)


def _batch(model: Model, phase: Phase, count: int) -> tuple[ForwardBatch, LatentPool]:
    """`count` samples with one new token each, or one prompt of `count` tokens, over a pool of their own."""
    longest = model.max_context_tokens
    count = min(count, longest) if phase == "prefill" else count
    sequences, context = (1, count) if phase == "prefill" else (count, min(_CONTEXT, longest))
    blocks = -(-context // _BLOCK_SIZE)
    region = model.kv_regions[0]
    pool = LatentPool(
        region.num_layers, sequences * blocks, _BLOCK_SIZE, region.row_width, model.pool_dtype, model.device
    )
    tables = torch.arange(sequences * blocks, dtype=torch.int32).view(sequences, blocks)
    if phase == "prefill":
        positions, slots, starts = torch.arange(count), torch.arange(count), [0, count]
    else:
        positions = torch.full((count,), context - 1)
        slots = tables[:, -1].long() * _BLOCK_SIZE + (context - 1) % _BLOCK_SIZE
        starts = list(range(count + 1))
    batch = ForwardBatch(
        token_ids=(torch.arange(count) * 37) % model.vocab_size,
        positions=positions,
        slots=slots,
        block_tables=tables,
        query_starts=starts,
        context_lens=[context] * sequences,
        logit_indices=torch.tensor([end - 1 for end in starts[1:]]),
    )
    return batch, pool
