"""How an op is timed on a GPU and set beside the hardware's limit and the best public kernel.

Each figure is the median over replays of one CUDA graph that holds many calls. The calls rotate over several input sets,
so that what is read comes from memory and not from the L2 cache. The ceilings are measured in the same run on random
data: a copy of 4 GiB (bytes read plus written) and products of 8192 x 8192 matrices.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from headrace.planning.ceilings import Ceilings

L2_BYTES = 60 << 20
GRAPH_MS = 4.0  # about as long as one timed graph runs
REPLAYS = 15

Call = Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """One op, shape and back end. `us` median microseconds a call; `max_error` as `relative_error` says, None where it was
    not measured (the row is what others are compared with)."""

    op: str
    shape: str
    backend: str
    us: float
    fraction_of_limit: float
    ratio_to_best_public: float | None
    best_public: str | None
    max_error: float | None
    notes: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure_ceilings(device: torch.device) -> Ceilings:
    """Fixed calls: a 4 GiB copy and 8192 ** 3 products in bf16 and e4m3, random data."""
    copy_us = _copy_us(device)
    size = 8192
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    bf16_us = time_us([lambda: torch.mm(a, b.T)])
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    scales = [(one, one), (torch.ones(size, 1, device=device), torch.ones(1, size, device=device))]

    def fp8_us(fast: bool) -> float:
        options = {"out_dtype": torch.bfloat16, "use_fast_accum": fast}
        return min(time_us([lambda pair=pair: torch._scaled_mm(a8, b8.T, *pair, **options)]) for pair in scales)

    flops = 2e-6 * size**3
    return Ceilings(2 * (4 << 30) / copy_us * 1e-3, flops / bf16_us, flops / fp8_us(False), flops / fp8_us(True))


def _copy_us(device: torch.device) -> float:
    """The faster of torch's copy and of one made of loads and stores; the copy engine's own path is slower here."""
    source = torch.randn(1 << 30, device=device)
    target = torch.empty_like(source)
    return min(time_us([lambda: target.copy_(source)], graph=False), time_us([lambda: torch.neg(source, out=target)]))


def sets_for(num_bytes: int, most: int = 16) -> int:
    """Input sets to rotate over so that together they are three times the L2 cache."""
    return max(1, min(most, -(-3 * L2_BYTES // max(num_bytes, 1))))


def time_us(calls: Sequence[Call], *, graph: bool = True) -> float:
    """Median microseconds of one call, the calls taken in turn. `graph=False` for what cannot be captured."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    once_ms = _elapsed_ms(lambda: [call() for call in calls]) / len(calls)
    count = max(len(calls), min(400, int(GRAPH_MS / max(once_ms, 1e-3)) // len(calls) * len(calls)))
    run = _captured(calls, count) if graph else lambda: [calls[i % len(calls)]() for i in range(count)]
    for _ in range(2):
        run()
    return statistics.median(_elapsed_ms(run) for _ in range(REPLAYS)) / count * 1e3


def _captured(calls: Sequence[Call], count: int) -> Call:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            calls[i % len(calls)]()
    return graph.replay


def _elapsed_ms(run: Call) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """max |out - reference| / max |reference|; infinite where one of them is not finite and the other is."""
    out, reference = out.double(), reference.double()
    if not torch.equal(out.isfinite(), reference.isfinite()):
        return float("inf")
    difference = (out - reference).nan_to_num(0.0).abs().max()
    return float(difference / reference.nan_to_num(0.0).abs().max().clamp_min(1e-30))


@dataclass
class Candidate:
    """One way to compute the op. `calls`: one for each input set. `public`: somebody else's kernel. `error`: of set 0, None
    where the candidate is what others are compared with."""

    name: str
    calls: Sequence[Call]
    error: float | None
    public: bool = False
    graph: bool = True
    notes: dict[str, Any] = field(default_factory=dict)


def rows_of(
    op: str, shape: str, candidates: Iterable[Candidate], limit_us: float, *, progress: Callable[[str], None] = print
) -> list[Row]:
    """Times every candidate; ratios are the best public candidate's time over the row's own (above 1: ours is faster).

    A candidate that raises is left out of the rows and named by `progress`: the others still count.
    """
    timed: list[tuple[Candidate, float]] = []
    for candidate in candidates:
        try:
            timed.append((candidate, time_us(candidate.calls, graph=candidate.graph)))
        except Exception as error:
            progress(f"{op} {shape} {candidate.name}: not timed: {type(error).__name__}: {str(error)[:200]}")
    public = [(us, candidate.name) for candidate, us in timed if candidate.public]
    best_us, best = min(public, default=(None, None))
    rows = [
        Row(
            op,
            shape,
            candidate.name,
            us,
            limit_us / us,
            None if best_us is None else best_us / us,
            best,
            candidate.error,
            candidate.notes,
        )
        for candidate, us in timed
    ]
    for row in rows:
        ratio = "" if row.ratio_to_best_public is None else f"  {row.ratio_to_best_public:.2f}x {row.best_public}"
        progress(
            f"{op:28} {shape:32} {row.backend:14} {row.us:9.1f} us  {row.fraction_of_limit:6.1%}"
            f"  error {'-' if row.max_error is None else format(row.max_error, '.1e')}{ratio}"
        )
    return rows
