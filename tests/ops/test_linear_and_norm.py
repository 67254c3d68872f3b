"""linear, rms_norm, rope, latent_store: each back end against its reference, on nasty inputs."""

from __future__ import annotations

import pytest
import torch

from kernels.attention import latent_store, rope
from kernels.linear import dense as linear
from kernels.rows import rms_norm
from kernels.toolchain import cpu_library

CPU = torch.device("cpu")
SUM_TOLERANCE = 2e-6  # fp32, relative to the sum of magnitudes: other orders of addition


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


def assert_near(got: torch.Tensor, want: torch.Tensor, bound: float) -> None:
    assert got.shape == want.shape
    assert torch.equal(got.isnan(), want.isnan()), "NaN in other places"
    assert torch.equal(got.isinf(), want.isinf()), "inf in other places"
    difference = (got - want).abs().nan_to_num(0, 0, 0)
    if difference.numel():
        worst = int(difference.argmax())
        assert difference.max() <= bound, f"{float(difference.max()):.2e} > {bound:.2e} at flat index {worst}"


@pytest.mark.parametrize("op", backends(linear))
@pytest.mark.parametrize("bf16_exact", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 6, 7, 8, 13, 31, 96, 97, 200])
def test_linear_equals_its_reference_at_every_row_count(op, bf16_exact, rows):
    for out_size, in_size in ((16, 8), (33, 48), (160, 256), (7, 1), (128, 100)):
        weight = draw(out_size, in_size, seed=out_size)
        weight = weight.bfloat16().float() if bf16_exact else weight
        x = draw(rows, in_size + 5)[:, 2 : 2 + in_size]  # strided rows, odd offset
        want = linear.reference(x, weight)
        bound = SUM_TOLERANCE * float((x.abs() @ weight.abs().T).max()) if rows else 0.0
        prepared = op.prepare(weight)
        assert_near(op.run(x, prepared), want, bound)
        residual = draw(rows, out_size, seed=3)
        assert_near(op.run(x, prepared, residual.clone()), residual + want, bound + 1e-6)


@pytest.mark.parametrize("op", backends(linear))
def test_linear_per_head_reads_and_writes_strided_views(op):
    weight = draw(3, 24, 16)
    x, out = draw(11, 3, 40)[..., 4:20], torch.full((11, 3, 50), 7.0)
    op.per_head(x, op.prepare(weight), out[..., 8:32])
    want = torch.stack([linear.reference(x[:, head], weight[head]) for head in range(3)], 1)
    assert_near(out[..., 8:32], want, 1e-5)
    assert (out[..., :8] == 7).all() and (out[..., 32:] == 7).all()


@pytest.mark.parametrize("op", backends(linear))
def test_nan_in_one_row_stays_in_that_row(op):
    x = draw(9, 32)
    x[4, 7] = float("nan")
    y = op.run(x, op.prepare(draw(20, 32)))
    assert y[4].isnan().all() and not y[[0, 1, 2, 3, 5, 6, 7, 8]].isnan().any()


@pytest.mark.skipif(bool(cpu_library.why_not()), reason=f"needs the CPU kernels: {cpu_library.why_not()}")
@pytest.mark.parametrize("bf16_exact", [True, False])
def test_a_c_linear_row_has_the_same_bits_in_every_batch_and_thread_count(bf16_exact):
    weight = draw(200, 144)
    weight = linear.PackedLinear.prepare(weight.bfloat16().float() if bf16_exact else weight)
    x, before = draw(300, 144), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = linear.PackedLinear.run(x, weight)
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for start, end in ((0, 1), (5, 7), (5, 8), (9, 13), (1, 6), (2, 9), (50, 63), (10, 250), (0, 300)):
                assert torch.equal(linear.PackedLinear.run(x[start:end], weight), whole[start:end]), (
                    threads,
                    start,
                    end,
                )
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("op", backends(rms_norm))
@pytest.mark.parametrize("rows, width", [(0, 8), (1, 8), (3, 24), (17, 256), (5, 10)])
def test_rms_norm_equals_its_reference(op, rows, width):
    x, gain = draw(rows, width + 3)[:, 1 : 1 + width], 1 + 0.1 * draw(width, seed=1)
    want = rms_norm.reference(x, gain, 1e-6)
    assert_near(op(x, gain, 1e-6), want, 2e-6)
    in_place = x.clone()
    assert op(in_place, gain, 1e-6, out=in_place) is in_place
    assert_near(in_place, want, 2e-6)


@pytest.mark.parametrize("op", backends(rms_norm))
def test_rms_norm_of_zeros_and_nan(op):
    x = torch.zeros(3, 16)
    x[1, 5] = float("nan")
    y = op(x, torch.ones(16), 1e-6)
    assert (y[[0, 2]] == 0).all() and y[1].isnan().all()


@pytest.mark.parametrize("op", backends(rope))
@pytest.mark.parametrize("dim", [2, 8, 16, 32])
def test_rope_rotates_interleaved_pairs_in_place(op, dim):
    angles = draw(7, dim // 2)
    for view in (lambda: draw(7, 3, dim), lambda: draw(7, 3, dim + 6)[..., 4 : 4 + dim], lambda: draw(7, 1, dim)):
        x, expected = view(), view().clone()
        rope.reference(expected, angles.cos(), angles.sin())
        op(x, angles.cos(), angles.sin())
        assert_near(x, expected, 1e-6)
        turned = torch.view_as_complex(view().contiguous().unflatten(-1, (-1, 2))) * torch.exp(1j * angles)[:, None]
        assert_near(x, torch.view_as_real(turned).flatten(-2), 1e-6)


@pytest.mark.parametrize("op", backends(latent_store))
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16])
def test_rows_are_finished_and_stored_in_their_slots_and_padding_is_skipped(op, pool_dtype):
    gain, angles = 1 + 0.1 * draw(16), draw(6, 2, seed=1)
    for slots in ([], [-1, -1], [9], [-1, 3, 14, 0, -1, 7], [5, 4, 3, 2, 1, 0]):
        plan, count, results = latent_store.plan(torch.tensor(slots, dtype=torch.int64)), len(slots), []
        for one in (op, latent_store.reference):
            q, rows = draw(6, 3, 12)[:count], draw(6, 30)[:count, 5:25]
            pool = torch.full((5, 3, 20), 9.0, dtype=pool_dtype)
            one(q, rows, gain, 1e-6, angles[:count].cos(), angles[:count].sin(), pool, plan)
            results.append((q, rows, pool))
        for got, want, bound in zip(*results, (1e-6, 2e-6, 2e-6 if pool_dtype == torch.float32 else 0.02), strict=True):
            assert_near(got.float(), want.float(), bound)
        q, rows, pool = results[0]
        untouched = [slot for slot in range(15) if slot not in slots]
        assert (pool.view(15, 20)[untouched] == 9).all()
        for token, slot in enumerate(slots):
            assert slot < 0 or torch.equal(pool.view(15, 20)[slot], rows[token].to(pool_dtype)), "rounding is torch's"


@pytest.mark.parametrize("op", backends(latent_store))
def test_nan_and_infinity_survive_the_cast_to_bf16(op):
    rows, pool = draw(2, 16), torch.zeros(1, 2, 16, dtype=torch.bfloat16)
    rows[0, 3], rows[1, 9] = float("nan"), float("inf")
    plan = latent_store.plan(torch.tensor([1, 0]))
    op(draw(2, 1, 8), rows, torch.ones(8), 1e-6, torch.ones(2, 4), torch.zeros(2, 4), pool, plan)
    assert pool[0, 1, :8].isnan().all() and not pool[0, 1, 8:].isnan().any()
    assert pool[0, 0, 8:].isinf().tolist() == [False, True] + [False] * 6
