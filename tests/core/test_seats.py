"""The one arithmetic of blocks, against counting them one by one."""

from __future__ import annotations

import pytest

from headrace.cache.seats import blocks_for, blocks_needed, decode_length, shared_blocks


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("prompt", [1, 3, 4, 5, 16, 33])
@pytest.mark.parametrize("more", [(0,), (1,), (0, 5), (7, 1, 12)])
def test_blocks_are_those_that_counting_finds(block_size, prompt, more):
    lengths = [prompt + extra for extra in more]
    blocks = set()
    for sample, length in enumerate(lengths):
        for position in range(length):
            block = position // block_size
            is_shared = (block + 1) * block_size <= prompt
            blocks.add((None if is_shared else sample, block))
    assert blocks_needed(prompt, lengths, block_size) == len(blocks)
    assert shared_blocks(prompt, block_size) == sum(owner is None for owner, _ in blocks)
    assert blocks_for(lengths[0], block_size) == len({block for owner, block in blocks if owner in (None, 0)})


def test_room_ends_at_the_context_and_never_before_what_was_written():
    assert decode_length(10, 5, 0, 100) == 15
    assert decode_length(10, 50, 0, 16) == 16
    assert decode_length(10, 3, 6, 100) == 16
