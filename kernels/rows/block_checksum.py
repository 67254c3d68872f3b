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

import torch

from kernels.select import Backend, choose
from kernels.toolchain.triton_support import jit, needs_triton, overlap, tl, triton, wait_for_previous

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


@jit
def _checksum_kernel(
    words, slots, positions, columns, total, addend, num_rows, num_words, pieces,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The programs share out tiles of ROWS rows and COLUMNS words; each adds to the total once. A word plus 2**31 is an
    unsigned u, and u times a 64-bit weight is two multiply-adds: u * low, and 2**32 * (u * high) of which only 32 bits
    count. `addend` makes up for the 2**31."""
    wait_for_previous(OVERLAP)
    summed = tl.zeros((ROWS, COLUMNS // VECTOR), tl.int64)
    counted = tl.zeros((ROWS,), tl.int64)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS) * pieces, tl.num_programs(0)):
        row = tile // pieces * ROWS + tl.arange(0, ROWS)
        column = tile % pieces * COLUMNS + tl.arange(0, COLUMNS)
        slot = tl.load(slots + row, mask=row < num_rows, other=0)
        position = tl.load(positions + row, mask=row < num_rows, other=0)  # padding has weight 0
        here = (row < num_rows)[:, None] & (column < num_words)[None, :]
        word = tl.load(words + slot[:, None] * num_words + column[None, :], mask=here, other=0).to(tl.int32)
        shifted = (word ^ -0x80000000).to(tl.uint32, bitcast=True)
        weight = tl.load(columns + column, mask=column < num_words, other=0).to(tl.uint64, bitcast=True)
        low, high = weight.to(tl.uint32), (weight >> 32).to(tl.uint32)
        product = shifted.to(tl.uint64) * low.to(tl.uint64)[None, :] + ((shifted * high[None, :]).to(tl.uint64) << 32)
        # a thread loads VECTOR words of a row: their sum costs no exchange
        of_vector = tl.sum(tl.reshape(product.to(tl.int64, bitcast=True), (ROWS, COLUMNS // VECTOR, VECTOR)), 2)
        summed += of_vector * position[:, None]
        counted += tl.where(tile % pieces == 0, position, 0)
    by_program = tl.sum(tl.reshape(summed, (ROWS * COLUMNS // VECTOR,)), 0) + addend * tl.sum(counted, 0)
    tl.atomic_add(total, by_program, sem="relaxed")


def _triton(
    pool_layer: torch.Tensor, slots: torch.Tensor, first_position: int,
    elements: int = 2048, num_warps: int = 4, columns: int = 32, programs: int = 132 * 8,
) -> torch.Tensor:  # fmt: skip
    words = _words(pool_layer)
    num_words, device = words.shape[1], words.device
    total = torch.zeros((), dtype=torch.int64, device=device)
    if len(slots):
        rows = min(elements // columns, max(16, triton.next_power_of_2(len(slots)) // 32))
        pieces = triton.cdiv(num_words, columns)
        _checksum_kernel[(min(programs, triton.cdiv(len(slots), rows) * pieces),)](
            words, slots, position_weights(first_position, len(slots), device), _column_weights(num_words, device), total,
            _addend_of_a_row(num_words), len(slots), num_words, pieces, rows, columns, 4,
            num_warps=num_warps, **overlap(device),
        )  # fmt: skip
    return total


BACKENDS = (
    Backend("triton", _triton, why_not=needs_triton),
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


@functools.lru_cache(maxsize=32)
def _addend_of_a_row(count: int) -> int:
    """What ADDEND, less `_checksum_kernel`'s 2**31, contributes to a row of `count` words before its position's weight."""
    return _signed((ADDEND - (1 << 31)) * sum(_odd_mix(COLUMN_SEED + column) for column in range(count)))


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
