"""How likely a given text is, token by token: one prefill whose every position goes through the head."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from headrace.engine.batches import plan_prefill
from headrace.engine.offline import EngineParts
from headrace.engine.request import PrefillSequence


def prompt_logprobs(parts: EngineParts, token_ids: Sequence[int]) -> np.ndarray:
    """Natural log-probabilities [len(token_ids) - 1] fp32 of each token but the first, given those before it.

    Raises PoolExhausted when the pool has no room for the prompt.
    """
    blocks = parts.blocks.allocate(parts.blocks.blocks_for(len(token_ids)))
    try:
        sequence = PrefillSequence(0, list(token_ids), list(blocks))
        plan = plan_prefill([sequence], parts.blocks.block_size)
        plan.logit_indices = np.arange(len(token_ids) - 1)
        logits = parts.runner.forward(parts.runner.to_batch(plan), "prefill")
        chosen = torch.tensor(token_ids[1:], device=logits.device)[:, None]
        return torch.log_softmax(logits, -1).gather(1, chosen)[:, 0].cpu().numpy()
    finally:
        parts.blocks.free(blocks)
