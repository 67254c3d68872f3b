"""The paged rows of every layer, as tensors. Which block belongs to whom is `cache/blocks.py`'s business.

A row is one token of one layer: kv_lora_rank latent values (normed) ++ qk_rope_head_dim values (rotated, interleaved).
"""

from __future__ import annotations

import torch

ROPE_ORDER = "interleaved"  # pairs (0, 1), (2, 3), ... as in the checkpoint; part of the KV layout


class LatentPool:
    """rows  [num_layers, num_blocks, block_size, row_dim]  fp32 (exact), bf16 or e4m3 (fast), one contiguous allocation.

    e4m3 rows are the values themselves (a scale of 1), rounded to nearest and held to +-448.
    A slot is `block_id * block_size + offset`. Rows start as zeros; a freed block keeps its last values.
    """

    def __init__(
        self, num_layers: int, num_blocks: int, block_size: int, row_dim: int, dtype: torch.dtype, device: torch.device
    ):
        if min(num_layers, num_blocks, block_size, row_dim) < 1:
            raise ValueError(f"empty pool: {num_layers=} {num_blocks=} {block_size=} {row_dim=}")
        self.rows = torch.zeros(num_layers, num_blocks, block_size, row_dim, dtype=dtype, device=device)
        self.num_layers, self.num_blocks, self.block_size, self.row_dim = self.rows.shape

    @property
    def row_bytes(self) -> int:
        return self.row_dim * self.rows.element_size()

    def layer(self, layer: int) -> torch.Tensor:
        """[num_blocks, block_size, row_dim], a view."""
        return self.rows[layer]

    def copy_rows(self, source_block: int, target_block: int, num_rows: int) -> None:
        """Copy the first `num_rows` rows of a block, in every layer (the partial last block of an n > 1 child)."""
        if not 0 <= num_rows <= self.block_size:
            raise ValueError(f"{num_rows=} outside 0..{self.block_size}")
        self.rows[:, target_block, :num_rows] = self.rows[:, source_block, :num_rows]
