"""How many blocks a prompt with several samples takes. The one home of this arithmetic: prefill, decode and router use it.

L prompt tokens, B tokens a block. The first L // B blocks hold whole prompt blocks and are shared by all samples; what follows is
each sample's own, and holds the rest of the prompt and the sample's output.
"""

from __future__ import annotations

from collections.abc import Sequence


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks of `block_size` tokens that hold `num_tokens`."""
    return -(-num_tokens // block_size)


def shared_blocks(prompt_tokens: int, block_size: int) -> int:
    """Blocks that hold nothing but prompt: all samples share them."""
    return prompt_tokens // block_size


def blocks_needed(prompt_tokens: int, lengths: Sequence[int], block_size: int) -> int:
    """Blocks for one sequence of each of `lengths` tokens; every sequence begins with the same prompt."""
    shared = shared_blocks(prompt_tokens, block_size)
    return shared + sum(blocks_for(length, block_size) - shared for length in lengths)


def decode_length(prompt_tokens: int, max_tokens: int, delivered_tokens: int, max_context_tokens: int) -> int:
    """Tokens of a sample's sequence that decode keeps room for: prompt and `max_tokens`, or up to the context where the engine
    stops; never less than what has been written."""
    return max(prompt_tokens + delivered_tokens, min(prompt_tokens + max_tokens, max_context_tokens))
