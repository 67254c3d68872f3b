"""Decode steps over fixed buffers: what the model and the sampler are fed, and the same tokens as without them.

Here the model is the toy and nothing is captured; tests/ops needs a GPU for that.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_fakes import VOCAB, ToyTransformer, small_config, toy_parts
from test_async_decode import PENALISED, SAMPLINGS, Device, mixed

from headrace.engine.device_sampler import DeviceSampler
from headrace.engine.offline import Engine
from headrace.engine.sampler import Sampler
from headrace.engine.sampling_table import SamplingTable
from headrace.engine.step import BlockTables
from headrace.engine.steps.graphs import LADDER, DecodeGraphs, StepBuffers, sizes_up_to
from headrace.errors import InternalError
from headrace.model.base import ForwardBatch
from headrace.protocol.common import SamplingParams


class ToyDecoder(ToyTransformer):
    """The toy, fed with DecodeInputs; writes down their sizes and what was planned on the host."""

    graph_safe = False

    def __init__(self, like: ToyTransformer):
        self.__dict__.update(vars(like))
        self.sizes: list[tuple[int, int]] = []
        self.planned: list[list[int]] = []

    def plan_decode(self, inputs, pool, context_lens_host):
        assert inputs.context_lens.tolist() == context_lens_host.tolist()
        self.planned.append(context_lens_host.tolist())

    def decode(self, inputs, pool):
        size = len(inputs.token_ids)
        real = int((inputs.slots >= 0).sum())
        self.sizes.append((real, size))
        assert (inputs.slots[real:] == -1).all() and (inputs.context_lens[real:] == 1).all()
        logits = torch.full((size, VOCAB), -1.0)
        batch = ForwardBatch(
            inputs.token_ids[:real], inputs.positions[:real], inputs.slots[:real], inputs.block_tables[:real],
            list(range(real + 1)), inputs.context_lens[:real].tolist(), torch.arange(real),
        )  # fmt: skip
        logits[:real] = self.forward(batch, pool, phase="decode")
        return logits


def graph_parts(steps_ahead, sizes=(1, 4, 8, 32), **changes):
    """toy_parts whose decode steps run in DecodeGraphs with the device's sampler."""
    parts = toy_parts(**{"num_blocks": 400, "max_context": 64, **changes})
    runner = parts.runner
    decoder = runner.transformer = parts.transformer = ToyDecoder(parts.transformer)
    runner.sampler = DeviceSampler(VOCAB, "cpu")
    runner.steps = DecodeGraphs(
        decoder, parts.pool, runner.sampler, sizes=sizes, max_blocks=-(-64 // parts.pool.block_size), capture=True
    )
    runner.steps_ahead = steps_ahead
    return parts


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_the_tokens_are_those_of_forward_and_the_host_sampler(steps_ahead, seed):
    prompts, chosen = mixed(12, SAMPLINGS + PENALISED, seed)
    config = small_config(max_batch_size=(32, 5)[seed % 2])
    expected = Engine(toy_parts(num_blocks=400, max_context=64), config).generate(prompts, chosen)
    parts = graph_parts(steps_ahead)
    device = Device(parts.runner)
    made = Engine(parts, config).generate(prompts, chosen)
    for one, other in zip(made, expected, strict=True):
        for got, wanted in zip(one, other, strict=True):
            assert got.token_ids == wanted.token_ids and got.finish_reason is wanted.finish_reason
            assert got.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)
            assert [[i for i, _ in top] for top in got.top] == [[i for i, _ in top] for top in wanted.top]
    assert not device.running and parts.blocks.ledger().free == parts.blocks.num_blocks
    decoder = parts.transformer
    assert {size for _, size in decoder.sizes} <= {1, 4, 8, 32} and len(decoder.planned) == len(decoder.sizes)
    assert all(size == min(s for s in (1, 4, 8, 32) if s >= real) for real, size in decoder.sizes)


def test_penalties_count_a_token_that_only_the_device_has():
    """A vocabulary of few likely tokens, so that the uncounted token is often one that was counted before."""
    samplings = [
        SamplingParams(max_tokens=30, frequency_penalty=2.0, presence_penalty=1.0),
        SamplingParams(max_tokens=30, repetition_penalty=1.5, min_tokens=9, stop_token_ids=(3,)),
        SamplingParams(max_tokens=30, frequency_penalty=0.7, temperature=1.5, seed=2, logit_bias=((5, 1.5),)),
        SamplingParams(max_tokens=30, temperature=1.5, seed=3),
    ] * 2
    prompts, made = [[1, 5, 9]] * 4 + [[2, 3]] * 4, []
    for parts in (toy_parts(num_blocks=400, max_context=64), graph_parts(1)):
        parts.transformer.shift[:] = -30.0
        parts.transformer.shift[2:9] = 0.0
        device = Device(parts.runner)
        made.append(Engine(parts, small_config()).generate(prompts, samplings))
        assert not device.running
    assert made[0] == made[1]
    assert all((plan.sources >= 0).all() for plan in device.plans[1:]), "a step waited for tokens"
    assert max(len(set(one[0].token_ids)) for one in made[0]) < 20


def test_a_token_that_stands_twice_gets_one_count():
    """A device writes both entries in any order."""
    at, counts = torch.tensor([3, 5, VOCAB + 3, VOCAB + 4]), torch.tensor([2.0, 0.0, 7.0, 1.0])
    late, places, fed = np.array([0, 1]), np.array([0, 1]), torch.tensor([3, 9])
    at, counts = DeviceSampler(VOCAB, "cpu")._count_late(at, counts, [2, 2], late, places, fed)
    assert at.tolist() == [3, 5, VOCAB + 3, VOCAB + 4, 3, VOCAB + 9] and counts.tolist() == [3, 0, 7, 1, 3, 1]


def test_block_tables_on_the_device_follow_rows_that_change_hands_and_grow():
    parts = graph_parts(1, num_blocks=600)
    prompts = [[handle % VOCAB] * (1 + handle % 30) for handle in range(90)]
    sampling = SamplingParams(max_tokens=9)
    config = small_config(max_batch_size=8)
    expected = Engine(toy_parts(num_blocks=600, max_context=64), config).generate(prompts, sampling)
    assert Engine(parts, config).generate(prompts, sampling) == expected
    tables = BlockTables(2)
    tables.put(0, [5, 6, 7])
    first = tables.on_device(torch.device("cpu"), 20)
    tables.put(1, list(range(30)))
    tables.put(0, [9])
    second = tables.on_device(torch.device("cpu"), 20)
    assert second.data_ptr() == first.data_ptr() and second[0].tolist() == [9] + [0] * 19
    tables.put(4, [1])
    assert tables.on_device(torch.device("cpu"), 20)[[0, 4], 0].tolist() == [9, 1]
    assert tables.slots(np.array([1, 4]), np.array([9, 2]), 4).tolist() == [2 * 4 + 1, 4 + 2]


def test_buffers_are_padded_whatever_they_held_before():
    buffers = StepBuffers(4, 3, torch.device("cpu"))
    address = buffers.there["slots"].data_ptr()
    buffers.fill({"slots": np.arange(4), "context_lens": np.full(4, 9), "temperature": np.ones(4), "top_k": np.ones(4)})
    lens = buffers.fill({"slots": np.array([7]), "context_lens": np.array([5])})
    assert lens.tolist() == buffers.there["context_lens"].tolist() == [5, 1, 1, 1]
    assert buffers.there["slots"].tolist() == [7, -1, -1, -1] and buffers.there["slots"].data_ptr() == address
    assert buffers.there["temperature"].tolist() == buffers.there["top_k"].tolist() == [0] * 4
    assert buffers.there["top_p"].tolist() == [1] * 4 and buffers.there["sources"].tolist() == [-1] * 4


def test_sizes_end_with_the_largest_batch():
    assert sizes_up_to(512) == LADDER
    assert sizes_up_to(50) == (1, 2, 4, 8, 16, 24, 32, 48, 50)
    assert sizes_up_to(64, (64,)) == (64,) and sizes_up_to(64, (3, 9)) == (3, 9, 64)


def test_a_step_that_is_too_large_or_feeds_on_replaced_tokens_is_our_mistake():
    parts = graph_parts(1, sizes=(2,))
    engine = Engine(parts, small_config(max_batch_size=3))
    with pytest.raises(InternalError, match="max_batch_size"):
        engine.generate([[1], [2], [3]], SamplingParams(max_tokens=5))
    engine, other = (Engine(parts, small_config(max_batch_size=2)) for _ in range(2))

    def interfere(index, token):
        if token.position == 2:
            other.generate([[4]], SamplingParams(max_tokens=3))

    with pytest.raises(InternalError, match="replaced"):
        engine.generate([[1]], SamplingParams(max_tokens=9), interfere)


@pytest.mark.parametrize("positions", [[0, 1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12]])
def test_the_device_sampler_edits_and_reports_as_the_host_one(positions):
    table = SamplingTable(VOCAB, 2)
    params = [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=1, logprobs=0),
        SamplingParams(temperature=0.7, top_k=9, seed=2, logprobs=4),
        SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5, logprobs=2),
        SamplingParams(logit_bias=((3, 40.0),), min_tokens=8, eos_token_ids=(3, 5), logprobs=VOCAB),
        SamplingParams(temperature=2.0, min_p=0.2, seed=6),
    ]
    for row, one in enumerate(params):
        table.put(row, one, 0, [1, 2], [3, 3])
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    untouched = logits.clone()
    rows, at = np.arange(6), np.array(positions)
    host = Sampler(VOCAB).sample(logits, table, rows, at)
    there = DeviceSampler(VOCAB, "cpu").sample(logits, table, rows, at)
    assert torch.equal(logits, untouched)
    assert there.token_ids.tolist() == host.token_ids.tolist()
    np.testing.assert_allclose(there.logprobs, host.logprobs, atol=1e-5)
    for place in range(6):
        wanted, got = host.top.get(place, ()), there.top.get(place, ())
        assert [one for one, _ in got] == [one for one, _ in wanted]
