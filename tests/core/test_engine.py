"""The engine alone: the same tokens whatever the batch, the order, the budget or the blocks. Real model, exact mode."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from engine_fakes import VOCAB, random_checkpoint, small_config, toy_parts

from headrace.engine.offline import Engine, EngineParts
from headrace.engine.request import PrefillJob, PrefillSequence
from headrace.errors import InvalidRequest
from headrace.model.deepseek.loading import load_transformer
from headrace.protocol.common import FinishReason, SamplingParams

BLOCK = 16
LENGTHS = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 5, 40, 100, 131, 7, 77)
SAMPLINGS = (
    SamplingParams(max_tokens=12),
    SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, repetition_penalty=1.1, seed=3),
    SamplingParams(max_tokens=1, temperature=1.0, seed=4),
    SamplingParams(max_tokens=9, temperature=1.0, top_k=30, seed=5, n=3, logprobs=2),
    SamplingParams(max_tokens=15, logprobs=0, presence_penalty=0.5),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """One loaded model, exact, on the CPU; each engine gets a pool of its own."""
    directory = random_checkpoint(tmp_path_factory.mktemp("random"))
    return load_transformer(directory, device=torch.device("cpu"), exact=True)


def engine_over(model, **changes) -> Engine:
    config = small_config(**changes)
    return Engine(EngineParts.over(model, config), config)


def mixed_requests(count: int, seed: int = 0, vocab: int = 500):
    draws = np.random.default_rng(seed)
    prompts = [draws.integers(2, vocab, LENGTHS[place % len(LENGTHS)]).tolist() for place in range(count)]
    return prompts, [SAMPLINGS[place % len(SAMPLINGS)] for place in range(count)]


def test_tokens_and_logprobs_do_not_depend_on_neighbours_order_budget_or_blocks(model, full):
    prompts, samplings = mixed_requests(60 if full else 20)
    together = engine_over(model).generate(prompts, samplings)
    alone = engine_over(model, max_batch_size=1, max_batch_tokens=1)
    assert [alone.generate([one], [sampling])[0] for one, sampling in zip(prompts, samplings, strict=True)] == together
    order = np.random.default_rng(1).permutation(len(prompts)).tolist()
    for changes in (
        {"max_batch_size": 5, "max_batch_tokens": 60},
        {"num_blocks": 40},  # requests wait for blocks and reuse scattered ones
        {"block_size": 32, "max_batch_size": 3},
    ):
        engine = engine_over(model, **changes)
        made = engine.generate([prompts[place] for place in order], [samplings[place] for place in order])
        assert made == [together[place] for place in order], changes
        assert engine.parts.blocks.ledger().free == engine.parts.blocks.num_blocks
    assert all(len(outputs) == sampling.n for outputs, sampling in zip(together, samplings, strict=True))


def test_a_seeded_request_ignores_31_unseeded_neighbours(model):
    prompts, _ = mixed_requests(32, seed=2)
    seeded = SamplingParams(max_tokens=24, temperature=1.0, seed=77)
    others = [dataclasses.replace(seeded, seed=1000 + place) for place in range(31)]
    alone = engine_over(model).generate(prompts[:1], seeded)
    assert engine_over(model).generate(prompts, [seeded, *others])[0] == alone[0]


def test_decode_continues_exactly_where_a_longer_prefill_would_be(model):
    """Every greedy token equals the first token of a fresh prefill of everything before it."""
    prompts, _ = mixed_requests(4, seed=3)
    engine = engine_over(model)
    sampling = SamplingParams(max_tokens=20, logprobs=0)
    for prompt, outputs in zip(prompts, engine.generate(prompts, sampling), strict=True):
        tokens, logprobs = outputs[0].token_ids, outputs[0].logprobs
        prefixes = [prompt + tokens[:end] for end in range(len(tokens))]
        replayed = engine.generate(prefixes, dataclasses.replace(sampling, max_tokens=1))
        assert [one[0].token_ids[0] for one in replayed] == tokens
        assert [one[0].logprobs[0] for one in replayed] == logprobs


def test_rows_from_a_prefix_cache_give_the_same_first_token(model):
    prompt = mixed_requests(1, seed=4)[0][0] * 90
    engine = engine_over(model)
    parts = engine.parts
    table = list(parts.blocks.allocate(parts.blocks.blocks_for(len(prompt) + 1)))
    first = []
    for cached in (0, 16, 48, 80, 89):
        job = PrefillJob(
            "one",
            [PrefillSequence(0, prompt, table, first_computed=cached)],
            SamplingParams(logprobs=3),
            on_tokens=first.extend,
        )
        engine.prefill.add(job)
        engine.prefill.run_once()
    assert len(first) == 5 and len(set(first)) == 1


def test_fast_mode_runs_the_same_requests(tmp_path):
    directory = random_checkpoint(tmp_path / "model")
    prompts, samplings = mixed_requests(10)
    exact = Engine.load(directory, small_config()).generate(prompts, samplings)
    fast = Engine.load(directory, small_config(exact=False)).generate(prompts, samplings)
    for one, other in zip(exact, fast, strict=True):
        assert [len(output.token_ids) for output in one] == [len(output.token_ids) for output in other]
    first = [(one[0].token_ids[0], other[0].token_ids[0]) for one, other in zip(exact, fast, strict=True)]
    assert sum(a == b for a, b in first) >= 6, "bf16 differs from fp32 now and then, not mostly"


# --- rules, over the toy ---


def toy_engine(**changes) -> Engine:
    return Engine(toy_parts(**changes), small_config())


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 3])
def test_exactly_max_tokens_come_out_and_prefills_counts(max_tokens):
    engine = toy_engine()
    output = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=max_tokens, n=2, logprobs=0, temperature=1.0))[0][1]
    assert len(output.token_ids) == len(output.logprobs) == max_tokens
    assert output.finish_reason is FinishReason.LENGTH
    assert engine.decode.steps == max(0, max_tokens - 1) and engine.parts.blocks.ledger().held == 0


@pytest.mark.parametrize("length", [254, 255, 256])
def test_the_context_limit_ends_a_sample(length):
    engine = toy_engine(max_context=256, num_blocks=200)
    output = engine.generate([[5] * length], SamplingParams(max_tokens=50))[0][0]
    assert len(output.token_ids) == max(1, 256 - length) and output.finish_reason is FinishReason.LENGTH
    with pytest.raises(InvalidRequest):
        engine.generate([[5] * 257])


@pytest.mark.parametrize("ignore", [False, True])
def test_end_of_text_as_the_very_first_token(ignore):
    engine = toy_engine()
    engine.parts.transformer.shift[9] = 100.0
    sampling = SamplingParams(max_tokens=4, eos_token_ids=(9,), ignore_eos=ignore)
    output = engine.generate([[1, 2]], sampling)[0][0]
    expected = ([9] * 4, FinishReason.LENGTH) if ignore else ([9], FinishReason.EOS)
    assert (output.token_ids, output.finish_reason) == expected
    later = engine.generate([[1, 2]], dataclasses.replace(sampling, ignore_eos=False, min_tokens=2))[0][0]
    assert 9 not in later.token_ids[:2] and later.token_ids[2:] == [9] and later.finish_reason is FinishReason.EOS


def test_penalties_see_the_prompt_prefills_token_and_every_step():
    engine = toy_engine()
    engine.parts.transformer.shift[[3, 5, 7]] = 100.0, 80.0, 60.0
    sampling = SamplingParams(max_tokens=6, frequency_penalty=30.0)
    assert engine.generate([[1]], sampling)[0][0].token_ids == [3, 5, 3, 7, 5, 3]
    sampling = SamplingParams(max_tokens=4, repetition_penalty=4.0)
    assert engine.generate([[1, 5]], sampling)[0][0].token_ids == [3, 7, 3, 3]
    sampling = SamplingParams(max_tokens=4, presence_penalty=90.0)
    assert engine.generate([[1, 5]], sampling)[0][0].token_ids == [3, 5, 7, 3]


def test_samples_of_one_prompt_are_distinct_reproducible_and_end_by_themselves():
    sampling = SamplingParams(max_tokens=30, temperature=1.0, seed=8, n=4, stop_token_ids=tuple(range(0, VOCAB, 9)))
    prompt = list(range(10))
    first = toy_engine().generate([prompt], sampling)[0]
    assert toy_engine().generate([[7] * 30, prompt], [SamplingParams(max_tokens=40), sampling])[1] == first
    assert len({tuple(output.token_ids) for output in first}) == 4
    assert len({len(output.token_ids) for output in first}) > 1
    for output in first:
        assert output.finish_reason is FinishReason.STOP or len(output.token_ids) == 30


def test_tokens_are_reported_as_they_are_drawn():
    heard = []
    made = toy_engine().generate(
        [[1], [2, 3]],
        SamplingParams(max_tokens=6),
        lambda index, token: heard.append((index, token.position, token.token_id)),
    )
    for index in range(2):
        assert [one[2] for one in heard if one[0] == index] == made[index][0].token_ids
        assert [one[1] for one in heard if one[0] == index] == list(range(6))


def test_what_can_never_fit_is_refused_and_a_failure_leaves_nothing_behind():
    engine = toy_engine(num_blocks=8)
    with pytest.raises(InvalidRequest) as caught:
        engine.generate([[1]], SamplingParams(max_tokens=40))
    assert caught.value.field == "sampling.max_tokens"
    with pytest.raises(InvalidRequest):
        engine.generate([[1], []])
    engine.parts.transformer.fail_with = RuntimeError("broken")
    with pytest.raises(RuntimeError):
        engine.generate([[1, 2], [3]], SamplingParams(max_tokens=4))
    with pytest.raises(ZeroDivisionError):
        engine.parts.transformer.fail_with = None
        engine.generate([[1, 2], [3]], SamplingParams(max_tokens=4), lambda *_: 1 // 0)
    assert engine.parts.blocks.ledger().free == 8
    assert len(engine.generate([[1, 2], [3]], SamplingParams(max_tokens=4))) == 2


# --- the shipped model ---


def test_greedy_requests_at_once_equal_one_by_one_on_the_shipped_model(tiny_directory, full):
    count = 64 if full else 16
    engine = Engine.load(tiny_directory, small_config(num_blocks=1024, max_batch_size=64))
    draws = np.random.default_rng(11)
    prompts = [draws.integers(3, 8192, length).tolist() for length in draws.integers(1, 200, count)]
    sampling = SamplingParams(max_tokens=24, logprobs=1)
    together = engine.generate(prompts, sampling)
    for prompt, outputs in zip(prompts, together, strict=True):
        assert engine.generate([prompt], sampling)[0] == outputs
