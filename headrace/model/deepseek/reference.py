"""DeepSeek-V3 / R1: MLA, gate, experts, blocks, transformer. Inference only, over a paged latent pool.

One forward serves a packed batch of sequences. `exact` (DESIGN section 6) makes a request's numbers depend on the
request alone: absorbed attention in both phases with a fixed order of additions, fp32 throughout, and either the `c` kernels,
whose rows do not know how many they are, or torch's on a multiple of 16 rows. Otherwise prefill is naive (expanded keys
and values) and decode is absorbed.

Tensor comments: t tokens, h heads, c latent, r rope, n nope, d value, e experts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from headrace.cache.latent import LatentPool
from headrace.model.base import ForwardBatch, KvRegion, Phase, Stepping
from headrace.model.deepseek import rope as rope_angles
from headrace.model.deepseek.config import ModelConfig
from kernels.attention import latent_store, mla_decode, mla_prefill
from kernels.experts import expert_ffn, gate
from kernels.linear import dense as linear
from kernels.linear.dense import Prepared
from kernels.rows import rms_norm
from kernels.select import Backend, BackendUnavailable, choose
from kernels.toolchain import cpu_library

INNER_NORM_EPS = 1e-6  # q_a_layernorm and kv_a_layernorm, whatever rms_norm_eps says
ROW_MULTIPLE = 16  # exact mode with torch's matrix products: rows of each; heads in absorbed attention
MAX_UNIFORM_QUERY_LEN = 8  # decode kernels take up to this many new tokens a sequence (drafts to verify)


@dataclass
class Forward:
    """What all layers of one forward share."""

    cos: torch.Tensor  # [t, r / 2]
    sin: torch.Tensor
    store: latent_store.Plan
    num_queries: int  # tokens that belong to a sequence; the rest is padding
    query_lens: list[int]
    context_lens: list[int]
    absorbed: Any = None  # the attention kernel that takes rows, None when this step is naive
    plan: Any = None  # what that kernel planned
    context_slots: torch.Tensor | None = None  # naive, when some context is longer than its new tokens


class Kernels:
    """The back end of each op on this device, chosen once.

    `wanted`: "c" or "torch" for all that have it; None takes cpu.c when the model's sizes and dtype fit it.
    `row_multiple`: what rows of every matrix product are padded to (exact mode on torch's own products; else 1).
    `chosen`: op -> name of its back end.
    """

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype, exact: bool, wanted: str | None):
        misfit = why_not_c(config, device, dtype)
        if wanted == "c" and misfit:
            raise BackendUnavailable(f"the CPU kernels were asked for: {misfit}")
        self.family = wanted or ("torch" if misfit else "c")
        self.row_multiple = ROW_MULTIPLE if exact and self.family == "torch" else 1
        self.chosen: dict[str, str] = {}
        absorbed = "c" if self.family == "c" else "folded"

        def pick(op, backends, name=self.family):
            found = choose(backends, device, name, op=op)
            self.chosen[op] = found.name
            return found.run

        self.linear = pick("linear", linear.BACKENDS)
        self.norm = pick("rms_norm", rms_norm.BACKENDS)
        self.store = pick("latent_store", latent_store.BACKENDS)
        self.gate = pick("gate", gate.BACKENDS)
        self.ffn = pick("expert_ffn", self._ffn_backends(), None if self.family == "torch" else "c")
        self.decode = pick("mla_decode", mla_decode.BACKENDS, absorbed if exact else self.family)
        self.prefill_absorbed = pick("mla_prefill", mla_prefill.BACKENDS, absorbed)
        self.prefill_naive = pick("mla_prefill_naive", mla_prefill.NAIVE_BACKENDS, "torch")
        in_c = self.family == "c"
        self.add_rows = cpu_library.add_rows if in_c else torch.Tensor.add_
        self.copy_heads = cpu_library.copy_heads if in_c else torch.Tensor.copy_

    def _ffn_backends(self) -> tuple[Backend, ...]:
        return tuple(b for b in expert_ffn.BACKENDS if (b.name == "c") == (self.family == "c"))


def why_not_c(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> str | None:
    """A sentence when cpu.c cannot compute this model in this dtype on this device, else None."""
    if dtype != torch.float32:
        return f"they compute in fp32, not {dtype}"
    widths = (config.hidden_size, config.intermediate_size, config.moe_intermediate_size, config.q_lora_rank or 8)
    if any(width % rms_norm.LANES for width in (*widths, config.kv_lora_rank, config.row_dim)):
        return f"some size of this model is no multiple of {rms_norm.LANES}"
    return cpu_library.why_not(device)


@dataclass
class Attention:
    """Multi-head latent attention. Weights are as `kernels.linear.prepare` made them, kv_b as it was loaded.

    qkv_a     [q_lora + c + r, hidden]    q_a_proj over kv_a_proj_with_mqa (the whole q_proj when q_lora is None)
    q_norm    [q_lora] or None            q_b  [h * (n + r), q_lora] or None
    kv_norm   [c]                         out  [hidden, h * d]
    up_key    h x [c, n]                  up_value h x [d, c]     the two halves of kv_b_proj, for the absorbed form
    kv_b      [h * (n + d), c]            for the naive form; None in exact mode
    """

    config: ModelConfig
    kernels: Kernels
    qkv_a: Prepared
    q_norm: torch.Tensor | None
    q_b: Prepared | None
    kv_norm: torch.Tensor
    up_key: Prepared
    up_value: Prepared
    kv_b: Prepared | None
    out: Prepared

    def __post_init__(self) -> None:
        config = self.config
        self.heads, self.nope, self.latent = config.num_attention_heads, config.qk_nope_head_dim, config.kv_lora_rank
        self.padded_heads = -(-self.heads // self.kernels.row_multiple) * self.kernels.row_multiple
        self.scale = config.softmax_scale

    def project(self, x: torch.Tensor, pool: torch.Tensor, step: Forward) -> tuple[torch.Tensor, torch.Tensor]:
        """[t, hidden] -> q [t, h, n + r] with its rope part rotated, rows [t, c + r]; the rows are in the pool too."""
        config, kernels = self.config, self.kernels
        packed = kernels.linear.run(x, self.qkv_a)
        rows = packed[:, -config.row_dim :]
        q = packed[:, : -config.row_dim]
        if self.q_b is not None:
            q = kernels.linear.run(kernels.norm(q, self.q_norm, INNER_NORM_EPS), self.q_b)
        q = q.view(len(x), self.heads, config.qk_head_dim)
        kernels.store(q, rows, self.kv_norm, INNER_NORM_EPS, step.cos, step.sin, pool, step.store)
        return q, rows

    def attend(self, q: torch.Tensor, rows: torch.Tensor, pool: torch.Tensor, step: Forward) -> torch.Tensor:
        """-> [t, h * d]; tokens that belong to no sequence get zeros."""
        if step.absorbed is None:
            return self._naive(q, rows, pool, step)
        tokens = len(q)
        absorbed = q.new_empty(tokens, self.padded_heads, self.config.row_dim)
        if self.padded_heads > self.heads:
            absorbed[:, self.heads :] = 0
        self.kernels.linear.per_head(q[..., : self.nope], self.up_key, absorbed[:, : self.heads, : self.latent])
        self.kernels.copy_heads(absorbed[:, : self.heads, self.latent :], q[..., self.nope :])
        mixed = step.absorbed.run(absorbed[: step.num_queries], pool, step.plan, self.scale, self.latent)
        mixed = _pad_rows(mixed[:, : self.heads], tokens)
        out = q.new_empty(tokens, self.heads, self.config.v_head_dim)
        self.kernels.linear.per_head(mixed, self.up_value, out)
        return out.flatten(1)

    def _naive(self, q: torch.Tensor, rows: torch.Tensor, pool: torch.Tensor, step: Forward) -> torch.Tensor:
        if step.context_slots is not None:
            rows = pool.view(-1, pool.shape[-1]).index_select(0, step.context_slots).to(q.dtype)
        else:
            rows = rows[: step.num_queries]
        expanded = self.kernels.linear.run(rows[:, : self.latent], self.kv_b).view(len(rows), self.heads, -1)
        shared = rows[:, None, self.latent :].expand(-1, self.heads, -1)
        k = torch.cat((expanded[..., : self.nope], shared), -1)
        lens = step.query_lens, step.context_lens
        out = self.kernels.prefill_naive(q[: step.num_queries], k, expanded[..., self.nope :], *lens, self.scale)
        return _pad_rows(out, len(q)).flatten(1)


def _pad_rows(x: torch.Tensor, num_rows: int) -> torch.Tensor:
    missing = num_rows - len(x)
    return x if missing == 0 else torch.cat((x, x.new_zeros(missing, *x.shape[1:])))


@dataclass
class DenseFfn:
    """An ordinary SwiGLU layer, or the shared experts. `weights` as `kernels.ffn.prepare` made them."""

    kernels: Kernels
    weights: expert_ffn.Swiglu

    def add_to(self, x: torch.Tensor, h: torch.Tensor) -> None:
        """x += ffn(h), rows of `hidden`."""
        self.kernels.ffn.run(h, self.weights, x, row_multiple=self.kernels.row_multiple)


@dataclass
class MoE:
    """Routed experts plus the shared ones. The two knobs bound memory and never change a result; 0 is off.

    router [e, hidden] prepared, fp32      bias [e] fp32      weights: all experts' SwiGLU, prepared
    """

    kernels: Kernels
    limits: gate.Limits
    router: Prepared
    bias: torch.Tensor
    weights: expert_ffn.Swiglu
    shared: DenseFfn | None
    dp_chunk_tokens: int = 0
    activation_chunk_tokens: int = 0

    def add_to(self, x: torch.Tensor, h: torch.Tensor) -> None:
        """x += experts(h), in chunks of whole padding units."""
        for part in self._chunks(len(h), self.dp_chunk_tokens):
            weights, ids = self._choose(h[part])
            for inner in self._chunks(len(ids), self.activation_chunk_tokens):
                rows = slice(part.start + inner.start, part.start + inner.stop)
                self._experts(x[rows], h[rows], weights[inner], ids[inner])

    def _choose(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.kernels.linear.run(h.float(), self.router)
        return self.kernels.gate(logits, self.bias, self.limits)

    def _experts(self, x: torch.Tensor, h: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
        routed = self.kernels.ffn.routed(h, weights, ids, self.weights, row_multiple=self.kernels.row_multiple)
        self.kernels.add_rows(x, routed)
        if self.shared is not None:
            self.shared.add_to(x, h)

    def _chunks(self, tokens: int, chunk: int) -> list[slice]:
        unit = self.kernels.row_multiple
        chunk = -(-chunk // unit) * unit or max(tokens, 1)
        return [slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]


@dataclass
class Block:
    """One decoder layer."""

    eps: float
    kernels: Kernels
    attention_norm: torch.Tensor
    attention: Attention
    ffn_norm: torch.Tensor
    ffn: DenseFfn | MoE

    def store(self, x: torch.Tensor, pool: torch.Tensor, step: Forward) -> tuple[torch.Tensor, torch.Tensor]:
        """Project, and put every new row of this layer into the pool."""
        return self.attention.project(self.kernels.norm(x, self.attention_norm, self.eps), pool, step)

    def finish(
        self, x: torch.Tensor, q: torch.Tensor, rows: torch.Tensor, pool: torch.Tensor, step: Forward
    ) -> torch.Tensor:
        """Attend and feed forward; `x` is the residual stream, added to in place."""
        x = self.kernels.linear.run(self.attention.attend(q, rows, pool, step), self.attention.out, add_to=x)
        self.ffn.add_to(x, self.kernels.norm(x, self.ffn_norm, self.eps))
        return x


class Transformer:
    """A loaded model (headrace.model.base.Model, and ReplayableModel with the C kernels): plain ops, one after another."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        exact: bool,
        kernels: Kernels,
        embedding: torch.Tensor,
        blocks: list[Block],
        norm: torch.Tensor,
        head: Prepared,
        precision: list[tuple[str, str]],
        pool_dtype: torch.dtype,
        mtp_tensors: dict[str, torch.Tensor] | None = None,
    ):
        self.config, self.device, self.dtype, self.exact, self.kernels = config, device, dtype, exact, kernels
        self.pool_dtype = pool_dtype
        self.vocab_size, self.max_context_tokens = config.vocab_size, config.max_position_embeddings
        self.kv_regions = (KvRegion("latent", len(blocks), config.row_dim),)
        self.stepping = Stepping.REPLAYED if kernels.family == "c" else Stepping.PLAIN
        self.embedding, self.blocks, self.norm, self.head = embedding, blocks, norm, head
        self.mtp_tensors = mtp_tensors or {}
        self._precision = precision
        self._cos, self._sin = rope_angles.tables(config, device)

    def precision_table(self) -> list[tuple[str, str]]:
        """(part, dtype) as decided at load, then (op, back end) as chosen."""
        return [*self._precision, *((f"kernel {op}", name) for op, name in self.kernels.chosen.items())]

    def with_chunks(self, *, dp_tokens: int = 0, activation_tokens: int = 0) -> Transformer:
        """The same weights with other bounds on the tokens that go through a MoE layer, and through its experts, at a time; 0 is all.
        Never changes a result."""
        made = copy.copy(self)
        chunks = {"dp_chunk_tokens": dp_tokens, "activation_chunk_tokens": activation_tokens}
        made.blocks = [
            replace(block, ffn=replace(block.ffn, **chunks)) if isinstance(block.ffn, MoE) else block
            for block in self.blocks
        ]
        return made

    @property
    def rope_tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin  [max_position, r / 2]."""
        return self._cos, self._sin

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

        `on_layer(l)` is called as soon as all rows of layer l are in the pool, so that their push may begin.
        """
        batch = self._padded(batch)
        step = self._plan(batch, pool, phase)
        x = self.embedding.index_select(0, batch.token_ids)
        for layer, block in enumerate(self.blocks):
            rows_of_layer = pool.layer(layer)
            q, rows = block.store(x, rows_of_layer, step)
            if on_layer is not None:
                on_layer(layer)
            x = block.finish(x, q, rows, rows_of_layer, step)
        return self.logits(x.index_select(0, batch.logit_indices))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] after the last layer -> [n, vocab] fp32."""
        count = len(hidden)
        hidden = _pad_rows(hidden, -(-count // self.kernels.row_multiple) * self.kernels.row_multiple)
        normed = self.kernels.norm(hidden, self.norm, self.config.rms_norm_eps)
        return self.kernels.linear.run(normed, self.head)[:count].float()

    def _padded(self, batch: ForwardBatch) -> ForwardBatch:
        missing = -len(batch.token_ids) % self.kernels.row_multiple
        if not missing:
            return batch
        return ForwardBatch(
            token_ids=F.pad(batch.token_ids, (0, missing)),
            positions=F.pad(batch.positions, (0, missing)),
            slots=F.pad(batch.slots, (0, missing), value=-1),
            block_tables=batch.block_tables,
            query_starts=batch.query_starts,
            context_lens=batch.context_lens,
            logit_indices=batch.logit_indices,
        )

    def uniform_step(self, cos: torch.Tensor, sin: torch.Tensor, store: latent_store.Plan, plan: Any) -> Forward:
        """A decode step of one token a sequence, over a plan of `kernels.decode`."""
        count = len(cos)
        lens = [1] * count  # only what has no plan looks at them
        return Forward(cos, sin, store, count, lens, lens, absorbed=self.kernels.decode, plan=plan)

    def _plan(self, batch: ForwardBatch, pool: LatentPool, phase: Phase) -> Forward:
        query_lens, context_lens = batch.query_lens, list(batch.context_lens)
        step = Forward(
            cos=self._cos.index_select(0, batch.positions),
            sin=self._sin.index_select(0, batch.positions),
            store=latent_store.plan(batch.slots),
            num_queries=int(batch.query_starts[-1]),
            query_lens=query_lens,
            context_lens=context_lens,
        )
        uniform = len(set(query_lens)) == 1 and query_lens[0] <= MAX_UNIFORM_QUERY_LEN
        if phase == "decode" and uniform:
            step.absorbed = self.kernels.decode
        elif self.exact or phase == "decode":
            step.absorbed = self.kernels.prefill_absorbed
        elif query_lens != context_lens:
            step.context_slots = _packed_context_slots(batch.block_tables, context_lens, pool.block_size)
        if step.absorbed is not None:
            step.plan = step.absorbed.plan(batch.block_tables, query_lens, context_lens, pool.block_size)
        return step


def _packed_context_slots(block_tables: torch.Tensor, context_lens: list[int], block_size: int) -> torch.Tensor:
    """[sum of context_lens] slots of every sequence's rows, packed in order."""
    lens = torch.tensor(context_lens, device=block_tables.device)
    width = max(context_lens)
    slots = mla_decode.slots_of(block_tables, lens, width, block_size)
    return slots[torch.arange(width, device=slots.device)[None] < lens[:, None]]
