"""One 64-bit number for the valid rows of one layer of one sequence: equal on both sides of a transfer, or it went wrong.

pool_layer      [num_blocks, block_size, row_dim]  any dtype, contiguous; only its bits matter
slots           [num_rows] int64                   block_id * block_size + offset of each valid row, in token order
first_position  int                                token position of the first of them
returns         [] int64, on pool_layer's device   sum over rows i and words j, modulo 2**64, of
                                                   (word[i, j] + 2**32) * position_weight(first_position + i) * column_weight(j)

Words are the row's bytes as signed int32 (int16 or int8 when the row is not a multiple of 4 or 2 bytes). All weights are
odd and fixed, so any change within one word changes the sum; the addend makes a row of zeros count. Blocks do not enter:
only where a row stands in the sequence does. Integer arithmetic wraps alike everywhere and its order is free, hence the
same value on CPU and GPU. No padding slots; no rows gives 0. It guards against accidents, not against an adversary.
Source: multiply-add hashing as in Dietzfelbinger 1996; weights are Steele, Lea and Flood's SplitMix64 (2014).
"""

from __future__ import annotations

import functools
import importlib.util

import torch

from kernels.select import Backend, choose

ADDEND = 1 << 32
COLUMN_SEED = 0x5DEECE66D
FEWEST_POSITIONS = 4096


def reference(pool_layer: torch.Tensor, slots: torch.Tensor, first_position: int) -> torch.Tensor:
    words = _words(pool_layer)
    total = 0
    for i, slot in enumerate(slots.tolist()):
        for j, word in enumerate(words[slot].tolist()):
            total += (word + ADDEND) * _odd_mix(first_position + i) * _odd_mix(COLUMN_SEED + j)
    return torch.tensor(_signed(total), dtype=torch.int64, device=pool_layer.device)


def _torch(pool_layer: torch.Tensor, slots: torch.Tensor, first_position: int) -> torch.Tensor:
    words = _words(pool_layer).index_select(0, slots).to(torch.int64)  # [num_rows, num_words]
    positions = position_weights(first_position, len(slots), words.device)
    columns = _column_weights(words.shape[1], words.device)
    if words.is_cuda:  # no integer matrix product there
        by_column = (words * positions[:, None]).sum(0)
    else:
        by_column = torch.mv(words.t(), positions)
    return (by_column * columns).sum() + ADDEND * positions.sum() * columns.sum()


def _triton(pool_layer: torch.Tensor, slots: torch.Tensor, first_position: int) -> torch.Tensor:
    """Never run on a GPU yet; equal to the reference through Triton's interpreter."""
    import triton

    words = _words(pool_layer)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    rows_per_program = 16
    grid = (triton.cdiv(len(slots), rows_per_program),)
    if grid[0]:
        _kernel()[grid](
            words,
            slots,
            position_weights(first_position, len(slots), words.device),
            _column_weights(words.shape[1], words.device),
            total,
            len(slots),
            words.shape[1],
            ADDEND,
            ROWS=rows_per_program,
            WORDS=triton.next_power_of_2(words.shape[1]),
        )
    return total


@functools.cache
def _kernel():
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(
        words, slots, positions, columns, total, num_rows, num_words, addend, ROWS: tl.constexpr, WORDS: tl.constexpr
    ):
        i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        j = tl.arange(0, WORDS)
        here = (i < num_rows)[:, None] & (j < num_words)[None, :]
        slot = tl.load(slots + i, mask=i < num_rows, other=0)
        position = tl.load(positions + i, mask=i < num_rows, other=0)
        column = tl.load(columns + j, mask=j < num_words, other=0)
        word = tl.load(words + slot[:, None] * num_words + j[None, :], mask=here, other=0).to(tl.int64)
        terms = (word + addend) * position[:, None] * column[None, :]  # padding has weight 0
        tl.atomic_add(total, tl.sum(tl.sum(terms, 1), 0))

    return kernel


def _needs_triton(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "needs a CUDA device"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None


BACKENDS = (
    Backend("triton", _triton, why_not=_needs_triton),
    Backend("torch", _torch),
    Backend("reference", reference),
)


def checksum(pool_layer: torch.Tensor, slots: torch.Tensor, first_position: int) -> int:
    """The value as a Python int in [-2**63, 2**63), by the best back end. Waits for the device."""
    return int(_best(pool_layer.device).run(pool_layer, slots, first_position))


@functools.cache
def _best(device: torch.device) -> Backend:
    return choose(BACKENDS, device, op="block_checksum")


def position_weights(first: int, count: int, device: torch.device) -> torch.Tensor:
    """`[count]` int64, odd: the weights of positions [first, first + count). A slice of a table that grows by doubling."""
    size = FEWEST_POSITIONS
    while size < first + count:
        size *= 2
    return _position_table(size, device)[first : first + count]


@functools.lru_cache(maxsize=8)
def _position_table(size: int, device: torch.device) -> torch.Tensor:
    return _mix_all(torch.arange(size, dtype=torch.int64)).to(device)


@functools.lru_cache(maxsize=32)
def _column_weights(count: int, device: torch.device) -> torch.Tensor:
    return _mix_all(COLUMN_SEED + torch.arange(count, dtype=torch.int64)).to(device)


def _words(pool_layer: torch.Tensor) -> torch.Tensor:
    """`[num_blocks * block_size, num_words]`, a view of the rows' bytes as the widest integers that divide a row."""
    if pool_layer.dim() != 3 or not pool_layer.is_contiguous():
        raise ValueError(f"one contiguous [num_blocks, block_size, row_dim], not {tuple(pool_layer.shape)}")
    row_bytes = pool_layer.shape[2] * pool_layer.element_size()
    dtype = {0: torch.int32, 2: torch.int16}.get(row_bytes % 4, torch.int8)
    return pool_layer.view(dtype).flatten(0, 1)


def _odd_mix(number: int) -> int:
    """SplitMix64's output for state `number`, made odd; the plain form of `_mix_all`."""
    mask = 2**64 - 1
    z = (number + 1) * 0x9E3779B97F4A7C15 & mask
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    return z ^ z >> 31 | 1


def _mix_all(numbers: torch.Tensor) -> torch.Tensor:
    """`_odd_mix` of each, as wrapped int64."""

    def shift(z: torch.Tensor, bits: int) -> torch.Tensor:
        return z >> bits & (1 << 64 - bits) - 1  # int64 shifts keep the sign; the mask drops its copies

    z = (numbers + 1) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ shift(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ shift(z, 31) | 1


def _signed(number: int) -> int:
    """`number` modulo 2**64 as a signed 64-bit value."""
    return (number + 2**63) % 2**64 - 2**63
