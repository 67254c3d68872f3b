"""The checksum of pushed rows: one value everywhere, and no accident it could miss."""

import os
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.rows.block_checksum import _torch, _triton, checksum, position_weights, reference
from kernels.select import choose
from kernels.toolchain.triton_support import needs_triton, triton

BLOCK_SIZE = 4
CPU = torch.device("cpu")
PINNED = -193035076886855680
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int16]


def pool_of(num_blocks: int, row_dim: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(0, dtype=dtype).element_size()
    numbers = torch.randint(0, 256, (num_blocks, BLOCK_SIZE, row_dim * size), dtype=torch.uint8, generator=generator)
    return numbers.view(dtype)  # NaN and inf among them


@st.composite
def cases(draw, fewest_rows=1):
    dtype = draw(st.sampled_from(DTYPES))
    pool = pool_of(draw(st.integers(1, 6)), draw(st.integers(1, 9)), dtype, draw(st.integers(0, 99)))
    rows = pool.shape[0] * BLOCK_SIZE
    count = draw(st.integers(min(fewest_rows, rows), rows))
    slots = torch.tensor(draw(st.permutations(range(rows)))[:count], dtype=torch.int64)
    return pool, slots, draw(st.integers(0, 10_000))


def raw(pool: torch.Tensor) -> torch.Tensor:
    return pool.view(torch.uint8).flatten(0, 1)


@given(cases(fewest_rows=0))
@settings(deadline=None)
def test_torch_agrees_with_the_reference(case):
    assert _torch(*case).item() == reference(*case).item() == checksum(*case)


@pytest.mark.skipif(
    triton is None or os.environ.get("TRITON_INTERPRET") != "1", reason="needs triton with TRITON_INTERPRET=1"
)
@given(cases(fewest_rows=0))
@settings(deadline=None, max_examples=20)
def test_triton_agrees_with_the_reference_through_its_interpreter(case):
    assert _triton(*case).item() == reference(*case).item()


@pytest.mark.skipif(
    needs_triton(torch.device("cuda")) is not None or not torch.cuda.is_available(), reason="needs a GPU"
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_value_is_the_same_on_a_gpu(dtype):
    pool, slots = pool_of(64, 160, dtype), torch.randperm(64 * BLOCK_SIZE)[:200]
    expected = reference(pool, slots, 77).item()
    for run in (_torch, _triton):
        assert run(pool.cuda(), slots.cuda(), 77).item() == expected


@given(cases(), st.data())
@settings(deadline=None, max_examples=300)
def test_flipping_any_bits_of_one_byte_is_seen(case, data):
    pool, slots, first = case
    before = checksum(pool, slots, first)
    row = slots[data.draw(st.integers(0, len(slots) - 1))]
    column = data.draw(st.integers(0, raw(pool).shape[1] - 1))
    raw(pool)[row, column] ^= data.draw(st.integers(1, 255))
    assert checksum(pool, slots, first) != before


def test_every_single_bit_of_a_request_counts():
    pool, slots = pool_of(2, 5, torch.bfloat16), torch.tensor([6, 1, 3])
    before = checksum(pool, slots, 9)
    for row in slots:
        for column in range(10):
            for bit in range(8):
                raw(pool)[row, column] ^= 1 << bit
                assert checksum(pool, slots, 9) != before
                raw(pool)[row, column] ^= 1 << bit
    assert checksum(pool, slots, 9) == before


def test_flipping_the_same_bit_in_two_words_is_seen():
    """Sign bits above all: in 64-bit words two of them would cancel."""
    pool, slots = pool_of(4, 8, torch.float32), torch.arange(16)
    before = checksum(pool, slots, 0)
    for bit in range(32):
        for one, two in (((0, 0), (0, 1)), ((0, 1), (0, 3)), ((2, 5), (11, 5)), ((3, 1), (9, 7))):
            words = pool.view(torch.int32).flatten(0, 1)
            flip = torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
            words[one] ^= flip
            words[two] ^= flip
            assert checksum(pool, slots, 0) != before
            words[one] ^= flip
            words[two] ^= flip


@given(cases(fewest_rows=2), st.data())
@settings(deadline=None, max_examples=200)
def test_swapping_two_rows_that_differ_is_seen(case, data):
    pool, slots, first = case
    if len(slots) < 2:
        return
    i, j = data.draw(st.lists(st.integers(0, len(slots) - 1), min_size=2, max_size=2, unique=True))
    swapped = slots.clone()
    swapped[[i, j]] = slots[[j, i]]
    same = torch.equal(raw(pool)[slots[i]], raw(pool)[slots[j]])
    assert (checksum(pool, swapped, first) == checksum(pool, slots, first)) == same


@given(cases())
@settings(deadline=None, max_examples=200)
def test_shifting_by_one_position_is_seen(case):
    pool, slots, first = case
    assert checksum(pool, slots, first) != checksum(pool, slots, first + 1)


@pytest.mark.parametrize("fill", [0, 255, 7])
def test_rows_that_are_all_equal_still_count_and_still_have_places(fill):
    pool = pool_of(4, 6, torch.float32)
    raw(pool).fill_(fill)
    slots = torch.arange(16)
    values = [checksum(pool, slots[:count], first) for count in range(1, 17) for first in range(8)]
    assert len(set(values)) == len(values)


@given(cases(fewest_rows=1), st.data())
@settings(deadline=None, max_examples=200)
def test_dropping_a_row_or_taking_a_stale_one_is_seen(case, data):
    pool, slots, first = case
    i = data.draw(st.integers(0, len(slots) - 1))
    assert checksum(pool, torch.cat([slots[:i], slots[i + 1 :]]), first) != checksum(pool, slots, first)
    stale = slots.clone()
    stale[i] = data.draw(st.integers(0, pool.shape[0] * BLOCK_SIZE - 1))
    same = torch.equal(raw(pool)[stale[i]], raw(pool)[slots[i]])
    assert (checksum(pool, stale, first) == checksum(pool, slots, first)) == same


def test_swapping_two_columns_is_seen():
    pool, slots = pool_of(3, 64, torch.float32), torch.arange(12)
    before = checksum(pool, slots, 3)
    words = pool.view(torch.int32).flatten(0, 1)
    for j in range(63):
        words[:, [j, j + 1]] = words[:, [j + 1, j]]
        assert checksum(pool, slots, 3) != before
        words[:, [j, j + 1]] = words[:, [j + 1, j]]


def test_block_ids_do_not_enter():
    pool, slots = pool_of(6, 8, torch.bfloat16), torch.tensor([0, 1, 2, 3, 4, 5])
    elsewhere = torch.tensor([20, 21, 22, 23, 8, 9])
    raw(pool)[elsewhere] = raw(pool)[slots]
    assert checksum(pool, slots, 100) == checksum(pool, elsewhere, 100)


def test_parts_add_up_so_that_layers_may_be_summed_as_they_arrive():
    pool, slots = pool_of(8, 8, torch.float32), torch.randperm(32)
    whole = checksum(pool, slots, 5)
    parts = checksum(pool, slots[:11], 5) + checksum(pool, slots[11:], 16)
    assert (whole - parts) % 2**64 == 0


def test_rows_nobody_may_read_do_not_matter():
    pool, slots = pool_of(4, 8, torch.float32), torch.arange(10)
    before = checksum(pool, slots, 0)
    pool.flatten(0, 1)[10:] = float("nan")
    assert checksum(pool, slots, 0) == before


def test_no_rows_give_zero():
    assert checksum(pool_of(1, 2, torch.float32), torch.empty(0, dtype=torch.int64), 12) == 0


def test_a_strided_pool_is_refused_rather_than_copied():
    with pytest.raises(ValueError, match="contiguous"):
        checksum(pool_of(2, 8, torch.float32)[:, :, ::2], torch.arange(2), 0)


def test_weights_of_positions_do_not_depend_on_how_far_the_table_reaches():
    near, far = position_weights(10, 5, CPU), position_weights(0, 9000, CPU)
    assert torch.equal(near, far[10:15])
    assert (far % 2 != 0).all() and len(far.unique()) == len(far)


def test_the_value_is_pinned_so_that_old_and_new_processes_agree():
    pool = torch.arange(2 * BLOCK_SIZE * 3, dtype=torch.float32).view(2, BLOCK_SIZE, 3)
    assert checksum(pool, torch.tensor([5, 0, 7]), 41) == PINNED


def test_cpu_takes_torch():
    from kernels.rows.block_checksum import BACKENDS

    assert choose(BACKENDS, CPU).name == "torch"


def test_two_thousand_rows_of_the_tiny_model_cost_well_under_a_millisecond():
    """In CPU time of this thread, on one thread: what else the host does counts for nothing."""
    pool, slots = torch.randn(160, 16, 160), torch.randperm(160 * 16)[:2048]
    best, threads = float("inf"), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(20):
            began = time.thread_time()
            checksum(pool, slots, 0)
            best = min(best, time.thread_time() - began)
    finally:
        torch.set_num_threads(threads)
    assert best < 1e-3
