"""The same model as `deepseek.py` for accelerators: weights in the format they are kept in, kernels for every step.

The residual stream is bf16; a layer's output is added to it by the norm that follows. Decode is absorbed attention over
the paged rows, prefill is naive attention over expanded keys and values. `decode` never waits for the device and has
static shapes, so that it can be captured into a graph; `forward` serves the callers of `Transformer.forward`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from headrace.cache.latent import LatentPool
from headrace.model.base import DecodeInputs, ForwardBatch, KvRegion, Phase, Stepping
from headrace.model.deepseek import rope as rope_angles
from headrace.model.deepseek.config import ModelConfig
from headrace.model.deepseek.fused_kernels import FusedKernels
from headrace.model.deepseek.fused_layers import DecodeStep, FusedBlock, FusedMoE, PrefillStep
from headrace.model.deepseek.fused_linear import PLAIN
from headrace.model.upload import upload
from kernels.attention import latent_store

SMALLEST_OPENED = 8  # decode attention is opened for powers of two from here on: sequences, and blocks of each


class FusedTransformer:
    """A loaded model on an accelerator (or, for tests, on a CPU with the reference kernels): headrace.model.base.GraphModel."""

    exact = False
    dtype = torch.bfloat16
    stepping = Stepping.GRAPHS

    def __init__(
        self,
        config: ModelConfig,
        *,
        kernels: FusedKernels,
        embedding: torch.Tensor,
        blocks: list[FusedBlock],
        norm: torch.Tensor,
        head: torch.Tensor,
        precision: list[tuple[str, str]],
        pool_dtype: torch.dtype = torch.bfloat16,
        mtp_tensors: dict[str, torch.Tensor] | None = None,
    ):
        self.config, self.kernels, self.device = config, kernels, embedding.device
        self.embedding, self.blocks, self.norm, self.head = embedding, blocks, norm, head
        self.pool_dtype = pool_dtype
        self.vocab_size, self.max_context_tokens = config.vocab_size, config.max_position_embeddings
        self.kv_regions = (KvRegion("latent", len(blocks), config.row_dim),)
        self.mtp_tensors = mtp_tensors or {}
        self._precision = precision
        self._cos, self._sin = rope_angles.tables(config, self.device)
        self.prefill_attention = kernels.open_prefill(config.qk_head_dim, config.v_head_dim)
        self._opened: dict[tuple, tuple[Any, torch.dtype]] = {}
        self._plans: dict[int, Any] = {}

    def precision_table(self) -> list[tuple[str, str]]:
        """(part, dtype) as decided at load, then (op, back end) as chosen."""
        return [*self._precision, *((f"kernel {op}", name) for op, name in self.kernels.chosen.items())]

    def with_chunks(self, *, dp_tokens: int = 0, activation_tokens: int = 0) -> FusedTransformer:
        """The same weights with other bounds on the tokens that go through a MoE layer, and through its experts, at a time in
        prefill; 0 is all. Never changes a result."""
        made = copy.copy(self)
        chunks = {"dp_chunk_tokens": dp_tokens, "activation_chunk_tokens": activation_tokens}
        made.blocks = [
            replace(block, ffn=replace(block.ffn, **chunks)) if isinstance(block.ffn, FusedMoE) else block
            for block in self.blocks
        ]
        return made

    def with_pool_dtype(self, dtype: torch.dtype) -> FusedTransformer:
        """The same weights for a pool of another dtype."""
        made = copy.copy(self)
        made.pool_dtype = dtype
        return made

    # --- decode ---

    @property
    def graph_safe(self) -> bool:
        """Whether `decode` plans its attention on the device, so that a captured graph needs no `plan_decode`."""
        return self.kernels.decode_graph_safe

    def plan_decode(self, inputs: DecodeInputs, pool: LatentPool, context_lens_host: np.ndarray | None) -> None:
        """Host planning of one step, before `decode` or the replay of its graph. Does nothing when graph_safe."""
        if not self.graph_safe:
            attention, _ = self._attention(inputs, pool)
            self._plans[id(attention)] = attention.plan(inputs.block_tables, inputs.context_lens, context_lens_host)

    @torch.no_grad()
    def decode(self, inputs: DecodeInputs, pool: LatentPool) -> torch.Tensor:
        """[b, vocab] fp32. Writes each layer's new rows into `pool`, then attends. Waits for nothing."""
        step, eps = self._decode_step(inputs, pool), self.config.rms_norm_eps
        x, delta = self.embedding.index_select(0, inputs.token_ids), None
        for layer, block in enumerate(self.blocks):
            rows = self.kernels.norm(x, delta, block.attention_norm, eps, block.attention.wants)
            delta = block.attention.decode(rows, pool.layer(layer), step)
            rows = self.kernels.norm(x, delta, block.ffn_norm, eps, *block.ffn.wants)
            delta = block.ffn.decode(rows)
        return self._logits(x, delta)

    def _decode_step(self, inputs: DecodeInputs, pool: LatentPool) -> DecodeStep:
        attention, query_dtype = self._attention(inputs, pool)
        if self.graph_safe:
            plan = attention.plan(inputs.block_tables, inputs.context_lens, None)
        else:
            plan = self._plans[id(attention)]
        return DecodeStep(
            cos=self._cos.index_select(0, inputs.positions),
            sin=self._sin.index_select(0, inputs.positions),
            slots=inputs.slots,
            attention=attention,
            plan=plan,
            query_dtype=query_dtype,
        )

    def _attention(self, inputs: DecodeInputs, pool: LatentPool) -> tuple[Any, torch.dtype]:
        """Opened once for each power of two of sequences and of blocks a sequence, and kept: graphs point into it."""
        batch, width = (_power_of_two(count) for count in inputs.block_tables.shape)
        key = pool.block_size, pool.rows.dtype, batch, width
        if key not in self._opened:
            config = self.config
            self._opened[key] = self.kernels.open_decode(
                pool.rows.dtype,
                heads=config.num_attention_heads,
                row_dim=config.row_dim,
                latent_dim=config.kv_lora_rank,
                block_size=pool.block_size,
                max_batch=batch,
                max_blocks=width,
                scale=config.softmax_scale,
            )
        return self._opened[key]

    def _logits(self, x: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        rows = self.kernels.norm(x, delta, self.norm, self.config.rms_norm_eps, PLAIN)
        return self.kernels.wide_product(rows.plain, self.head)

    # --- the callers of Transformer.forward ---

    @torch.no_grad()
    def forward(
        self,
        batch: ForwardBatch,
        pool: LatentPool,
        *,
        phase: Phase,
        on_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """[num_logits, vocab] fp32. Writes each layer's rows into `pool`, then attends.

        `on_layer(l)` is called when the work that puts all rows of layer l into the pool is queued on the current stream.
        A decode batch may hold several new tokens of a sequence: each becomes a sequence of its own.
        """
        if phase == "prefill":
            return self._prefill(batch, pool, on_layer)
        inputs, host = one_token_each(batch)
        self.plan_decode(inputs, pool, host)
        logits = self.decode(inputs, pool).index_select(0, batch.logit_indices)
        for layer in range(len(self.blocks)) if on_layer is not None else ():
            on_layer(layer)
        return logits

    def _prefill(self, batch: ForwardBatch, pool: LatentPool, on_layer: Callable[[int], None] | None) -> torch.Tensor:
        step, eps, last = self._prefill_step(batch, pool), self.config.rms_norm_eps, len(self.blocks) - 1
        count = int(batch.query_starts[-1])
        x, delta = self.embedding.index_select(0, batch.token_ids[:count]), None
        for layer, block in enumerate(self.blocks):
            rows_of_layer = pool.layer(layer)
            rows = self.kernels.norm(x, delta, block.attention_norm, eps, block.attention.wants)
            del delta
            q, latent_rows = block.attention.store(rows, rows_of_layer, step)
            if on_layer is not None:
                on_layer(layer)
            del rows
            if layer == last and batch.last_token_logits:
                self._attend_with_last_tokens(step, batch)
            delta = block.attention.attend(q, latent_rows, rows_of_layer, step)
            del q, latent_rows
            if layer == last:
                x = x.index_select(0, batch.logit_indices)
                delta = delta if step.query_rows is not None else delta.index_select(0, batch.logit_indices)
            delta = block.ffn.prefill(self.kernels.norm(x, delta, block.ffn_norm, eps, *block.ffn.wants))
        return self._logits(x, delta)

    def _prefill_step(self, batch: ForwardBatch, pool: LatentPool) -> PrefillStep:
        count = int(batch.query_starts[-1])
        query_lens, context_lens = batch.query_lens, list(batch.context_lens)
        positions, slots = batch.positions[:count], batch.slots[:count]
        step = PrefillStep(
            cos=self._cos.index_select(0, positions),
            sin=self._sin.index_select(0, positions),
            store=latent_store.plan(slots),
            attention=self.prefill_attention,
            plan=self._plan_prefill(query_lens, context_lens),
        )
        if query_lens != context_lens:
            step.context_slots = packed_context_slots(batch.block_tables, context_lens, pool.block_size)
        return step

    def _attend_with_last_tokens(self, step: PrefillStep, batch: ForwardBatch) -> None:
        """From here on. Not planned with the step: some back ends keep one plan at a time."""
        context_lens = list(batch.context_lens)
        step.query_rows, step.plan = batch.logit_indices, self._plan_prefill([1] * len(context_lens), context_lens)

    def _plan_prefill(self, query_lens: list[int], context_lens: list[int]) -> Any:
        config = self.config
        return self.prefill_attention.plan(
            query_lens,
            context_lens,
            config.num_attention_heads,
            config.qk_head_dim,
            config.v_head_dim,
            config.softmax_scale,
            self.device,
        )


def one_token_each(batch: ForwardBatch) -> tuple[DecodeInputs, np.ndarray]:
    """A batch whose every token is a sequence of its own, and its context lengths on the host; padding tokens attend
    to one row. Token j of q new ones sees all but the last q - 1 - j rows of its context."""
    tokens, lens = len(batch.token_ids), np.asarray(batch.query_lens, np.int64)
    owner = np.repeat(np.arange(len(lens)), lens)
    behind = np.asarray(batch.query_starts[1:], np.int64)[owner] - 1 - np.arange(len(owner))
    contexts = np.ones(tokens, np.int32)
    contexts[: len(owner)] = np.asarray(batch.context_lens, np.int64)[owner] - behind
    tables = batch.block_tables
    if tokens != len(tables) or (lens != 1).any():
        picked = np.zeros(tokens, np.int64)
        picked[: len(owner)] = owner
        tables = tables.index_select(0, upload(picked, tables.device))
    lens_there = upload(contexts, tables.device)
    return DecodeInputs(batch.token_ids, batch.positions, batch.slots, tables, lens_there), contexts


def packed_context_slots(block_tables: torch.Tensor, context_lens: list[int], block_size: int) -> torch.Tensor:
    """[sum of context_lens] int64 slots of every sequence's rows, packed in order. Waits for nothing."""
    lens = np.asarray(context_lens, np.int64)
    owner = np.repeat(np.arange(len(lens)), lens)
    place = np.arange(len(owner)) - (lens.cumsum() - lens)[owner]
    at = upload(np.stack((owner, place // block_size, place % block_size)), block_tables.device)
    return block_tables[at[0], at[1]].long() * block_size + at[2]


def _power_of_two(count: int) -> int:
    return max(SMALLEST_OPENED, 1 << (count - 1).bit_length())
