"""DeepSeek-V3 / R1: MLA, gate, experts, blocks, transformer. Inference only, over a paged latent pool.

One forward serves a packed batch of sequences. `exact` (DESIGN section 6) makes a request's numbers depend on the
request alone: absorbed attention with fixed key chunks in both phases, every matrix product on a multiple of 16 rows,
fp32 throughout. Otherwise prefill is naive (expanded keys and values) and decode is absorbed.

Tensor comments: t tokens, h heads, c latent, r rope, n nope, d value, e experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F

from headrace.cache.latent import LatentPool
from headrace.model import rope as rope_angles
from headrace.model.config import ModelConfig
from kernels import expert_dispatch, expert_ffn, gate, latent_store, mla_decode, mla_prefill, rms_norm, rope
from kernels.select import choose

INNER_NORM_EPS = 1e-6  # q_a_layernorm and kv_a_layernorm, whatever rms_norm_eps says
ROW_MULTIPLE = 16  # exact mode: rows of every matrix product; attention pads heads to half of it
MAX_UNIFORM_QUERY_LEN = 8  # decode kernels take up to this many new tokens a sequence (drafts to verify)

Phase = Literal["prefill", "decode"]


@dataclass
class ForwardBatch:
    """Sequences packed one after another, on the model's device.

    token_ids      [num_tokens] int64
    positions      [num_tokens] int64              0-based place in its sequence
    slots          [num_tokens] int64              block_id * block_size + offset; -1 is padding, skipped
    block_tables   [num_seqs, max_blocks] int32    0-padded
    query_starts   num_seqs + 1 integers           sequence i owns tokens query_starts[i] : query_starts[i + 1];
                                                   tokens past the last start are padding
    context_lens   num_seqs integers               rows a sequence attends to, its new tokens (the last ones) included;
                                                   earlier rows are in the pool already
    logit_indices  [num_logits] int64              tokens whose hidden state goes through the head
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    block_tables: torch.Tensor
    query_starts: Sequence[int]
    context_lens: Sequence[int]
    logit_indices: torch.Tensor

    @property
    def query_lens(self) -> list[int]:
        return [end - start for start, end in zip(self.query_starts, self.query_starts[1:], strict=False)]


@dataclass
class Step:
    """What all layers of one forward share. `attend` is one of the three attention forms, planned."""

    cos: torch.Tensor  # [t, r / 2]
    sin: torch.Tensor
    store: latent_store.Plan
    num_queries: int  # tokens that belong to a sequence; the rest is padding
    buckets: list[mla_decode.Bucket] | None = None
    query_len: int = 1
    pieces: list[mla_prefill.Piece] | None = None
    query_lens: list[int] = field(default_factory=list)
    context_lens: list[int] = field(default_factory=list)
    context_slots: torch.Tensor | None = None  # naive, when some context is longer than its new tokens


class Kernels:
    """The back end of each op on this device, chosen once."""

    def __init__(self, device: torch.device, exact: bool):
        def pick(module, wanted=None, backends=None):
            return choose(backends or module.BACKENDS, device, wanted, op=module.__name__).run

        self.norm = pick(rms_norm)
        self.rotate = pick(rope)
        self.store = pick(latent_store)
        self.gate = pick(gate)
        self.dispatch = pick(expert_dispatch)
        self.experts = pick(expert_ffn)
        self.decode = pick(mla_decode, "folded" if exact else None)
        self.prefill_absorbed = pick(mla_prefill)
        self.prefill_naive = pick(mla_prefill, backends=mla_prefill.NAIVE_BACKENDS)


@dataclass
class Attention:
    """Multi-head latent attention.

    qkv_a    [q_lora + c + r, hidden]    q_a_proj over kv_a_proj_with_mqa (the whole q_proj when q_lora is None)
    q_norm   [q_lora] or None            q_b  [h * (n + r), q_lora] or None
    kv_norm  [c]                         kv_b [h * (n + d), c]
    out      [hidden, h * d]
    """

    config: ModelConfig
    kernels: Kernels
    exact: bool
    qkv_a: torch.Tensor
    q_norm: torch.Tensor | None
    q_b: torch.Tensor | None
    kv_norm: torch.Tensor
    kv_b: torch.Tensor
    out: torch.Tensor

    def __post_init__(self) -> None:
        config = self.config
        self.heads, self.nope, self.latent = (
            config.num_attention_heads,
            config.qk_nope_head_dim,
            config.kv_lora_rank,
        )
        per_head = self.kv_b.view(self.heads, self.nope + config.v_head_dim, self.latent)
        self.up_key = per_head[:, : self.nope]  # [h, n, c]
        self.up_value = per_head[:, self.nope :].mT  # [h, c, d]
        self.scale = config.softmax_scale

    def project(self, x: torch.Tensor, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """[t, hidden] -> q [t, h, n + r] with its rope part rotated, rows [t, c + r]."""
        config = self.config
        packed = F.linear(x, self.qkv_a)
        rows = packed[:, -config.row_dim :]
        q = packed[:, : -config.row_dim]
        if self.q_b is not None:
            q = F.linear(self.kernels.norm(q, self.q_norm, INNER_NORM_EPS), self.q_b)
        q = q.view(len(x), self.heads, config.qk_head_dim)
        latent = rows[:, : self.latent]
        latent.copy_(self.kernels.norm(latent, self.kv_norm, INNER_NORM_EPS))
        self.kernels.rotate(rows[:, None, self.latent :], step.cos, step.sin)
        self.kernels.rotate(q[..., self.nope :], step.cos, step.sin)
        return q, rows

    def attend(self, q: torch.Tensor, rows: torch.Tensor, pool: torch.Tensor, step: Step) -> torch.Tensor:
        """-> [t, h * d]; tokens that belong to no sequence get zeros."""
        if step.buckets is None and step.pieces is None:
            return self._naive(q, rows, pool, step)
        latent = torch.bmm(q[..., : self.nope].transpose(0, 1), self.up_key)  # [h, t, c]
        absorbed = torch.cat((latent.transpose(0, 1), q[..., self.nope :]), -1)
        mixed = self._absorbed(absorbed[: step.num_queries], pool, step)
        mixed = _pad_rows(mixed[:, : self.heads], len(q))
        return torch.bmm(mixed.transpose(0, 1), self.up_value).transpose(0, 1).reshape(len(q), -1)

    def _absorbed(self, q: torch.Tensor, pool: torch.Tensor, step: Step) -> torch.Tensor:
        if self.exact and self.heads % (ROW_MULTIPLE // 2):
            q = F.pad(q, (0, 0, 0, -self.heads % (ROW_MULTIPLE // 2)))
        if step.buckets is None:
            return self.kernels.prefill_absorbed(q, pool, step.pieces, self.scale, self.latent)
        by_sequence = q.unflatten(0, (-1, step.query_len))
        return self.kernels.decode(by_sequence, pool, step.buckets, self.scale, self.latent).flatten(0, 1)

    def _naive(self, q: torch.Tensor, rows: torch.Tensor, pool: torch.Tensor, step: Step) -> torch.Tensor:
        if step.context_slots is not None:
            rows = pool.view(-1, pool.shape[-1]).index_select(0, step.context_slots).to(q.dtype)
        else:
            rows = rows[: step.num_queries]
        expanded = F.linear(rows[:, : self.latent], self.kv_b).view(len(rows), self.heads, -1)
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
    """gate_up [2 * inner, hidden], down [hidden, inner]: an ordinary SwiGLU layer, or the shared experts."""

    exact: bool
    gate_up: torch.Tensor
    down: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return expert_ffn.swiglu(x, self.gate_up, self.down, exact=self.exact)


@dataclass
class MoE:
    """Routed experts plus the shared ones. The two knobs bound memory and never change a result; 0 is off.

    router   [e, hidden] fp32      bias [e] fp32
    gate_up  [e, 2 * inner, hidden]      down [e, hidden, inner]
    """

    kernels: Kernels
    exact: bool
    limits: gate.Limits
    router: torch.Tensor
    bias: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    shared: DenseFfn | None
    dp_chunk_tokens: int = 0
    activation_chunk_tokens: int = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return _in_chunks(self._moe, x, self._whole_rows(self.dp_chunk_tokens))

    def _moe(self, x: torch.Tensor) -> torch.Tensor:
        out = _in_chunks(self._routed, x, self._whole_rows(self.activation_chunk_tokens))
        return out if self.shared is None else out.add_(self.shared(x))

    def _routed(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.kernels.gate(x, self.router, self.bias, self.limits)
        plan = self.kernels.dispatch(ids, len(self.router), ROW_MULTIPLE if self.exact else 1)
        return self.kernels.experts(x, weights, plan, self.gate_up, self.down, exact=self.exact)

    def _whole_rows(self, chunk_tokens: int) -> int:
        return -(-chunk_tokens // ROW_MULTIPLE) * ROW_MULTIPLE if self.exact else chunk_tokens


def _in_chunks(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, chunk: int) -> torch.Tensor:
    if chunk == 0 or len(x) <= chunk:
        return function(x)
    return torch.cat([function(part) for part in x.split(chunk)])


@dataclass
class Block:
    """One decoder layer."""

    eps: float
    kernels: Kernels
    attention_norm: torch.Tensor
    attention: Attention
    ffn_norm: torch.Tensor
    ffn: DenseFfn | MoE

    def store(self, x: torch.Tensor, pool: torch.Tensor, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """Project, and put every new row of this layer into the pool."""
        q, rows = self.attention.project(self.kernels.norm(x, self.attention_norm, self.eps), step)
        self.kernels.store(pool, rows, step.store)
        return q, rows

    def finish(
        self, x: torch.Tensor, q: torch.Tensor, rows: torch.Tensor, pool: torch.Tensor, step: Step
    ) -> torch.Tensor:
        x = torch.addmm(x, self.attention.attend(q, rows, pool, step), self.attention.out.T)
        return x + self.ffn(self.kernels.norm(x, self.ffn_norm, self.eps))


class Transformer:
    """A loaded model. `weights.load_transformer` makes it; one engine thread calls it.

    config, device, dtype (of the matrix products), exact; pool_dtype: what a LatentPool for it should hold.
    """

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
        head: torch.Tensor,
        precision: list[tuple[str, str]],
        mtp_tensors: dict[str, torch.Tensor] | None = None,
    ):
        self.config, self.device, self.dtype, self.exact, self.kernels = config, device, dtype, exact, kernels
        self.pool_dtype = torch.float32 if exact else torch.bfloat16
        self.embedding, self.blocks, self.norm, self.head = embedding, blocks, norm, head
        self.mtp_tensors = mtp_tensors or {}
        self._precision = precision
        self._cos, self._sin = rope_angles.tables(config, device)

    def precision_table(self) -> list[tuple[str, str]]:
        """(part, dtype) as decided at load."""
        return list(self._precision)

    @property
    def moe_dp_chunk_tokens(self) -> int:
        """Tokens that go through a MoE layer at a time; 0 is all. Never changes the result."""
        return next((block.ffn.dp_chunk_tokens for block in self._moe_blocks()), 0)

    @moe_dp_chunk_tokens.setter
    def moe_dp_chunk_tokens(self, tokens: int) -> None:
        for block in self._moe_blocks():
            block.ffn.dp_chunk_tokens = tokens

    @property
    def moe_activation_chunk_tokens(self) -> int:
        """Tokens whose expert activations are held at a time; 0 is all. Never changes the result."""
        return next((block.ffn.activation_chunk_tokens for block in self._moe_blocks()), 0)

    @moe_activation_chunk_tokens.setter
    def moe_activation_chunk_tokens(self, tokens: int) -> None:
        for block in self._moe_blocks():
            block.ffn.activation_chunk_tokens = tokens

    def _moe_blocks(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block.ffn, MoE)]

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
        return self._logits(x.index_select(0, batch.logit_indices))

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        count = len(hidden)
        if self.exact:
            hidden = _pad_rows(hidden, -(-count // ROW_MULTIPLE) * ROW_MULTIPLE)
        logits = F.linear(self.kernels.norm(hidden, self.norm, self.config.rms_norm_eps), self.head)
        return logits[:count].float()

    def _padded(self, batch: ForwardBatch) -> ForwardBatch:
        missing = -len(batch.token_ids) % ROW_MULTIPLE if self.exact else 0
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

    def _plan(self, batch: ForwardBatch, pool: LatentPool, phase: Phase) -> Step:
        query_lens, context_lens = batch.query_lens, list(batch.context_lens)
        step = Step(
            cos=self._cos.index_select(0, batch.positions),
            sin=self._sin.index_select(0, batch.positions),
            store=latent_store.plan(batch.slots),
            num_queries=int(batch.query_starts[-1]),
            query_lens=query_lens,
            context_lens=context_lens,
        )
        uniform = len(set(query_lens)) == 1 and query_lens[0] <= MAX_UNIFORM_QUERY_LEN
        if phase == "decode" and uniform:
            step.query_len = query_lens[0]
            step.buckets = mla_decode.plan(batch.block_tables, context_lens, step.query_len, pool.block_size)
        elif self.exact or phase == "decode":
            step.pieces = mla_prefill.plan(batch.block_tables, query_lens, context_lens, pool.block_size)
        elif query_lens != context_lens:
            step.context_slots = _packed_context_slots(batch.block_tables, context_lens, pool.block_size)
        return step


def _packed_context_slots(block_tables: torch.Tensor, context_lens: list[int], block_size: int) -> torch.Tensor:
    """[sum of context_lens] slots of every sequence's rows, packed in order."""
    lens = torch.tensor(context_lens, device=block_tables.device)
    width = max(context_lens)
    slots = mla_decode.slots_of(block_tables, lens, width, block_size)
    return slots[torch.arange(width, device=slots.device)[None] < lens[:, None]]
