"""latent_store's Triton forms against plain torch: interpreted on a CPU, exactly on a GPU."""

from __future__ import annotations

import pytest
import torch

from kernels.attention import latent_store

EPS = 1e-6
SHAPES = [(8, 32, 32, 128), (3, 12, 8, 24), (1, 16, 64, 512)]  # heads, nope, rope, latent
SLOTS = ([9], [-1, -1], [-1, 3, 14, 0, -1, 7])
BF16_STEP = 2.0**-7  # the interpreter truncates to bf16; a GPU may sum the norm in another order


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def inputs(shape, count, dtype, pool_dtype, device):
    heads, nope, rope, latent = shape
    angles = draw(count, rope // 2, seed=1)
    q = draw(count, heads, nope + rope).to(device, dtype)
    rows = draw(count, latent + rope + 10).to(device, dtype)[:, 8 : 8 + latent + rope]
    gain = (1 + 0.1 * draw(latent)).to(device, dtype)
    pool = torch.full((5, 3, latent + rope), 9.0, device=device).to(pool_dtype)
    return q, rows, gain, EPS, angles.cos().to(device), angles.sin().to(device), pool


def assert_close(got, want, what):
    got, want = got.double(), want.double()
    error = (got - want).abs() / want.abs().clamp_min(1.0)
    assert got.isfinite().all() and float(error.max()) <= 2 * BF16_STEP, (what, float(error.max()), int(error.argmax()))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16])
def test_prefill_finishes_in_place_and_stores(triton_device, shape, slots, dtype, pool_dtype):
    slot_ids = torch.tensor(slots, device=triton_device)
    got, want = (inputs(shape, len(slots), dtype, pool_dtype, triton_device) for _ in range(2))
    latent_store._triton(*got, latent_store.plan(slot_ids))
    latent_store.reference(*want, latent_store._look(slot_ids))
    for name, place in (("q", 0), ("rows", 1), ("pool", 6)):
        assert_close(got[place], want[place], name)
    flat, untouched = got[6].view(15, -1), [slot for slot in range(15) if slot not in slots]
    assert (flat[untouched] == 9).all()
    for token, slot in enumerate(slots):
        assert slot < 0 or pool_dtype != dtype or torch.equal(flat[slot], got[1][token])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("slots", SLOTS)
def test_decode_writes_the_rotated_queries_beside_what_was_absorbed_and_leaves_its_inputs(triton_device, shape, slots):
    heads, _, _, latent = shape
    slot_ids = torch.tensor(slots, device=triton_device)
    results = []
    for one in (latent_store._decode_triton, latent_store.decode_reference):
        q, rows, *rest = inputs(shape, len(slots), torch.bfloat16, torch.bfloat16, triton_device)
        kept = q.clone(), rows.clone()
        absorbed = torch.full((len(slots), heads, rows.shape[1]), 7.0, dtype=torch.bfloat16, device=triton_device)
        one(q, rows, *rest, slot_ids, absorbed)
        assert torch.equal(q, kept[0]) and torch.equal(rows, kept[1]) and (absorbed[..., :latent] == 7).all()
        results.append((absorbed, rest[-1]))
    for name, got, want in zip(("absorbed", "pool"), *results, strict=True):
        assert_close(got, want, name)


def exact_inputs(device):
    """Values whose every rounding to e4m3 is exact: halves, a norm of 1, quarter turns."""
    q = draw(4, 8, 64).mul(4).round().div(2).clamp(-7, 7).to(device, torch.bfloat16)
    rows = torch.cat((draw(4, 128).sign(), draw(4, 32).mul(4).round().div(2).clamp(-7, 7)), 1)
    quarter = draw(4, 16).mul(3).round() * (torch.pi / 2)
    cos, sin = quarter.cos().round(), quarter.sin().round()
    pool = torch.zeros(2, 4, 160, device=device, dtype=torch.float8_e4m3fn)
    gain = 2.0 ** draw(128).round().clamp(-3, 3)
    return q, rows.to(device, torch.bfloat16), gain.to(device), 0.0, cos.to(device), sin.to(device), pool


def test_e4m3_rows_and_queries_where_no_rounding_is_needed(triton_device):
    slots, results = torch.tensor([6, -1, 0, 3], device=triton_device), []
    for one in (latent_store._decode_triton, latent_store.decode_reference):
        absorbed = torch.zeros(4, 8, 160, device=triton_device, dtype=torch.float8_e4m3fn)
        values = exact_inputs(triton_device)
        one(*values, slots, absorbed)
        results.append((absorbed.float(), values[-1].float()))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want) and want.abs().sum() > 0


def test_no_tokens_is_no_launch_and_bad_shapes_are_refused(triton_device):
    values = inputs(SHAPES[0], 0, torch.bfloat16, torch.bfloat16, triton_device)
    latent_store._triton(*values, latent_store.plan(torch.zeros(0, dtype=torch.int64, device=triton_device)))
    assert (values[-1] == 9).all()
    q, rows, gain, *rest = inputs(SHAPES[0], 1, torch.bfloat16, torch.bfloat16, triton_device)
    with pytest.raises(ValueError, match="must fit"):
        slots = torch.zeros(1, dtype=torch.int64, device=triton_device)
        latent_store._triton(q, rows, gain[:-1], *rest, latent_store.plan(slots))


def test_e4m3_rounds_as_torch_does(gpu):
    """What the interpreter gets wrong: carries into the exponent, subnormals, overflow to the largest value."""
    for dtype in (torch.float8_e4m3fn, torch.bfloat16):
        q, rows, gain, eps, _, _, _ = inputs((128, 128, 64, 512), 64, torch.bfloat16, torch.bfloat16, gpu)
        rows[:, 512:] *= torch.logspace(-4, 4, 64, device=gpu).bfloat16()
        cos, sin = torch.ones(64, 32, device=gpu), torch.zeros(64, 32, device=gpu)
        slots = torch.randperm(128, device=gpu)[:64]
        pool, absorbed = (torch.zeros(shape, device=gpu).to(dtype) for shape in ((2, 64, 576), (64, 128, 576)))
        latent_store._decode_triton(q, rows, gain, eps, cos, sin, pool, slots, absorbed)
        assert torch.equal(absorbed[..., 512:].float(), latent_store.rounded(q[..., 128:], dtype).float())
        stored = pool.view(torch.uint8).view(128, -1)[slots].view(dtype)
        assert torch.equal(stored[:, 512:].float(), latent_store.rounded(rows[:, 512:], dtype).float())


def test_plan_and_both_forms_are_capturable(gpu):
    """Capture fails on a host sync."""
    slots = torch.randperm(128, device=gpu)[:64]
    values = inputs((16, 128, 64, 512), 64, torch.bfloat16, torch.bfloat16, gpu)[:-1]
    pool = torch.zeros(2, 64, 576, device=gpu, dtype=torch.bfloat16)
    absorbed = torch.zeros(64, 16, 576, device=gpu, dtype=torch.bfloat16)

    def step():
        latent_store._decode_triton(*values, pool, slots, absorbed)
        latent_store._triton(values[0], values[1].clone(), *values[2:], pool, latent_store.plan(slots))

    step()
    torch.cuda.synchronize()
    kept = pool.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    pool.zero_()
    graph.replay()
    assert torch.equal(pool, kept)
