"""One token a row from logits, on the device: temperature, top-k, top-p, min-p and seeded noise.

logits       [num_rows, vocab] fp32   last dimension dense; penalties and biases are in it already; not written to
keys         [num_rows] int64         of the noise: one for each (seed, sample, position)
temperature  [num_rows] fp32          below 1e-5: the largest logit wins (the first of equals), all else is ignored
top_k        [num_rows] int32         0 is off; ties with the last one stay
top_p        [num_rows] fp32          1 is off; the fewest of the likeliest that reach it (ties by id), of what top-k left
min_p        [num_rows] fp32          0 is off; relative to the likeliest token
returns      [num_rows] int64

Of the tokens left, the largest probability / Exp(1) variate wins, the first of equals. A variate is a pure function of
(key, token id), the same bits as `reference` everywhere; probabilities are fp32 exponentials, so a token whose weight
lies within rounding of a cut may fall on the other side of it. A row depends on nothing but itself, and its sums have a
fixed order. -inf is never drawn beside a finite logit; a row of only -inf gives token 0; NaN or +inf give some token.

Triton: five launches (sampling_triton.py), most of them for rows with cuts only; nothing waits for the host. A cut is
found by bisection over the bits of the logits. As a rule a few hundred tokens survive, and they are settled on chip;
where more than `Tiles.room` do, one program reads the whole row several times, which is slower and as exact.
Source: Gumbel-max in its exponential form; hash and logarithm are those of the engine's noise.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.rows import sampling_triton
from kernels.select import Backend
from kernels.toolchain.triton_support import needs_triton, triton

GREEDY_BELOW = 1e-5

# --- plain torch ---


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finish on int64 bits; shifts are logical."""
    for shift, odd in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * odd
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def exponential(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Exp(1) variates in fp32; keys and token ids int64, broadcast against each other."""
    hashes = _mixed((tokens + 0x486561647261636A) * -0x61C8864680B583EB)
    mixed = (keys ^ hashes) * 0x7FB5D329728EA185
    mixed = (mixed ^ (mixed >> 32)) * -0x7E25210B43D22BB3
    x = 1.0 - (((mixed >> 41) & 0x7FFFFF).float() + 0.5) * 2.0**-23
    bits = x.view(torch.int32)
    mantissa = ((bits & 0x007FFFFF) | 0x3F000000).view(torch.float32)
    s = (1.0 - mantissa) / (mantissa + 1.0)
    square, series = s * s, torch.full_like(s, 1 / 11)
    for odd in (9, 7, 5, 3, 1):
        series = series * square + 1 / odd
    return series * s * 2.0 + (126 - (bits >> 23)).float() * 0.6931471805599453


def reference(
    logits: torch.Tensor,
    keys: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Row by row; the host waits for each."""
    columns = (column.tolist() for column in (temperature, top_k, top_p, min_p))
    rows = [_reference_row(*one) for one in zip(logits, keys, *columns, strict=True)]
    return torch.stack(rows) if rows else torch.empty(0, dtype=torch.int64, device=logits.device)


def _reference_row(
    logits: torch.Tensor, key: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    if temperature < GREEDY_BELOW:
        return logits.argmax()
    scaled = logits / torch.tensor(temperature, device=logits.device)
    likely, ids = torch.softmax(scaled, -1).sort(descending=True, stable=True)
    kept, weights = torch.ones_like(ids, dtype=torch.bool), likely.double()
    if 0 < top_k < len(ids):
        kept = scaled[ids] >= scaled.topk(top_k).values[-1]
        weights = weights * kept
    if top_p < 1:
        total = weights.sum() if top_k else 1.0
        kept = kept & (weights.cumsum(0) - weights < top_p * total)
    kept = kept & (likely >= torch.tensor(min_p, device=likely.device) * likely[0])
    kept[0] = True
    scores = torch.full_like(likely, -1.0)
    scores[ids] = torch.where(kept, likely / exponential(key, ids), -1.0)
    return scores.argmax()


# --- Triton ---


class Tiles(NamedTuple):
    """Sizes and warps of the kernels.

    piece   tokens that one program looks at together, at most 65536
    group   rows that share the hashes of a piece
    turns   pieces that one program takes where a row is cut
    room    survivors of the cuts that are settled on chip; few: as a rule there are no more
    block   tokens of one turn where a row is searched as a whole
    *_registers bound the compiler's ILP: without, a third as many pieces are in flight
    """

    piece: int = 2048
    group: int = 4
    turns: int = 8
    room: int = 4096
    few: int = 512
    block: int = 4096
    survey_warps: int = 4
    survey_registers: int | None = 128
    piece_warps: int = 4
    settle_warps: int = 8
    settle_registers: int | None = 128
    search_warps: int = 16


def _triton(
    logits: torch.Tensor,
    keys: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    tiles: Tiles = Tiles(),
) -> torch.Tensor:
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return out
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(f"logits {logits.dtype} {logits.stride()}: fp32 and a dense last dimension are needed")
    piece, block = (min(size, triton.next_power_of_2(vocab)) for size in (tiles.piece, tiles.block))
    group = tiles.group if rows >= 4 * tiles.group else 1
    pieces = triton.cdiv(vocab, piece)
    turns = tiles.turns if rows >= 4 * tiles.turns else 1
    programs = rows * triton.cdiv(pieces, turns)

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(rows, *shape, dtype=dtype, device=logits.device)

    floats, tokens, table = scratch(2, pieces), scratch(pieces, dtype=torch.int32), scratch(12, pieces)
    rooms = scratch(2, tiles.room, dtype=torch.int32)
    of_pieces = {"PIECES": pieces, "PIECES_BLOCK": triton.next_power_of_2(pieces)}
    cuts, stride = (temperature, top_k, top_p, min_p), logits.stride(0)
    sampling_triton._survey[(triton.cdiv(rows, group) * pieces,)](
        logits, stride, keys, *cuts, floats, tokens, rows, vocab,
        PIECES=pieces, BLOCK=piece, GROUP=group, num_warps=tiles.survey_warps,
        maxnreg=tiles.survey_registers, enable_fp_fusion=False,
    )  # fmt: skip
    sampling_triton._weigh[(programs,)](
        logits, stride, *cuts, floats, table, vocab, **of_pieces, BLOCK=piece, TURNS=turns,
        num_warps=tiles.piece_warps, enable_fp_fusion=False,
    )  # fmt: skip
    sampling_triton._collect[(programs,)](
        logits, stride, *cuts, floats, table, rooms, vocab, **of_pieces, ROOM=tiles.room, BLOCK=piece,
        TURNS=turns, num_warps=tiles.piece_warps, enable_fp_fusion=False,
    )  # fmt: skip
    sampling_triton._settle[(rows,)](
        logits, stride, keys, *cuts, floats, tokens, table, rooms, out, vocab, **of_pieces, ROOM=tiles.room,
        FEW=min(tiles.few, tiles.room), num_warps=tiles.settle_warps, maxnreg=tiles.settle_registers,
        enable_fp_fusion=False,
    )  # fmt: skip
    sampling_triton._search[(rows,)](
        logits, stride, keys, *cuts, floats, table, rooms, out, vocab, **of_pieces, ROOM=tiles.room, BLOCK=block,
        num_warps=tiles.search_warps, enable_fp_fusion=False,
    )  # fmt: skip
    return out


BACKENDS = (
    Backend("triton", _triton, why_not=needs_triton),
    Backend("reference", reference),
)
