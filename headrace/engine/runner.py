"""Batches to tensors to logits to tokens: the only place where a plan meets the model.

A plan is made of numpy arrays (`batches.py`). A decode step is launched: its tokens stay on the device for the next step, and
`Drawn.wait` reads them. How steps run is one of `steps/`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from headrace.cache.latent import LatentPool
from headrace.engine.batches import BatchPlan, to_batch
from headrace.engine.sampler import Drawn, Sampled, Sampler, SamplingTable
from headrace.engine.step import StepPlan
from headrace.engine.steps.plain import PlainSteps
from headrace.model.base import ForwardBatch, Model, Phase


class Steps(Protocol):
    """How decode steps run: headrace/engine/steps/{plain,replayed,graphs}.py.

    counts_on_host   penalties need the host to have counted a sample's newest token when its step is launched
    """

    counts_on_host: bool

    def launch(self, plan: StepPlan, table: SamplingTable, before: Drawn | None) -> Drawn:
        """A decode step and its draw, queued. `before`: the step launched last, whose tokens `plan.sources` name; None when the host
        knows all tokens."""
        ...

    def warm(self) -> None:
        """Makes ready what the first step would have to wait for (graphs)."""
        ...


class Runner:
    """A model, the pool its rows live in, and a sampler; owns none of them. One thread uses it.

    steps          how decode steps run; None: op by op
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
        self.steps: Steps = steps or PlainSteps(transformer, pool, sampler)
        self.steps_ahead = steps_ahead

    def to_batch(self, plan: BatchPlan) -> ForwardBatch:
        """The plan on the model's device."""
        return to_batch(plan, self.transformer.device)

    def forward(self, batch: ForwardBatch, phase: Phase, on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """[num_logits, vocab] fp32, op by op."""
        with torch.inference_mode():
            return self.transformer.forward(batch, self.pool, phase=phase, on_layer=on_layer)

    def sample(self, logits: torch.Tensor, table: SamplingTable, rows: np.ndarray, positions: np.ndarray) -> Sampled:
        """One token a row of `table`, at these output positions."""
        with torch.inference_mode():
            return self.sampler.sample(logits, table, rows, positions)

    @property
    def counts_on_host(self) -> bool:
        """As Steps."""
        return self.steps.counts_on_host

    def launch(self, plan: StepPlan, table: SamplingTable, before: Drawn | None) -> Drawn:
        """As Steps."""
        with torch.inference_mode():
            return self.steps.launch(plan, table, before)

    def warm(self) -> None:
        """As Steps."""
        self.steps.warm()

    def settle(self) -> None:
        """Returns when nothing that was launched runs any more, whether it went well or not."""
        if self.transformer.device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # the failure itself: whoever reads the step hears of it
                torch.cuda.synchronize(self.transformer.device)
