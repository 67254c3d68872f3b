"""Layers of the GPU model: attention in both phases, feed-forward, one decoder block. `kernels` does the arithmetic.

Every layer takes the normed hidden state as `Rows` and answers what is to be added to the residual; the next norm adds
it. Tensor comments: t tokens, h heads, n nope, r rope, c latent, d value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from headrace.model.deepseek.config import ModelConfig
from headrace.model.deepseek.fused_kernels import FusedKernels
from headrace.model.deepseek.fused_linear import PLAIN, ExpertSwiglu, Linear, Rows, Swiglu
from headrace.model.deepseek.reference import INNER_NORM_EPS
from headrace.parallel.experts import ExpertExchange
from kernels.attention import latent_store
from kernels.experts import gate


@dataclass
class DecodeStep:
    """What all layers of one decode step share; one new token a sequence.

    cos, sin  [t, r / 2] fp32      slots  [t] int64, -1 is padding
    attention, plan: an open `mla_decode` back end and what it planned for this step
    query_dtype: of the absorbed queries
    """

    cos: torch.Tensor
    sin: torch.Tensor
    slots: torch.Tensor
    attention: Any
    plan: Any
    query_dtype: torch.dtype


@dataclass
class PrefillStep:
    """What all layers of one prefill share; sequences packed, no padding.

    attention: an open `mla_prefill` back end
    plan: what it planned for every token, or for those of `query_rows` once these are set
    query_rows    [n] int64, the tokens that attend in the last layer where only their logits are taken; None: all do
    context_slots [sum of context_lens] int64 where some context is longer than its new tokens, else None
    """

    cos: torch.Tensor
    sin: torch.Tensor
    store: latent_store.Plan
    attention: Any
    plan: Any
    query_rows: torch.Tensor | None = None
    context_slots: torch.Tensor | None = None


@dataclass
class FusedAttention:
    """Multi-head latent attention.

    qkv_a    hidden -> q_lora + c + r (the whole q in place of q_lora when the model has none)
    q_norm   [q_lora] or None          q_b    q_lora -> h * (n + r), or None
    kv_norm  [c]                       kv_b   c -> h * (n + d), for prefill
    up_key   [h, n, c] bf16            up_value  [h, c, d] bf16     the halves of kv_b, for decode
    out      h * d -> hidden
    """

    config: ModelConfig
    kernels: FusedKernels
    qkv_a: Linear
    q_norm: torch.Tensor | None
    q_b: Linear | None
    kv_norm: torch.Tensor
    kv_b: Linear
    up_key: torch.Tensor
    up_value: torch.Tensor
    out: Linear

    def __post_init__(self) -> None:
        self.heads, self.nope, self.latent = len(self.up_key), *self.up_key.shape[1:]
        self.wants = self.qkv_a.wants

    def project(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """-> q [t, h, n + r], latent rows [t, c + r] (a strided slice); neither normed nor rotated yet."""
        packed = self.qkv_a(rows)
        q, latent_rows = packed[:, : -self.config.row_dim], packed[:, -self.config.row_dim :]
        if self.q_b is not None:
            q = self.q_b(self.kernels.norm(q, None, self.q_norm, INNER_NORM_EPS, self.q_b.wants))
        return q.unflatten(1, (self.heads, -1)), latent_rows

    def decode(self, rows: Rows, pool: torch.Tensor, step: DecodeStep) -> torch.Tensor:
        """[t, hidden] -> [t, hidden]; each token's row is stored first."""
        q, latent_rows = self.project(rows)
        absorbed = q.new_empty(len(q), self.heads, self.config.row_dim, dtype=step.query_dtype)
        self._absorb(q, latent_rows, pool, step, absorbed)
        mixed = step.attention.run(absorbed, pool, step.plan)
        out = mixed.new_empty(len(q), self.heads, self.config.v_head_dim)
        torch.bmm(mixed.transpose(0, 1), self.up_value, out=out.transpose(0, 1))
        return self.out(self.kernels.rows(out.flatten(1), self.out.wants))

    def _absorb(
        self, q: torch.Tensor, latent_rows: torch.Tensor, pool: torch.Tensor, step: DecodeStep, absorbed: torch.Tensor
    ) -> None:
        """q's part without position through up_key ++ its rotated rest, into `absorbed`; the row into the pool."""
        nope, rope = q[..., : self.nope].transpose(0, 1), q[..., self.nope :]
        finish = self.kv_norm, INNER_NORM_EPS, step.cos, step.sin, pool, step.slots, absorbed
        if absorbed.dtype == q.dtype:
            self.kernels.latent_store_decode(q, latent_rows, *finish)
            torch.bmm(nope, self.up_key, out=absorbed[..., : self.latent].transpose(0, 1))
        else:
            latent = torch.bmm(nope, self.up_key).transpose(0, 1)
            self.kernels.rope_quantize_store(latent, rope, latent_rows, *finish)

    def store(self, rows: Rows, pool: torch.Tensor, step: PrefillStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Projects, and puts every new row into the pool -> q [t, h, n + r] and rows [t, c + r], both finished."""
        q, latent_rows = self.project(rows)
        self.kernels.latent_store(q, latent_rows, self.kv_norm, INNER_NORM_EPS, step.cos, step.sin, pool, step.store)
        return q, latent_rows

    def attend(self, q: torch.Tensor, latent_rows: torch.Tensor, pool: torch.Tensor, step: PrefillStep) -> torch.Tensor:
        """-> [t, hidden], or of the step's `query_rows` only [n, hidden]."""
        if step.context_slots is not None:
            latent_rows = _gathered(pool, step.context_slots, q.dtype)
        expanded = self.kv_b(self.kernels.rows(latent_rows[:, : self.latent], self.kv_b.wants))
        expanded = expanded.unflatten(1, (self.heads, -1))
        k = self.kernels.concat_mla_k(expanded[..., : self.nope], latent_rows[:, self.latent :])
        if step.query_rows is not None:
            q = q.index_select(0, step.query_rows)
        out = step.attention.run(q, k, expanded[..., self.nope :], step.plan)
        del expanded, k, q
        return self.out(self.kernels.rows(out.flatten(1), self.out.wants))


def _gathered(pool: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[num_slots, c + r] rows of the pool in the model's dtype (bytes are gathered: torch selects no e4m3)."""
    rows = pool.view(-1, pool.shape[-1])
    if rows.element_size() > 1:
        return rows.index_select(0, slots).to(dtype)
    return rows.view(torch.uint8).index_select(0, slots).view(rows.dtype).to(dtype)


@dataclass
class FusedDense:
    """An ordinary feed-forward layer."""

    ffn: Swiglu

    @property
    def wants(self) -> tuple[str, ...]:
        return (self.ffn.wants,)

    def decode(self, rows: Rows) -> torch.Tensor:
        return self.ffn(rows)

    prefill = decode


@dataclass
class FusedMoE:
    """Routed experts plus the shared one. The two knobs bound memory in prefill and never change a result; 0 is off.

    router [e, hidden] bf16 (fp32 where bf16 would lose something)      bias [e] fp32
    experts: this rank's share; exchange: the way to the others
    shared: the shared expert; None where there is none, or where it is the last of `experts` (`own_rows`)
    """

    kernels: FusedKernels
    limits: gate.Limits
    router: torch.Tensor
    bias: torch.Tensor
    experts: ExpertSwiglu
    shared: Swiglu | None
    exchange: ExpertExchange
    own_rows: bool = False
    dp_chunk_tokens: int = 0
    activation_chunk_tokens: int = 0

    @property
    def wants(self) -> tuple[str, ...]:
        return (PLAIN, self.experts.wants, *([self.shared.wants] if self.shared else []))

    def decode(self, rows: Rows) -> torch.Tensor:
        """[t, hidden] -> [t, hidden]."""
        return self._experts(rows, *self._choose(rows))

    def prefill(self, rows: Rows) -> torch.Tensor:
        """The same in chunks."""
        chunks = _chunks(rows.num_tokens, self.dp_chunk_tokens)
        if len(chunks) == 1 and not self.activation_chunk_tokens:
            return self.decode(rows)
        out = torch.empty_like(rows.plain)
        for chunk in chunks:
            part = rows.part(chunk)
            weights, ids = self._choose(part)
            for inner in _chunks(len(ids), self.activation_chunk_tokens):
                out[chunk][inner] = self._experts(part.part(inner), weights[inner], ids[inner])
        return out

    def _choose(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kernels.gate(self.kernels.wide_product(rows.plain, self.router), self.bias, self.limits)

    def _experts(self, rows: Rows, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        own = {"own": True} if self.own_rows else {}
        sent = self.exchange.dispatch(rows.chosen(self.experts.wants), weights, ids, **own)
        made = self.experts(sent.rows, sent.starts)
        return self.exchange.combine(made, sent, self.shared(rows) if self.shared is not None else None)


def _chunks(tokens: int, chunk: int) -> list[slice]:
    chunk = chunk or max(tokens, 1)
    return [slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]


@dataclass
class FusedBlock:
    """One decoder layer; gains [hidden] of its two norms."""

    attention_norm: torch.Tensor
    attention: FusedAttention
    ffn_norm: torch.Tensor
    ffn: FusedDense | FusedMoE
