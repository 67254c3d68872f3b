"""Attention of DeepSeek-R1: absorbed decode over paged rows, and naive causal prefill.

Decode counts 2 x heads x (576 + 512) FLOP a row, every row once, queries and outputs; prefill counts 2 x heads x
(192 + 128) FLOP a query-key pair that is seen. Schedules are made once a step and are not timed here. Errors are those of
a few sequences or heads against fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from bench.kernels.harness import Candidate, Row, relative_error, rows_of
from headrace.planning.ceilings import Ceilings
from kernels.attention import mla_decode, mla_prefill

HEADS, LATENT, ROPE, BLOCK = 128, 512, 64, 64
QK, VALUE = 192, 128
SCALE = 0.1352  # 192 ** -0.5 times YaRN's mscale squared
E4M3 = torch.float8_e4m3fn
DECODE_SHAPES = [(64, 4096), (128, 4096), (512, 4096), (256, 3072), (512, 3072)]
FP8_SHAPES = [(128, 4096), (512, 3072)]
PREFILL_SHAPES = [(16, 4096), (4, 16384)]
PUBLIC = ("flash_mla", "flashinfer", "torch")
CHECKED = 4  # sequences compared with fp32
Progress = Callable[[str], None]


class DecodeInputs:
    """Contexts of `length` plus or minus a tenth, over shuffled blocks of a pool that holds nothing else."""

    def __init__(self, batch: int, length: int, device: torch.device):
        draw = torch.Generator(device).manual_seed(batch + length)
        spread = torch.rand(batch, device=device, generator=draw) * 0.2 + 0.9
        self.lens = (spread * length).int()
        self.lens_host = self.lens.cpu().numpy()
        blocks = -(-self.lens_host // BLOCK)
        self.rows = int(self.lens_host.sum())
        order = torch.randperm(int(blocks.sum()), device=device, generator=draw).int()
        self.tables = torch.zeros(batch, int(blocks.max()), dtype=torch.int32, device=device)
        start = 0
        for seq, count in enumerate(blocks.tolist()):
            self.tables[seq, :count] = order[start : start + count]
            start += count
        shape = len(order), BLOCK, LATENT + ROPE
        self.pool = torch.randn(shape, device=device, generator=draw, dtype=torch.bfloat16)
        self.q = torch.randn(batch, HEADS, LATENT + ROPE, device=device, generator=draw, dtype=torch.bfloat16)

    def reference(self, q: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
        """[CHECKED, heads, latent] fp32."""
        made = []
        for seq in range(CHECKED):
            blocks = self.tables[seq, : -(-int(self.lens_host[seq]) // BLOCK)].long()
            rows = pool[blocks].flatten(0, 1)[: int(self.lens_host[seq])].float()
            made.append(torch.softmax(SCALE * q[seq].float() @ rows.T, -1) @ rows[:, :LATENT])
        return torch.stack(made)


def _decode_candidates(
    inputs: DecodeInputs, q: torch.Tensor, pool: torch.Tensor, progress: Progress
) -> Iterator[Candidate]:
    device = q.device
    sizes = dict(
        heads=HEADS, row_dim=LATENT + ROPE, latent_dim=LATENT, block_size=BLOCK, q_dtype=q.dtype, pool_dtype=pool.dtype,
        max_batch=len(q), max_blocks=inputs.tables.shape[1], scale=SCALE,
    )  # fmt: skip
    want = inputs.reference(q, pool)
    for backend in mla_decode.DEVICE_BACKENDS[:-1]:  # all but the reference
        reason = backend.why_not(device) or backend.run.misfit(**sizes)
        if reason:
            progress(f"mla_decode {backend.name}: {reason}")
            continue
        try:
            op = backend.run(**sizes, device=device)
            plan = op.plan(inputs.tables, inputs.lens, np.asarray(inputs.lens_host))
            error = relative_error(op.run(q, pool, plan)[:CHECKED], want)
        except Exception as problem:
            progress(f"mla_decode {backend.name}: {type(problem).__name__}: {str(problem)[:300]}")
            continue
        yield Candidate(backend.name, [partial(op.run, q, pool, plan)], error, public=backend.name in PUBLIC)


def _decode_rows(
    inputs: DecodeInputs,
    shape: str,
    q_dtype: torch.dtype,
    pool_dtype: torch.dtype,
    ceilings: Ceilings,
    progress: Progress,
) -> list[Row]:
    q, pool = inputs.q.to(q_dtype), inputs.pool.to(pool_dtype)
    num_bytes = inputs.rows * pool[0, 0].nbytes + q.nbytes + len(q) * HEADS * LATENT * 2
    flops = 2 * HEADS * (LATENT + ROPE + LATENT) * inputs.rows
    limit = ceilings.limit_us(num_bytes, flops, "fp8" if q_dtype == E4M3 else "bf16")
    names = {torch.bfloat16: "bf16", E4M3: "e4m3"}
    shape = f"{shape} q {names[q_dtype]} rows {names[pool_dtype]}"
    return rows_of("mla_decode", shape, _decode_candidates(inputs, q, pool, progress), limit, progress=progress)


def decode_rows(device: torch.device, ceilings: Ceilings, progress: Progress) -> list[Row]:
    made: list[Row] = []
    for batch, length in DECODE_SHAPES:
        inputs = DecodeInputs(batch, length, device)
        shape = f"{batch} x ~{length}"
        made += _decode_rows(inputs, shape, torch.bfloat16, torch.bfloat16, ceilings, progress)
        if (batch, length) in FP8_SHAPES:
            made += _decode_rows(inputs, shape, torch.bfloat16, E4M3, ceilings, progress)
            made += _decode_rows(inputs, shape, E4M3, E4M3, ceilings, progress)
    return made


class PrefillInputs:
    """Packed prompts of one length; v is a slice of what kv_b made, k is dense."""

    def __init__(self, batch: int, length: int, device: torch.device):
        draw = torch.Generator(device).manual_seed(batch + length)

        def normal(width: int) -> torch.Tensor:
            shape = batch * length, HEADS, width
            return torch.randn(shape, device=device, generator=draw, dtype=torch.bfloat16)

        self.lens = [length] * batch
        self.q, self.k, self.v = normal(QK), normal(QK), normal(2 * VALUE)[..., VALUE:]

    def picked(self, out: torch.Tensor) -> torch.Tensor:
        """Two heads of the first and the last 64 queries of the last prompt."""
        last = out[-self.lens[-1] :, :2]
        return torch.cat((last[:64], last[-64:]))

    def reference(self) -> torch.Tensor:
        length = self.lens[-1]
        places = torch.cat((torch.arange(64), torch.arange(length - 64, length))).to(self.q.device)
        q = self.picked(self.q).float().transpose(0, 1)
        k, v = (part[-length:, :2].float().transpose(0, 1) for part in (self.k, self.v))
        hidden = torch.arange(length, device=q.device)[None] > places[:, None]
        scores = (SCALE * q @ k.mT).masked_fill(hidden, float("-inf"))
        return (torch.softmax(scores, -1) @ v).transpose(0, 1)


def _prefill_candidates(inputs: PrefillInputs, progress: Progress) -> Iterator[Candidate]:
    device, want = inputs.q.device, inputs.reference()
    for backend in mla_prefill.VARLEN_BACKENDS[:-1]:
        reason = backend.why_not(device)
        if reason:
            progress(f"mla_prefill {backend.name}: {reason}")
            continue
        try:
            plan = backend.run.plan(inputs.lens, inputs.lens, HEADS, QK, VALUE, SCALE, device)
            error = relative_error(inputs.picked(backend.run.run(inputs.q, inputs.k, inputs.v, plan)), want)
        except Exception as problem:
            progress(f"mla_prefill {backend.name}: {type(problem).__name__}: {str(problem)[:300]}")
            continue
        call = partial(backend.run.run, inputs.q, inputs.k, inputs.v, plan)
        yield Candidate(backend.name, [call], error, public=backend.name in PUBLIC)


def prefill_rows(device: torch.device, ceilings: Ceilings, progress: Progress) -> list[Row]:
    made: list[Row] = []
    for batch, length in PREFILL_SHAPES:
        inputs = PrefillInputs(batch, length, device)
        flops = 2 * HEADS * (QK + VALUE) * batch * length * (length + 1) // 2
        num_bytes = batch * length * HEADS * 2 * (2 * QK + 2 * VALUE)
        limit = ceilings.limit_us(num_bytes, flops)
        candidates = _prefill_candidates(inputs, progress)
        made += rows_of("mla_prefill", f"{batch} x {length}", candidates, limit, progress=progress)
        del inputs, candidates
        torch.cuda.empty_cache()
    return made


def rows(device: torch.device, ceilings: Ceilings, progress: Progress) -> list[Row]:
    return decode_rows(device, ceilings, progress) + prefill_rows(device, ceilings, progress)


if __name__ == "__main__":
    from bench.kernels.harness import measure_ceilings

    here = torch.device("cuda")
    found = measure_ceilings(here)
    print(found)
    rows(here, found, print)
