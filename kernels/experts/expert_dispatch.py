"""Sort (token, expert) pairs by expert, with each expert's rows padded to a multiple.

ids      [num_tokens, top_k]  int64  chosen experts, 0 <= id < num_experts
returns  Plan, the receipt that `expert_ffn` uses to read tokens and to put results back

Padding rows read token 0 and are never read back. An expert that nobody chose gets no rows, not even padding.
No tokens give a plan with no rows. Order within an expert is by token, so it does not depend on the sort used.

The device form never waits for the device, has static shapes and can be captured in a CUDA graph:
DEVICE_PLAN  (ids, first_expert, num_local, row_multiple, capacity) -> DevicePlan
             ids [num_tokens, top_k] int32 or int64, dense; experts outside [first_expert, first_expert + num_local) and
             negative ids have no row here. capacity: `capacity_for`. A token must not name one expert twice.
PERMUTE      (x [num_tokens, width] bf16 or Fp8Rows, plan) -> the same kind with capacity rows, in expert order. Padding
             rows of an expert are zeros (scale 0); rows at and past starts[-1] are not written.
COMBINE      (rows [capacity, width] bf16, weights [num_tokens, top_k] fp32, plan.rows, shared [num_tokens, width] or None)
             -> [num_tokens, width] bf16 = sum over k of weight * row, then + shared: fp32, in the order of k, rounded once.
             Choices with row -1 are skipped, so a token with none gives zeros (or shared).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.formats import fp8
from kernels.select import Backend
from kernels.toolchain.triton_support import jit, needs_triton, overlap, tl, triton, wait_for_previous

SMALL_PAIRS = 4096  # up to here one launch plans everything
CHUNK_PAIRS = 2048  # above: pairs of one program
EXPERTS_AT_ONCE = 4  # of one program that places pairs
BATCH = 2048  # up to here latency counts, above it bytes and instructions
PROGRAMS = 132 * 8  # at most so many share out the rows in use, however many the capacity allows


class Plan(NamedTuple):
    """
    tokens   [num_rows]           int64  which token each expert row reads
    rows     [num_tokens, top_k]  int64  the expert row that holds this token's k-th result
    ends     [num_experts]        int32  one past each expert's last row, non-decreasing
    num_rows                             rows in all, padding included
    """

    tokens: torch.Tensor
    rows: torch.Tensor
    ends: torch.Tensor
    num_rows: int


def reference(ids: torch.Tensor, num_experts: int, row_multiple: int) -> Plan:
    tokens: list[int] = []
    rows = torch.empty_like(ids)
    ends = []
    for expert in range(num_experts):
        for token, place in (ids == expert).nonzero().tolist():
            rows[token, place] = len(tokens)
            tokens.append(token)
        tokens += [0] * (-len(tokens) % row_multiple)
        ends.append(len(tokens))
    made = torch.tensor(tokens, dtype=torch.int64, device=ids.device)
    return Plan(made, rows, torch.tensor(ends, dtype=torch.int32, device=ids.device), len(tokens))


def _torch(ids: torch.Tensor, num_experts: int, row_multiple: int) -> Plan:
    flat = ids.reshape(-1)
    expert_of_row, order = flat.sort(stable=True)
    counts = torch.bincount(flat, minlength=num_experts)
    padded = counts if row_multiple == 1 else (counts + (row_multiple - 1)) // row_multiple * row_multiple
    ends = padded.cumsum(0)
    source = order // ids.shape[1] if ids.shape[1] else order
    rows = torch.empty_like(flat)
    if row_multiple == 1:
        rows[order] = torch.arange(len(flat), device=ids.device)
        return Plan(source, rows.view_as(ids), ends.to(torch.int32), len(flat))
    shift = (ends - padded) - (counts.cumsum(0) - counts)
    place = torch.arange(len(flat), device=ids.device) + shift[expert_of_row]
    num_rows = int(ends[-1])
    tokens = torch.zeros(num_rows, dtype=torch.int64, device=ids.device)
    tokens[place] = source
    rows[order] = place
    return Plan(tokens, rows.view_as(ids), ends.to(torch.int32), num_rows)


class DevicePlan(NamedTuple):
    """
    tokens  [capacity]           int32  source token of each expert row, -1 = padding
    rows    [num_tokens, top_k]  int32  expert row of each choice, -1 = that expert is not local
    starts  [num_local + 1]      int32  each expert's first row, multiples of row_multiple; the last: rows in use, padded
    counts  [num_local]          int32  real rows of each expert
    """

    tokens: torch.Tensor
    rows: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor


def capacity_for(num_pairs: int, num_local: int, row_multiple: int) -> int:
    """Rows that hold any routing of `num_pairs` local (token, expert) pairs, padding included."""
    return -(-num_pairs // row_multiple) * row_multiple + num_local * row_multiple


def empty_plan(ids: torch.Tensor, num_local: int, capacity: int) -> DevicePlan:
    """Uninitialised."""
    shapes = (capacity, ids.shape, num_local + 1, num_local)
    return DevicePlan(*(torch.empty(shape, dtype=torch.int32, device=ids.device) for shape in shapes))


def reference_device_plan(
    ids: torch.Tensor, first_expert: int, num_local: int, row_multiple: int, capacity: int
) -> DevicePlan:
    plan = empty_plan(ids, num_local, capacity)
    plan.tokens.fill_(-1)
    plan.rows.fill_(-1)
    row = 0
    for expert in range(num_local):
        plan.starts[expert] = row
        pairs = (ids == first_expert + expert).nonzero().tolist()
        for offset, (token, place) in enumerate(pairs):
            plan.rows[token, place] = row + offset
            plan.tokens[row + offset] = token
        plan.counts[expert] = len(pairs)
        row += -(-len(pairs) // row_multiple) * row_multiple
    plan.starts[num_local] = row
    return plan


@jit
def _place(pair, valid, row, tokens, rows, TOP_K: tl.constexpr):
    tl.store(rows + pair, row, mask=valid)
    tl.store(tokens + row, pair // TOP_K, mask=valid)


@jit
def _starts_of(counts, row_multiple):
    """`[experts]` counts -> padded counts and first rows."""
    padded = (counts + row_multiple - 1) // row_multiple * row_multiple
    return padded, tl.cumsum(padded, 0) - padded


@jit
def _plan_small_kernel(
    ids, tokens, rows, starts, counts, first_expert, num_local, num_pairs, capacity, row_multiple,
    TOP_K: tl.constexpr, PAIRS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program an expert; each counts every pair, so that none waits for another."""
    wait_for_previous(OVERLAP)
    mine = tl.program_id(0)
    pair, expert = tl.arange(0, PAIRS), tl.arange(0, EXPERTS)
    local = tl.load(ids + pair, mask=pair < num_pairs, other=-1).to(tl.int32) - first_expert
    valid = (pair < num_pairs) & (local >= 0) & (local < num_local)
    count = tl.histogram(tl.where(valid, local, 0), EXPERTS, mask=valid)
    padded, start = _starts_of(count, row_multiple)
    its_start = tl.sum(tl.where(expert == mine, start, 0), 0)
    its_count = tl.sum(tl.where(expert == mine, count, 0), 0)
    its_end = tl.sum(tl.where(expert == mine, start + padded, 0), 0)
    chosen = valid & (local == mine)
    _place(pair, chosen, its_start + tl.cumsum(chosen.to(tl.int32), 0) - 1, tokens, rows, TOP_K)
    offset = tl.arange(0, BLOCK)
    for first in range(its_start + its_count, its_end, BLOCK):
        tl.store(tokens + first + offset, -1, mask=first + offset < its_end)
    total = tl.sum(padded, 0)
    for first in range(total + mine * BLOCK, capacity, num_local * BLOCK):
        tl.store(tokens + first + offset, -1, mask=first + offset < capacity)
    if mine == 0:
        tl.store(rows + pair, -1, mask=(pair < num_pairs) & (valid == 0))
        tl.store(counts + expert, count, mask=expert < num_local)
        tl.store(starts + expert, start, mask=expert < num_local)
        tl.store(starts + num_local, total)


@jit
def _count_kernel(
    ids, tokens, rows, counts, chunk_counts, first_expert, num_local, num_pairs, capacity,
    PAIRS: tl.constexpr, EXPERTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program a chunk of pairs: its own histogram, the sum of all, and -1 wherever `_place_kernel` may not write."""
    wait_for_previous(OVERLAP)
    chunk = tl.program_id(0)
    pair, expert = chunk * PAIRS + tl.arange(0, PAIRS), tl.arange(0, EXPERTS)
    local = tl.load(ids + pair, mask=pair < num_pairs, other=-1).to(tl.int32) - first_expert
    valid = (pair < num_pairs) & (local >= 0) & (local < num_local)
    count = tl.histogram(tl.where(valid, local, 0), EXPERTS, mask=valid)
    tl.store(chunk_counts + chunk * EXPERTS + expert, count)
    tl.atomic_add(counts + expert, count, mask=(expert < num_local) & (count > 0), sem="relaxed")
    tl.store(rows + pair, -1, mask=pair < num_pairs)
    for first in range(chunk * PAIRS, capacity, tl.num_programs(0) * PAIRS):
        at = first + tl.arange(0, PAIRS)
        tl.store(tokens + at, -1, mask=at < capacity)


@jit
def _place_kernel(
    ids, tokens, rows, starts, counts, chunk_counts, first_expert, num_local, num_pairs, row_multiple,
    TOP_K: tl.constexpr, PAIRS: tl.constexpr, EXPERTS: tl.constexpr, MINE: tl.constexpr, CHUNKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program a chunk and MINE experts: rows of the chunk's pairs stand behind those of all chunks before it."""
    wait_for_previous(OVERLAP)
    chunk, first_mine = tl.program_id(0), tl.program_id(1) * MINE
    pair, expert = chunk * PAIRS + tl.arange(0, PAIRS), tl.arange(0, EXPERTS)
    local = tl.load(ids + pair, mask=pair < num_pairs, other=-1).to(tl.int32) - first_expert
    local = tl.where((pair < num_pairs) & (local < num_local), local, -1)
    padded, start = _starts_of(tl.load(counts + expert, mask=expert < num_local, other=0), row_multiple)
    before = tl.arange(0, CHUNKS)
    for step in tl.static_range(MINE):
        mine = first_mine + step
        earlier = tl.load(chunk_counts + before * EXPERTS + mine, mask=(before < chunk) & (mine < num_local), other=0)
        its_start = tl.sum(tl.where(expert == mine, start, 0), 0) + tl.sum(earlier, 0)
        chosen = (local == mine) & (mine < num_local)
        _place(pair, chosen, its_start + tl.cumsum(chosen.to(tl.int32), 0) - 1, tokens, rows, TOP_K)
    if (chunk == 0) & (first_mine == 0):
        tl.store(starts + expert, start, mask=expert < num_local)
        tl.store(starts + num_local, tl.sum(padded, 0))


def _triton_device_plan(
    ids: torch.Tensor, first_expert: int, num_local: int, row_multiple: int, capacity: int,
    num_warps: int = 8,
) -> DevicePlan:  # fmt: skip
    plan, num_pairs = empty_plan(ids, num_local, capacity), ids.numel()
    if not ids.is_contiguous() or capacity < capacity_for(num_pairs, num_local, row_multiple):
        raise ValueError(f"dense ids, and a capacity that holds {num_pairs} pairs, not {capacity}")
    experts, top_k = max(32, triton.next_power_of_2(num_local)), ids.shape[1]
    if num_pairs <= SMALL_PAIRS:
        pairs = max(128, triton.next_power_of_2(num_pairs))
        _plan_small_kernel[(num_local,)](
            ids, *plan, first_expert, num_local, num_pairs, capacity, row_multiple, top_k, pairs, experts, 128,
            num_warps=num_warps, **overlap(ids.device),
        )  # fmt: skip
        return plan
    plan.counts.zero_()
    chunks = triton.cdiv(num_pairs, CHUNK_PAIRS)
    chunk_counts = torch.empty(chunks, experts, dtype=torch.int32, device=ids.device)
    _count_kernel[(chunks,)](
        ids, plan.tokens, plan.rows, plan.counts, chunk_counts, first_expert, num_local, num_pairs, capacity,
        CHUNK_PAIRS, experts, num_warps=8, **overlap(ids.device),
    )  # fmt: skip
    _place_kernel[(chunks, triton.cdiv(num_local, EXPERTS_AT_ONCE))](
        ids, *plan, chunk_counts, first_expert, num_local, num_pairs, row_multiple,
        top_k, CHUNK_PAIRS, experts, EXPERTS_AT_ONCE, triton.next_power_of_2(chunks),
        num_warps=num_warps, **overlap(ids.device),
    )  # fmt: skip
    return plan


def reference_permute(x: torch.Tensor | fp8.Fp8Rows, plan: DevicePlan) -> torch.Tensor | fp8.Fp8Rows:
    if isinstance(x, fp8.Fp8Rows):
        made = fp8.empty_rows(len(plan.tokens), x.data.shape[1], x.data.device)
        data = reference_permute(x.data.view(torch.uint8), plan).view(torch.float8_e4m3fn)
        return fp8.Fp8Rows(data, made.scale.copy_(reference_permute(x.scale, plan)))
    kept = plan.tokens >= 0
    made = x.new_zeros(len(plan.tokens), x.shape[1])
    made[kept] = x[plan.tokens[kept]]
    return made


@jit
def _permute_kernel(
    words, scale, scale_stride, made, made_scale, made_scale_stride, tokens, used, num_words, num_groups,
    ROWS: tl.constexpr, WORDS: tl.constexpr, GROUPS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The programs share out the rows in use, ROWS at a time; a row of padding is a masked load, hence zeros."""
    wait_for_previous(OVERLAP)
    word, group = tl.arange(0, WORDS)[None, :], tl.arange(0, GROUPS)[:, None]
    end = tl.load(used)
    for tile in range(tl.program_id(0), tl.cdiv(end, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        token = tl.load(tokens + row, mask=row < end, other=-1)
        source, target = token.to(tl.int64), row.to(tl.int64)
        at = words + source[:, None] * num_words + word
        values = tl.load(at, mask=(token >= 0)[:, None] & (word < num_words), other=0)
        scales = tl.load(
            scale + group * scale_stride + source[None, :], mask=(token >= 0)[None, :] & (group < num_groups), other=0
        )
        tl.store(made + target[:, None] * num_words + word, values, mask=(row < end)[:, None] & (word < num_words))
        tl.store(
            made_scale + group * made_scale_stride + target[None, :],
            scales,
            mask=(row < end)[None, :] & (group < num_groups),
        )


def _triton_permute(
    x: torch.Tensor | fp8.Fp8Rows, plan: DevicePlan, rows: int = 4, num_warps: int = 8, programs: int = PROGRAMS
) -> torch.Tensor | fp8.Fp8Rows:
    data, scale = x if isinstance(x, fp8.Fp8Rows) else (x, None)
    width, capacity = data.shape[1], len(plan.tokens)
    num_bytes = width * data.element_size()
    if not data.is_contiguous() or num_bytes % 4:
        raise ValueError(f"dense rows of a multiple of 4 bytes, not {tuple(data.shape)} strides {data.stride()}")
    if scale is None:
        made, made_scale, groups = data.new_empty(capacity, width), None, 0
    else:
        (made, made_scale), groups = fp8.empty_rows(capacity, width, data.device), scale.shape[1]
    words = num_bytes // 4
    _permute_kernel[(min(triton.cdiv(capacity, rows), programs),)](
        data.view(torch.int32), data if scale is None else scale, 0 if scale is None else scale.stride(1),
        made.view(torch.int32), made if scale is None else made_scale, 0 if scale is None else made_scale.stride(1),
        plan.tokens, plan.starts[-1:], words, groups,
        rows, triton.next_power_of_2(words), triton.next_power_of_2(max(groups, 1)),
        num_warps=num_warps, **overlap(data.device),
    )  # fmt: skip
    return made if scale is None else fp8.Fp8Rows(made, made_scale)


def reference_combine(
    rows: torch.Tensor, weights: torch.Tensor, plan_rows: torch.Tensor, shared: torch.Tensor | None
) -> torch.Tensor:
    total = rows.new_zeros(len(weights), rows.shape[1], dtype=torch.float32)
    for place in range(weights.shape[1]):
        row = plan_rows[:, place].long()
        term = weights[:, place, None].float() * rows[row.clamp_min(0)].float()
        total += torch.where(row[:, None] >= 0, term, 0.0)
    return (total if shared is None else total + shared.float()).to(rows.dtype)


@jit
def _combine_kernel(
    rows, weights, plan_rows, shared, made, width,
    SHARED: tl.constexpr, TOP_K: tl.constexpr, COLUMNS: tl.constexpr, SKIP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program a token and COLUMNS columns. With SKIP it branches around rows that are not local, which saves
    instructions; without, their loads are only masked, so that all of a token's loads are in flight together."""
    wait_for_previous(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = column < width
    total = tl.zeros((COLUMNS,), tl.float32)
    if SHARED:
        of_shared = tl.load(shared + token * width + column, mask=here, other=0.0)
    for place in tl.static_range(TOP_K):
        row = tl.load(plan_rows + token * TOP_K + place).to(tl.int64)
        weight = tl.load(weights + token * TOP_K + place)
        at = rows + row * width + column
        if SKIP:
            if row >= 0:
                total += weight * tl.load(at, mask=here, other=0.0).to(tl.float32)
        else:
            total += weight * tl.load(at, mask=here & (row >= 0), other=0.0).to(tl.float32)
    if SHARED:
        total += of_shared.to(tl.float32)
    tl.store(made + token * width + column, total.to(made.dtype.element_ty), mask=here)


def _triton_combine(
    rows: torch.Tensor, weights: torch.Tensor, plan_rows: torch.Tensor, shared: torch.Tensor | None,
    columns: int = 0, num_warps: int = 0, skip: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    (num_tokens, top_k), width = weights.shape, rows.shape[1]
    made = rows.new_empty(num_tokens, width)
    if not all(t is None or t.is_contiguous() for t in (rows, weights, plan_rows, shared)):
        raise ValueError("rows, weights, plan rows and shared must be dense")
    best = (1024, 2, False) if num_tokens <= BATCH else (4096, 8, True)  # as measured on an H200
    columns, num_warps, skip = columns or best[0], num_warps or best[1], best[2] if skip is None else skip
    if made.numel():
        _combine_kernel[(num_tokens, triton.cdiv(width, columns))](
            rows, weights, plan_rows, made if shared is None else shared, made, width,
            shared is not None, top_k, columns, skip, num_warps=num_warps, **overlap(rows.device),
        )  # fmt: skip
    return made


run = _torch
BACKENDS = (Backend("torch", _torch), Backend("reference", reference))
DEVICE_PLAN_BACKENDS = (
    Backend("triton", _triton_device_plan, why_not=needs_triton),
    Backend("reference", reference_device_plan),
)
PERMUTE_BACKENDS = (
    Backend("triton", _triton_permute, why_not=needs_triton),
    Backend("reference", reference_permute),
)
COMBINE_BACKENDS = (
    Backend("triton", _triton_combine, why_not=needs_triton),
    Backend("reference", reference_combine),
)
