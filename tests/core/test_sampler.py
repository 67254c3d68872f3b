"""The sampler against a plain one, and its independence of the batch."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from headrace.engine import noise
from headrace.engine.choice import Batched, Cuts, RowByRow
from headrace.engine.request import finish_reason
from headrace.engine.sampler import Sampled, Sampler
from headrace.engine.sampling_table import Need, SamplingTable, TokenCounts
from headrace.errors import InvalidRequest
from headrace.protocol.common import FinishReason, SamplingParams

VOCAB = 515  # odd on purpose: no row starts at a vector's border


def sample(logits, params, positions=None, prompts=None, outputs=None, sample_indices=None) -> Sampled:
    count = len(logits)
    table = SamplingTable(logits.shape[1], 1)
    for row in range(count):
        table.put(
            row,
            params[row],
            sample_indices[row] if sample_indices else 0,
            prompts[row] if prompts else [],
            outputs[row] if outputs else [],
        )
    positions = np.zeros(count, np.int64) if positions is None else np.asarray(positions)
    return Sampler(logits.shape[1]).sample(logits, table, np.arange(count), positions)


def reference_probabilities(logits, params: SamplingParams, prompt, output, position) -> np.ndarray:
    """What the documented order of operations leaves of one row, in float64, one token at a time."""
    row = logits.astype(np.float64)
    for token in range(len(row)):
        if token in prompt or token in output:
            row[token] = (
                row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
            )
        count = list(output).count(token)
        row[token] -= params.presence_penalty * (count > 0) + params.frequency_penalty * count
    for token, value in params.logit_bias:
        row[token] += value
    if position < params.min_tokens:
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(params.eos_token_ids))
        row[list(ends)] = -np.inf
    row = row / params.temperature
    if 0 < params.top_k < len(row):
        row[row < np.sort(row)[-params.top_k]] = -np.inf
    probs = np.exp(row - row.max())
    probs /= probs.sum()
    if params.top_p < 1:
        before = 0.0
        for token in sorted(range(len(row)), key=lambda one: (-probs[one], one)):
            kept = before < params.top_p
            before += probs[token]
            if not kept:
                probs[token] = 0.0
    if params.min_p > 0:
        probs[probs < params.min_p * probs.max()] = 0.0
    return probs / probs.sum()


MIXED = (
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.1, seed=2),
    SamplingParams(temperature=1.3, top_k=20, seed=3, logprobs=0),
    SamplingParams(temperature=0.9, min_p=0.05, seed=4, presence_penalty=0.5, frequency_penalty=0.3),
    SamplingParams(temperature=2.0, top_k=20, top_p=0.85, min_p=0.25, seed=5, logprobs=3),
    SamplingParams(logit_bias=((3, 4.0), (9, -100.0)), logprobs=5),
    SamplingParams(temperature=0.8, min_tokens=4, eos_token_ids=(1, 2), stop_token_ids=(7,), seed=6),
    SamplingParams(repetition_penalty=1.3),
)


def mixed_batch(count: int, seed: int = 0, vocab: int = VOCAB):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, vocab, generator=generator) * 3
    draws = np.random.default_rng(seed)
    params = [MIXED[row % len(MIXED)] for row in range(count)]
    prompts = [draws.integers(0, vocab, 30).tolist() for _ in range(count)]
    outputs = [draws.integers(0, vocab, 1 + row % 9).tolist() for row in range(count)]
    return logits, params, prompts, outputs, [len(output) for output in outputs]


@pytest.mark.parametrize("vocab", [VOCAB, 8192])
def test_a_row_has_the_same_token_and_logprob_alone_and_among_others(vocab):
    logits, params, prompts, outputs, positions = mixed_batch(45, vocab=vocab)
    together = sample(logits, params, positions, prompts, outputs)
    order = np.random.default_rng(3).permutation(45)
    shuffled = sample(logits[order], *([one[row] for row in order] for one in (params, positions, prompts, outputs)))
    for row in range(45):
        part = slice(row, row + 1)
        alone = sample(logits[part], params[part], positions[part], prompts[part], outputs[part])
        place = int(np.flatnonzero(order == row)[0])
        assert alone.token_ids[0] == together.token_ids[row] == shuffled.token_ids[place]
        if params[row].logprobs is not None:
            assert alone.logprobs[0] == together.logprobs[row] == shuffled.logprobs[place]
            assert alone.top.get(0) == together.top.get(row) == shuffled.top.get(place)


@pytest.mark.parametrize("params", MIXED[1:6] + MIXED[7:8], ids=lambda params: str(params.seed))
def test_tokens_are_drawn_from_the_documented_distribution(params, full):
    """Chi-square over many positions of one row; the bound is six standard deviations."""
    count, vocab = (60_000 if full else 8_000), 40
    row = np.random.default_rng(params.seed).normal(0, 2, vocab).astype(np.float32)
    prompt, output = [1, 5, 9, 30], [5, 5, 17]
    expected = reference_probabilities(row, params, prompt, output, 3) * count
    sampler, table = Sampler(vocab), SamplingTable(vocab, 1)
    table.put(0, dataclasses.replace(params, logprobs=None, min_tokens=params.min_tokens * 10**6), 0, prompt, output)
    logits = torch.from_numpy(row).expand(count, vocab).contiguous()
    drawn = sampler.sample(logits, table, np.zeros(count, np.int64), np.arange(count))
    found = np.bincount(drawn.token_ids, minlength=vocab)
    possible = expected > 0
    assert found[~possible].sum() == 0, "a token that was cut has been drawn"
    common = expected >= 5
    square = ((found - expected)[common] ** 2 / expected[common]).sum()
    freedom = common.sum() - 1
    assert square < freedom + 6 * math.sqrt(2 * freedom), (square, freedom)


@pytest.mark.parametrize("vocab", [40, VOCAB, 8192])
def test_row_by_row_and_batched_choices_are_the_same(vocab):
    draws = np.random.default_rng(vocab)
    count = 120
    scaled = torch.from_numpy(draws.normal(0, 1, (count, vocab)).astype(np.float32) * draws.uniform(0.1, 5, (count, 1)))
    scaled = scaled.float()
    scaled[:20] = scaled[:20].round()  # many ties
    cuts = Cuts(
        draws.choice([0, 0, 1, 5, vocab // 2], count),
        draws.choice([1.0, 0.9, 0.5, 0.999, 0.01], count).astype(np.float32),
        draws.choice([0.0, 0.0, 0.05, 0.5], count).astype(np.float32),
    )
    keys = noise.position_keys(noise.sample_keys(np.arange(count), np.zeros(count, np.int64)), np.arange(count))
    expected = Batched(vocab).from_cut(scaled, keys, cuts)
    assert RowByRow(vocab).from_cut(scaled, keys, cuts).tolist() == expected.tolist()
    for row in range(0, count, 7):
        part = slice(row, row + 1)
        alone = Batched(vocab).from_cut(scaled[part], keys[part], Cuts(*(column[part] for column in cuts)))
        assert alone[0] == expected[row]


def test_greedy_with_penalties_and_bias_follows_the_plain_rule():
    logits, _, prompts, outputs, positions = mixed_batch(12, seed=5)
    params = [
        SamplingParams(
            repetition_penalty=1.0 + 0.1 * row,
            presence_penalty=0.2 * row,
            frequency_penalty=0.3,
            logit_bias=((row, 2.0),),
        )
        for row in range(12)
    ]
    made = sample(logits, params, positions, prompts, outputs)
    for row in range(12):
        plain = dataclasses.replace(params[row], temperature=1.0)
        probs = reference_probabilities(logits[row].numpy(), plain, prompts[row], outputs[row], positions[row])
        assert made.token_ids[row] == probs.argmax()


def test_counting_tokens_step_by_step_equals_counting_them_at_once():
    draws = np.random.default_rng(1)
    prompt, output = draws.integers(0, 300, 50).tolist(), draws.integers(0, 300, 400).tolist()
    grown = TokenCounts(prompt, output[:3])
    for token in output[3:]:
        grown.add(token)
    whole = TokenCounts(prompt, output)
    assert dict(zip(grown.ids.tolist(), grown.counts.tolist(), strict=True)) == dict(
        zip(whole.ids.tolist(), whole.counts.tolist(), strict=True)
    )


def test_end_tokens_cannot_be_drawn_below_min_tokens():
    logits = torch.zeros(2, VOCAB)
    logits[:, 1], logits[:, 7], logits[:, 4] = 9.0, 8.0, 5.0
    params = SamplingParams(min_tokens=3, eos_token_ids=(1,), stop_token_ids=(7, 10**6))
    assert sample(logits, [params] * 2, [2, 3]).token_ids.tolist() == [4, 1]
    ignoring = dataclasses.replace(params, ignore_eos=True)
    assert sample(logits, [ignoring] * 2, [2, 3]).token_ids.tolist() == [1, 1]


def test_logprobs_are_of_the_raw_logits():
    logits, *_ = mixed_batch(3, seed=8)
    params = [
        SamplingParams(temperature=2.0, top_k=3, repetition_penalty=1.5, logprobs=4),
        SamplingParams(logit_bias=((5, 100.0),), logprobs=0),
        SamplingParams(),
    ]
    made = sample(logits, params, prompts=[[1], [], []], outputs=[[2], [], []])
    expected = torch.log_softmax(logits.double(), -1).numpy()
    assert made.token_ids[1] == 5
    for row in range(2):
        assert made.logprobs[row] == pytest.approx(expected[row, made.token_ids[row]], abs=1e-5)
    ids, values = zip(*made.top[0], strict=True)
    assert list(ids) == np.argsort(-expected[0])[:4].tolist() and list(values) == sorted(values, reverse=True)
    assert values == pytest.approx(expected[0, list(ids)], abs=1e-5)
    assert 1 not in made.top and 2 not in made.top


def test_seed_sample_and_position_each_change_the_draw_and_nothing_else_does():
    logits = torch.zeros(1, VOCAB)

    def draw(seed=0, sample_index=0, position=0):
        return int(
            sample(
                logits, [SamplingParams(temperature=1.0, seed=seed)], [position], None, None, [sample_index]
            ).token_ids[0]
        )

    assert draw() == draw()
    for name in ("seed", "sample_index", "position"):
        drawn = {draw(**{name: value}) for value in range(40)}
        assert len(drawn) > 30, f"{name} hardly matters"
    assert draw(seed=-1) == draw(seed=2**64 - 1) and draw(seed=-(2**63)) != draw(seed=2**63 - 1)


def test_noise_is_exponential_and_its_logarithm_is_one():
    keys = torch.from_numpy(
        noise.position_keys(noise.sample_keys(np.arange(64), np.zeros(64, np.int64)), np.arange(64))
    )
    drawn = noise.exponential(keys[:, None], torch.from_numpy(noise.token_hashes(4096))).double().flatten()
    assert abs(drawn.mean() - 1) < 0.01 and abs(drawn.var() - 1) < 0.03
    for at in (1e-3, 0.1, 0.5, 1.0, 3.0, 8.0):
        below, expected = float((drawn < at).double().mean()), 1 - math.exp(-at)
        assert abs(below - expected) < 6 * math.sqrt(expected * (1 - expected) / len(drawn))
    halves = (torch.arange(2**16, dtype=torch.float64) + 0.5) / 2**16
    edges = torch.cat((halves, torch.tensor([2.0**-24, 1 - 2.0**-24, 0.5, 1 - 2.0**-20])))
    made, exact = noise._minus_log(edges.float()).double(), -torch.log(edges.float().double())
    assert float(((made - exact) / exact).abs().max()) < 2e-6


def test_noise_has_the_same_bits_on_every_device_and_in_every_version():
    keys = noise.position_keys(noise.sample_keys(np.array([1, -5]), np.array([0, 3])), np.array([0, 77]))
    drawn = noise.exponential(torch.from_numpy(keys)[:, None], torch.from_numpy(noise.token_hashes(3)))
    assert drawn.view(torch.int32).tolist() == [
        [1049261521, 1050207621, 1083168581],
        [1046752857, 1034196440, 1069291850],
    ]


def test_needs_of_nobody_cost_nothing():
    table = SamplingTable(VOCAB)
    table.put(0, SamplingParams(top_p=0.5, top_k=3), 0, [], [])
    assert table.needs[0] == 0, "cuts do not matter to a greedy row"
    table.put(0, SamplingParams(temperature=1.0, top_k=VOCAB), 0, [], [])
    assert table.needs[0] == Need.NOISE


def test_a_bias_for_a_token_that_does_not_exist_is_the_callers_mistake():
    with pytest.raises(InvalidRequest) as caught:
        SamplingTable(VOCAB).put(0, SamplingParams(logit_bias=((VOCAB, 1.0),)), 0, [], [])
    assert caught.value.field == "sampling.logit_bias"


def test_ties_at_the_top_k_border_and_huge_logits_are_handled():
    logits = torch.zeros(3, VOCAB)
    logits[0, :10] = 5.0
    logits[1, 3] = 1e6
    logits[2] = float("-inf")
    logits[2, 11] = 0.0
    params = [SamplingParams(temperature=0.01, top_k=4, seed=seed) for seed in range(3)]
    made = sample(logits, params)
    assert made.token_ids[0] < 10 and made.token_ids[1:].tolist() == [3, 11]


@pytest.mark.parametrize(
    ("token_id", "position", "total", "expected"),
    [
        (5, 0, 11, FinishReason.NONE),
        (1, 0, 11, FinishReason.NONE),  # below min_tokens
        (1, 1, 12, FinishReason.EOS),
        (7, 1, 12, FinishReason.STOP),
        (5, 9, 20, FinishReason.LENGTH),
        (1, 9, 20, FinishReason.EOS),
        (5, 3, 64, FinishReason.LENGTH),
    ],
)
def test_a_sample_ends_by_one_rule(token_id, position, total, expected):
    params = SamplingParams(max_tokens=10, min_tokens=1, eos_token_ids=(1,), stop_token_ids=(7,))
    assert finish_reason(token_id, params, position, total, 64) is expected


def test_ignored_end_of_text_still_ends_at_a_stop_id():
    params = SamplingParams(max_tokens=10, eos_token_ids=(1,), stop_token_ids=(7,), ignore_eos=True)
    assert finish_reason(1, params, 0, 5, 64) is FinishReason.NONE
    assert finish_reason(7, params, 0, 5, 64) is FinishReason.STOP


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("repetition_penalty", (0.0, 1e-300, -1.0, float("nan"), float("inf"))),
        ("temperature", (float("nan"), float("inf"))),
        ("top_p", (float("nan"),)),
        ("frequency_penalty", (float("inf"),)),
        ("logit_bias", (((1, float("nan")),), ((1, float("inf")),))),
    ],
)
def test_numbers_that_would_make_logits_infinite_are_refused_before_they_join_a_batch(field, values):
    for value in values:
        table = SamplingTable(32)
        with pytest.raises(InvalidRequest) as caught:
            table.put(0, SamplingParams(**{field: value}), 0, [1], [2])
        assert caught.value.field == f"sampling.{field}"
        assert table.needs[0] == 0


def test_a_token_that_is_not_in_the_vocabulary_cannot_reach_a_neighbours_logits():
    with pytest.raises(InvalidRequest):
        SamplingTable(32).put(0, SamplingParams(presence_penalty=1.0), 0, [1, 32], [2])
