"""NVFP4 on this GPU: the row quantiser, and products with NVFP4 weights beside the same products with FP8 weights.

The weights' bytes set the limit at few rows an expert: codes and scales read once, rows read once, results written once.
The same products with FP8 weights are timed in the same run (`fp8 <back end>`; for one matrix, torch in bf16).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.kernels.harness import Candidate, Row, measure_ceilings, relative_error, rows_of, sets_for
from headrace.planning.ceilings import Ceilings
from kernels.formats import fp8, nvfp4
from kernels.linear import grouped_linear, grouped_nvfp4, nvfp4_linear

EXPERTS = 8
GROUPED_SHAPES = ((4096, 7168), (7168, 2048))  # gate_up and down of one routed expert
GROUPED_ROWS = (16, 32, 64, 128)
LINEAR_SHAPES = ((4096, 7168), (7168, 2048), (36864, 7168), (7168, 18432))  # shared expert, dense layer
LINEAR_ROWS = (64, 256)


def rows(device: torch.device, ceilings: Ceilings, progress: Callable[[str], None] = print) -> list[Row]:
    made = _quantise(device, ceilings, progress)
    for n, k in GROUPED_SHAPES:
        weights = _Weights(device, n, k)
        for count in GROUPED_ROWS:
            made += _grouped(weights, count, ceilings, progress)
    for n, k in LINEAR_SHAPES:
        made += _linear(device, n, k, ceilings, progress)
    return made


def _quantise(device: torch.device, ceilings: Ceilings, progress: Callable[[str], None]) -> list[Row]:
    tokens, width = 4096, 7168
    xs = [torch.randn(tokens, width, device=device).bfloat16() for _ in range(sets_for(2 * tokens * width))]
    scale = xs[0].abs().amax().float().reshape(1) / (nvfp4.LARGEST_CODE * nvfp4.LARGEST_SCALE)
    expected = nvfp4.dequantise(nvfp4.Nvfp4Weight(*nvfp4.reference(xs[0], scale), scale[0]))
    candidates = []
    for backend in _usable(nvfp4.QUANTISE_BACKENDS, device):
        packed, block_scale = backend.run(xs[0], scale)
        error = relative_error(nvfp4.dequantise(nvfp4.Nvfp4Weight(packed, block_scale, scale[0])), expected)
        calls = [lambda x=x, run=backend.run: run(x, scale) for x in xs]
        candidates.append(Candidate(backend.name, calls, error, public=backend.name == "flashinfer"))
    limit = ceilings.limit_us(tokens * width * (2 + 0.5 + 1 / 16))
    return rows_of("nvfp4_quantise", f"{tokens}x{width}", candidates, limit, progress=progress)


class _Weights:
    """Several sets of [EXPERTS, n, k] in both formats, prepared for every back end that runs here."""

    def __init__(self, device: torch.device, n: int, k: int):
        self.device, self.n, self.k = device, n, k
        self.fp4, self.fp8 = [], []
        self.bytes = EXPERTS * n * k * 9 // 16
        for _ in range(sets_for(self.bytes, 4)):
            wide = torch.randn(EXPERTS, n, k, device=device).bfloat16()
            self.fp4.append(nvfp4.quantise(wide))
            self.fp8.append(fp8.quantise_weight(wide))
        self.backends = _usable(grouped_nvfp4.MASKED_BACKENDS, device)
        self.prepared = {b.name: [b.run.prepare(w) for w in self.fp4] for b in self.backends}


def _grouped(weights: _Weights, count: int, ceilings: Ceilings, progress: Callable[[str], None]) -> list[Row]:
    device, n, k = weights.device, weights.n, weights.k
    flat = torch.randn(EXPERTS * count, k, device=device).bfloat16()
    data, scale = fp8.reference(flat)
    masked = fp8.Fp8Rows(data.view(EXPERTS, count, k), scale.T.reshape(-1, EXPERTS, count).permute(1, 2, 0))
    counts = torch.full((EXPERTS,), count, dtype=torch.int32, device=device)
    wide = fp8.dequantise_rows(fp8.Fp8Rows(data, scale)).view(EXPERTS, count, k)
    expected = torch.bmm(wide, nvfp4.dequantise(weights.fp4[0]).mT)
    candidates = []
    for backend in weights.backends:
        sets = weights.prepared[backend.name]
        calls = [lambda w=w, run=backend.run.run: run(masked, w, counts) for w in sets]
        candidates.append(Candidate(backend.name, calls, relative_error(calls[0](), expected)))
    of_fp8 = torch.bmm(wide, fp8.dequantise_weight(weights.fp8[0]).mT)
    for backend in _usable(_masked_fp8(), device):
        calls = [lambda w=w, run=backend.run: run(masked, w, counts) for w in weights.fp8]
        candidates.append(Candidate(f"fp8 {backend.name}", calls, relative_error(calls[0](), of_fp8)))
    moved = EXPERTS * count * (k * (1 + 4 / 128) + 2 * n)
    limit = ceilings.limit_us(weights.bytes + moved, 2 * EXPERTS * count * n * k)
    made = rows_of("grouped_nvfp4 masked", f"{EXPERTS}x{count} x [{n}, {k}]", candidates, limit, progress=progress)
    _compare(made, weights, ceilings, progress)
    return made


def _compare(made: list[Row], weights: _Weights, ceilings: Ceilings, progress: Callable[[str], None]) -> None:
    """Sets NVFP4 beside the best FP8 kernel of this run and beside the time to read the FP8 weights alone."""
    best = min((row.us for row in made if row.backend.startswith("fp8 ")), default=None)
    floor = ceilings.limit_us(weights.bytes * 16 / 9)
    for row in made:
        if not row.backend.startswith("fp8 "):
            row.notes.update(times_fp8_kernel=best and best / row.us, times_fp8_floor=floor / row.us)
            beside = "" if best is None else f"{best / row.us:.2f}x the FP8 kernel, "
            progress(f"    {row.backend}: {beside}{floor / row.us:.2f}x the FP8 floor")


def _masked_fp8() -> Any:
    found = getattr(grouped_linear, "MASKED_BACKENDS", None) or grouped_linear.MASKED
    return [backend for backend in found if backend.name != "reference"]


def _linear(device: torch.device, n: int, k: int, ceilings: Ceilings, progress: Callable[[str], None]) -> list[Row]:
    made: list[Row] = []
    num_bytes = n * k * 9 // 16
    wide = [torch.randn(n, k, device=device).bfloat16() for _ in range(sets_for(num_bytes, 4))]
    weights = [nvfp4.quantise(one) for one in wide]
    prepared = {b.name: [b.run.prepare(w) for w in weights] for b in _usable(nvfp4_linear.LINEAR_BACKENDS, device)}
    for count in LINEAR_ROWS:
        x = torch.randn(count, k, device=device).bfloat16()
        rows = fp8.reference(x)  # what the model hands over
        expected = fp8.dequantise_rows(rows) @ nvfp4.dequantise(weights[0]).T
        candidates = []
        for backend in _usable(nvfp4_linear.LINEAR_BACKENDS, device):
            calls = [lambda w=w, run=backend.run.run, rows=rows: run(rows, w) for w in prepared[backend.name]]
            candidates.append(
                Candidate(
                    backend.name, calls, relative_error(calls[0](), expected), public=backend.name == "flashinfer"
                )
            )
        calls = [lambda w=w, x=x: x @ w.T for w in wide]
        notes = {"weights": "bf16"}
        candidates.append(
            Candidate("torch bf16", calls, relative_error(calls[0](), x.float() @ wide[0].float().T), True, notes=notes)
        )
        limit = ceilings.limit_us(num_bytes + count * (k + 2 * n), 2 * count * n * k)
        made += rows_of("nvfp4_linear", f"{count} x [{n}, {k}]", candidates, limit, progress=progress)
    return made


def _usable(backends: Any, device: torch.device) -> list[Any]:
    return [b for b in backends if b.why_not(device) is None and b.name != "reference"]


def main() -> None:
    device = torch.device("cuda")
    torch.manual_seed(0)
    ceilings = measure_ceilings(device)
    print(ceilings)
    rows(device, ceilings)


if __name__ == "__main__":
    main()
