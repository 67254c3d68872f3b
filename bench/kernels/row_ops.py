"""The ops that move rows: norm, SwiGLU, quantise, gate, expert dispatch, checksum; DeepSeek-R1 sizes.

    python -m bench.kernels.row_ops [name ...]      needs a GPU; names choose cases, such as `gate`

All are bound by memory: the limit is each input read once and each output written once at the run's copy rate.
FlashInfer where it has the op, torch's eager kernels elsewhere. Fresh random inputs; errors are of the first rows of set
0 against fp32 (for FP8 output: of the dequantised values, so about 2 ** -4).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch

from bench.kernels.harness import Candidate, Row, measure_ceilings, relative_error, rows_of, sets_for
from headrace.planning.ceilings import Ceilings
from kernels.experts import expert_dispatch, gate
from kernels.formats import fp8
from kernels.rows import block_checksum, rms_norm, silu_mul
from kernels.select import Backend

HIDDEN, INNER, Q_LORA, QKV_A, ROW, HEADS_VALUE = 7168, 2048, 1536, 2112, 576, 128 * 128
EXPERTS, TOP_K, LOCAL = 256, 8, 8
LIMITS = gate.Limits(TOP_K, 8, 4, True, 2.5)
SIZES = (256, 16384, 65536)  # tokens: a decode batch, two prefills
SAMPLE = 512  # rows whose error is looked at
EPS = 1e-6

Case = Callable[[int, torch.device], Iterator[tuple[str, str, list[Candidate], float]]]


def rows(device: torch.device, ceilings: Ceilings, progress: Callable[[str], None] = print, names=()) -> list[Row]:
    made: list[Row] = []
    for name, case in CASES.items():
        if names and name not in names:
            continue
        for tokens in SIZES:
            for op, shape, candidates, num_bytes in case(tokens, device):
                made += rows_of(op, shape, candidates, ceilings.limit_us(num_bytes), progress=progress)
            torch.cuda.empty_cache()
    return made


def flashinfer_function(name: str, module: str = "flashinfer") -> Callable | None:
    """None where FlashInfer is not installed or lacks it."""
    try:
        return getattr(__import__(module, fromlist=[name]), name)
    except (ImportError, AttributeError):
        return None


def normal(device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, device=device)


def error_of(made: torch.Tensor | fp8.Fp8Rows, want: torch.Tensor) -> float:
    if isinstance(made, fp8.Fp8Rows):
        made = fp8.dequantise_rows(fp8.Fp8Rows(made.data[:SAMPLE], made.scale[:SAMPLE]))
    return relative_error(made[:SAMPLE], want[:SAMPLE])


def ours(backends: tuple[Backend, ...], name: str = "triton") -> Callable:
    return next(backend.run for backend in backends if backend.name == name)


def add_norm_cases(tokens: int, device: torch.device):
    run = ours(rms_norm.ADD_NORM_BACKENDS)
    gain = normal(device, HIDDEN)
    count = sets_for(tokens * HIDDEN * 8)
    sets = [(normal(device, tokens, HIDDEN), normal(device, tokens, HIDDEN)) for _ in range(count)]
    x, delta = (t[:SAMPLE].clone() for t in sets[0])
    total = (x.float() + delta.float()).bfloat16().float()
    want = torch.nn.functional.rms_norm(total, (HIDDEN,), gain.float(), EPS)
    shape = f"[{tokens}, {HIDDEN}]"

    def mine(keep: bool, quantise: bool) -> Candidate:
        h, quantised = run(x.clone(), delta, gain, EPS, keep=keep, quantise=quantise)
        error = error_of(quantised if quantise else h, want)
        return Candidate("triton", [lambda s=s: run(*s, gain, EPS, keep=keep, quantise=quantise) for s in sets], error)

    candidates = [mine(True, False)]
    fused = flashinfer_function("fused_add_rmsnorm")
    if fused:
        one, residual = delta.clone(), x.clone()
        fused(one, residual, gain, EPS)
        candidates.append(
            Candidate("flashinfer", [lambda s=s: fused(s[1], s[0], gain, EPS) for s in sets], error_of(one, want), True)
        )
    yield "add_norm", shape, candidates, tokens * HIDDEN * 8
    sets = [(normal(device, tokens, HIDDEN), normal(device, tokens, HIDDEN)) for _ in range(count)]  # fused wrote them

    def eager(x: torch.Tensor, delta: torch.Tensor) -> fp8.Fp8Rows:
        return fp8.reference(torch.nn.functional.rms_norm(x.add_(delta), (HIDDEN,), gain, EPS))

    torch_eager = Candidate(
        "torch eager", [lambda s=s: eager(*s) for s in sets[:1]], error_of(eager(x.clone(), delta), want), True
    )
    quantised_bytes = HIDDEN + HIDDEN // 128 * 4
    yield "add_norm_quantise", shape, [mine(False, True), torch_eager], tokens * (HIDDEN * 6 + quantised_bytes)
    yield "add_norm_keep_quantise", shape, [mine(True, True)], tokens * (HIDDEN * 8 + quantised_bytes)


def norm_cases(tokens: int, device: torch.device):
    vendor = flashinfer_function("rmsnorm")
    gain = normal(device, HIDDEN)
    sets = [normal(device, tokens, HIDDEN) for _ in range(sets_for(tokens * HIDDEN * 4))]
    want = torch.nn.functional.rms_norm(sets[0][:SAMPLE].float(), (HIDDEN,), gain.float(), EPS)
    run, candidates = ours(rms_norm.BACKENDS), []
    for name, function, public in (("triton", run, False), ("flashinfer", vendor, True)):
        if function:
            error = error_of(function(sets[0], gain, EPS), want)
            candidates.append(Candidate(name, [lambda s=s, f=function: f(s, gain, EPS) for s in sets], error, public))
    yield "rms_norm", f"[{tokens}, {HIDDEN}]", candidates, tokens * HIDDEN * 4

    wide = [normal(device, tokens, QKV_A) for _ in range(sets_for(tokens * Q_LORA * 3))]
    gain_a, add_norm = normal(device, Q_LORA), ours(rms_norm.ADD_NORM_BACKENDS)
    want_a = torch.nn.functional.rms_norm(wide[0][:SAMPLE, :Q_LORA].float(), (Q_LORA,), gain_a.float(), EPS)
    call = lambda x: add_norm(x[:, :Q_LORA], None, gain_a, EPS, keep=False, quantise=True)[1]  # noqa: E731
    mine = Candidate("triton", [lambda s=s: call(s) for s in wide], error_of(call(wide[0]), want_a))
    yield "q_a_norm_quantise", f"[{tokens}, {Q_LORA}]", [mine], tokens * (Q_LORA * 3 + Q_LORA // 128 * 4)


def quantise_cases(tokens: int, device: torch.device):
    for width in (HIDDEN, HEADS_VALUE):
        sets = [normal(device, tokens, width) for _ in range(sets_for(tokens * width * 3))]
        candidates = []
        for name, function in (("triton", ours(fp8.QUANTISE_BACKENDS)), ("torch eager", fp8.reference)):
            error = error_of(function(sets[0]), sets[0][:SAMPLE].float())
            calls = [lambda s=s, f=function: f(s) for s in (sets if name == "triton" else sets[:1])]
            candidates.append(Candidate(name, calls, error, name != "triton"))
        yield "quantise", f"[{tokens}, {width}]", candidates, tokens * (width * 3 + width // 128 * 4)


def silu_cases(tokens: int, device: torch.device):
    run, quantise = ours(silu_mul.BACKENDS), ours(silu_mul.QUANTISE_BACKENDS)
    vendor = flashinfer_function("silu_and_mul")
    sets = [normal(device, tokens, 2 * INNER) for _ in range(sets_for(tokens * INNER * 6))]
    want, shape = silu_mul.reference(sets[0][:SAMPLE].float()), f"[{tokens}, 2 x {INNER}]"
    candidates = []
    for name, function, public in (("triton", run, False), ("flashinfer", vendor, True)):
        if function:
            error = error_of(function(sets[0]), want)
            candidates.append(Candidate(name, [lambda s=s, f=function: f(s) for s in sets], error, public))
    yield "silu_mul", shape, candidates, tokens * INNER * 6
    limit = torch.tensor([tokens], dtype=torch.int32, device=device)
    eager = lambda s: fp8.reference(silu_mul._torch(s))  # noqa: E731
    candidates = [
        Candidate("triton", [lambda s=s: quantise(s, limit) for s in sets], error_of(quantise(sets[0], limit), want)),
        Candidate("torch eager", [lambda: eager(sets[0])], error_of(eager(sets[0]), want), True),
    ]
    yield "silu_mul_quantise", shape, candidates, tokens * (INNER * 5 + INNER // 128 * 4)


def gate_cases(tokens: int, device: torch.device):
    bias = 0.05 * normal(device, EXPERTS, dtype=torch.float32)
    sets = [normal(device, tokens, EXPERTS, dtype=torch.float32) for _ in range(sets_for(tokens * EXPERTS * 4))]
    run, vendor = ours(gate.BACKENDS), flashinfer_function("fused_topk_deepseek", "flashinfer.fused_moe")
    want, _ = gate._torch(sets[0][:SAMPLE].clone(), bias, LIMITS)
    candidates = [
        Candidate(
            "triton", [lambda s=s: run(s, bias, LIMITS) for s in sets], error_of(run(sets[0], bias, LIMITS)[0], want)
        )
    ]
    if vendor:
        weights = torch.empty(tokens, TOP_K, device=device)
        ids = torch.empty(tokens, TOP_K, dtype=torch.int32, device=device)
        call = lambda s: vendor(s, bias, LIMITS.n_group, LIMITS.topk_group, TOP_K, 2.5, weights, ids)  # noqa: E731
        call(sets[0])
        error = error_of(weights.sort(-1, descending=True)[0], want.sort(-1, descending=True)[0])
        candidates.append(Candidate("flashinfer", [lambda s=s: call(s) for s in sets], error, True))
    eager = lambda: gate._torch(sets[0].clone(), bias, LIMITS)  # noqa: E731
    candidates.append(Candidate("torch eager", [eager], None, True))
    yield "gate", f"[{tokens}, {EXPERTS}]", candidates, tokens * (EXPERTS * 4 + TOP_K * 8)


def routed(tokens: int, device: torch.device) -> torch.Tensor:
    return torch.rand(tokens, EXPERTS, device=device).topk(TOP_K, -1)[1].int()


def dispatch_cases(tokens: int, device: torch.device):
    """One rank of 32: an eighth of a token's choices, on average a quarter of a row each."""
    plan_of, permute = ours(expert_dispatch.DEVICE_PLAN_BACKENDS), ours(expert_dispatch.PERMUTE_BACKENDS)
    combine, ids = ours(expert_dispatch.COMBINE_BACKENDS), routed(tokens, device)
    capacity = expert_dispatch.capacity_for(ids.numel(), LOCAL, 128)
    shape = f"{tokens} tokens, {LOCAL} of {EXPERTS} experts"
    plan, pairs = plan_of(ids, 0, LOCAL, 128, capacity), ids.numel()
    want = expert_dispatch._torch(ids.long(), EXPERTS, 128)  # sorts by expert: ours are its first rows
    used = int(plan.starts[-1])
    wrong = float(
        (plan.rows != torch.where(ids < LOCAL, want.rows, -1)).sum() + (plan.starts[1:] != want.ends[:LOCAL]).sum()
    )
    candidates = [
        Candidate("triton", [lambda: plan_of(ids, 0, LOCAL, 128, capacity)], wrong),
        Candidate("torch eager", [lambda: expert_dispatch._torch(ids.long(), EXPERTS, 128)], 0.0, True, graph=False),
    ]
    yield "expert_plan", shape, candidates, pairs * 8 + capacity * 4

    sets = [normal(device, tokens, HIDDEN) for _ in range(sets_for(tokens * HIDDEN * 2))]
    quantised = [fp8.reference(s[:4096].contiguous()) if len(s) > 4096 else fp8.reference(s) for s in sets[:4]]
    if tokens > 4096:  # the reference's fp32 copies would not fit: tile what was quantised
        quantised = [ours(fp8.QUANTISE_BACKENDS)(s) for s in sets[:4]]
    real, sources = int(plan.counts.sum()), int((plan.rows >= 0).any(1).sum())
    where = plan.tokens[:used].long().clamp_min(0)
    made = permute(quantised[0], plan)
    theirs = expert_dispatch.reference_permute(fp8.Fp8Rows(*(t.contiguous() for t in quantised[0])), plan)
    same = torch.equal(made.data.view(torch.int8)[:used], theirs.data.view(torch.int8)[:used])
    row_bytes = HIDDEN + HIDDEN // 128 * 4
    candidates = [
        Candidate("triton", [lambda q=q: permute(q, plan) for q in quantised], 0.0 if same else float("inf")),
        Candidate(
            "torch eager", [lambda q=q: (q.data.view(torch.int32)[where], q.scale[where]) for q in quantised], 0.0, True
        ),
    ]
    yield "permute", f"{shape}, {real} rows", candidates, (sources + real) * row_bytes

    results, shared = normal(device, used, HIDDEN), normal(device, tokens, HIDDEN)
    weights = torch.rand(tokens, TOP_K, device=device)
    reference = expert_dispatch.reference_combine(results, weights[:SAMPLE], plan.rows[:SAMPLE], shared[:SAMPLE])
    call = lambda: combine(results, weights, plan.rows, shared)  # noqa: E731
    token_weights = (weights * (plan.rows >= 0)).sum(1)[where, None].bfloat16()
    eager = lambda: shared.index_add(0, where, results * token_weights)  # noqa: E731
    candidates = [
        Candidate("triton", [call], error_of(call(), reference)),
        Candidate("torch eager", [eager], 0.0, True, notes={"error": "not computed: one weight a token"}),
    ]
    yield "combine", f"{shape}, {real} rows", candidates, (real + 2 * tokens) * HIDDEN * 2 + pairs * 8


def checksum_cases(tokens: int, device: torch.device):
    run, eager = ours(block_checksum.BACKENDS), block_checksum._torch
    blocks = torch.randperm(tokens // 64, device=device)
    slots = (blocks[:, None] * 64 + torch.arange(64, device=device)).flatten()
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        size = torch.empty(0, dtype=dtype).element_size()
        pools = [
            torch.randint(-128, 127, (tokens // 64, 64, ROW * size), dtype=torch.int8, device=device).view(dtype)
            for _ in range(sets_for(tokens * ROW * size))
        ]
        value, expected = run(pools[0], slots, 0).item(), eager(pools[0], slots, 0).item()
        candidates = [
            Candidate("triton", [lambda p=p: run(p, slots, 0) for p in pools], float(value != expected)),
            Candidate("torch eager", [lambda p=p: eager(p, slots, 0) for p in pools[:2]], None, True),
        ]
        yield "block_checksum", f"[{tokens}, {ROW}] {str(dtype)[6:]}", candidates, tokens * (ROW * size + 8)


CASES: dict[str, Case] = {
    "add_norm": add_norm_cases,
    "norm": norm_cases,
    "quantise": quantise_cases,
    "silu_mul": silu_cases,
    "gate": gate_cases,
    "dispatch": dispatch_cases,
    "checksum": checksum_cases,
}

if __name__ == "__main__":
    the_device = torch.device("cuda")
    found = measure_ceilings(the_device)
    print(found)
    torch.cuda.empty_cache()
    rows(the_device, found, names=sys.argv[1:])
