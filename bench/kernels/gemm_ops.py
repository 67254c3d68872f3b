"""FP8 products at DeepSeek-R1 sizes: one weight (fp8_linear), eight local experts (grouped_linear).

Limits count each operand read once and the result written once, or the FLOP at the run's FP8 rate. Errors are against
fp32 products of the dequantised operands, on rows drawn anew (at most 48 of each expert).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.kernels.harness import Candidate, Row, measure_ceilings, relative_error, rows_of, sets_for
from headrace.planning.ceilings import Ceilings
from kernels.formats import fp8
from kernels.formats.fp8 import Fp8Rows, Fp8Weight
from kernels.linear import fp8_linear, grouped_linear
from kernels.select import choose

EXPERTS = 8
GATE_UP, DOWN = (4096, 7168), (7168, 2048)  # n, k
LINEARS = {
    "qkv_a": (2112, 7168),
    "q_b": (24576, 1536),
    "kv_b": (32768, 512),
    "o": (7168, 16384),
    "shared gate_up": GATE_UP,
    "shared down": DOWN,
}
DECODE_TOKENS, PREFILL_TOKENS = (64, 256), (16384,)
MASKED_ROWS = (16, 64, 128, 256, 512)
CONTIGUOUS_ROWS = (256, 4096, 16384)
FLASHINFER_SHAPES = {("o", 256)}  # it compiles each shape anew
TRITON_SHAPES, TRITON_ROWS = {("o", 64)}, (64, 256)  # the fall-back, at a few sizes: each compiles for a second or two
SAMPLED = 48


def rows(device: torch.device, ceilings: Ceilings, progress: Callable[[str], None] = print) -> list[Row]:
    made = []
    for name, (n, k) in LINEARS.items():
        for tokens in (*DECODE_TOKENS, *PREFILL_TOKENS):
            if name != "kv_b" or tokens in PREFILL_TOKENS:
                made += _linear_rows(device, ceilings, progress, name, tokens, n, k)
    for n, k in (GATE_UP, DOWN):
        weight = drawn_weight(EXPERTS, n, k, device)
        for each in MASKED_ROWS:
            made += _masked_rows(device, ceilings, progress, each, weight)
        for each in CONTIGUOUS_ROWS:
            made += _contiguous_rows(device, ceilings, progress, each, weight)
    return made


def drawn_weight(experts: int, n: int, k: int, device: torch.device) -> Fp8Weight:
    return fp8.quantise_weight(torch.randn(experts, n, k, device=device, dtype=torch.bfloat16) * k**-0.5)


def drawn_rows(num_rows: int, k: int, device: torch.device) -> Fp8Rows:
    run = choose(fp8.QUANTISE_BACKENDS, device).run
    return run(torch.randn(num_rows, k, device=device, dtype=torch.bfloat16))


def drawn_starts(each: int, device: torch.device) -> torch.Tensor:
    """Row counts of eight experts that share 8 * `each` rows as tokens' choices would: about `each`, never equal."""
    counts = torch.multinomial(torch.ones(EXPERTS), EXPERTS * each, replacement=True).bincount(minlength=EXPERTS)
    multiple = grouped_linear.row_multiple_for(each)
    starts = torch.zeros(EXPERTS + 1, dtype=torch.int32)
    starts[1:] = (-(-counts // multiple) * multiple).cumsum(0)
    return starts.to(device)


def error_of(out: torch.Tensor, rows: Fp8Rows, weight: Fp8Weight, starts: list[int]) -> float:
    """`relative_error` over some rows of each expert, its first and last among them."""
    got, want = [], []
    for expert, (first, end) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        if first == end:
            continue
        some = torch.cat([torch.randint(first, end, (SAMPLED,)), torch.tensor([first, end - 1])]).to(out.device)
        x = fp8.dequantise_rows(Fp8Rows(rows.data.view(torch.uint8)[some].view(torch.float8_e4m3fn), rows.scale[some]))
        want.append(x @ fp8.dequantise_weight(Fp8Weight(weight.data[expert], weight.scale[expert])).T)
        got.append(out[some])
    return relative_error(torch.cat(got), torch.cat(want))


def limit_us(ceilings: Ceilings, num_rows: int, experts: int, n: int, k: int) -> float:
    num_bytes = num_rows * (k + k // 128 * 4 + 2 * n) + experts * n * k * (1 + 4 / 128**2)
    return ceilings.limit_us(num_bytes, 2.0 * num_rows * n * k, "fp8")


def _linear_rows(
    device: torch.device, ceilings: Ceilings, progress: Any, name: str, tokens: int, n: int, k: int
) -> list[Row]:
    num_sets = sets_for(n * k + tokens * (k + 2 * n))
    weights = [drawn_weight(1, n, k, device) for _ in range(num_sets)]
    inputs = [drawn_rows(tokens, k, device) for _ in range(num_sets)]

    def candidates() -> Iterator[Candidate]:
        for backend in fp8_linear.LINEAR_BACKENDS:
            at = {"reference": (), "flashinfer": FLASHINFER_SHAPES, "triton": TRITON_SHAPES}.get(backend.name)
            if at is not None and (name, tokens) not in at:
                continue
            if (reason := backend.why_not(device)) is not None:
                progress(f"fp8_linear {backend.name}: {reason}")
                continue
            yield from _tried(progress, f"fp8_linear {name}", lambda b=backend: linear_candidate(b))

    def linear_candidate(backend: Any) -> Candidate:
        prepared = [backend.run.prepare(Fp8Weight(w.data[0], w.scale[0])) for w in weights]
        out = torch.empty(tokens, n, dtype=torch.bfloat16, device=device)
        calls = [lambda x=x, w=w: backend.run.run(x, w, out) for x, w in zip(inputs, prepared, strict=True)]
        error = error_of(calls[0](), inputs[0], weights[0], [0, tokens])
        public = backend.name in ("cublas", "flashinfer")
        label = "torch._scaled_mm" if backend.name == "cublas" else backend.name
        return Candidate(label, calls, error, public=public)

    return rows_of(
        f"fp8_linear {name}", f"{tokens}x{n}x{k}", candidates(), limit_us(ceilings, tokens, 1, n, k), progress=progress
    )


def _masked_rows(device: torch.device, ceilings: Ceilings, progress: Any, each: int, weight: Fp8Weight) -> list[Row]:
    _, n, k = weight.data.shape
    flat = drawn_rows(EXPERTS * each, k, device)
    scale = flat.scale.reshape(EXPERTS, each, -1).mT.contiguous().mT
    rows = Fp8Rows(flat.data.view(EXPERTS, each, k), scale)
    counts = torch.full((EXPERTS,), each, dtype=torch.int32, device=device)
    starts = [each * expert for expert in range(EXPERTS + 1)]

    def ours(backend: Any) -> Candidate:
        out = backend.run(rows, weight, counts).view(-1, n)
        call = lambda: backend.run(rows, weight, counts)  # noqa: E731
        return Candidate(backend.name, [call], error_of(out, flat, weight, starts))

    def candidates() -> Iterator[Candidate]:
        for backend in grouped_linear.MASKED_BACKENDS:
            if _is_timed(backend, each, device):
                yield from _tried(progress, "grouped masked", lambda b=backend: ours(b))
        yield from _tried(progress, "grouped masked", lambda: scaled_grouped_mm(flat, weight, starts))

    limit = limit_us(ceilings, EXPERTS * each, EXPERTS, n, k)
    return rows_of("grouped_linear masked", f"8x{each}x{n}x{k}", candidates(), limit, progress=progress)


def _contiguous_rows(
    device: torch.device, ceilings: Ceilings, progress: Any, each: int, weight: Fp8Weight
) -> list[Row]:
    _, n, k = weight.data.shape
    starts = drawn_starts(each, device)
    bounds = starts.tolist()
    rows = drawn_rows(bounds[-1], k, device)

    def ours(backend: Any) -> Candidate:
        error = error_of(backend.run(rows, weight, starts), rows, weight, bounds)
        return Candidate(backend.name, [lambda: backend.run(rows, weight, starts)], error)

    def candidates() -> Iterator[Candidate]:
        for backend in grouped_linear.CONTIGUOUS_BACKENDS:
            if _is_timed(backend, each, device):
                yield from _tried(progress, "grouped contiguous", lambda b=backend: ours(b))
        yield from _tried(progress, "grouped contiguous", lambda: scaled_grouped_mm(rows, weight, bounds))

    limit = limit_us(ceilings, bounds[-1], EXPERTS, n, k)
    return rows_of("grouped_linear contiguous", f"8x~{each}x{n}x{k}", candidates(), limit, progress=progress)


def _is_timed(backend: Any, each: int, device: torch.device) -> bool:
    if backend.name == "reference" or (backend.name == "triton" and each not in TRITON_ROWS):
        return False
    return backend.why_not(device) is None


def scaled_grouped_mm(rows: Fp8Rows, weight: Fp8Weight, starts: list[int]) -> Candidate:
    """torch's grouped product: one scale a row of each operand, an easier job than one for each 128 of k."""
    experts, n, _ = weight.data.shape
    scale_a = rows.scale[:, 0].contiguous()
    scale_b = weight.scale[:, :, 0].repeat_interleave(128, 1)[:, :n].contiguous()
    ends = torch.tensor(starts[1:], dtype=torch.int32, device=rows.data.device)

    def call() -> torch.Tensor:
        return torch._scaled_grouped_mm(
            rows.data, weight.data.mT, scale_a, scale_b, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    same = Fp8Rows(rows.data, scale_a[:, None].expand(-1, rows.scale.shape[1]))
    same_weight = Fp8Weight(weight.data, weight.scale[:, :, :1].expand(-1, -1, weight.scale.shape[2]))
    error = error_of(call(), same, same_weight, starts)
    return Candidate("torch._scaled_grouped_mm", [call], error, public=True, notes={"scales": "one a row, not blocks"})


def _tried(progress: Any, op: str, make: Callable[[], Candidate]) -> Iterator[Candidate]:
    try:
        yield make()
    except Exception as error:
        progress(f"{op}: left out: {type(error).__name__}: {str(error)[:200]}")


if __name__ == "__main__":
    torch.manual_seed(0)
    here = torch.device("cuda")
    measured = measure_ceilings(here)
    print(measured)
    rows(here, measured)
