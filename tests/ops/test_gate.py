"""The gate on the device: the same experts as the reference, also where scores tie and where logits are not numbers."""

from __future__ import annotations

import pytest
import torch

from kernels.experts import gate

R1 = gate.Limits(8, 8, 4, True, 2.5)
TINY = gate.Limits(4, 4, 2, True, 1.0)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "experts, limits",
    [(256, R1), (16, TINY), (8, gate.Limits(3, 1, 1, False, 2.0)), (18, gate.Limits(2, 3, 2, True, 1.5)),
     (8, gate.Limits(2, 8, 5, True, 1.0)), (16, gate.Limits(8, 4, 4, False, 1.0))],
)  # fmt: skip
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_triton_chooses_as_the_reference(triton_device, rows, experts, limits):
    logits, bias = draw(rows, experts + 3)[:, :experts].to(triton_device), 0.1 * draw(experts, seed=1).to(triton_device)
    weights, ids = gate._triton(logits, bias, limits)
    want, want_ids = gate.reference(logits, bias, limits)
    assert ids.dtype == torch.int32 and torch.equal(ids.long(), want_ids)
    torch.testing.assert_close(weights, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("experts, limits", [(256, R1), (16, TINY)])
def test_ties_go_to_the_lower_id(triton_device, experts, limits):
    logits = draw(5, experts).sign().to(triton_device)  # two values only
    logits[0] = 0
    bias = torch.zeros(experts, device=triton_device)
    _, ids = gate._triton(logits, bias, limits)
    assert torch.equal(ids.long(), gate.reference(logits, bias, limits)[1])
    assert ids[0].tolist() == list(range(limits.num_experts_per_tok))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_ids_stay_distinct_and_in_range_whatever_the_logits(triton_device, bad):
    logits = draw(4, 16).to(triton_device)
    logits[1], logits[2, ::2] = bad, bad
    weights, ids = gate._triton(logits, torch.zeros(16, device=triton_device), TINY)
    assert all(len(set(row)) == 4 and 0 <= min(row) and max(row) < 16 for row in ids.tolist())
    assert weights[[0, 3]].isfinite().all()


def test_more_choices_than_the_kept_groups_hold_are_refused(triton_device):
    with pytest.raises(ValueError, match="top 9"):
        gate._triton(draw(1, 16).to(triton_device), torch.zeros(16), gate.Limits(9, 4, 2, True, 1.0))
