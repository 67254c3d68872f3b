"""The rank bench's arithmetic: what a step must move and multiply, and what other ranks would send."""

import json

import pytest
import torch

from bench import op_times
from bench.drawn import DrawnExchange
from bench.kernels.harness import relative_error, sets_for
from headrace.model.deepseek.fused_kernels import FusedKernels
from headrace.model.weights.random_weights import published_config
from headrace.planning.ceilings import Ceilings
from headrace.planning.roofline import Op, Share, step_ops, total_us
from kernels.linear import grouped_linear

CEILINGS = Ceilings(copy_gb_s=4000.0, bf16_tflops=800.0, fp8_tflops=1000.0)


def op(ops: list[Op], name: str) -> Op:
    return next(one for one in ops if one.name == name)


def decode_share(batch: int, context: int, kv_bytes: float = 2.0) -> Share:
    return Share(batch, batch * 8, 8, batch * context, batch * context, batch, kv_bytes)


def test_an_op_takes_the_longer_of_moving_and_multiplying():
    assert CEILINGS.limit_us(4e9) == pytest.approx(1000.0)
    assert CEILINGS.limit_us(1, 8e11) == pytest.approx(1000.0)
    assert CEILINGS.limit_us(4e9, 8e11, "fp8") == pytest.approx(1000.0)


def test_decode_reads_each_latent_row_once_and_each_weight_once():
    ops = step_ops(published_config("deepseek-r1"), decode_share(64, 3072), "decode")
    attention = op(ops, "mla_decode")
    assert attention.count == 61
    assert attention.num_bytes == 64 * 3072 * 576 * 2 + 64 * 128 * (576 + 512) * 2
    assert attention.flops == 2 * 128 * (576 + 512) * 64 * 3072
    gate_up = op(ops, "experts_gate_up")
    assert gate_up.count == 58 and gate_up.flops == 2 * 64 * 8 * 4096 * 7168
    assert gate_up.num_bytes > 8 * 4096 * 7168, "the weights of all local experts are read"
    halved = step_ops(published_config("deepseek-r1"), decode_share(64, 3072, 1.0), "decode")
    assert op(halved, "mla_decode").num_bytes < attention.num_bytes


def test_weights_of_all_projections_add_up_to_the_published_model():
    """Without experts and embeddings R1 has about 187 M weights a layer in attention."""
    ops = step_ops(published_config("deepseek-r1"), decode_share(1, 1), "prefill")
    names = ("qkv_a", "q_b", "kv_b", "o_proj")
    weights = sum(op(ops, name).flops / 2 for name in names)
    assert weights == 7168 * 2112 + 1536 * 24576 + 512 * 32768 + 16384 * 7168


def test_a_step_is_the_sum_of_its_ops():
    ops = [Op("a", 2, 4e9), Op("b", 1, 0.0, 1e12, "fp8")]
    assert total_us(ops, CEILINGS) == pytest.approx(3000.0)


def test_drawn_rows_arrive_as_thirty_two_ranks_would_send_them():
    kernels = FusedKernels(torch.device("cpu"))
    exchange = DrawnExchange(kernels, torch.device("cpu"), num_experts=256, ranks=32, top_k=8)
    tokens, hidden = 48, 256
    arrived = exchange.arrived(tokens)
    assert abs(arrived - tokens * 8) < 6 * (tokens * 8) ** 0.5, "eight rows a token on average"
    h = torch.randn(tokens, hidden).bfloat16()
    weights, ids = torch.rand(tokens, 8), torch.zeros(tokens, 8, dtype=torch.int32)
    sent = exchange.dispatch(h, weights, ids)
    routing = exchange._routing(tokens, False)
    assert int(routing.plan.counts.sum()) == arrived
    multiple = grouped_linear.row_multiple_for(-(-arrived // 8))
    assert all(int(start) % multiple == 0 for start in sent.starts) and len(sent.starts) == 9
    real = routing.plan.tokens >= 0
    assert int(real.sum()) == arrived
    assert torch.equal(sent.rows[real], h[routing.plan.tokens[real].long()])
    copies = routing.plan.rows
    assert torch.equal(routing.plan.tokens[copies[copies >= 0].long()], (copies >= 0).nonzero()[:, 0].int())
    made = sent.rows
    expected = (weights[..., None] * made.float()[sent.receipt.rows.long()]).sum(1)
    combined = exchange.combine(made, sent, None)
    assert relative_error(combined, expected) < 1e-2
    assert bool(real[sent.receipt.rows.long()].all()), "every result that comes back is of a real row"


def test_the_shared_expert_gets_each_own_token_once():
    kernels = FusedKernels(torch.device("cpu"))
    exchange = DrawnExchange(kernels, torch.device("cpu"), num_experts=64, ranks=8, top_k=4)
    tokens, hidden = 40, 128
    h, weights, ids = torch.randn(tokens, hidden).bfloat16(), torch.rand(tokens, 4), torch.zeros(tokens, 4).int()
    sent = exchange.dispatch(h, weights, ids, own=True)
    assert len(sent.starts) == 10 and sent.receipt.rows.shape == (tokens, 5)
    assert torch.equal(sent.rows[sent.receipt.rows[:, 4].long()], h), "the last choice is the token itself"
    assert bool((sent.receipt.weights[:, 4] == 1).all())
    assert bool((sent.receipt.rows[:, 4] >= sent.starts[8]).all()) and bool(
        (sent.receipt.rows[:, :4] < sent.starts[8]).all()
    )
    plan = exchange._routing(tokens, True).plan
    real = plan.tokens >= 0
    assert torch.equal(sent.rows[real], h[plan.tokens[real].long()])
    assert exchange.arrived(tokens) == int(plan.counts[:8].sum()), "the same draw with and without own rows"


def test_experts_that_cannot_be_shared_are_refused():
    with pytest.raises(ValueError, match="256 experts cannot be shared by 24 ranks"):
        DrawnExchange(None, torch.device("cpu"), num_experts=256, ranks=24, top_k=8)


def test_measured_ops_stand_beside_their_roofline_and_nothing_is_dropped():
    ops = step_ops(published_config("deepseek-r1"), decode_share(64, 3072), "decode")
    measured = {"mla_decode": 10.0, "norm_quantise": 2.0, "other: something": 1.0}
    entries = op_times.beside_the_roofline(ops, CEILINGS, measured)
    found = {entry["op"]: entry["measured_us"] for entry in entries}
    assert found["mla_decode"] == 10.0 and found["norm_quantise"] == 2.0 and found["other: something"] == 1.0
    assert found["o_proj"] is None, "what was not seen says so"
    assert sum(entry["roofline_us"] for entry in entries) == pytest.approx(total_us(ops, CEILINGS))
    assert op_times.tflops_of("mla_decode", ops, measured) == pytest.approx(
        61 * 2 * 128 * 1088 * 64 * 3072 / 10.0 * 1e-6
    )
    assert op_times.tflops_of("experts", ops, measured) is None
    json.dumps(entries)


def test_kernels_belong_to_the_innermost_op_whose_markers_they_run_between():
    log = ["experts", "silu_mul", None, None, "gate", None]
    ran = [
        "a",
        "spin_kernel",
        "b",
        "spin_kernel",
        "c",
        "spin_kernel",
        "d",
        "spin_kernel(x)",
        "spin_kernel",
        "spin_kernel",
    ]
    found = op_times.attribute([(name, 1.0) for name in ran], log)
    assert found == {"other: a": 1.0, "experts": 2.0, "silu_mul": 1.0}
    with pytest.raises(ValueError, match="6 were put"):
        op_times.attribute([("spin_kernel", 1.0)], log)
    with pytest.raises(ValueError, match="more markers"):
        op_times.attribute([("spin_kernel", 1.0)], [])


def test_errors_are_relative_to_the_largest_value_and_nan_counts():
    reference = torch.tensor([1.0, -4.0])
    assert relative_error(torch.tensor([1.0, -3.0]), reference) == pytest.approx(0.25)
    assert relative_error(torch.tensor([float("nan"), -4.0]), reference) == float("inf")
    assert sets_for(1 << 30) == 1 and sets_for(1) == 16
