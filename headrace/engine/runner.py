"""Batches to tensors to logits to tokens: the only place where a plan meets the model.

A plan is made of numpy arrays; `to_batch` uploads it. A decode step is launched: its tokens stay on the device for the
next step, and `Drawn.wait` reads them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from headrace.cache.latent import LatentPool
from headrace.engine.request import PrefillSequence
from headrace.engine.sampler import Drawn, Sampled, Sampler, SamplingTable
from headrace.engine.step import StepPlan
from headrace.model.deepseek import ForwardBatch
from headrace.model.upload import upload


class Model(Protocol):
    """What the runner needs of a transformer."""

    device: torch.device

    def forward(
        self, batch: ForwardBatch, pool: LatentPool, *, phase: str, on_layer: Callable[[int], None] | None = None
    ) -> torch.Tensor: ...


@dataclass
class BatchPlan:
    """One forward in numpy; fields as in ForwardBatch."""

    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    block_tables: np.ndarray
    query_starts: list[int]
    context_lens: list[int]
    logit_indices: np.ndarray


def plan_prefill(sequences: Sequence[PrefillSequence], block_size: int) -> BatchPlan:
    """Packs the rows that each sequence computes, one sequence after another; logits of each one's last token."""
    width = max(len(sequence.block_table) for sequence in sequences)
    tables = np.zeros((len(sequences), width), np.int32)
    token_ids, positions, slots = [], [], []
    for place, sequence in enumerate(sequences):
        table = np.asarray(sequence.block_table, np.int64)
        tables[place, : len(table)] = table
        at = np.arange(sequence.first_computed, len(sequence.token_ids))
        token_ids.append(np.asarray(sequence.token_ids[sequence.first_computed :], np.int64))
        positions.append(at)
        slots.append(table[at // block_size] * block_size + at % block_size)
    ends = np.cumsum([sequence.num_computed for sequence in sequences])
    return BatchPlan(
        token_ids=np.concatenate(token_ids),
        positions=np.concatenate(positions),
        slots=np.concatenate(slots),
        block_tables=tables,
        query_starts=[0, *ends.tolist()],
        context_lens=[len(sequence.token_ids) for sequence in sequences],
        logit_indices=ends - 1,
    )


def plan_step(plan: StepPlan, block_size: int) -> BatchPlan:
    """One new token a sample."""
    return BatchPlan(
        token_ids=plan.token_ids,
        positions=plan.context_lens - 1,
        slots=plan.slots,
        block_tables=plan.tables.of(plan.rows, -(-int(plan.context_lens.max()) // block_size)),
        query_starts=list(range(len(plan.rows) + 1)),
        context_lens=plan.context_lens.tolist(),
        logit_indices=np.arange(len(plan.rows)),
    )


class Steps(Protocol):
    """Another way to run decode steps than through `forward`; headrace/engine/graphs.py has one."""

    def launch(self, plan: StepPlan, table: SamplingTable, before: Drawn | None) -> Drawn: ...

    def warm(self) -> None: ...


class Runner:
    """A model, the pool its rows live in, and a sampler; owns none of them. One thread uses it.

    steps          how decode steps run; None: through the model's `forward`
    steps_ahead    1: a DecodeBatcher launches a step before it reads the tokens of the one in flight; 0: it does not
    """

    def __init__(
        self,
        transformer: Model,
        pool: LatentPool,
        sampler: Sampler,
        max_context: int,
        *,
        steps: Steps | None = None,
        steps_ahead: int = 0,
    ):
        self.transformer, self.pool, self.sampler = transformer, pool, sampler
        self.max_context = max_context
        self.block_size = pool.block_size
        self.steps, self.steps_ahead = steps, steps_ahead

    def to_batch(self, plan: BatchPlan) -> ForwardBatch:
        """The plan on the model's device."""
        device = self.transformer.device
        return ForwardBatch(
            token_ids=upload(plan.token_ids, device),
            positions=upload(plan.positions, device),
            slots=upload(plan.slots, device),
            block_tables=upload(plan.block_tables, device),
            query_starts=plan.query_starts,
            context_lens=plan.context_lens,
            logit_indices=upload(plan.logit_indices, device),
            last_token_logits=np.array_equal(plan.logit_indices, np.asarray(plan.query_starts[1:]) - 1),
        )

    def forward(self, batch: ForwardBatch, phase: str, on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """[num_logits, vocab] fp32. `phase` is `prefill` or `decode`."""
        with torch.inference_mode():
            return self.transformer.forward(batch, self.pool, phase=phase, on_layer=on_layer)

    def sample(self, logits: torch.Tensor, table: SamplingTable, rows: np.ndarray, positions: np.ndarray) -> Sampled:
        """One token a row of `table`, at these output positions."""
        with torch.inference_mode():
            return self.sampler.sample(logits, table, rows, positions)

    @property
    def counts_on_host(self) -> bool:
        """Whether penalties need the host to have counted a sample's newest token when its step is launched."""
        return self.steps is None

    def launch(self, plan: StepPlan, table: SamplingTable, before: Drawn | None) -> Drawn:
        """A decode step and its draw, queued. `before`: the step launched last, whose tokens `plan.sources` name; None when
        the host knows all tokens."""
        if self.steps is not None:
            with torch.inference_mode():
                return self.steps.launch(plan, table, before)
        batch = self.to_batch(plan_step(plan, self.block_size))
        if before is not None:
            sources = upload(plan.sources, self.transformer.device)
            fed = before.token_ids.to(self.transformer.device).index_select(0, sources.clamp(min=0))
            batch.token_ids = torch.where(sources >= 0, fed, batch.token_ids)
        logits = self.forward(batch, "decode")
        with torch.inference_mode():
            return self.sampler.draw(logits, table, plan.rows, plan.positions)

    def warm(self) -> None:
        """Makes ready what the first step would have to wait for (graphs)."""
        if self.steps is not None:
            self.steps.warm()

    def settle(self) -> None:
        """Returns when nothing that was launched runs any more, whether it went well or not."""
        if self.transformer.device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # the failure itself: whoever reads the step hears of it
                torch.cuda.synchronize(self.transformer.device)
