"""Decode steps op by op, through the model's `forward`."""

from __future__ import annotations

import torch

from headrace.cache.latent import LatentPool
from headrace.engine.batches import plan_step, to_batch
from headrace.engine.sampler import Drawn, Sampler
from headrace.engine.sampling_table import SamplingTable
from headrace.engine.step import StepPlan
from headrace.model.base import ForwardBatch, Model
from headrace.model.upload import upload


class PlainSteps:
    """See headrace.engine.runner.Steps. The tokens to feed may still be on the device; the host counts for penalties."""

    counts_on_host = True

    def __init__(self, model: Model, pool: LatentPool, sampler: Sampler):
        self.model, self.pool, self.sampler = model, pool, sampler

    def warm(self) -> None:
        """Nothing has to be made ready."""

    def launch(self, plan: StepPlan, table: SamplingTable, before: Drawn | None) -> Drawn:
        """As Steps.launch; in inference mode."""
        logits = self.logits(self.batch_of(plan, before))
        return self.sampler.draw(logits, table, plan.rows, plan.positions)

    def batch_of(self, plan: StepPlan, before: Drawn | None) -> ForwardBatch:
        """The step on the model's device, with tokens of the step before where the host does not know them."""
        device = self.model.device
        batch = to_batch(plan_step(plan, self.pool.block_size), device)
        if before is not None:
            sources = upload(plan.sources, device)
            fed = before.token_ids.to(device).index_select(0, sources.clamp(min=0))
            batch.token_ids = torch.where(sources >= 0, fed, batch.token_ids)
        return batch

    def logits(self, batch: ForwardBatch) -> torch.Tensor:
        """[num_logits, vocab] fp32 of one step."""
        return self.model.forward(batch, self.pool, phase="decode")
