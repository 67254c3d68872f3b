"""gate, expert_dispatch, expert_ffn: each back end against its reference."""

from __future__ import annotations

import pytest
import torch

from kernels.experts import expert_dispatch, expert_ffn, gate
from kernels.toolchain import cpu_library

CPU = torch.device("cpu")


def backends(module, skip=("reference",)):
    return [
        pytest.param(
            backend.run,
            id=backend.name,
            marks=[pytest.mark.skip(reason=f"needs: {backend.why_not(CPU)}")] if backend.why_not(CPU) else [],
        )
        for backend in module.BACKENDS
        if backend.name not in skip
    ]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("op", backends(gate))
@pytest.mark.parametrize(
    "experts, limits",
    [
        (16, gate.Limits(4, 4, 2, True, 2.5)),
        (8, gate.Limits(3, 4, 2, True, 1.0)),
        (12, gate.Limits(2, 3, 1, False, 2.0)),
        (8, gate.Limits(8, 1, 1, True, 1.0)),
        (256, gate.Limits(8, 8, 4, True, 2.5)),
        (6, gate.Limits(1, 1, 1, True, 1.0)),
    ],
)
def test_the_gate_chooses_and_weighs_as_its_reference(op, experts, limits):
    for rows in (0, 1, 33):
        logits, bias = 3 * draw(rows, experts), 0.3 * draw(experts, seed=1)
        weights, ids = op(logits.clone(), bias, limits)
        want_weights, want_ids = gate.reference(logits, bias, limits)
        assert ids.dtype == torch.int64 and torch.equal(ids, want_ids)
        torch.testing.assert_close(weights, want_weights, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("op", backends(gate))
def test_the_correction_bias_moves_the_choice_and_never_the_weight(op):
    logits, bias = torch.zeros(1, 8), torch.zeros(8)
    bias[6] = 5.0
    weights, ids = op(logits.clone(), bias, gate.Limits(2, 4, 1, False, 1.0))
    assert sorted(ids[0].tolist()) == [6, 7]  # the favoured expert and its group
    assert weights.tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("op", backends(gate))
def test_extreme_logits_saturate_without_nan(op):
    logits = torch.tensor([[200.0, -200.0, 90.0, -90.0, 0.0, 1.0, -1.0, 20.0]])
    weights, ids = op(logits.clone(), torch.zeros(8), gate.Limits(8, 1, 1, True, 1.0))
    assert torch.isfinite(weights).all() and weights.sum() == pytest.approx(1.0)
    assert weights[0, ids[0].tolist().index(1)] < 1e-30


@pytest.mark.parametrize("op", backends(expert_dispatch))
@pytest.mark.parametrize("row_multiple", [1, 4, 16])
def test_dispatch_sorts_by_expert_and_pads_only_experts_in_use(op, row_multiple):
    for rows in (0, 1, 37):
        ids = (
            torch.stack([torch.randperm(9, generator=torch.Generator().manual_seed(i))[:3] for i in range(rows)] or [])
            if rows
            else torch.empty(0, 3, dtype=torch.int64)
        )
        ids = ids.clamp(max=7)  # expert 8 is nobody's choice
        got, want = op(ids, 9, row_multiple), expert_dispatch.reference(ids, 9, row_multiple)
        assert got.num_rows == want.num_rows == len(got.tokens)
        assert torch.equal(got.tokens, want.tokens) and torch.equal(got.rows, want.rows)
        assert torch.equal(got.ends, want.ends) and got.ends.dtype == torch.int32


@pytest.mark.parametrize("op", backends(expert_ffn))
@pytest.mark.parametrize("bf16_exact", [True, False])
@pytest.mark.parametrize("row_multiple", [1, 16])
def test_routed_experts_equal_their_reference(op, bf16_exact, row_multiple):
    experts, inner, hidden = 6, 24, 32
    gate_up, down = 0.2 * draw(experts, 2 * inner, hidden), 0.2 * draw(experts, hidden, inner, seed=1)
    if bf16_exact:
        gate_up, down = gate_up.bfloat16().float(), down.bfloat16().float()
    for rows in (0, 1, 5, 150):
        x, weights = draw(rows, hidden), draw(rows, 2, seed=2).abs()
        ids = torch.stack([torch.arange(rows) % 2 + 1, torch.full((rows,), 4)], 1)  # crowded and unused experts
        got = op.routed(x, weights, ids, op.prepare(gate_up, down), row_multiple=row_multiple)
        torch.testing.assert_close(
            got, expert_ffn.reference_routed(x, weights, ids, gate_up, down), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("op", backends(expert_ffn))
def test_weights_of_which_only_one_is_exact_in_bf16_are_served_exactly(op):
    gate_up, down = draw(2, 32, 16).bfloat16().float(), draw(2, 16, 16, seed=1)
    x, weights, ids = draw(9, 16), torch.ones(9, 1), torch.arange(9)[:, None] % 2
    got = op.routed(x, weights, ids, op.prepare(gate_up, down))
    want = expert_ffn.reference_routed(x, weights, ids, gate_up, down)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("op", backends(expert_ffn))
def test_one_swiglu_for_all_equals_its_reference_and_adds_in_place(op):
    gate_up, down = 0.2 * draw(80, 32), 0.2 * draw(32, 40, seed=1)
    prepared = op.prepare(gate_up, down)
    for rows in (0, 1, 7, 130):
        x, residual = draw(rows, 32), draw(rows, 32, seed=5)
        want = expert_ffn.reference(x, gate_up, down)
        torch.testing.assert_close(op.run(x, prepared), want, rtol=1e-5, atol=1e-5)
        added = residual.clone()
        assert op.run(x, prepared, added) is added
        torch.testing.assert_close(added, residual + want, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(bool(cpu_library.why_not()), reason=f"needs the CPU kernels: {cpu_library.why_not()}")
def test_a_c_expert_row_has_the_same_bits_in_every_crowd_and_thread_count():
    op = expert_ffn.PackedFfn
    prepared = op.prepare(draw(8, 64, 48).bfloat16().float(), draw(8, 48, 32, seed=1).bfloat16().float())
    x, weights = draw(260, 48), draw(260, 3, seed=2).abs()
    ids = torch.stack([torch.randperm(8, generator=torch.Generator().manual_seed(i))[:3] for i in range(260)])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = op.routed(x, weights, ids, prepared)
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for part in (slice(0, 1), slice(7, 20), slice(100, 260), slice(0, 260)):
                assert torch.equal(op.routed(x[part], weights[part], ids[part].contiguous(), prepared), whole[part])
    finally:
        torch.set_num_threads(before)
