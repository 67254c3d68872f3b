"""A pool as transfer code sees it: on the CPU, and on a GPU beside work that is not its own."""

from __future__ import annotations

import pytest
import torch

from headrace.cache.latent import LatentPool
from headrace.cache.rows import Rows
from headrace.engine.streams import event_now, use_own_stream
from kernels.rows.block_checksum import checksum

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
LAYERS, BLOCKS, SIZE, WIDTH = 3, 16, 4, 8


@pytest.fixture(params=DEVICES)
def latent(request) -> LatentPool:
    pool = LatentPool(LAYERS, BLOCKS, SIZE, WIDTH, torch.bfloat16, torch.device(request.param))
    pool.rows.copy_(torch.randn(LAYERS, BLOCKS, SIZE, WIDTH))
    return pool


def expected(pool: LatentPool, layer: int, blocks, first_row: int, num_rows: int) -> int:
    """The plain way: rows gathered one by one on the CPU."""
    rows = pool.rows[layer].cpu()
    slots = torch.tensor([blocks[i // SIZE] * SIZE + i % SIZE for i in range(first_row, first_row + num_rows)])
    return checksum(rows, slots, first_row)


@pytest.mark.parametrize(("first_row", "num_rows"), [(0, 12), (3, 6), (5, 1)])
def test_every_layers_checksum_is_of_the_rows_asked_for(latent, first_row, num_rows):
    rows, blocks = Rows(latent), [7, 2, 11]
    wanted = [expected(latent, layer, blocks, first_row, num_rows) for layer in range(LAYERS)]
    assert rows.layer_checksums(blocks, first_row, num_rows) == wanted
    assert [rows.checksum(layer, blocks, first_row, num_rows) for layer in range(LAYERS)] == wanted
    started = [rows.begin_checksum(layer, blocks, first_row, num_rows) for layer in range(LAYERS)]
    assert [value() for value in reversed(started)] == wanted[::-1]


def test_a_flipped_byte_shows_and_flipped_back_does_not(latent):
    rows = Rows(latent)
    before = rows.checksum(1, [5], 0, 4)
    rows.flip_byte(1, 5, 3)
    assert rows.checksum(1, [5], 0, 4) != before and rows.checksum(0, [5], 0, 4) == expected(latent, 0, [5], 0, 4)
    rows.flip_byte(1, 5, 3)
    assert rows.checksum(1, [5], 0, 4) == before


def test_rows_are_copied_in_every_layer(latent):
    before = latent.rows.clone()
    Rows(latent).copy_rows(2, 9, 3)
    assert torch.equal(latent.rows[:, 9, :3], before[:, 2, :3]) and torch.equal(latent.rows[:, 9, 3], before[:, 9, 3])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_checksum_does_not_wait_for_a_long_forward_of_the_engine():
    device = torch.device("cuda")
    pool = LatentPool(LAYERS, BLOCKS, SIZE, WIDTH, torch.bfloat16, device)
    pool.rows.copy_(torch.randn(LAYERS, BLOCKS, SIZE, WIDTH))
    rows, before = Rows(pool), torch.cuda.current_stream()
    wanted = rows.layer_checksums([1, 2], 0, 8)
    weight = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    use_own_stream(device)
    try:
        for _ in range(150):  # 0.2 s
            weight @ weight
        forward = event_now(device)
        assert rows.layer_checksums([1, 2], 0, 8) == wanted
        rows.copy_rows(1, 3, 4)
        assert not forward.query(), "the checksum has waited for the forward"
        forward.synchronize()
    finally:
        torch.cuda.set_stream(before)


def test_on_a_cpu_there_is_nothing_to_wait_for():
    use_own_stream(torch.device("cpu"))
    assert event_now(torch.device("cpu")) is None
