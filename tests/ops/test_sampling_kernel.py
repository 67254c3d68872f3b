"""The sampling kernel against the engine's own choice of tokens, on random and on adversarial rows.

Where a cut or a race of two scores is decided by rounding, any outcome within rounding is right: `allowed` says so.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from headrace.engine import noise
from headrace.engine.choice import Batched, Cuts
from kernels.rows import sampling
from kernels.rows.sampling import Tiles

ROUNDING = 1e-5


def parameters(count, vocab, seed=0):
    draws = np.random.default_rng(seed)
    return {
        "keys": noise.position_keys(noise.sample_keys(np.arange(count), np.zeros(count, np.int64)), np.arange(count)),
        "temperature": draws.choice([0.0, 0.6, 1.0, 1.7], count, p=[0.1, 0.3, 0.4, 0.2]).astype(np.float32),
        "top_k": draws.choice([0, 0, 0, 1, 5, vocab // 2, vocab], count).astype(np.int32),
        "top_p": draws.choice([1.0, 1.0, 0.9, 0.5, 0.999, 0.01, 1e-9], count).astype(np.float32),
        "min_p": draws.choice([0.0, 0.0, 0.05, 0.5, 1.0], count).astype(np.float32),
    }


def expected(logits, keys, temperature, top_k, top_p, min_p):
    """By headrace.engine.choice, as its sampler calls it."""
    ids = logits.argmax(-1).numpy()
    drawn = np.flatnonzero(temperature >= sampling.GREEDY_BELOW)
    if len(drawn):
        scaled = logits[drawn] / torch.from_numpy(temperature[drawn])[:, None]
        top_k = np.where(top_k >= logits.shape[1], 0, top_k).astype(np.int64)
        cuts = Cuts(top_k[drawn], top_p[drawn], min_p[drawn])
        ids[drawn] = Batched(logits.shape[1]).from_cut(scaled, keys[drawn], cuts)
    return ids


def allowed(token, logits, key, temperature, top_k, top_p, min_p):
    """Whether some rounding of the cuts and scores gives `token`; all in fp64."""
    scaled = (logits / torch.tensor(temperature)).double()
    softmax = torch.softmax(scaled, -1)
    drawn = noise.exponential(torch.tensor([[int(key)]]), torch.from_numpy(noise.token_hashes(len(logits))))[0].double()
    for by, slack in itertools.product((softmax, scaled), (1 - ROUNDING, 1.0, 1 + ROUNDING)):
        ids = by.sort(descending=True, stable=True).indices
        likely, kept = softmax[ids], torch.ones(len(ids), dtype=torch.bool)
        if 0 < top_k < len(ids):
            kept = scaled[ids] >= scaled.topk(int(top_k)).values[-1]
        weights = likely * kept
        total = weights.sum() if 0 < top_k < len(ids) else 1.0
        if top_p < 1:
            kept &= weights.cumsum(0) - weights < float(top_p) * total * slack
        kept &= likely >= float(min_p) * likely[0] * slack
        kept[0] = True
        scores = torch.where(kept, likely / drawn[ids], -1.0)
        if scores[ids == token] >= scores.max() * (1 - ROUNDING):
            return True
    return False


def check(device, logits, columns, fewest_equal=0.97, tiles=Tiles()):
    """Equal to the engine's choice, or explained by rounding; and rows do not depend on each other."""
    on_device = [torch.from_numpy(column).to(device) for column in columns.values()]
    got = sampling._triton(logits.to(device), *on_device, tiles).cpu().numpy()
    want = expected(logits, **columns)
    different = np.flatnonzero(got != want)
    for row in different:
        one = [column[row] for column in columns.values()]
        assert one[1] >= sampling.GREEDY_BELOW and allowed(got[row], logits[row], *one), (row, got[row], want[row], one)
    assert len(different) <= (1 - fewest_equal) * len(got), (different, got[different], want[different])
    for row in range(0, len(got), max(1, len(got) // 2)):
        alone = sampling._triton(logits[row : row + 1].to(device), *(c[row : row + 1] for c in on_device), tiles)
        assert int(alone) == got[row]


def spread_rows(count, vocab, seed=0):
    draws = np.random.default_rng(seed)
    scale = draws.choice([0.02, 1.0, 3.0, 8.0], (count, 1))
    logits = torch.from_numpy((draws.normal(0, 1, (count, vocab)) * scale).astype(np.float32))
    logits[: count // 4] = logits[: count // 4].round()  # many ties, both zeros
    return logits


def hard_rows(vocab):
    """All equal; one-hot; -inf but one; -inf for half; two levels; huge; steps of one bit; the best at both ends."""
    rows = torch.zeros(10, vocab)
    rows[1, vocab // 3] = 30.0
    rows[2] = float("-inf")
    rows[2, vocab - 1] = -5.0
    rows[3, ::2] = float("-inf")
    rows[4, : vocab // 2] = 1.0
    rows[5] = torch.linspace(-1e6, 1e6, vocab)
    rows[6] = (torch.arange(vocab, dtype=torch.int32) % 7 + 0x3F800000).view(torch.float32)
    rows[7, 0], rows[7, -1] = 4.0, 4.0
    rows[8] = -torch.arange(vocab, dtype=torch.float32) / 4
    rows[9] = -1e-30
    rows[9, 5:] = 0.0
    rows[9, 6::2] = -0.0
    return rows


def test_noise_has_the_engines_bits(triton_device):
    count, vocab = (8, 100) if triton_device.type == "cpu" else (200, 8192)
    keys = torch.from_numpy(parameters(count, vocab)["keys"])
    want = noise.exponential(keys[:, None], torch.from_numpy(noise.token_hashes(vocab)))
    got = sampling.exponential(keys[:, None].to(triton_device), torch.arange(vocab, device=triton_device))
    assert torch.equal(got.cpu(), want)
    # the kernel's, through its choice among equal logits: the smallest variate
    ones, zeros = torch.ones(count, device=triton_device), torch.zeros(count, device=triton_device)
    equal = torch.zeros(count, vocab, device=triton_device)
    got = sampling._triton(equal, keys.to(triton_device), ones, zeros.int(), ones, zeros)
    assert torch.equal(got.cpu(), want.argmin(-1))


@pytest.mark.parametrize("vocab", [40, 257])
def test_reference_is_the_engines_choice(vocab):
    logits, columns = spread_rows(60, vocab), parameters(60, vocab)
    got = sampling.reference(logits, *(torch.from_numpy(column) for column in columns.values()))
    assert got.tolist() == expected(logits, **columns).tolist()


@pytest.mark.parametrize(
    ("vocab", "piece", "block", "room"), [(40, 64, 64, 64), (150, 128, 64, 16), (150, 64, 64, 128)]
)
def test_random_rows_and_cuts(triton_device, vocab, piece, block, room):
    """Small rooms force the form for many survivors, piece and block sizes the walk over a row."""
    count = 8 if triton_device.type == "cpu" else 400
    tiles = Tiles(piece, 2, 2, room, few=8, block=block)
    check(triton_device, spread_rows(count, vocab), parameters(count, vocab, vocab), 0.8, tiles)


CUTS = ({}, {"top_k": 1}, {"top_k": 7}, {"top_p": 0.5}, {"top_p": 1e-9}, {"min_p": 0.3}, {"top_k": 50, "top_p": 0.7})


@pytest.mark.parametrize("room", [8, 128])
def test_hard_rows(triton_device, room):
    """Each row meets some cuts on a CPU (interpreted, hence slow), all of them on a GPU."""
    cases = [(row, cut) for row in range(10) for cut in CUTS]
    if triton_device.type == "cpu":
        cases = cases[room % 3 :: 5]
    columns = parameters(len(cases), 100)
    columns["temperature"][:], columns["top_k"][:], columns["top_p"][:], columns["min_p"][:] = 1.0, 0, 1.0, 0.0
    for place, (_, cut) in enumerate(cases):
        for name, value in cut.items():
            columns[name][place] = value
    check(
        triton_device, hard_rows(100)[[row for row, _ in cases]], columns, 0.7, Tiles(64, 4, 2, room, few=8, block=64)
    )


def test_ties_on_the_edge_stay_for_top_k_and_leave_by_id_for_top_p(triton_device):
    """On a CPU (interpreted, slow) few draws. 16 equal logits: top-k 2 keeps all of them, top-p 1/2 the first eight."""
    count = 4 if triton_device.type == "cpu" else 300
    keys = torch.from_numpy(parameters(count, 40)["keys"]).to(triton_device)
    logits = torch.full((count, 40), -4.0, device=triton_device)
    logits[:, 3:19] = 1.5
    ones, zeros = torch.ones(count, device=triton_device), torch.zeros(count, device=triton_device)
    for top_k, top_p, possible in ((2, 1.0, range(3, 19)), (2, 0.5, range(3, 11)), (0, 1e-6, [3])):
        ks = zeros.int() + top_k
        for room in (8,) if triton_device.type == "cpu" else (8, 64):
            got = sampling._triton(logits, keys, ones, ks, ones * top_p, zeros, Tiles(64, 1, 2, room, few=8, block=64))
            seen = set(got.tolist())
            assert seen <= set(possible) and (count < 300 or seen == set(possible))


def test_rows_without_a_finite_logit_and_no_rows(triton_device):
    logits = torch.full((2, 40), float("-inf"), device=triton_device)
    columns = [torch.from_numpy(column[:2]).to(triton_device) for column in parameters(2, 40).values()]
    columns[1] = torch.ones(2, device=triton_device)
    assert sampling._triton(logits, *columns).tolist() == [0, 0]
    assert sampling._triton(logits[:0], *(column[:0] for column in columns)).shape == (0,)
    broken = torch.full((2, 40), float("nan"), device=triton_device)
    for heat in (0.0, 1.0):
        columns[1] = torch.full((2,), heat, device=triton_device)
        found = sampling._triton(broken, *columns)
        assert bool(((found >= 0) & (found < 40)).all()), (
            "a broken row gives a token that exists: the next step reads it"
        )
    with pytest.raises(ValueError, match="fp32"):
        sampling._triton(logits.double(), *columns)


@pytest.mark.parametrize("vocab", [8192, 129280])
def test_whole_vocabularies(gpu, vocab):
    logits = torch.cat((spread_rows(118, vocab, seed=vocab), hard_rows(vocab)))
    check(gpu, logits, parameters(128, vocab, seed=3), 0.95)


def test_the_same_bits_again_and_in_a_graph(gpu):
    logits = spread_rows(64, 129280, seed=5).to(gpu)
    columns = [torch.from_numpy(column).to(gpu) for column in parameters(64, 129280, seed=6).values()]
    first = sampling._triton(logits, *columns)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = sampling._triton(logits, *columns)
    for _ in range(20):
        again.zero_()
        graph.replay()
        assert torch.equal(again, first)
