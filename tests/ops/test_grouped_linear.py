"""Grouped FP8 products: each back end against fp32, with empty experts, ragged counts and rows nobody may read."""

from __future__ import annotations

import pytest
import torch

from kernels.formats.fp8 import Fp8Rows, Fp8Weight, quantise_weight
from kernels.formats.fp8 import reference as quantise
from kernels.linear import grouped_linear as grouped
from kernels.select import choose

TOLERANCE = 2**-7  # of the largest value: one rounding to bf16, and fp32 sums in another order

STARTS = ([0, 16, 16, 64], [0, 0, 0, 0], [0, 48, 64, 80], [0, 3, 20, 33])
SIZES = ((200, 256), (128, 384), (72, 144))


def made(capacity: int, experts: int, n: int, k: int, device: torch.device, seed: int = 0) -> tuple[Fp8Rows, Fp8Weight]:
    """Random operands whose scales differ by orders of magnitude between blocks, so that a wrong scale shows."""
    torch.manual_seed(seed)
    steps = -(-k // 128)
    x = torch.randn(capacity, steps * 128, device=device)
    x *= torch.logspace(-2, 1, steps, device=device).repeat_interleave(128)
    x *= torch.linspace(0.25, 4, capacity, device=device)[:, None]
    rows = quantise(x.bfloat16())
    w = torch.randn(experts, n, k, device=device)
    w *= torch.linspace(0.5, 3, -(-n // 128), device=device).repeat_interleave(128)[:n, None]
    weight = quantise_weight(w * torch.linspace(1, 2, experts, device=device)[:, None, None])
    return Fp8Rows(rows.data[:, :k].contiguous(), rows.scale), weight


def assert_close(out: torch.Tensor, want: torch.Tensor) -> None:
    assert out.dtype == torch.bfloat16
    if not want.numel():
        assert out.shape == want.shape
        return
    difference = (out.float() - want.float()).abs()
    bound = TOLERANCE * want.float().abs().max().clamp_min(1e-6)
    worst = int(difference.nan_to_num(float("inf")).argmax())
    assert bool((difference <= bound).all()), f"worst at {worst}: {difference.flatten()[worst]} above {bound}"


def poisoned(rows: Fp8Rows, first: int) -> Fp8Rows:
    """NaN in all rows from `first` on."""
    data = rows.data.clone()
    data.view(torch.uint8)[first:] = 0x7F
    return rows._replace(data=data)


@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize("n,k", SIZES)
def test_triton_contiguous_equals_one_expert_after_another(triton_device, starts, n, k):
    rows, weight = made(96, 3, n, k, triton_device)
    used = starts[-1]
    starts = torch.tensor(starts, dtype=torch.int32, device=triton_device)
    out = grouped.launch_triton(poisoned(rows, used), weight, starts, grouped.CONTIGUOUS_MODE)
    assert_close(out[:used], grouped.reference(rows, weight, starts)[:used])


@pytest.mark.parametrize("row_tile,swap", [(16, True), (64, False)])
def test_triton_tiles_of_any_shape_agree(triton_device, row_tile, swap):
    rows, weight = made(80, 2, 136, 256, triton_device)
    starts = torch.tensor([0, 70, 80], dtype=torch.int32, device=triton_device)
    out = grouped.launch_triton(rows, weight, starts, grouped.CONTIGUOUS_MODE, row_tile=row_tile, swap=swap)
    assert_close(out, grouped.reference(rows, weight, starts))


def masked(rows: Fp8Rows, experts: int) -> Fp8Rows:
    data = rows.data.view(experts, -1, rows.data.shape[1])
    scale = rows.scale.view(experts, -1, rows.scale.shape[1])  # strides (m, 1, all rows): still row next to row
    return Fp8Rows(data, scale.mT.contiguous().mT)


@pytest.mark.parametrize("counts", [[5, 0, 24], [24, 24, 24], [0, 0, 0]])
def test_triton_masked_computes_the_first_rows_of_each_expert(triton_device, counts):
    rows, weight = made(72, 3, 136, 256, triton_device)
    rows = masked(rows, 3)
    counts_there = torch.tensor(counts, dtype=torch.int32, device=triton_device)
    out = grouped.launch_triton(rows, weight, counts_there, grouped.MASKED_MODE)
    want = grouped.reference_masked(rows, weight, counts_there)
    for expert, count in enumerate(counts):
        assert_close(out[expert, :count], want[expert, :count])


def test_both_references_agree():
    rows, weight = made(48, 2, 136, 256, torch.device("cpu"))
    starts, counts = torch.tensor([0, 24, 48]), torch.tensor([24, 24])
    both = masked(rows, 2)
    assert torch.equal(
        grouped.reference(rows, weight, starts).view(2, 24, -1), grouped.reference_masked(both, weight, counts)
    )


def test_operands_that_do_not_fit_are_refused():
    rows, weight = made(16, 2, 136, 256, torch.device("cpu"))
    with pytest.raises(ValueError, match="neighbour"):
        grouped.Layout(rows._replace(scale=rows.scale.contiguous()), weight, grouped.CONTIGUOUS_MODE)
    with pytest.raises(ValueError, match="weight of k"):
        grouped.Layout(Fp8Rows(rows.data[:, :128].contiguous(), rows.scale), weight, grouped.CONTIGUOUS_MODE)
    with pytest.raises(ValueError, match="scales"):
        grouped.Layout(rows, weight._replace(scale=weight.scale[:, :1].contiguous()), grouped.CONTIGUOUS_MODE)


def test_a_cpu_gets_the_reference():
    assert choose(grouped.CONTIGUOUS_BACKENDS, torch.device("cpu")).name == "reference"
    assert choose(grouped.MASKED_BACKENDS, torch.device("cpu")).name == "reference"


@pytest.fixture(scope="session")
def hopper(gpu):
    from kernels.linear import fp8_hopper

    reason = fp8_hopper.why_not(gpu)
    if reason:
        pytest.skip(reason)
    return gpu


CUDA_CASES = [
    ([0, 300, 300, 1100, 1111], 200, 256),
    ([0, 0, 0, 0, 0], 128, 128),
    ([0, 64, 1000, 1001, 1199], 1096, 144),
    ([0, 1, 17, 64, 120], 384, 1408),
    ([0, 250, 570, 700, 1200], 640, 1024),
]


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("slabs,columns", [(4, 128), (3, 128), (1, 128), (2, 64)])
@pytest.mark.parametrize("starts,n,k", CUDA_CASES)
def test_cuda_contiguous_equals_fp32(hopper, cluster, slabs, columns, starts, n, k):
    rows, weight = made(1200, 4, n, k, hopper)
    used = starts[-1]
    starts = torch.tensor(starts, dtype=torch.int32, device=hopper)
    mode, options = grouped.CONTIGUOUS_MODE, {"cluster": cluster, "slabs": slabs, "columns": columns}
    untouched = torch.full((1200, n), 7.0, dtype=torch.bfloat16, device=hopper)
    out = grouped.launch_cuda(poisoned(rows, used), weight, starts, mode, untouched, **options)
    assert_close(out[:used], grouped.reference(rows, weight, starts)[:used])
    assert bool((out[used:] == 7.0).all())


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("counts", [[5, 0, 640, 16], [640, 64, 65, 128], [0, 0, 0, 0], [1, 257, 256, 255]])
@pytest.mark.parametrize("n,k", [(200, 256), (1096, 1408)])
def test_cuda_masked_equals_fp32(hopper, cluster, counts, n, k):
    rows, weight = made(4 * 640, 4, n, k, hopper)
    rows = masked(rows, 4)
    counts_there = torch.tensor(counts, dtype=torch.int32, device=hopper)
    out = torch.full((4, 640, n), 7.0, dtype=torch.bfloat16, device=hopper)
    grouped.launch_cuda(rows, weight, counts_there, grouped.MASKED_MODE, out, cluster=cluster)
    want = grouped.reference_masked(rows, weight, counts_there)
    for expert, count in enumerate(counts):
        assert_close(out[expert, :count], want[expert, :count])
        assert bool((out[expert, count:] == 7.0).all())


def test_a_captured_product_follows_its_starts(hopper):
    rows, weight = made(512, 4, 384, 512, hopper)
    starts = torch.tensor([0, 128, 256, 384, 512], dtype=torch.int32, device=hopper)
    run = choose(grouped.CONTIGUOUS_BACKENDS, hopper).run
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(rows, weight, starts)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(rows, weight, starts)
    for other in ([0, 0, 500, 500, 512], [0, 16, 32, 48, 64]):
        starts.copy_(torch.tensor(other, dtype=torch.int32))
        graph.replay()
        assert_close(out[: other[-1]], grouped.reference(rows, weight, starts)[: other[-1]])
