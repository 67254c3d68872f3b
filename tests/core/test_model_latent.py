"""The paged tensors: one allocation, and a partial block copied for a child."""

from __future__ import annotations

import pytest
import torch

from headrace.cache.latent import LatentPool


def test_a_pool_is_one_dense_allocation_of_zeros():
    pool = LatentPool(3, 5, 4, 6, torch.bfloat16, torch.device("cpu"))
    assert pool.rows.shape == (3, 5, 4, 6) and pool.rows.is_contiguous() and not pool.rows.any()
    assert pool.row_bytes == 12
    assert pool.layer(1).data_ptr() == pool.rows.data_ptr() + 5 * 4 * 6 * 2


def test_copying_rows_touches_only_the_first_rows_of_the_target_in_every_layer():
    pool = LatentPool(2, 4, 4, 3, torch.float32, torch.device("cpu"))
    pool.rows.copy_(torch.arange(pool.rows.numel()).view_as(pool.rows))
    before = pool.rows.clone()
    pool.copy_rows(1, 3, 2)
    assert torch.equal(pool.rows[:, 3, :2], before[:, 1, :2])
    before[:, 3, :2] = before[:, 1, :2]
    assert torch.equal(pool.rows, before)
    pool.copy_rows(0, 2, 0)
    assert torch.equal(pool.rows, before)


@pytest.mark.parametrize("num_rows", [-1, 5])
def test_more_rows_than_a_block_holds_are_refused(num_rows):
    with pytest.raises(ValueError, match="outside 0..4"):
        LatentPool(1, 2, 4, 3, torch.float32, torch.device("cpu")).copy_rows(0, 1, num_rows)


def test_an_empty_pool_is_refused():
    with pytest.raises(ValueError, match="num_blocks=0"):
        LatentPool(1, 0, 4, 3, torch.float32, torch.device("cpu"))
