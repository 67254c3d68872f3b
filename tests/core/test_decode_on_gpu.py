"""CUDA graphs, a step ahead, on a GPU: an integer model gives the CPU's tokens; the real one gives those of its eager self."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from engine_fakes import small_config

from headrace.engine.offline import Engine, EngineParts
from headrace.model.base import KvRegion, Stepping
from headrace.model.weights.random_checkpoint import write_random_checkpoint
from headrace.protocol.common import SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

VOCAB, BLOCK = 211, 4
SAMPLINGS = (
    SamplingParams(max_tokens=30),
    SamplingParams(max_tokens=40, eos_token_ids=tuple(range(0, VOCAB, 9)), min_tokens=2, logprobs=3),
    SamplingParams(max_tokens=25, temperature=1.0, seed=5, logprobs=0, stop_token_ids=(1, 2, 3, 4, 5)),
    SamplingParams(max_tokens=25, temperature=0.8, top_k=20, seed=6, n=3, logit_bias=((7, 3.0),)),
    SamplingParams(max_tokens=1, temperature=1.0, seed=4),
)
PENALISED = SamplingParams(max_tokens=20, repetition_penalty=1.3, frequency_penalty=0.5, temperature=0.9, seed=8)


class IntegerModel:
    """Logits are an integer hash of the tokens that the block table leads to: the same numbers on every device."""

    exact, graph_safe, dtype, pool_dtype = False, True, torch.float32, torch.float32
    vocab_size, max_context_tokens = VOCAB, 256
    kv_regions, stepping = (KvRegion("tokens", 1, 2),), Stepping.GRAPHS

    def __init__(self, device):
        self.device = torch.device(device)
        draws = torch.Generator().manual_seed(0)
        self.by_place = torch.randint(1, 2**40, (256,), generator=draws).to(self.device)
        self.by_token = torch.randint(1, 2**40, (VOCAB,), generator=draws).to(self.device) * 2 + 1

    def plan_decode(self, inputs, pool, context_lens_host):
        pass

    def decode(self, inputs, pool):
        flat = pool.layer(0).view(-1, 2)
        slots = torch.where(inputs.slots < 0, len(flat) - 1, inputs.slots)  # the last row is nobody's
        flat[:, 0].index_copy_(0, slots, inputs.token_ids.float())
        return self.logits(flat, inputs.block_tables, inputs.context_lens)

    def logits(self, flat, tables, lens):
        at = torch.arange(min(256, tables.shape[1] * BLOCK), device=self.device)
        slots = tables[:, at // BLOCK].long() * BLOCK + at % BLOCK
        seen = (flat[:, 0][slots].long() + 1) * self.by_place[: len(at)] * (at < lens[:, None])
        return ((seen.sum(-1, keepdim=True) * self.by_token >> 36) & 0xFFFF).float() / 8192.0

    def forward(self, batch, pool, *, phase, on_layer=None):
        flat = pool.layer(0).view(-1, 2)
        flat[:, 0].index_copy_(0, batch.slots, batch.token_ids.float())
        lens = torch.tensor(batch.context_lens, device=self.device)
        if on_layer is not None:
            on_layer(0)
        assert batch.last_token_logits
        return self.logits(flat, batch.block_tables, lens)


def engine_over(model, **changes):
    settings = {"device": str(model.device), "exact": False, "block_size": BLOCK, "num_blocks": 3000, **changes}
    config = small_config(**settings)
    return Engine(EngineParts.over(model, config), config)


def requests(count, samplings, vocab=VOCAB, longest=90):
    draws = np.random.default_rng(count)
    prompts = [draws.integers(0, vocab, length).tolist() for length in draws.integers(1, longest, count)]
    return prompts, [samplings[place % len(samplings)] for place in range(count)]


@pytest.mark.parametrize("penalties", [False, True])
def test_graphs_a_step_ahead_give_the_tokens_of_the_cpu(penalties):
    prompts, samplings = requests(60, (*SAMPLINGS, PENALISED) if penalties else SAMPLINGS)
    expected = engine_over(IntegerModel("cpu"), async_scheduling=False).generate(prompts, samplings)
    gpu = engine_over(IntegerModel("cuda"))
    assert gpu.decode.steps_ahead == 1
    for _ in range(2):  # graphs are captured on the way, then found
        made = gpu.generate(prompts, samplings)
        for one, other in zip(made, expected, strict=True):
            for got, wanted in zip(one, other, strict=True):
                assert (got.token_ids, got.finish_reason) == (wanted.token_ids, wanted.finish_reason)
                assert got.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)
        assert gpu.parts.blocks.ledger().held == 0
    assert len(gpu.parts.runner.steps.captured) > 3


def test_no_step_waits_for_the_device_but_for_the_tokens_of_the_step_before():
    gpu = engine_over(IntegerModel("cuda"), decode_graph_sizes=(8, 32))
    gpu.parts.runner.warm()
    prompts, samplings = requests(20, (*SAMPLINGS, PENALISED))
    gpu.generate(prompts, samplings)  # pinned memory is there after this
    launch, steps = gpu.parts.runner.launch, []

    def watched(*given):
        torch.cuda.set_sync_debug_mode("error")
        try:
            steps.append(launch(*given))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return steps[-1]

    gpu.parts.runner.launch = watched
    gpu.generate(prompts, samplings)
    assert len(steps) > 20


def test_what_ends_or_leaves_is_told_when_the_device_has_let_go_of_it():
    """At each end, and when `remove` returns, every step with the sample has completed on the device."""
    gpu = engine_over(IntegerModel("cuda"), decode_graph_sizes=(8, 32))
    runner, running = gpu.parts.runner, {}
    launch = runner.launch

    def marked(plan, *rest):
        drawn = launch(plan, *rest)
        event = torch.cuda.Event()
        event.record()
        for row in plan.rows.tolist():
            running[gpu.decode._samples.handle[row], gpu.decode._samples.sample_index[row]] = event
        return drawn

    runner.launch = marked
    told = []

    def on_token(index, token):
        if token.finish_reason and (index, token.sample_index) in running:
            told.append(running[index, token.sample_index].query())

    prompts, samplings = requests(40, SAMPLINGS)
    gpu.generate(prompts, samplings, on_token)
    assert len(told) > 30 and all(told)


@pytest.fixture(scope="module", params=["bf16", "fp8"])
def served(request, tmp_path_factory):
    """The directory of a small checkpoint and settings for it."""
    directory = write_random_checkpoint(tmp_path_factory.mktemp("graphs"), {"num_hidden_layers": 3}, seed=3)
    settings = {"device": "cuda", "exact": False, "kv_dtype": request.param, "max_batch_size": 32}
    return directory, settings


def test_the_model_in_graphs_draws_what_it_draws_eagerly(served):
    directory, settings = served
    prompts, samplings = requests(24, SAMPLINGS[:1] + SAMPLINGS[2:4], vocab=8000)
    samplings = [dataclasses.replace(one, stop_token_ids=(), ignore_eos=True) for one in samplings]
    made = {}
    for name, changes in {
        "eager": {"decode_graphs": False, "async_scheduling": False},
        "graphs": {"async_scheduling": False},
        "ahead": {},
    }.items():
        # one size: another one may take other kernels, and round differently
        engine = Engine.load(directory, small_config(**settings, **changes, decode_graph_sizes=(32,)))
        made[name] = [[output.token_ids for output in one] for one in engine.generate(prompts, samplings)]
        assert engine.parts.blocks.ledger().held == 0
        again = [[output.token_ids for output in one] for one in engine.generate(prompts, samplings)]
        assert again == made[name], f"{name}: the same requests drew other tokens"
    assert made["graphs"] == made["eager"]
    assert made["ahead"] == made["graphs"]


def test_launching_the_model_never_waits(served):
    directory, settings = served
    engine = Engine.load(directory, small_config(**settings))
    engine.parts.runner.warm()
    prompts, samplings = requests(24, (*SAMPLINGS, PENALISED), vocab=8000)
    engine.generate(prompts, samplings)
    launch = engine.parts.runner.launch

    def watched(*given):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(*given)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    engine.parts.runner.launch = watched
    assert all(one[0].token_ids for one in engine.generate(prompts, samplings))
