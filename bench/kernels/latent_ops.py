"""What moves rows, keys and tokens at DeepSeek-R1 sizes: concat_mla_k, rope_quantize, latent_store, sampling.

All are bound by memory: a limit is each input read once and each output written once at the run's copy rate. "eager" and
"unfused" are chains of torch operations. Errors of e4m3 results are against the same values in fp32, so half a step of
the format (2**-5 of the value) is what rounding costs. Sampling's error is the share of rows that differ from the plain
reference; FlashInfer draws other noise, so there only its speed is of interest (error 0 is not a claim).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.kernels.harness import Candidate, Row, measure_ceilings, relative_error, rows_of, sets_for
from headrace.planning.ceilings import Ceilings
from kernels.attention import concat_mla_k, latent_store, rope, rope_quantize
from kernels.rows import sampling

HEADS, NOPE, VALUE, LATENT, ROPE, BLOCK, VOCAB = 128, 128, 128, 512, 64, 64, 129_280
ROW = LATENT + ROPE
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
DECODE, PREFILL = (64, 256, 512), 16_384
EPS = 1e-6


def rows(device: torch.device, ceilings: Ceilings, progress: Callable[[str], None] = print) -> list[Row]:
    vendor = _vendor(progress)
    made = []
    for tokens in (2048, PREFILL):
        made += _concat_rows(device, ceilings, progress, vendor, tokens)
    for tokens in (256, 4096):
        made += _quantise_rows(device, ceilings, progress, vendor, tokens)
    for tokens in (256, PREFILL):
        made += _write_rows(device, ceilings, progress, vendor, tokens)
    made += _prefill_rows(device, ceilings, progress, PREFILL)
    for tokens in DECODE:
        made += _decode_rows(device, ceilings, progress, tokens)
    for batch in (64, 256):
        for case in CASES:
            made += _sampling_rows(device, ceilings, progress, vendor, batch, case)
    return made


def _vendor(progress: Callable[[str], None]) -> Any:
    """FlashInfer, or None."""
    try:
        import flashinfer
        import flashinfer.concat_ops
        import flashinfer.rope
        import flashinfer.sampling

        return flashinfer
    except ImportError as error:
        progress(f"flashinfer is left out: {error}")
        return None


def _tried(made: list[Candidate], progress: Callable[[str], None], make: Callable[[], Candidate]) -> None:
    """A public kernel that does not run here is named and left out."""
    try:
        made.append(make())
    except Exception as error:
        progress(f"left out: {type(error).__name__}: {str(error)[:200]}")


def _angles(tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.rand(tokens, ROPE // 2, device=device) * 6.28
    return angle.cos(), angle.sin()


def _draw(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=BF16)


# --- concat ---


def _concat_rows(device, ceilings, progress, vendor, tokens: int) -> list[Row]:
    num_bytes = tokens * 2 * (HEADS * NOPE + ROPE + HEADS * (NOPE + ROPE))
    sets = [
        (_draw(tokens, HEADS, NOPE + VALUE, device=device)[..., :NOPE], _draw(tokens, ROW, device=device)[:, LATENT:])
        for _ in range(sets_for(num_bytes))
    ]
    want = concat_mla_k.reference(*sets[0])

    def ours() -> Candidate:
        calls = [lambda one=one: concat_mla_k._triton(*one) for one in sets]
        return Candidate("triton", calls, relative_error(calls[0](), want))

    def eager() -> Candidate:
        return Candidate("eager", [lambda one=one: concat_mla_k.reference(*one) for one in sets], None, public=True)

    def flashinfer() -> Candidate:
        out = torch.empty_like(want)
        calls = [lambda one=one: vendor.concat_ops.concat_mla_k(out, one[0], one[1][:, None]) for one in sets]
        calls[0]()
        return Candidate("flashinfer", calls, relative_error(out, want), public=True)

    candidates = [ours(), eager()]
    if vendor:
        _tried(candidates, progress, flashinfer)
    limit = ceilings.limit_us(num_bytes)
    return rows_of("concat_mla_k", f"tokens {tokens}", candidates, limit, progress=progress)


# --- rope + quantise (+ write) ---


class _Queries:
    """One input set: q's absorbed part and its rope part apart, rows, angles, a pool and where its rows go."""

    def __init__(self, tokens: int, device: torch.device):
        self.tokens = tokens
        self.absorbed = _draw(tokens, HEADS, ROW, device=device)
        self.latent, self.rope = self.absorbed[..., :LATENT], self.absorbed[..., LATENT:]
        self.rows = _draw(tokens, ROW, device=device)
        self.cos, self.sin = _angles(tokens, device)
        self.cache = torch.cat((self.cos, self.sin), 1)
        blocks = -(-tokens // BLOCK) + 8
        self.pool = torch.zeros(blocks, BLOCK, ROW, device=device).to(E4M3)
        self.blocks = torch.randperm(blocks, device=device)[: -(-tokens // BLOCK)]
        at = torch.arange(tokens, device=device)
        self.slots = self.blocks[at // BLOCK] * BLOCK + at % BLOCK
        self.out = torch.empty(tokens, HEADS, ROW, device=device).to(E4M3)

    def wide(self) -> tuple[torch.Tensor, torch.Tensor]:
        """q and rows rotated, fp32."""
        q, rows = self.absorbed.float(), self.rows.float()
        rope.reference(q[..., LATENT:], self.cos, self.sin)
        rope.reference(rows[:, None, LATENT:], self.cos, self.sin)
        return q, rows


def _unfused(one: _Queries) -> tuple[torch.Tensor, torch.Tensor]:
    q_rope, k_rope = one.rope.clone(), one.rows[:, None, LATENT:].clone()
    rope.reference(q_rope, one.cos, one.sin)
    rope.reference(k_rope, one.cos, one.sin)
    q = torch.cat((one.latent, q_rope), -1).to(E4M3)
    return q, torch.cat((one.rows[:, :LATENT], k_rope[:, 0]), -1).to(E4M3)


def _unfused_write(one: _Queries) -> None:
    q, made = _unfused(one)
    one.out.copy_(q)
    one.pool.view(torch.uint8).view(-1, ROW).index_copy_(0, one.slots, made.view(torch.uint8))


def _stored(one: _Queries) -> torch.Tensor:
    return one.pool.view(torch.uint8).view(-1, ROW)[one.slots].view(E4M3)


def _two_errors(q: torch.Tensor, made: torch.Tensor, want: tuple[torch.Tensor, torch.Tensor]) -> float:
    return max(relative_error(q.float(), want[0]), relative_error(made.float(), want[1]))


def _quantise_rows(device, ceilings, progress, vendor, tokens: int) -> list[Row]:
    num_bytes = tokens * ((HEADS + 1) * ROW * 3 + ROPE * 4)
    sets = [_Queries(tokens, device) for _ in range(sets_for(num_bytes))]
    want = sets[0].wide()

    def of(name: str, run: Callable[[_Queries], Any], public: bool) -> Candidate:
        error = _two_errors(*run(sets[0]), want)
        return Candidate(name, [lambda one=one: run(one) for one in sets], error, public=public)

    candidates = [
        of("triton", lambda one: rope_quantize._triton(one.absorbed, one.rows, one.cos, one.sin, E4M3), False),
        of("unfused", _unfused, True),
    ]
    if vendor:
        position = torch.arange(tokens, device=device, dtype=torch.int32)
        rows8 = torch.empty(tokens, ROW, device=device).to(E4M3)

        def theirs(one: _Queries) -> tuple[torch.Tensor, torch.Tensor]:
            vendor.rope.mla_rope_quantize_fp8(
                one.rope, one.rows[:, LATENT:], one.latent, one.rows[:, :LATENT], one.cache, position, is_neox=False,
                quantize_dtype=E4M3, q_rope_out=one.out[..., LATENT:], k_rope_out=rows8[:, LATENT:],
                q_nope_out=one.out[..., :LATENT], k_nope_out=rows8[:, :LATENT],
            )  # fmt: skip
            return one.out, rows8

        _tried(candidates, progress, lambda: of("flashinfer", theirs, True))
    limit = ceilings.limit_us(num_bytes)
    return rows_of("rope_quantize", f"tokens {tokens}", candidates, limit, progress=progress)


def _write_rows(device, ceilings, progress, vendor, tokens: int) -> list[Row]:
    num_bytes = tokens * ((HEADS + 1) * ROW * 3 + ROPE * 4 + 8)
    sets = [_Queries(tokens, device) for _ in range(sets_for(num_bytes))]
    want, gain = sets[0].wide(), torch.ones(LATENT, device=device, dtype=BF16)

    def of(name: str, run: Callable[[_Queries], Any], public: bool) -> Candidate:
        sets[0].out.zero_(), sets[0].pool.zero_()
        run(sets[0])
        error = _two_errors(sets[0].out, _stored(sets[0]), want)
        return Candidate(name, [lambda one=one: run(one) for one in sets], error, public=public)

    def ours(one: _Queries, norm: torch.Tensor | None = None) -> None:
        rope_quantize._store_triton(
            one.latent, one.rope, one.rows, norm, EPS, one.cos, one.sin, one.pool, one.slots, one.out
        )

    candidates = [of("triton", ours, False), of("unfused", _unfused_write, True)]
    with_norm = of("triton+norm", lambda one: ours(one, gain), False)
    with_norm.error = relative_error(sets[0].out.float(), want[0])  # of q; its row is another one
    candidates.append(with_norm)
    if vendor:
        position = torch.arange(tokens, device=device, dtype=torch.int32)
        starts = torch.tensor([0, len(sets[0].blocks)], device=device, dtype=torch.int32)
        blocks = [one.blocks.int() for one in sets]
        of_set = {id(one): block for one, block in zip(sets, blocks, strict=True)}

        zero = torch.zeros_like(position)

        def theirs(one: _Queries) -> None:
            vendor.rope.rope_quantize_fp8_append_paged_kv_cache(
                one.rope, one.rows[:, LATENT:], one.latent, one.rows[:, :LATENT], None, one.cache, position,
                (one.pool[..., :LATENT], one.pool[..., LATENT:]), of_set[id(one)], starts, zero, position,
                is_neox=False, quantize_dtype=E4M3, page_size=BLOCK, q_rope_out=one.out[..., LATENT:],
                q_nope_out=one.out[..., :LATENT],
            )  # fmt: skip

        _tried(candidates, progress, lambda: of("flashinfer", theirs, True))
    limit = ceilings.limit_us(num_bytes)
    return rows_of("rope_quantize_store", f"tokens {tokens}", candidates, limit, progress=progress)


# --- latent_store ---


class _Step:
    """One input set of latent_store; prefill finishes its q and rows in place, call after call."""

    def __init__(self, tokens: int, device: torch.device):
        self.q = _draw(tokens, HEADS, NOPE + ROPE, device=device)
        self.rows = _draw(tokens, ROW, device=device)
        self.gain = torch.rand(LATENT, device=device).add(0.5).to(BF16)
        self.cos, self.sin = _angles(tokens, device)
        self.pool = torch.zeros(-(-tokens // BLOCK) + 1, BLOCK, ROW, device=device, dtype=BF16)
        at, blocks = torch.arange(tokens, device=device), torch.randperm(-(-tokens // BLOCK), device=device)
        self.slots = blocks[at // BLOCK] * BLOCK + at % BLOCK  # a prompt fills whole blocks
        if tokens in DECODE:
            self.slots = torch.randperm(len(self.pool) * BLOCK, device=device)[:tokens]
        self.absorbed = torch.zeros(tokens, HEADS, ROW, device=device, dtype=BF16)

    def finished(self) -> tuple[torch.Tensor, torch.Tensor]:
        """q's rope part and the rows, fp32."""
        part, made = self.q[..., NOPE:].float(), self.rows.float()
        rope.reference(part, self.cos, self.sin)
        rope.reference(made[:, None, LATENT:], self.cos, self.sin)
        latent = made[:, :LATENT]
        made[:, :LATENT] = latent * torch.rsqrt(latent.square().mean(-1, keepdim=True) + EPS) * self.gain.float()
        return part, made

    def stored(self) -> torch.Tensor:
        return self.pool.view(-1, ROW)[self.slots]


def _eager_finish(one: _Step, rows: torch.Tensor) -> None:
    rows[:, :LATENT] = torch.nn.functional.rms_norm(rows[:, :LATENT], (LATENT,), one.gain, EPS)
    rope.reference(rows[:, None, LATENT:], one.cos, one.sin)
    one.pool.view(-1, ROW).index_copy_(0, one.slots, rows)


def _prefill_rows(device, ceilings, progress, tokens: int) -> list[Row]:
    num_bytes = tokens * (4 * HEADS * ROPE + 3 * 2 * ROW + ROPE * 4 + 8)

    def ours(one: _Step) -> None:
        plan = latent_store.Plan(one.slots, None, one.slots)
        latent_store._triton(one.q, one.rows, one.gain, EPS, one.cos, one.sin, one.pool, plan)

    def eager(one: _Step) -> None:
        rope.reference(one.q[..., NOPE:], one.cos, one.sin)
        _eager_finish(one, one.rows)

    candidates = []
    for name, run, public in (("triton", ours, False), ("eager", eager, True)):
        sets = [_Step(tokens, device) for _ in range(sets_for(num_bytes))]
        want = sets[0].finished()
        run(sets[0])
        error = max(relative_error(sets[0].q[..., NOPE:], want[0]), relative_error(sets[0].stored(), want[1]))
        candidates.append(Candidate(name, [lambda run=run, one=one: run(one) for one in sets], error, public=public))
    limit = ceilings.limit_us(num_bytes)
    return rows_of("latent_store prefill", f"tokens {tokens}", candidates, limit, progress=progress)


def _decode_rows(device, ceilings, progress, tokens: int) -> list[Row]:
    num_bytes = tokens * (4 * HEADS * ROPE + 2 * 2 * ROW + ROPE * 4 + 8)
    sets = [_Step(tokens, device) for _ in range(sets_for(num_bytes))]
    want = sets[0].finished()

    def ours(one: _Step) -> None:
        latent_store._decode_triton(one.q, one.rows, one.gain, EPS, one.cos, one.sin, one.pool, one.slots, one.absorbed)

    def eager(one: _Step) -> None:
        part = one.q[..., NOPE:].clone()
        rope.reference(part, one.cos, one.sin)
        one.absorbed[..., LATENT:] = part
        _eager_finish(one, one.rows.clone())

    candidates = []
    for name, run, public in (("triton", ours, False), ("eager", eager, True)):
        sets[0].absorbed.zero_(), sets[0].pool.zero_()
        run(sets[0])
        error = max(relative_error(sets[0].absorbed[..., LATENT:], want[0]), relative_error(sets[0].stored(), want[1]))
        candidates.append(Candidate(name, [lambda run=run, one=one: run(one) for one in sets], error, public=public))
    limit = ceilings.limit_us(num_bytes)
    return rows_of("latent_store decode", f"tokens {tokens}", candidates, limit, progress=progress)


# --- sampling ---

# name -> (temperature, top_k, top_p, min_p, spread of the logits, whose likeliest stand out)
CASES = {
    "greedy": (0.0, 0, 1.0, 0.0, 3.0),
    "noise": (1.0, 0, 1.0, 0.0, 3.0),
    "top-p 0.95": (0.6, 0, 0.95, 0.0, 3.0),
    "top-k 50, top-p 0.9": (1.0, 50, 0.9, 0.0, 3.0),
    "top-p 0.95, flat": (1.0, 0, 0.95, 0.0, 0.5),
}


def _sampling_rows(device, ceilings, progress, vendor, batch: int, case: str) -> list[Row]:
    temperature, top_k, top_p, min_p, spread = CASES[case]
    num_bytes = batch * VOCAB * 4
    sets = [torch.randn(batch, VOCAB, device=device) * spread for _ in range(sets_for(num_bytes, most=4))]

    def column(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((batch,), value, dtype=dtype, device=device)

    keys = torch.randint(-(1 << 62), 1 << 62, (batch,), device=device)
    columns = keys, column(temperature), column(top_k, torch.int32), column(top_p), column(min_p)
    few = [one[:16] for one in (sets[0], *columns)]
    error = float((sampling._triton(*few) != sampling.reference(*few)).float().mean())
    candidates = [Candidate("triton", [lambda one=one: sampling._triton(one, *columns) for one in sets], error)]
    public = _public_sampling(vendor, case, columns)
    if public is not None:
        name, run = public
        calls = [lambda one=one: run(one) for one in sets]
        candidates.append(Candidate(name, calls, None, public=True, graph=name == "torch", notes={"other noise": True}))
    limit = ceilings.limit_us(num_bytes)
    return rows_of("sampling", f"batch {batch}, {case}", candidates, limit, progress=progress)


def _public_sampling(vendor, case: str, columns) -> tuple[str, Callable[[torch.Tensor], Any]] | None:
    _, temperature, top_k, top_p, _ = columns
    if case == "greedy":
        return "torch", lambda logits: logits.argmax(-1)
    if vendor is None:
        return None
    module = vendor.sampling
    if case == "noise":
        return "flashinfer", lambda logits: module.sampling_from_logits(logits / temperature[:, None])
    if case.startswith("top-k"):
        return "flashinfer", lambda logits: module.top_k_top_p_sampling_from_logits(logits, top_k, top_p)
    return "flashinfer", lambda logits: module.top_p_sampling_from_probs(module.softmax(logits, temperature), top_p)


if __name__ == "__main__":
    torch.manual_seed(0)
    main_device = torch.device("cuda")
    measured = measure_ceilings(main_device)
    print(measured)
    rows(main_device, measured)
