"""GPU back ends of mla_decode and mla_prefill against one query at a time; Triton's also through its interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.attention import mla_decode, mla_prefill
from kernels.attention.mla_decode_triton import TritonDecode, Tuning
from kernels.attention.mla_prefill_triton import TritonVarlen, tiles_of
from kernels.attention.mla_prefill_triton import Tuning as VarlenTuning
from kernels.select import BackendUnavailable

SCALE = 0.21
E4M3 = torch.float8_e4m3fn
BF16_BOUND = 2e-2  # bf16 weights and outputs of a few units: two steps of 2 ** -8 near 2
FP32_BOUND = 1e-5  # fp32 scores of up to 160 products, on either side


class Case:
    """Sequences of the given lengths over shuffled blocks; every row nobody may read is NaN."""

    def __init__(self, lens, *, heads, latent, rope, block_size, dtype, device, q_dtype=None, seed=0):
        self.lens, self.latent, self.block_size = list(lens), latent, block_size
        self.heads, self.row_dim, self.dtype, self.device = heads, latent + rope, dtype, device
        self.q_dtype = q_dtype or (torch.float32 if dtype == torch.float32 else torch.bfloat16)
        draw = torch.Generator().manual_seed(seed)
        needed = [-(-length // block_size) for length in lens]
        order = torch.randperm(sum(needed) + 3, generator=draw)
        pool = torch.full((len(order), block_size, self.row_dim), float("nan"))
        self.tables = torch.zeros(len(lens), max(needed) + 1, dtype=torch.int32)
        for seq, (count, length) in enumerate(zip(needed, lens, strict=True)):
            blocks, order = order[:count], order[count:]
            self.tables[seq, :count] = blocks
            rows = torch.full((count * block_size, self.row_dim), float("nan"))
            rows[:length] = torch.randn(length, self.row_dim, generator=draw)
            pool[blocks] = rows.view(count, block_size, -1)
        self.q = torch.randn(len(lens), heads, self.row_dim, generator=draw).to(self.q_dtype).to(device)
        self.pool = pool.to(dtype).to(device)
        self.tables = self.tables.to(device)
        self.context_lens = torch.tensor(self.lens, dtype=torch.int32, device=device)

    def sizes(self, scale=SCALE):
        return dict(
            heads=self.heads, row_dim=self.row_dim, latent_dim=self.latent, block_size=self.block_size,
            q_dtype=self.q_dtype, pool_dtype=self.dtype, max_batch=len(self.lens), max_blocks=self.tables.shape[1],
            scale=scale,
        )  # fmt: skip

    def run(self, op):
        plan = op.plan(self.tables, self.context_lens, np.asarray(self.lens, dtype=np.int32))
        return op.run(self.q, self.pool, plan)

    def reference(self, scale=SCALE):
        ones = [1] * len(self.lens)
        q, pool = self.q.float().cpu(), self.pool.float().cpu()
        return mla_decode.reference(q, pool, self.tables.cpu(), ones, self.lens, scale, self.latent)

    def check(self, op, bound, scale=SCALE):
        got, want = self.run(op).float().cpu(), self.reference(scale)
        assert torch.isfinite(got).all(), "read a row that is not its own"
        worst = (got - want).abs().max()
        assert worst < bound, f"{worst} at {(got - want).abs().argmax()}"


def triton_decode(case, tuning=None):
    sizes = {name: value for name, value in case.sizes().items() if name != "max_blocks"}
    return TritonDecode(**sizes, device=case.device, tuning=tuning)


LENS = [[1], [3, 4, 5], [1, 40, 17, 64, 100], [200], [127, 128, 129, 2]]
SMALL = dict(heads=5, latent=16, rope=8, block_size=4)


@pytest.mark.parametrize("lens", LENS)
def test_triton_decode_equals_one_query_at_a_time(triton_device, lens):
    case = Case(lens, **SMALL, dtype=torch.float32, device=triton_device)
    case.check(triton_decode(case), FP32_BOUND)


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
@pytest.mark.parametrize("lens", LENS[2:])
def test_triton_decode_reads_narrow_rows(triton_device, lens, dtype):
    case = Case(lens, **SMALL, dtype=dtype, device=triton_device)
    case.check(triton_decode(case), BF16_BOUND)


@pytest.mark.parametrize("workers", [1, 2, 3, 7, 40])
def test_however_the_work_is_cut_the_parts_merge(triton_device, workers):
    case = Case(
        [70, 1, 300, 16, 33], heads=20, latent=24, rope=8, block_size=16, dtype=torch.float32, device=triton_device
    )
    op = triton_decode(case, Tuning(16, 16, 4, 1, workers))
    op.parts.fill_(float("nan")), op.part_lse.fill_(float("nan"))
    case.check(op, FP32_BOUND)


@pytest.mark.parametrize(
    "heads, latent, rope, block_size", [(1, 16, 8, 1), (8, 128, 32, 16), (8, 128, 32, 64), (17, 40, 24, 3)]
)
def test_triton_decode_takes_odd_sizes(triton_device, heads, latent, rope, block_size):
    sizes = dict(heads=heads, latent=latent, rope=rope, block_size=block_size)
    case = Case([7, 64, 65], **sizes, dtype=torch.float32, device=triton_device)
    case.check(triton_decode(case), FP32_BOUND)


def test_triton_decode_large_scores_do_not_overflow(triton_device):
    case = Case([40, 3], **SMALL, dtype=torch.float32, device=triton_device)
    case.q *= 300
    case.check(triton_decode(case), 1e-4)


def test_sizes_that_do_not_fit_are_named():
    sizes = dict(heads=8, row_dim=160, latent_dim=128, block_size=16, q_dtype=torch.bfloat16, pool_dtype=torch.bfloat16)
    for backend in mla_decode.DEVICE_BACKENDS:
        assert (backend.run.misfit(**sizes) is None) == (backend.name in ("triton", "reference"))
    with pytest.raises(BackendUnavailable, match="needs a CUDA device"):
        mla_decode.open_device(torch.device("cpu"), "triton", **sizes, max_batch=1, max_blocks=1, scale=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, E4M3])
def test_the_reference_op_runs_on_any_device_and_reads_no_row_past_a_context(dtype):
    case = Case([70, 1, 17], **SMALL, dtype=dtype, device=torch.device("cpu"))
    op = mla_decode.open_device(case.device, graph_safe=True, **case.sizes())
    case.check(op, FP32_BOUND if dtype == torch.float32 else BF16_BOUND)


@pytest.mark.parametrize("name", ["torch", "reference"])
def test_varlen_prefill_on_a_cpu(name):
    op = mla_prefill.open_varlen(torch.device("cpu"), name, qk_dim=24, value_dim=16, dtype=torch.float32)
    check_varlen(op, PROMPTS[1], (24, 16), torch.float32, torch.device("cpu"), FP32_BOUND)


R1 = dict(heads=128, latent=512, rope=64, block_size=64)
PAIRS = [
    ("flash_mla", torch.bfloat16, torch.bfloat16),
    ("flash_mla", E4M3, E4M3),
    ("gluon", torch.bfloat16, torch.bfloat16),
    ("flashinfer", torch.bfloat16, torch.bfloat16),
    ("flashinfer", torch.bfloat16, E4M3),
    ("triton", torch.bfloat16, torch.bfloat16),
    ("triton", torch.bfloat16, E4M3),
    ("triton", E4M3, E4M3),
]
RAGGED = [1, 700, 64, 65, 2000, 3, 129, 63, 5, 1000]


def opened(case, name, scale):
    backend = next(backend for backend in mla_decode.DEVICE_BACKENDS if backend.name == name)
    if backend.why_not(case.device):
        pytest.skip(f"{name} {backend.why_not(case.device)}")
    return backend.run(**case.sizes(scale), device=case.device)


@pytest.mark.parametrize("name, q_dtype, pool_dtype", PAIRS)
def test_every_device_decode_equals_the_reference_at_full_width(gpu, name, q_dtype, pool_dtype):
    scale = 0.1352  # 192 ** -0.5 times YaRN's mscale squared for R1: no vendor's default
    case = Case(RAGGED, **R1, dtype=pool_dtype, q_dtype=q_dtype, device=gpu)
    bound = 0.15 if q_dtype == E4M3 and name == "flash_mla" else 3e-2  # e4m3 weights have 3 bits
    case.check(opened(case, name, scale), bound, scale)


@pytest.mark.parametrize("name, q_dtype, pool_dtype", PAIRS)
def test_a_captured_decode_follows_new_lengths_and_tables(gpu, name, q_dtype, pool_dtype):
    case = Case(RAGGED, **R1, dtype=pool_dtype, q_dtype=q_dtype, device=gpu)
    op = opened(case, name, SCALE)
    lens = case.context_lens

    def host_plan():
        return op.plan(case.tables, lens, np.asarray(case.lens, dtype=np.int32))

    def step():
        return op.run(case.q, case.pool, op.plan(case.tables, lens, None) if op.graph_safe else first)

    first = host_plan()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    order = torch.randperm(len(RAGGED), generator=torch.Generator().manual_seed(3)).tolist()
    case.lens = [max(1, RAGGED[i] - 1) for i in order]
    case.tables.copy_(case.tables[order].clone())
    lens.copy_(torch.tensor(case.lens, dtype=torch.int32))
    if not op.graph_safe:
        host_plan()
    out.fill_(float("nan"))
    graph.replay()
    bound = 0.2 if q_dtype == E4M3 and name == "flash_mla" else 3e-2
    assert (out.float().cpu() - case.reference()).abs().max() < bound


def prompt(query_lens, context_lens, heads, qk_dim, value_dim, dtype, device):
    """q, and k and v as slices of wider rows, as the model has them."""
    draw = torch.Generator().manual_seed(1)
    q = torch.randn(sum(query_lens), heads, qk_dim, generator=draw)
    k = torch.randn(sum(context_lens), heads, qk_dim + 8, generator=draw)
    v = torch.randn(sum(context_lens), heads, value_dim + 8, generator=draw)
    q, k, v = (part.to(dtype).to(device) for part in (q, k, v))
    return q, k[..., :qk_dim], v[..., 8:]


def check_varlen(op, lens, widths, dtype, device, bound, heads=2):
    q, k, v = prompt(*lens, heads, *widths, dtype, device)
    plan = op.plan(*lens, heads, *widths, SCALE, device, dtype)
    got = op.run(q, k, v, plan).float().cpu()
    want = mla_prefill.reference(q.float().cpu(), k.float().cpu(), v.float().cpu(), *lens, SCALE)
    assert torch.isfinite(got).all()
    assert (got - want).abs().max() < bound


PROMPTS = [([5], [5]), ([5, 1, 70], [5, 9, 200]), ([1, 33, 64, 4], [100, 33, 65, 68])]


@pytest.mark.parametrize("lens", PROMPTS)
@pytest.mark.parametrize("widths", [(24, 16), (24, 20), (64, 64)])
def test_triton_prefill_equals_one_query_at_a_time(triton_device, lens, widths):
    check_varlen(TritonVarlen(), lens, widths, torch.float32, triton_device, FP32_BOUND)


def test_triton_prefill_of_bf16(triton_device):
    check_varlen(TritonVarlen(VarlenTuning(32, 16, 4, 2)), PROMPTS[1], (48, 32), torch.bfloat16, triton_device, 3e-2)


@pytest.mark.parametrize("name", ["flashinfer", "triton", "torch"])
@pytest.mark.parametrize("lens", [([300], [300]), ([130, 1, 200, 64], [130, 190, 333, 64]), ([7], [260])])
def test_every_varlen_prefill_equals_the_reference_at_full_width(gpu, name, lens):
    backend = next(backend for backend in mla_prefill.VARLEN_BACKENDS if backend.name == name)
    if backend.why_not(gpu):
        pytest.skip(f"{name} {backend.why_not(gpu)}")
    check_varlen(backend.run, lens, (192, 128), torch.bfloat16, gpu, 4e-2)


@pytest.mark.parametrize("name", ["flashinfer", "triton", "torch"])
def test_two_plans_of_a_step_live_side_by_side(gpu, name):
    op = next(backend for backend in mla_prefill.VARLEN_BACKENDS if backend.name == name)
    if op.why_not(gpu):
        pytest.skip(f"{name} {op.why_not(gpu)}")
    lens = ([130, 40], [130, 70]), ([1, 1], [130, 70])
    plans = [op.run.plan(*each, 2, 192, 128, SCALE, gpu) for each in lens]
    for each, plan in zip(lens, plans, strict=True):
        q, k, v = prompt(*each, 2, 192, 128, torch.bfloat16, gpu)
        want = mla_prefill.reference(q.float().cpu(), k.float().cpu(), v.float().cpu(), *each, SCALE)
        assert (op.run.run(q, k, v, plan).float().cpu() - want).abs().max() < 4e-2


def test_tiles_cover_every_query_once_and_the_longest_come_first():
    query_lens, context_lens = [70, 1, 130], [80, 5, 130]
    tiles = tiles_of(query_lens, context_lens, 64)
    queries = sorted(token for first, count, *_ in tiles.tolist() for token in range(first, first + count))
    assert queries == list(range(201))
    assert tiles[:, 4].tolist() == sorted(tiles[:, 4], reverse=True)
    by_first = {int(first): rest for first, *rest in tiles.tolist()}
    assert by_first[0] == [64, 0, 11, 74] and by_first[64] == [6, 0, 75, 80]
    assert by_first[70] == [1, 80, 5, 5] and by_first[71 + 128] == [2, 85, 129, 130]
