"""Expert dispatch on the device: plan, permute, combine beside their references, and what padding holds."""

from __future__ import annotations

import pytest
import torch

from kernels.experts import expert_dispatch as dispatch
from kernels.formats import fp8


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def choices(rows: int, experts: int, top_k: int, seed: int = 0) -> torch.Tensor:
    scores = torch.rand(rows, experts, generator=torch.Generator().manual_seed(seed))
    return scores.topk(top_k, -1)[1]


def planned(ids, first, local, multiple):
    capacity = dispatch.capacity_for(ids.numel(), local, multiple)
    return [
        run(ids, first, local, multiple, capacity)
        for run in (dispatch._triton_device_plan, dispatch.reference_device_plan)
    ]


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("first, local, multiple", [(0, 16, 1), (4, 5, 8), (15, 1, 128), (0, 8, 64)])
@pytest.mark.parametrize("rows", [1, 70])
def test_the_device_plan_equals_its_reference(triton_device, monkeypatch, rows, first, local, multiple, small):
    monkeypatch.setattr(dispatch, "SMALL_PAIRS", 4096 if small else 0)
    monkeypatch.setattr(dispatch, "CHUNK_PAIRS", 128)
    for dtype in (torch.int64, torch.int32):
        ids = choices(rows, 16, 4).to(triton_device, dtype)
        got, want = planned(ids, first, local, multiple)
        for name in want._fields:
            assert torch.equal(getattr(got, name), getattr(want, name)), name
            assert getattr(got, name).dtype == torch.int32


@pytest.mark.parametrize("small", [True, False])
def test_a_plan_for_nobody_has_no_rows(triton_device, monkeypatch, small):
    monkeypatch.setattr(dispatch, "SMALL_PAIRS", 4096 if small else 0)
    ids = torch.tensor([[0, 1], [-1, -1], [7, 3]], device=triton_device)
    got, want = planned(ids, 4, 3, 16)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert got.starts[-1] == 0 and (got.tokens == -1).all() and (got.rows == -1).all()


def test_too_small_a_capacity_is_refused(triton_device):
    with pytest.raises(ValueError, match="capacity"):
        dispatch._triton_device_plan(choices(4, 8, 2).to(triton_device), 0, 8, 16, 64)


@pytest.mark.parametrize("quantised", [True, False])
def test_permute_copies_each_row_to_its_experts_and_zeros_their_padding(triton_device, quantised):
    ids = choices(37, 16, 4).to(triton_device)
    plan = dispatch.reference_device_plan(ids, 2, 9, 16, dispatch.capacity_for(37 * 4, 9, 16))
    x = draw(37, 384).to(triton_device, torch.bfloat16)
    used = int(plan.starts[-1])
    if not quantised:
        got, want = dispatch._triton_permute(x, plan), dispatch.reference_permute(x, plan)
        assert got.shape == want.shape and torch.equal(got[:used], want[:used])
        return
    rows = fp8.reference(x)
    got, want = dispatch._triton_permute(rows, plan), dispatch.reference_permute(rows, plan)
    assert got.scale.stride() == want.scale.stride() == (1, len(plan.tokens))
    assert torch.equal(got.data.view(torch.uint8)[:used], want.data.view(torch.uint8)[:used])
    assert torch.equal(got.scale[:used], want.scale[:used])
    assert (want.scale[:used].amax(1) == 0).sum() == used - int(plan.counts.sum())


@pytest.mark.parametrize("rows", [0, 1, 23])
@pytest.mark.parametrize("with_shared, skip", [(True, True), (False, True), (True, False)])
def test_combine_sums_in_the_order_of_choice_and_skips_what_is_not_local(triton_device, rows, with_shared, skip):
    ids = choices(rows, 16, 4).to(triton_device)
    plan = dispatch.reference_device_plan(ids, 4, 6, 8, dispatch.capacity_for(rows * 4, 6, 8))
    results = draw(len(plan.tokens), 200).to(triton_device, torch.bfloat16)
    results[plan.tokens < 0] = float("nan")  # padding is never read
    weights = draw(rows, 4, seed=1).abs().to(triton_device)
    shared = draw(rows, 200, seed=2).to(triton_device, torch.bfloat16) if with_shared else None
    got = dispatch._triton_combine(results, weights, plan.rows, shared, skip=skip)
    want = dispatch.reference_combine(results, weights, plan.rows, shared)
    torch.testing.assert_close(got, want, rtol=2.0**-7, atol=1e-6)
    nobody = (plan.rows < 0).all(1)
    assert torch.equal(got[nobody], torch.zeros_like(got[nobody]) if shared is None else shared[nobody])


def test_the_three_steps_together_are_a_weighted_sum(triton_device):
    ids = choices(50, 8, 2).to(triton_device)
    plan = dispatch._triton_device_plan(ids, 0, 8, 16, dispatch.capacity_for(100, 8, 16))
    x = draw(50, 128).to(triton_device, torch.bfloat16)
    weights = draw(50, 2, seed=1).abs().to(triton_device)
    got = dispatch._triton_combine(dispatch._triton_permute(x, plan), weights, plan.rows, None)
    torch.testing.assert_close(got.float(), x.float() * weights.sum(1, keepdim=True), rtol=2.0**-7, atol=1e-5)
