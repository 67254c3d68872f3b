"""Absorbed attention over paged rows: every sequence has the same small number of new tokens, at its end.

plan(block_tables, query_lens, context_lens, block_size), once for all layers of a step
  block_tables  [num_seqs, max_blocks] int32         blocks in order, 0-padded
  query_lens    num_seqs equal integers >= 1         new tokens of each sequence (`c`: need not be equal)
  context_lens  num_seqs integers >= query_len       rows a sequence attends to, its new ones included
run(q, pool, plan, scale, latent_dim)
  q             [num_tokens, num_heads, row_dim]     absorbed query: latent part ++ rotated rope part, sequences packed
  pool          [num_blocks, block_size, row_dim]    one layer; the new tokens' rows are already in it
  returns       [num_tokens, num_heads, latent_dim]  q's dtype

score = scale * q . row over all row_dim values; the value of a row is its first latent_dim values. Query j of a
sequence sees its first context_len - query_len + j + 1 rows. Rows past a context are never read, so NaN there is
harmless; no sequences give no rows. `scale` has no default: (nope + rope) ** -0.5 times YaRN's mscale squared.

The torch back ends sort sequences into buckets of similar length so that a long neighbour does not cost everyone.
Source: DeepSeek-V2 report 2.1 (absorption). In two back ends a query's bits depend on its own context only, not on
neighbours, padding or phase: `c` adds up rows from left to right; `folded` adds up key chunks of one fixed size from
left to right, each by one matrix product. `mla_prefill` has the same two.

On a GPU, one new token a sequence: `DEVICE_BACKENDS` and `open_device`, whose contract is in mla_decode_device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kernels.attention.mla_decode_device import DEVICE_BACKENDS, open_device
from kernels.select import Backend
from kernels.toolchain import cpu_library

__all__ = ["BACKENDS", "DEVICE_BACKENDS", "KEY_CHUNK", "open_device", "reference"]

KEY_CHUNK = 128  # keys per folded product; part of exact mode's numbers
BUCKET_WASTE_ROWS = 2048  # padded rows that cost about as much as one more bucket


class Bucket(NamedTuple):
    """
    members  [n] int64 or None (all sequences, in order)
    slots    [n * width] int64    rows to read; places past a context repeat its last row
    width                         rows read per sequence, a multiple of KEY_CHUNK
    seen_by_all                   leading rows that every query of the bucket sees
    mask     [n, query_len, width - seen_by_all] fp32   0 or -inf
    """

    members: torch.Tensor | None
    slots: torch.Tensor
    width: int
    seen_by_all: int
    mask: torch.Tensor


def slots_of(block_tables: torch.Tensor, context_lens: torch.Tensor, width: int, block_size: int) -> torch.Tensor:
    """[n, max_blocks], [n] -> [n, width] slots in order; places past a context repeat its last row."""
    place = torch.arange(width, device=block_tables.device)[None].minimum(context_lens[:, None] - 1)
    blocks = block_tables.gather(1, place.div(block_size, rounding_mode="floor"))
    return blocks.long() * block_size + place.remainder(block_size)


def _group_by_length(context_lens: Sequence[int]) -> list[list[int]]:
    """Longest first; a new group starts where padding to the group's width would waste too many rows."""
    groups: list[list[int]] = []
    waste, width = 0, 0
    for member in sorted(range(len(context_lens)), key=lambda i: (-context_lens[i], i)):
        waste += width - _padded(context_lens[member])
        if not groups or waste > BUCKET_WASTE_ROWS:
            groups.append([])
            waste, width = 0, _padded(context_lens[member])
        groups[-1].append(member)
    return groups


def _padded(context_len: int) -> int:
    return -(-context_len // KEY_CHUNK) * KEY_CHUNK


def _bucket(
    block_tables: torch.Tensor, context_lens: Sequence[int], members: list[int], query_len: int, block_size: int
) -> Bucket:
    device = block_tables.device
    everyone = len(members) == len(context_lens)
    members = sorted(members) if everyone else members
    lens = torch.tensor([context_lens[i] for i in members], dtype=torch.int64, device=device)
    chosen = None if everyone else torch.tensor(members, dtype=torch.int64, device=device)
    width = max(_padded(context_lens[i]) for i in members)
    tables = block_tables if chosen is None else block_tables[chosen]
    slots = slots_of(tables, lens, width, block_size).reshape(-1)
    first = min(context_lens[i] for i in members) - query_len + 1
    seen = lens[:, None] - query_len + 1 + torch.arange(query_len, device=device)
    hidden = torch.arange(first, width, device=device) >= seen[..., None]
    mask = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))
    return Bucket(chosen, slots, width, first, mask)


def folded(
    q: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor, seen_by_all: int, scale: float, latent_dim: int
) -> torch.Tensor:
    """
    q     [n, query_len, num_heads, row_dim]     rows  [n, width, row_dim], width a multiple of KEY_CHUNK
    mask  [n or 1, query_len, width - seen_by_all], 0 or -inf
    returns [n, query_len, num_heads, latent_dim]
    """
    n, query_len, num_heads, row_dim = q.shape
    width, lines = rows.shape[1], query_len * num_heads
    # Rows as columns of their own and the scale on the queries: with a transposed view, or a factor inside the product, MKL
    # chooses other additions for other numbers of lines (seen on Sapphire Rapids).
    scores = torch.bmm(q.reshape(n, lines, row_dim) * scale, rows.mT.contiguous())
    if mask.shape[-1]:
        scores.view(n, query_len, num_heads, width)[..., seen_by_all:] += mask[:, :, None]
    weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    total = weights.view(n, lines, width // KEY_CHUNK, KEY_CHUNK).sum(-1).cumsum(-1)[..., -1:]
    out = q.new_zeros(n, lines, latent_dim)
    for start in range(0, width, KEY_CHUNK):
        chunk = slice(start, start + KEY_CHUNK)
        out.baddbmm_(weights[:, :, chunk], rows[:, chunk, :latent_dim])
    return out.div_(total).view(n, query_len, num_heads, latent_dim)


def fused(
    q: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor, seen_by_all: int, scale: float, latent_dim: int
) -> torch.Tensor:
    """Same shapes as `folded`, one call of torch's fused attention: heads stand where it expects queries."""
    n, query_len, num_heads, row_dim = q.shape
    full = F.pad(mask, (seen_by_all, 0)).to(q.dtype)
    full = full[:, :, None].expand(-1, -1, num_heads, -1).reshape(len(mask), 1, query_len * num_heads, -1)
    query = q.reshape(n, 1, query_len * num_heads, row_dim)
    out = F.scaled_dot_product_attention(query, rows[:, None], rows[:, None], attn_mask=full, scale=scale)
    return out[..., :latent_dim].view(n, query_len, num_heads, latent_dim)


class Bucketed:
    """Gathers each bucket's rows and gives them to `attend` (folded or fused)."""

    def __init__(self, attend: Callable[..., torch.Tensor]):
        self._attend = attend

    def plan(
        self, block_tables: torch.Tensor, query_lens: Sequence[int], context_lens: Sequence[int], block_size: int
    ) -> list[Bucket]:
        assert len(set(query_lens)) <= 1, "bucketed decode takes equal query lengths"
        return [
            _bucket(block_tables, context_lens, members, query_lens[0], block_size)
            for members in _group_by_length(context_lens)
        ]

    def run(
        self, q: torch.Tensor, pool: torch.Tensor, plan: list[Bucket], scale: float, latent_dim: int
    ) -> torch.Tensor:
        if not plan:
            return q.new_empty(*q.shape[:-1], latent_dim)
        by_sequence = q.unflatten(0, (-1, plan[0].mask.shape[1]))
        out = q.new_empty(*by_sequence.shape[:-1], latent_dim)
        for bucket in plan:
            picked = by_sequence if bucket.members is None else by_sequence[bucket.members]
            rows = pool.view(-1, pool.shape[-1]).index_select(0, bucket.slots).to(q.dtype)
            rows = rows.view(len(picked), bucket.width, pool.shape[-1])
            made = self._attend(picked, rows, bucket.mask, bucket.seen_by_all, scale, latent_dim)
            if bucket.members is None:
                return made.flatten(0, 1)
            out[bucket.members] = made
        return out.flatten(0, 1)


class PagedPlan(NamedTuple):
    """tables [num_seqs, max_blocks] int32; starts [num_seqs + 1], contexts [num_seqs] int64; all dense, on the CPU."""

    tables: torch.Tensor
    starts: torch.Tensor
    contexts: torch.Tensor


class Paged:
    """cpu.c reads the paged rows where they are: no gather, no padding, any query lengths."""

    QUERIES_AT_ONCE = 4  # of one sequence, sharing each row read

    @staticmethod
    def fits(row_dim: int, latent_dim: int) -> bool:
        return row_dim % 8 == 0 and latent_dim % 8 == 0

    def plan(
        self, block_tables: torch.Tensor, query_lens: Sequence[int], context_lens: Sequence[int], block_size: int
    ) -> PagedPlan:
        starts = torch.tensor([0, *accumulate(query_lens)], dtype=torch.int64)
        contexts = torch.tensor(list(context_lens), dtype=torch.int64)
        return PagedPlan(block_tables.to(torch.int32).contiguous(), starts, contexts)

    def run(self, q: torch.Tensor, pool: torch.Tensor, plan: PagedPlan, scale: float, latent_dim: int) -> torch.Tensor:
        tokens, heads, row_dim = q.shape
        out = q.new_empty(tokens, heads, latent_dim)
        failed = cpu_library.library().hr_attend(
            q.data_ptr(), q.stride(0), heads, row_dim, latent_dim, pool.data_ptr(), pool.dtype == torch.bfloat16,
            pool.shape[1], plan.tables.data_ptr(), plan.tables.shape[1], plan.starts.data_ptr(),
            plan.contexts.data_ptr(), len(plan.contexts), self.QUERIES_AT_ONCE, scale, out.data_ptr(), out.stride(0),
            torch.get_num_threads(),
        )  # fmt: skip
        if failed:
            raise MemoryError("attention scratch")
        return out


def reference(
    q: torch.Tensor,
    pool: torch.Tensor,
    block_tables: torch.Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    scale: float,
    latent_dim: int,
) -> torch.Tensor:
    out = q.new_zeros(*q.shape[:-1], latent_dim)
    token = 0
    for seq, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
        rows = torch.cat([pool[block] for block in block_tables[seq].tolist()])[:context_len].float()
        for j in range(query_len):
            seen = rows[: context_len - query_len + j + 1]
            out[token] = torch.softmax(scale * q[token].float() @ seen.T, -1) @ seen[:, :latent_dim]
            token += 1
    return out


BACKENDS = (
    Backend("c", Paged(), why_not=cpu_library.why_not),
    Backend("torch", Bucketed(fused)),
    Backend("folded", Bucketed(folded)),
)
