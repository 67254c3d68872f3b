"""Triton kernels of `kernels.rows.sampling`, in five launches.

`_survey`   reads each piece of a few rows: its largest logit, its weight, and who wins it, if nothing is cut.
`_weigh`    of rows with cuts: what lies at or above six depths below the row's largest logit, piece by piece.
`_collect`  brings the tokens that may survive together, in order of id, where they fit in the row's room.
`_settle`   one program a row: the winner of the pieces, or the cuts and the noise over the room.
`_search`   the rows with more survivors than room: the same over the whole row, read several times.

Tokens are compared by int32 keys that sort as their scaled logits do, so a cut is an exact key, found by bisection.
Sums have one order whatever the batch is. Fused multiply-adds are off wherever noise is made: it has the engine's bits.
"""

from __future__ import annotations

from kernels.toolchain.triton_support import jit, tl

# --- parts ---


@jit
def _hash(token):
    """int64 of each token id (int32, not negative)."""
    x = (token.to(tl.uint32).to(tl.uint64) + 0x486561647261636A) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return (x ^ (x >> 31)).to(tl.int64)


@jit
def _uniform(key, hashes):
    """fp32 in (0, 1), exact: the variate is -log of one minus it."""
    mixed = (key ^ hashes) * 0x7FB5D329728EA185
    mixed = (mixed ^ (mixed >> 32)) * -0x7E25210B43D22BB3
    return (((mixed >> 41) & 0x7FFFFF).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@jit
def _minus_log(x):
    bits = x.to(tl.int32, bitcast=True)
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
def _exponential(key, hashes):
    return _minus_log(1.0 - _uniform(key, hashes))


@jit
def _nearly_exponential(key, hashes):
    """Within 2 ** -14 of `_exponential`, at half its price: -log(1 - t) is t times a polynomial, for t up to 1/2."""
    bits = (1.0 - _uniform(key, hashes)).to(tl.int32, bitcast=True)
    t = 1.0 - ((bits & 0x007FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    series = tl.fma(t, 0.7313795685768127, -0.04428951442241669)
    series = tl.fma(tl.fma(series, t, 0.39169299602508545), t, 0.4961758852005005)
    return tl.fma(tl.fma(series, t, 1.0000386238098145), t, (126 - (bits >> 23)).to(tl.float32) * 0.6931471805599453)


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
    """Logits over temperature, rounded as IEEE division does: product, exact rest, correction."""
    x = tl.load(row + at, at < vocab, float("-inf"))
    inverse = tl.div_rn(1.0, heat)
    quotient = x * inverse
    rest = tl.fma(-quotient, heat + tl.zeros_like(x), x)
    return tl.where(
        rest == rest, tl.fma(rest, inverse + tl.zeros_like(x), quotient), quotient
    )  # infinities have no rest


@jit
def _keyed(row, at, vocab, heat, most):
    """Key and weight of some tokens of a row; beyond the vocabulary a key below all others."""
    x = _scaled(row, at, vocab, heat)
    return tl.where(at < vocab, _ordered(x), -0x7FFFFFFF), tl.exp(x - most)


@jit
def _first_best(scores, tokens, vocab):
    return tl.min(tl.where(scores == tl.max(scores), tokens, vocab))


@jit
def _has_cut(k, p, relative, vocab):
    return ((k > 0) & (k < vocab)) | (p < 1.0) | (relative > 0.0)


# --- every row, in pieces ---


@jit
def _survey(
    logits, row_stride, keys, temperature, top_k, top_p, min_p, floats, tokens, rows, vocab,
    PIECES: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """GROUP rows share one computation of their tokens' hashes.

    floats [rows, 2, pieces]: largest scaled logit, weight relative to it; tokens [rows, pieces]: who wins its piece.
    """
    group, piece = tl.program_id(0) // PIECES, tl.program_id(0) % PIECES
    at = piece * BLOCK + tl.arange(0, BLOCK)
    all_rows = group * GROUP + tl.arange(0, GROUP)
    heats = tl.load(temperature + all_rows, all_rows < rows, 0.0)
    cut = _has_cut(
        tl.load(top_k + all_rows, all_rows < rows, 0), tl.load(top_p + all_rows, all_rows < rows, 1.0),
        tl.load(min_p + all_rows, all_rows < rows, 0.0), vocab,
    )  # fmt: skip
    hashes = tl.zeros([BLOCK], tl.int64)
    if tl.max(((heats >= 1e-5) & (cut == 0)).to(tl.int32)) > 0:
        hashes = _hash(at)
    for i in range(GROUP):
        row = (group * GROUP + i).to(tl.int64)
        if row < rows:
            heat = tl.load(temperature + row)
            start, whose = logits + row * row_stride, tokens + row * PIECES + piece
            place = floats + row * (2 * PIECES) + piece
            if heat < 1e-5:
                x = tl.load(start + at, at < vocab, float("-inf"))
                tl.store(place, tl.max(x))
                tl.store(whose, tl.minimum(_first_best(x, at, vocab), vocab - 1))  # of NaN: some token
            else:
                x = _scaled(start, at, vocab, heat)
                most = tl.max(x)
                weight = tl.exp(x - tl.where(most == float("-inf"), 0.0, most))
                tl.store(place, most)
                tl.store(place + PIECES, tl.sum(weight))
                if _has_cut(tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row), vocab) == 0:
                    winner = _best_of_piece(weight, tl.load(keys + row), hashes, BLOCK)
                    tl.store(whose, tl.minimum(piece * BLOCK + winner, vocab - 1))


@jit
def _best_of_piece(weight, key, hashes, BLOCK: tl.constexpr):
    """Where weight / variate is largest. Cheap variates find it; exact ones decide between those too near."""
    place, root = tl.arange(0, BLOCK), tl.rsqrt(_nearly_exponential(key, hashes))
    scores = weight * root * root
    near = scores >= tl.max(scores) * 0.99975
    winner = tl.sum(tl.where(near, 65536 + place, 0))  # one: 65536 and its place; more: at least 131072
    if winner >= 131072:
        winner = _first_best(tl.where(near, weight / _exponential(key, hashes), -1.0), place, BLOCK)
    return winner & 65535


# --- rows with cuts, in pieces ---


@jit
def _depth(most, i: tl.constexpr):
    """Key of a scaled logit below the row's largest; i from 0, the deepest, to 5."""
    return _ordered(most - (14.0 - 2.4 * i))


@jit
def _largest(floats, row, PIECES: tl.constexpr, PIECES_BLOCK: tl.constexpr):
    piece = tl.arange(0, PIECES_BLOCK)
    return tl.max(tl.load(floats + row * (2 * PIECES) + piece, piece < PIECES, float("-inf")))


@jit
def _total(floats, row, most, PIECES: tl.constexpr, PIECES_BLOCK: tl.constexpr):
    piece = tl.arange(0, PIECES_BLOCK)
    place = floats + row * (2 * PIECES) + piece
    largest = tl.load(place, piece < PIECES, float("-inf"))
    return tl.sum(tl.load(place + PIECES, piece < PIECES, 0.0) * tl.exp(largest - most))


@jit
def _weigh(
    logits, row_stride, temperature, top_k, top_p, min_p, floats, table, vocab,
    PIECES: tl.constexpr, PIECES_BLOCK: tl.constexpr, BLOCK: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """table [rows, 12, pieces] fp32: weights, then counts, at or above each of the six depths. TURNS pieces a program."""
    turns: tl.constexpr = (PIECES + TURNS - 1) // TURNS
    row, first = (tl.program_id(0) // turns).to(tl.int64), tl.program_id(0) % turns * TURNS
    heat = tl.load(temperature + row)
    is_cut = _has_cut(tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row), vocab)
    if (heat >= 1e-5) & is_cut:
        most = _largest(floats, row, PIECES, PIECES_BLOCK)
        for piece in range(first, tl.minimum(first + TURNS, PIECES)):
            at = piece * BLOCK + tl.arange(0, BLOCK)
            key, weight = _keyed(logits + row * row_stride, at, vocab, heat, most)
            place = table + row * (12 * PIECES) + piece
            for i in tl.static_range(6):
                tl.store(place + i * PIECES, tl.sum(tl.where(key >= _depth(most, i), weight, 0.0)))
            for i in tl.static_range(3):  # two counts, each below 2 ** 16, in one sum
                both = (key >= _depth(most, 2 * i)).to(tl.int32) + ((key >= _depth(most, 2 * i + 1)).to(tl.int32) << 16)
                counts = tl.sum(both)
                tl.store(place + (6 + 2 * i) * PIECES, (counts & 0xFFFF).to(tl.float32))
                tl.store(place + (7 + 2 * i) * PIECES, (counts >> 16).to(tl.float32))


@jit
def _of_row(table, row, which, PIECES: tl.constexpr, PIECES_BLOCK: tl.constexpr):
    """One line of the table."""
    piece = tl.arange(0, PIECES_BLOCK)
    return tl.load(table + row * (12 * PIECES) + which * PIECES + piece, piece < PIECES, 0.0)


@jit
def _bracket(table, row, most, total, k, p, relative, vocab, PIECES: tl.constexpr, PIECES_BLOCK: tl.constexpr):
    """Two neighbouring depths with the first cut between them, as a bracket: keys lo and hi (int64), how many tokens are
    at or above lo, count and weight at or above hi. And which depth lo is (-1: below all)."""
    lo, hi = most.to(tl.int64) * 0 - 0x7F800000, _ordered(most).to(tl.int64) + 1
    count, which, above_count, above, below = vocab, -1, 0, 0.0, 1
    for i in tl.static_range(6):
        key = _depth(most, i).to(tl.int64)
        weight = tl.sum(_of_row(table, row, i, PIECES, PIECES_BLOCK))
        many = tl.sum(_of_row(table, row, 6 + i, PIECES, PIECES_BLOCK)).to(tl.int32)
        if k > 0:
            reached = many >= k
        elif p < 1.0:
            reached = weight >= p * total
        else:
            reached = tl.exp(_value(key) - most) <= relative * 0.999
        if reached:
            lo, count, which = key, many, i
        elif below > 0:
            hi, above_count, above, below = key, many, weight, 0
    return (lo, hi, count, above_count, above), which


@jit
def _collect(
    logits, row_stride, temperature, top_k, top_p, min_p, floats, table, rooms, vocab,
    PIECES: tl.constexpr, PIECES_BLOCK: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """rooms [rows, 2, ROOM] int32: keys, then ids, of all tokens at or above lo, if there is room for them."""
    turns: tl.constexpr = (PIECES + TURNS - 1) // TURNS
    row, first = (tl.program_id(0) // turns).to(tl.int64), tl.program_id(0) % turns * TURNS
    heat, k = tl.load(temperature + row), tl.load(top_k + row)
    p, relative = tl.load(top_p + row), tl.load(min_p + row)
    k = tl.where(k >= vocab, 0, k)
    if (heat >= 1e-5) & _has_cut(k, p, relative, vocab):
        most = _largest(floats, row, PIECES, PIECES_BLOCK)
        total = _total(floats, row, most, PIECES, PIECES_BLOCK)
        bracket, which = _bracket(table, row, most, total, k, p, relative, vocab, PIECES, PIECES_BLOCK)
        if (which >= 0) & (bracket[2] <= ROOM):
            counts, each = _of_row(table, row, 6 + which, PIECES, PIECES_BLOCK), tl.arange(0, PIECES_BLOCK)
            for piece in range(first, tl.minimum(first + TURNS, PIECES)):
                if tl.sum(tl.where(each == piece, counts, 0.0)) > 0.0:
                    before = tl.sum(tl.where(each < piece, counts, 0.0)).to(tl.int32)
                    at = piece * BLOCK + tl.arange(0, BLOCK)
                    key, weight = _keyed(logits + row * row_stride, at, vocab, heat, most)
                    _put(rooms + row * (2 * ROOM), before, key >= bracket[0].to(tl.int32), key, at, ROOM)


@jit
def _put(room, before, take, key, at, ROOM: tl.constexpr):
    place = room + before + tl.cumsum(take.to(tl.int32)) - 1
    tl.store(place, key, take)
    tl.store(place + ROOM, at, take)


# --- one row ---


@jit
def _edge(key, measure, need, base, lo, hi):
    """The largest key at which `base` and the measure of what is at or above it reach `need`; lo if none does."""
    while hi - lo > 1:
        middle = lo + (hi - lo) // 2
        if base + tl.sum(tl.where(key >= middle.to(tl.int32), measure, 0.0)) >= need:
            lo = middle
        else:
            hi = middle
    return lo


@jit
def _ties_to_keep(need, above, edge, most, ties):
    """How many of `ties` tokens on the edge it takes to reach `need`, at least one."""
    fewest = tl.ceil(tl.div_rn(need - above, tl.exp(_value(edge) - most)))
    return tl.minimum(tl.maximum(fewest, 1.0), ties * 1.0).to(tl.int32)


@jit
def _last_tie(key, token, edge, need, above, most, vocab):
    """The id of the last token on the edge that stays; tokens are in order of id."""
    tie = (key == edge.to(tl.int32)).to(tl.int32)
    ties = tl.sum(tie)
    keep, limit = _ties_to_keep(need, above, edge, most, ties), vocab
    if keep < ties:
        limit = tl.max(tl.where((tie > 0) & (tl.cumsum(tie) == keep), token, -1))
    return limit


@jit
def _in_room(room, found, most, vocab, ROOM: tl.constexpr, TILE: tl.constexpr):
    """Keys, ids and weights of the tokens in a room, of which TILE slots are looked at."""
    slot = tl.arange(0, TILE)
    key = tl.load(room + slot, slot < found, -0x7FFFFFFF)
    token = tl.load(room + ROOM + slot, slot < found, vocab)
    return key, token, tl.where(slot < found, tl.exp(_value(key) - most), 0.0)


@jit
def _choose_among_few(
    room, noise_key, most, total, k, p, relative, bracket, vocab, ROOM: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """All that may survive is in the room."""
    lo, hi, found, above_count, above = bracket
    key, token, weight = _in_room(room, found, most, vocab, ROOM, TILE)
    edge, limit = lo, vocab
    if k > 0:
        edge = _edge(key, (key > -0x7FFFFFFF).to(tl.float32), k, 0.0, lo, hi)
        total = tl.sum(tl.where(key >= edge.to(tl.int32), weight, 0.0))
        hi = _ordered(most).to(tl.int64) + 1
    if p < 1.0:
        edge = _edge(key, weight, p * total, 0.0, edge, hi)
        heavier = tl.sum(tl.where(key > edge.to(tl.int32), weight, 0.0))
        limit = _last_tie(key, token, edge, p * total, heavier, most, vocab)
    kept = (key > edge.to(tl.int32)) | ((key == edge.to(tl.int32)) & (token <= limit))
    kept = kept & (weight >= relative) & (token < vocab)
    return _first_best(tl.where(kept, weight / _exponential(noise_key, _hash(token)), -1.0), token, vocab)


@jit
def _narrow(line, need, bracket, BY_COUNT: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr):
    """A bracket around the edge, a quarter as wide each time, until its tokens fit in the room or it holds one key."""
    row, heat, most, vocab = line
    lo, hi, count, above_count, above = bracket
    while (hi - lo > 1) & (count - above_count > ROOM):
        low, middle, high = lo + (hi - lo) // 4, lo + (hi - lo) // 2, lo + (hi - lo) * 3 // 4
        a, b, c = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        i, j, k = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
        for start in tl.range(0, vocab, BLOCK, num_stages=3):
            key, weight = _keyed(row, start + tl.arange(0, BLOCK), vocab, heat, most)
            a += tl.where(key >= low.to(tl.int32), weight, 0.0)
            b += tl.where(key >= middle.to(tl.int32), weight, 0.0)
            c += tl.where(key >= high.to(tl.int32), weight, 0.0)
            i += (key >= low.to(tl.int32)).to(tl.int32)
            j += (key >= middle.to(tl.int32)).to(tl.int32)
            k += (key >= high.to(tl.int32)).to(tl.int32)
        bracket = (lo, hi, count, above_count, above)
        bracket = _step(bracket, low, tl.sum(a), tl.sum(i), need, BY_COUNT)
        bracket = _step(bracket, middle, tl.sum(b), tl.sum(j), need, BY_COUNT)
        lo, hi, count, above_count, above = _step(bracket, high, tl.sum(c), tl.sum(k), need, BY_COUNT)
    return lo, hi, count, above_count, above


@jit
def _step(bracket, key, weight, many, need, BY_COUNT: tl.constexpr):
    """`key` becomes an end of the bracket, unless it lies outside already."""
    lo, hi, count, above_count, above = bracket
    reached = weight >= need
    if BY_COUNT:
        reached = many.to(tl.float32) >= need
    if reached:
        lo, count = tl.maximum(lo, key), tl.minimum(count, many)
    elif key < hi:
        hi, above_count, above = key, many, weight
    return lo, hi, count, above_count, above


@jit
def _closed(line, room, need, bracket, BY_COUNT: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr):
    """The edge over the whole row: its key, the weight at or above it, and the last id that stays on it."""
    row, heat, most, vocab = line
    lo, hi, count, above_count, above = _narrow(line, need, bracket, BY_COUNT, ROOM, BLOCK)
    edge, upto, limit = lo, above, vocab
    if count - above_count <= ROOM:
        found = 0
        for start in tl.range(0, vocab, BLOCK, num_stages=3):
            at = start + tl.arange(0, BLOCK)
            key, weight = _keyed(row, at, vocab, heat, most)
            take = (key >= lo.to(tl.int32)) & (key < hi.to(tl.int32))
            many = tl.sum(take.to(tl.int32))
            if many > 0:
                _put(room, found, take, key, at, ROOM)
            found += many
        tl.debug_barrier()  # what other threads stored is read here
        key, token, weight = _in_room(room, found, most, vocab, ROOM, ROOM)
        if BY_COUNT:
            edge = _edge(key, (key > -0x7FFFFFFF).to(tl.float32), need, above_count * 1.0, lo, hi)
        else:
            edge = _edge(key, weight, need, above, lo, hi)
        heavier = above + tl.sum(tl.where(key > edge.to(tl.int32), weight, 0.0))
        upto = heavier + tl.sum(tl.where(key == edge.to(tl.int32), weight, 0.0))
        if not BY_COUNT:
            limit = _last_tie(key, token, edge, need, heavier, most, vocab)
        tl.debug_barrier()  # the room is used again
    else:  # many tokens share one logit
        ties = count - above_count
        upto = above + ties * 1.0 * tl.exp(_value(edge) - most)
        keep = _ties_to_keep(need, above, edge, most, ties)
        if (BY_COUNT == 0) & (keep < ties):
            limit = _last_tie_in_row(row, heat, edge.to(tl.int32), keep, vocab, BLOCK)
    return edge, upto, limit


@jit
def _last_tie_in_row(row, heat, edge, keep, vocab, BLOCK: tl.constexpr):
    seen, limit = 0, vocab
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tie = (_ordered(_scaled(row, at, vocab, heat)) == edge).to(tl.int32)
        limit = tl.minimum(limit, tl.min(tl.where((tie > 0) & (seen + tl.cumsum(tie) == keep), at, vocab)))
        seen += tl.sum(tie)
    return limit


@jit
def _choose_among_many(
    line, room, noise_key, total, k, p, relative, bracket, ROOM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The edges over the whole row, then the noise in one more reading."""
    row, heat, most, vocab = line
    edge, limit = bracket[0], vocab
    if k > 0:
        edge, total, limit = _closed(line, room, k.to(tl.float32), bracket, True, ROOM, BLOCK)
        # how many are at or above the edge is not known: `vocab` makes the next search go on to its end
        bracket = (edge, _ordered(most).to(tl.int64) + 1, vocab, 0, 0.0)
    if p < 1.0:
        edge, upto, limit = _closed(line, room, p * total, bracket, False, ROOM, BLOCK)
    best, winner = tl.full([BLOCK], -1.0, tl.float32), tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, vocab, BLOCK, num_stages=3):
        at = start + tl.arange(0, BLOCK)
        key, weight = _keyed(row, at, vocab, heat, most)
        kept = (key > edge.to(tl.int32)) | ((key == edge.to(tl.int32)) & (at <= limit))
        kept = kept & (weight >= relative) & (at < vocab)
        score = tl.where(kept, weight / _exponential(noise_key, _hash(at)), -1.0)
        winner = tl.where(score > best, at, winner)
        best = tl.maximum(score, best)
    return _first_best(best, winner, vocab)


@jit
def _settle(
    logits, row_stride, keys, temperature, top_k, top_p, min_p, floats, tokens, table, rooms, out, vocab,
    PIECES: tl.constexpr, PIECES_BLOCK: tl.constexpr, ROOM: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """One program a row; out is -1 where the cuts leave more than ROOM tokens to choose from."""
    row = tl.program_id(0).to(tl.int64)
    heat, k = tl.load(temperature + row), tl.load(top_k + row)
    p, relative = tl.load(top_p + row), tl.load(min_p + row)
    k = tl.where(k >= vocab, 0, k)
    noise_key, piece = tl.load(keys + row), tl.arange(0, PIECES_BLOCK)
    largest = tl.load(floats + row * (2 * PIECES) + piece, piece < PIECES, float("-inf"))
    most = tl.max(largest)
    if (heat < 1e-5) | (most == float("-inf")):
        winner = _first_best(largest, tl.load(tokens + row * PIECES + piece, piece < PIECES, vocab), vocab)
        winner = tl.where(heat < 1e-5, winner, 0)
    elif _has_cut(k, p, relative, vocab) == 0:
        token = tl.load(tokens + row * PIECES + piece, piece < PIECES, vocab)
        weight = tl.exp(_scaled(logits + row * row_stride, token, vocab, heat) - most)
        scores = tl.where(token < vocab, weight / _exponential(noise_key, _hash(token)), -1.0)
        winner = _first_best(scores, token, vocab)
    else:
        room = rooms + row * (2 * ROOM)
        total = _total(floats, row, most, PIECES, PIECES_BLOCK)
        bracket, which = _bracket(table, row, most, total, k, p, relative, vocab, PIECES, PIECES_BLOCK)
        if (which < 0) | (bracket[2] > ROOM):
            winner = -1
        elif bracket[2] > FEW:
            winner = _choose_among_few(room, noise_key, most, total, k, p, relative, bracket, vocab, ROOM, ROOM)
        else:
            winner = _choose_among_few(room, noise_key, most, total, k, p, relative, bracket, vocab, ROOM, FEW)
    tl.store(out + row, tl.minimum(winner, vocab - 1))


@jit
def _search(
    logits, row_stride, keys, temperature, top_k, top_p, min_p, floats, table, rooms, out, vocab,
    PIECES: tl.constexpr, PIECES_BLOCK: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The rows that `_settle` left at -1."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(out + row) < 0:
        heat, k = tl.load(temperature + row), tl.load(top_k + row)
        p, relative = tl.load(top_p + row), tl.load(min_p + row)
        k = tl.where(k >= vocab, 0, k)
        most = _largest(floats, row, PIECES, PIECES_BLOCK)
        total = _total(floats, row, most, PIECES, PIECES_BLOCK)
        bracket, which = _bracket(table, row, most, total, k, p, relative, vocab, PIECES, PIECES_BLOCK)
        line, room = (logits + row * row_stride, heat, most, vocab), rooms + row * (2 * ROOM)
        winner = _choose_among_many(line, room, tl.load(keys + row), total, k, p, relative, bracket, ROOM, BLOCK)
        tl.store(out + row, tl.minimum(winner, vocab - 1))
