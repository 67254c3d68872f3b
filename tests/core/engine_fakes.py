"""A toy model with the transformer's interface, and random checkpoints of the real one.

The toy's rows hold (token, position) and its logits are a hash of every row that a sequence attends to, read back
through the block table: a lost, shifted or stale row changes every later token.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from headrace.cache.blocks import BlockPool
from headrace.cache.latent import LatentPool
from headrace.config import EngineConfig
from headrace.engine.offline import EngineParts
from headrace.engine.runner import Runner
from headrace.engine.sampler import Sampler
from headrace.model.base import KvRegion, Stepping
from headrace.model.weights.random_checkpoint import write_random_checkpoint

VOCAB = 211
NUM_LAYERS = 2


class ToyTransformer:
    """Logits in [-4, 4), fp32, from a hash of the context."""

    def __init__(self, vocab_size: int = VOCAB, max_context: int = 256):
        self.device = torch.device("cpu")
        self.exact, self.dtype, self.pool_dtype = True, torch.float32, torch.float32
        self.vocab_size, self.max_context_tokens = vocab_size, max_context
        self.kv_regions, self.stepping = (KvRegion("toy", NUM_LAYERS, 2),), Stepping.PLAIN
        self.batches: list[tuple[str, list[int]]] = []
        self.fail_with: Exception | None = None
        self.shift = np.zeros(vocab_size, np.float32)
        """Added to every logit row: lets a test make a token likely."""

    def forward(self, batch, pool, *, phase, on_layer=None):
        lens = [end - start for start, end in zip(batch.query_starts, batch.query_starts[1:], strict=False)]
        self.batches.append((phase, lens))
        for layer in range(NUM_LAYERS):
            flat = pool.layer(layer).view(-1, 2)
            flat[batch.slots, 0] = batch.token_ids.float()
            flat[batch.slots, 1] = batch.positions.float()
            if on_layer is not None:
                on_layer(layer)
            if self.fail_with is not None:
                raise self.fail_with
        return torch.from_numpy(np.stack([self._logits(batch, pool, index) for index in batch.logit_indices.tolist()]))

    def _logits(self, batch, pool, token: int) -> np.ndarray:
        seq = int(np.searchsorted(batch.query_starts, token, side="right")) - 1
        length = batch.context_lens[seq] - (batch.query_starts[seq + 1] - 1 - token)
        at = torch.arange(length)
        blocks = batch.block_tables[seq].long()[at // pool.block_size]
        rows = pool.rows[:, blocks, at % pool.block_size]  # [layers, length, 2]
        assert torch.equal(rows[0], rows[1]) and torch.equal(rows[0, :, 1], at.float()), "a row is not where it belongs"
        seed = np.random.SeedSequence(rows[0, :, 0].to(torch.int64).tolist())
        return (
            np.random.Generator(np.random.PCG64(seed)).uniform(-4, 4, self.vocab_size).astype(np.float32) + self.shift
        )


def toy_parts(num_blocks: int = 64, block_size: int = 4, max_context: int = 256) -> EngineParts:
    """EngineParts over the toy."""
    toy = ToyTransformer(max_context=max_context)
    pool = LatentPool(NUM_LAYERS, num_blocks, block_size, 2, torch.float32, toy.device)
    runner = Runner(toy, pool, Sampler(VOCAB), max_context)
    return EngineParts(toy, pool, BlockPool(num_blocks, block_size), runner, max_context)


def random_checkpoint(directory: Path, **changes: object) -> Path:
    """A DeepSeek-V3 directory with random weights: three layers, eight experts, a vocabulary of 500."""
    shape = {
        "vocab_size": 500,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "max_position_embeddings": 512,
    }
    return write_random_checkpoint(directory, {**shape, **changes})


def small_config(**changes: object) -> EngineConfig:
    """Settings that fit a test."""
    return EngineConfig(**{"num_blocks": 512, "max_batch_tokens": 512, "max_batch_size": 32, **changes})
