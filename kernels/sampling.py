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

Triton: the first launch looks at pieces of rows and settles those without cuts. The second takes one program a row: it
narrows a bracket of logits, ordered by their bits, until the few thousand tokens above its lower end fit on the chip.
Where more survive, the bracket closes over the whole row instead, and the noise is made in one more pass.
Source: Gumbel-max in its exponential form; hash and logarithm are those of the engine's noise.
"""

from __future__ import annotations

import torch

from kernels.select import Backend
from kernels.triton_support import jit, needs_triton, tl, triton

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


# --- Triton: parts ---


@jit
def _exponential(key, token):
    """As `exponential`, bit by bit; callers switch fused multiply-adds off."""
    x = (token.to(tl.uint64) + 0x486561647261636A) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    mixed = (key ^ (x ^ (x >> 31)).to(tl.int64)) * 0x7FB5D329728EA185
    mixed = (mixed ^ (mixed >> 32)) * -0x7E25210B43D22BB3
    rest = 1.0 - (((mixed >> 41) & 0x7FFFFF).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    bits = rest.to(tl.int32, bitcast=True)
    mantissa = ((bits & 0x007FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    s = tl.div_rn(1.0 - mantissa, mantissa + 1.0)
    square = s * s
    series = square * 0.09090909090909091 + 0.1111111111111111
    series = series * square + 0.14285714285714285
    series = series * square + 0.2
    series = series * square + 0.3333333333333333
    series = series * square + 1.0
    return series * s * 2.0 + (126 - (bits >> 23)).to(tl.float32) * 0.6931471805599453


@jit
def _ordered(x):
    """int32 that sorts as the fp32 value does, the two zeros alike."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def _value(key):
    """Back from `_ordered`."""
    key = key.to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def _scaled(row, at, vocab, heat):
    return tl.div_rn(tl.load(row + at, at < vocab, float("-inf")), heat + tl.zeros_like(at).to(tl.float32))


@jit
def _has_cut(k, p, relative, vocab):
    return ((k > 0) & (k < vocab)) | (p < 1.0) | (relative > 0.0)


@jit
def _first_best(scores, tokens, vocab):
    return tl.min(tl.where(scores == tl.max(scores), tokens, vocab))


# --- Triton: the first launch ---


@jit
def _survey(
    logits, row_stride, keys, temperature, top_k, top_p, min_p, floats, tokens, vocab,
    PIECES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of one piece of a row: floats [rows, 3, pieces] largest, weight, best score; tokens [rows, pieces] who."""
    row, piece = (tl.program_id(0) // PIECES).to(tl.int64), tl.program_id(0) % PIECES
    heat = tl.load(temperature + row)
    at = piece * BLOCK + tl.arange(0, BLOCK)
    greedy = heat < 1e-5
    x = _scaled(logits + row * row_stride, at, vocab, tl.where(greedy, 1.0, heat))
    most = tl.max(x)
    weight = tl.exp(x - tl.where(most == float("-inf"), 0.0, most))
    score, token = 0.0, _first_best(x, at, vocab)
    k = tl.load(top_k + row)
    cut = _has_cut(k, tl.load(top_p + row), tl.load(min_p + row), vocab)
    if (greedy | cut) == 0:
        scores = tl.where(at < vocab, weight / _exponential(tl.load(keys + row), at), -1.0)
        score, token = tl.max(scores), _first_best(scores, at, vocab)
    place = floats + row * (3 * PIECES) + piece
    tl.store(place, most)
    tl.store(place + PIECES, tl.sum(weight))
    tl.store(place + 2 * PIECES, score)
    tl.store(tokens + row * PIECES + piece, token)


# --- Triton: the second launch ---


@jit
def _weigh(row, heat, most, low, middle, high, vocab, BLOCK: tl.constexpr):
    """Weights, then counts, of the tokens at or above each of three keys."""
    a, b, c = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    i, j, k = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        x = _scaled(row, start + tl.arange(0, BLOCK), vocab, heat)
        key, weight = _ordered(x), tl.exp(x - most)
        a += tl.where(key >= low, weight, 0.0)
        b += tl.where(key >= middle, weight, 0.0)
        c += tl.where(key >= high, weight, 0.0)
        i += (key >= low).to(tl.int32)
        j += (key >= middle).to(tl.int32)
        k += (key >= high).to(tl.int32)
    return tl.sum(a), tl.sum(b), tl.sum(c), tl.sum(i), tl.sum(j), tl.sum(k)


@jit
def _narrow(
    row, heat, most, need, lo, hi, count, vocab, BY_COUNT: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr
):
    """Raises lo, lowers hi: what is at or above lo still reaches `need`, at or above hi no more.

    Ends when lo is the edge itself (hi == lo + 1) or `count`, of the tokens at or above lo, fits in ROOM.
    """
    low, middle = _ordered(most - 10.0).to(tl.int64), _ordered(most - 5.0).to(tl.int64)  # few rows need another look
    high = _ordered(most - 2.0).to(tl.int64)
    while (hi - lo > 1) & (count > ROOM):
        low, middle, high = tl.maximum(low, lo), tl.maximum(middle, lo), tl.maximum(high, lo)
        low, middle, high = tl.minimum(low, hi), tl.minimum(middle, hi), tl.minimum(high, hi)
        a, b, c, i, j, k = _weigh(
            row, heat, most, low.to(tl.int32), middle.to(tl.int32), high.to(tl.int32), vocab, BLOCK
        )
        if BY_COUNT:
            a, b, c = i.to(tl.float32), j.to(tl.float32), k.to(tl.float32)
        if a >= need:
            lo, count = low, i
        if b >= need:
            lo, count = middle, j
        if c >= need:
            lo, count = high, k
        if c < need:
            hi = high
        if b < need:
            hi = middle
        if a < need:
            hi = low
        step = hi - lo
        low, middle, high = lo + step // 4, lo + step // 2, lo + step * 3 // 4
    return lo, hi, count


@jit
def _edge(key, weight, need, lo, hi):
    """The largest key at which the weight of what is at or above it reaches `need`; lo if none does."""
    while hi - lo > 1:
        middle = lo + (hi - lo) // 2
        if tl.sum(tl.where(key >= middle.to(tl.int32), weight, 0.0)) >= need:
            lo = middle
        else:
            hi = middle
    return lo


@jit
def _ties_to_keep(need, above, edge, most, ties):
    """How many of `ties` tokens on the edge it takes to reach `need`, at least one."""
    fewest = tl.ceil(tl.div_rn(need - above, tl.exp(_value(edge) - most)))
    return tl.minimum(tl.maximum(fewest, 1.0), ties.to(tl.float32)).to(tl.int32)


@jit
def _choose_gathered(
    row, room, key_of_noise, heat, most, total, k, top_p, min_p, lo, hi, vocab, ROOM: tl.constexpr, BLOCK: tl.constexpr
):
    """Brings the few tokens at or above lo together, in order of id, and does the rest in registers. k 0: done already."""
    found = 0
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        key = _ordered(_scaled(row, at, vocab, heat))
        take = key >= lo.to(tl.int32)
        place = room + found + tl.cumsum(take.to(tl.int32)) - 1
        tl.store(place, key, take)
        tl.store(place + ROOM, at, take)
        found += tl.sum(take.to(tl.int32))
    tl.debug_barrier()  # what other threads stored is read here
    slot = tl.arange(0, ROOM)
    key = tl.load(room + slot, slot < found, -0x7FFFFFFF)
    token = tl.load(room + ROOM + slot, slot < found, vocab)
    weight = tl.where(slot < found, tl.exp(_value(key) - most), 0.0)
    edge, limit = lo, vocab
    if k > 0:
        edge = _edge(key, (slot < found).to(tl.float32), k, lo, hi)
        total = tl.sum(tl.where(key >= edge.to(tl.int32), weight, 0.0))
    if top_p < 1.0:
        edge = _edge(key, weight, top_p * total, edge, hi)
        tie = key == edge.to(tl.int32)
        ties, above = tl.sum(tie.to(tl.int32)), tl.sum(tl.where(key > edge.to(tl.int32), weight, 0.0))
        keep = _ties_to_keep(top_p * total, above, edge, most, ties)
        if keep < ties:
            limit = tl.max(tl.where(tie & (tl.cumsum(tie.to(tl.int32)) == keep), token, -1))
    kept = (key > edge.to(tl.int32)) | ((key == edge.to(tl.int32)) & (token <= limit))
    kept = kept & (weight >= min_p) & (slot < found)
    return _first_best(tl.where(kept, weight / _exponential(key_of_noise, token), -1.0), token, vocab)


@jit
def _limit_in_row(row, heat, edge, keep, vocab, BLOCK: tl.constexpr):
    """The id of the keep-th token on the edge."""
    seen, limit = 0, vocab
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tie = (_ordered(_scaled(row, at, vocab, heat)) == edge).to(tl.int32)
        limit = tl.minimum(limit, tl.min(tl.where((tie > 0) & (seen + tl.cumsum(tie) == keep), at, vocab)))
        seen += tl.sum(tie)
    return limit


@jit
def _choose_in_row(row, key_of_noise, heat, most, total, top_p, min_p, edge, vocab, BLOCK: tl.constexpr):
    """As `_choose_gathered` when too many tokens survive: `edge` is exact, and the row is read once more or twice."""
    limit, edge = vocab, edge.to(tl.int32)
    if top_p < 1.0:
        _, above, _, upto, beyond, _ = _weigh(row, heat, most, edge, edge + 1, edge + 1, vocab, BLOCK)
        keep = _ties_to_keep(top_p * total, above, edge, most, upto - beyond)
        if keep < upto - beyond:
            limit = _limit_in_row(row, heat, edge, keep, vocab, BLOCK)
    best, winner = tl.full([BLOCK], -1.0, tl.float32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = _scaled(row, at, vocab, heat)
        key, weight = _ordered(x), tl.exp(x - most)
        kept = ((key > edge) | ((key == edge) & (at <= limit))) & (weight >= min_p) & (at < vocab)
        if tl.max(kept.to(tl.int32)) > 0:
            score = tl.where(kept, weight / _exponential(key_of_noise, at), -1.0)
            winner = tl.where(score > best, at, winner)
            best = tl.maximum(score, best)
    return _first_best(best, winner, vocab)


@jit
def _settle(
    logits, row_stride, keys, temperature, top_k, top_p, min_p, floats, tokens, rooms, out, vocab,
    PIECES: tl.constexpr, PIECES_BLOCK: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: from its pieces where it has no cut; else the cuts and the noise."""
    row = tl.program_id(0).to(tl.int64)
    heat, k = tl.load(temperature + row), tl.load(top_k + row)
    p, relative = tl.load(top_p + row), tl.load(min_p + row)
    k = tl.where(k >= vocab, 0, k)
    piece = tl.arange(0, PIECES_BLOCK)
    mine, place = piece < PIECES, floats + row * (3 * PIECES) + piece
    largest = tl.load(place, mine, float("-inf"))
    most = tl.max(largest)
    factor = tl.where(largest == most, 1.0, tl.exp(largest - most))
    total = tl.sum(tl.load(place + PIECES, mine, 0.0) * factor)
    token = tl.load(tokens + row * PIECES + piece, mine, vocab)
    start, key = logits + row * row_stride, tl.load(keys + row)
    room = rooms + row * (2 * ROOM)
    if (heat < 1e-5) | (most == float("-inf")):
        winner = _first_best(largest, token, vocab)
    elif _has_cut(k, p, relative, vocab) == 0:
        winner = _first_best(tl.load(place + 2 * PIECES, mine, -1.0) * factor, token, vocab)
    else:
        top = _ordered(most).to(tl.int64) + 1
        lo = top * 0 - 0x7F800000  # above -inf
        hi, count = top, vocab
        if k > 0:
            lo, hi, count = _narrow(start, heat, most, k.to(tl.float32), lo, hi, count, vocab, True, ROOM, BLOCK)
            if count > ROOM:
                total, _, _, _, _, _ = _weigh(
                    start, heat, most, lo.to(tl.int32), lo.to(tl.int32), lo.to(tl.int32), vocab, BLOCK
                )
                k = 0
        if (count > ROOM) & (p < 1.0):
            lo, hi, count = _narrow(start, heat, most, p * total, lo, top, count, vocab, False, ROOM, BLOCK)
        if count > ROOM:
            winner = _choose_in_row(start, key, heat, most, total, p, relative, lo, vocab, BLOCK)
        else:
            winner = _choose_gathered(start, room, key, heat, most, total, k, p, relative, lo, top, vocab, ROOM, BLOCK)
    tl.store(out + row, winner.to(tl.int64))


PIECE, BLOCK, ROOM = 4096, 4096, 4096


def _triton(
    logits: torch.Tensor,
    keys: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    return _launch(logits, keys, temperature, top_k, top_p, min_p, PIECE, BLOCK, ROOM, 8, 16)


def _launch(
    logits, keys, temperature, top_k, top_p, min_p, piece, block, room, survey_warps, settle_warps
) -> torch.Tensor:
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return out
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(
            f"logits {logits.dtype} with strides {logits.stride()}: fp32 and a dense last dimension are needed"
        )
    piece = min(piece, triton.next_power_of_2(vocab))
    block = min(block, triton.next_power_of_2(vocab))
    pieces = triton.cdiv(vocab, piece)
    floats = torch.empty(rows, 3, pieces, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, pieces, dtype=torch.int32, device=logits.device)
    rooms = torch.empty(rows, 2, room, dtype=torch.int32, device=logits.device)
    columns = (logits, logits.stride(0), keys, temperature, top_k, top_p, min_p, floats, tokens)
    _survey[(rows * pieces,)](
        *columns, vocab, PIECES=pieces, BLOCK=piece, num_warps=survey_warps, enable_fp_fusion=False
    )
    _settle[(rows,)](
        *columns, rooms, out, vocab, PIECES=pieces, PIECES_BLOCK=triton.next_power_of_2(pieces), ROOM=room, BLOCK=block,
        num_warps=settle_warps, enable_fp_fusion=False,
    )  # fmt: skip
    return out


BACKENDS = (
    Backend("triton", _triton, why_not=needs_triton),
    Backend("reference", reference),
)
