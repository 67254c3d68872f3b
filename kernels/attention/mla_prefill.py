"""Causal attention of whole prompts, packed one after another; a prompt may continue rows that are already cached.

naive      expanded keys and values
  q          [num_tokens, num_heads, qk_dim]    new tokens only, sequences packed
  k, v       [num_keys, num_heads, qk_dim], [num_keys, num_heads, value_dim]    all context_len keys of each sequence
  returns    [num_tokens, num_heads, value_dim]
absorbed   the cached rows themselves: plan(...) and run(...) as in mla_decode, for any query lengths

query_lens, context_lens: one integer a sequence, context_len >= query_len >= 1; the new tokens are the last ones of
the context, so query j sees the first context_len - query_len + j + 1 keys. `scale` has no default (see mla_decode).
varlen     the naive form planned once a step for all layers: `VARLEN_BACKENDS`, `open_varlen`
  plan(query_lens, context_lens, heads, qk_dim, value_dim, scale, device, dtype=bf16) -> plan    host work, async uploads
  run(q, k, v, plan)    as naive; rows may be strided, last dimensions dense; no host work
Each is the other's oracle. The bits of the absorbed form depend on one query's own context only (see mla_decode).
Source: DeepSeek-V2 report 2.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from kernels.attention import mla_decode
from kernels.attention.mla_decode import KEY_CHUNK
from kernels.attention.mla_prefill_triton import TritonVarlen
from kernels.attention.mla_prefill_vendors import FlashInferVarlen, needs_flashinfer
from kernels.select import Backend, choose
from kernels.toolchain import cpu_library
from kernels.toolchain.triton_support import needs_triton

QUERY_TILE = 64  # queries at a time in the absorbed form: bounds the scores held at once


class Piece(NamedTuple):
    """One sequence of a packed batch: where its tokens start, and the slots of its context (padded to KEY_CHUNK)."""

    start: int
    query_len: int
    context_len: int
    slots: torch.Tensor


class FoldedPrefill:
    """`mla_decode.folded`, a tile of queries at a time."""

    def plan(
        self, block_tables: torch.Tensor, query_lens: Sequence[int], context_lens: Sequence[int], block_size: int
    ) -> list[Piece]:
        starts = [0, *accumulate(query_lens)]
        pieces = []
        for seq, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
            width = -(-context_len // KEY_CHUNK) * KEY_CHUNK
            length = torch.tensor([context_len], device=block_tables.device)
            slots = mla_decode.slots_of(block_tables[seq : seq + 1], length, width, block_size)[0]
            pieces.append(Piece(starts[seq], query_len, context_len, slots))
        return pieces

    def run(
        self, q: torch.Tensor, pool: torch.Tensor, plan: list[Piece], scale: float, latent_dim: int
    ) -> torch.Tensor:
        out = q.new_empty(*q.shape[:-1], latent_dim)
        mask = _staircase(QUERY_TILE, q.device)
        for piece in plan:
            rows = pool.view(-1, pool.shape[-1]).index_select(0, piece.slots).to(q.dtype)[None]
            for first in range(0, piece.query_len, QUERY_TILE):
                count = min(QUERY_TILE, piece.query_len - first)
                seen_by_all = piece.context_len - piece.query_len + first + 1
                width = -(-(seen_by_all + count - 1) // KEY_CHUNK) * KEY_CHUNK
                tile = slice(piece.start + first, piece.start + first + count)
                tail = mask[:, :count, : width - seen_by_all]
                out[tile] = mla_decode.folded(q[tile][None], rows[:, :width], tail, seen_by_all, scale, latent_dim)[0]
        return out


def _staircase(size: int, device: torch.device) -> torch.Tensor:
    """[1, size, size + KEY_CHUNK]: query j sees j keys more than the first query of its tile."""
    key = torch.arange(size + KEY_CHUNK, device=device)
    hidden = key[None] >= torch.arange(size, device=device)[:, None]
    return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))[None]


def _sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    scale: float,
) -> torch.Tensor:
    """One fused call for each run of neighbours of equal lengths."""
    value_dim = v.shape[-1]
    out = q.new_empty(*q.shape[:2], value_dim)
    widest = max(q.shape[-1], value_dim)
    q, k, v = (F.pad(part, (0, widest - part.shape[-1])) if part.shape[-1] < widest else part for part in (q, k, v))
    query_at = key_at = seq = 0
    while seq < len(query_lens):
        query_len, context_len, end = query_lens[seq], context_lens[seq], seq + 1
        while end < len(query_lens) and (query_lens[end], context_lens[end]) == (query_len, context_len):
            end += 1
        queries = slice(query_at, query_at + (end - seq) * query_len)
        keys = slice(key_at, key_at + (end - seq) * context_len)
        batch = (part.unflatten(0, (end - seq, -1)).transpose(1, 2) for part in (q[queries], k[keys], v[keys]))
        made = _causal(*batch, scale)[..., :value_dim].transpose(1, 2)
        out[queries].view(made.shape).copy_(made)
        query_at, key_at, seq = queries.stop, keys.stop, end
    return out


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    query_len, context_len = q.shape[-2], k.shape[-2]
    if query_len == context_len:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    if query_len == 1:
        return F.scaled_dot_product_attention(q, k, v, scale=scale)
    mask = torch.ones(query_len, context_len, dtype=torch.bool, device=q.device).tril_(context_len - query_len)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    scale: float,
) -> torch.Tensor:
    """The naive form, one query and one head at a time."""
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    query_at = key_at = 0
    for query_len, context_len in zip(query_lens, context_lens, strict=True):
        for j in range(query_len):
            seen = slice(key_at, key_at + context_len - query_len + j + 1)
            for head in range(q.shape[1]):
                scores = scale * (k[seen, head].float() @ q[query_at + j, head].float())
                out[query_at + j, head] = torch.softmax(scores, 0) @ v[seen, head].float()
        query_at, key_at = query_at + query_len, key_at + context_len
    return out


class TorchVarlen:
    """A function of NAIVE_BACKENDS with the lengths kept in the plan."""

    def __init__(self, attend: Callable[..., torch.Tensor]):
        self._attend = attend

    def plan(
        self, query_lens: Sequence[int], context_lens: Sequence[int], heads: int, qk_dim: int, value_dim: int,
        scale: float, device: torch.device, dtype: torch.dtype = torch.bfloat16,
    ) -> tuple[list[int], list[int], float]:  # fmt: skip
        return list(query_lens), list(context_lens), scale

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: tuple[list[int], list[int], float]
    ) -> torch.Tensor:
        return self._attend(q, k, v, *plan)


def open_varlen(
    device: torch.device, wanted: str | None = None, *, qk_dim: int, value_dim: int, dtype: torch.dtype
) -> Any:
    """The first of VARLEN_BACKENDS (or the one named `wanted`) that runs on `device` and takes these widths.

    Raises BackendUnavailable with the reason of each back end.
    """

    def fitting(backend: Backend) -> Backend:
        misfit = getattr(backend.run, "misfit", lambda *sizes: None)
        return Backend(
            backend.name, backend.run, lambda where: backend.why_not(where) or misfit(qk_dim, value_dim, dtype)
        )

    return choose([fitting(backend) for backend in VARLEN_BACKENDS], device, wanted, op="mla_prefill").run


NAIVE_BACKENDS = (Backend("torch", _sdpa), Backend("reference", reference))
BACKENDS = (
    Backend("c", mla_decode.Paged(), why_not=cpu_library.why_not),
    Backend("folded", FoldedPrefill()),
)
VARLEN_BACKENDS = (
    Backend("flashinfer", FlashInferVarlen(), why_not=needs_flashinfer),
    Backend("triton", TritonVarlen(), why_not=needs_triton),
    Backend("torch", TorchVarlen(_sdpa)),
    Backend("reference", TorchVarlen(reference)),
)
