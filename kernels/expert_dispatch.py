"""Sort (token, expert) pairs by expert, with each expert's rows padded to a multiple.

ids      [num_tokens, top_k]  int64  chosen experts, 0 <= id < num_experts
returns  Plan, the receipt that `expert_ffn` uses to read tokens and to put results back

Padding rows read token 0 and are never read back. An expert that nobody chose gets no rows, not even padding.
No tokens give a plan with no rows. Order within an expert is by token, so it does not depend on the sort used.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.select import Backend


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


run = _torch
BACKENDS = (Backend("torch", _torch), Backend("reference", reference))
