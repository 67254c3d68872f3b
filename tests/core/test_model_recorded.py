"""Replayed decode steps have the bits of steps that went op by op, and what cannot be replayed is not."""

from __future__ import annotations

import pytest
import torch

from headrace.model.random_checkpoint import write_random_checkpoint
from headrace.model.weights import load_transformer
from kernels.toolchain import cpu_library
from tests.core.model_driver import Driver

needs_c = pytest.mark.skipif(
    cpu_library.why_not() is not None, reason=f"needs the CPU kernels: {cpu_library.why_not()}"
)
PROMPTS = {"a": 5, "b": 17, "c": 130, "d": 33}


@pytest.fixture(scope="module", params=[True, False], ids=["exact", "fast"])
def model(request, tmp_path_factory):
    where = write_random_checkpoint(tmp_path_factory.mktemp("recorded"), {"num_hidden_layers": 3}, seed=3)
    return load_transformer(where, exact=request.param)


def steps_of(model, crowds) -> list[dict[str, torch.Tensor]]:
    """Logits of a decode step of each crowd of names in turn, after everyone's prefill."""
    driver = Driver(model, num_blocks=64)
    for name, length in PROMPTS.items():
        driver.run([(name, [(3 * i + length) % model.config.vocab_size for i in range(length)])], "prefill")
    return [driver.run([(name, [7 + place]) for name in names], "decode") for place, names in enumerate(crowds)]


@needs_c
def test_replayed_steps_have_the_bits_of_steps_that_ran_op_by_op(model):
    crowds = ["a", "abcd", "db", "abcd", "c", "cab", "abcd"]
    recorded = model.recorded
    replayed = steps_of(model, crowds)
    assert recorded.refused is None
    try:
        model.recorded = None
        expected = steps_of(model, crowds)
    finally:
        model.recorded = recorded
    for place, (got, wanted) in enumerate(zip(replayed, expected, strict=True)):
        for name in wanted:
            assert torch.equal(got[name], wanted[name]), f"step {place}, sequence {name}"


@needs_c
def test_a_size_is_walked_once_and_then_replayed(model, monkeypatch):
    monkeypatch.setattr(model, "recorded", type(model.recorded)(model))
    walked, finish = [], type(model.blocks[0]).finish

    def counted(block, *arguments):
        walked.append(block)
        return finish(block, *arguments)

    driver = Driver(model, num_blocks=64)
    driver.run([("a", [3, 4, 5]), ("b", [6, 7, 8])], "prefill")
    monkeypatch.setattr(type(model.blocks[0]), "finish", counted)
    for token in range(20):
        driver.run([("a", [token]), ("b", [token + 1])], "decode")
    assert walked == model.blocks


@needs_c
def test_a_step_that_computes_in_torch_is_refused_and_runs_op_by_op(model, monkeypatch):
    expected = steps_of(model, ["ab"])[0]
    fresh = type(model.recorded)(model)
    monkeypatch.setattr(model, "recorded", fresh)
    monkeypatch.setattr(model.kernels, "add_rows", torch.Tensor.add_)
    got = steps_of(model, ["ab"])[0]
    assert "add_" in fresh.refused
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@needs_c
def test_other_threads_and_chunks_are_recorded_anew(model):
    before = torch.get_num_threads(), model.moe_activation_chunk_tokens
    expected = steps_of(model, ["abcd"])[0]
    try:
        torch.set_num_threads(2 if before[0] == 1 else 1)
        model.moe_activation_chunk_tokens = 3
        got = steps_of(model, ["abcd"])[0]
    finally:
        torch.set_num_threads(before[0])
        model.moe_activation_chunk_tokens = before[1]
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@needs_c
def test_only_one_new_token_a_sequence_is_recorded(model, monkeypatch):
    fresh = type(model.recorded)(model)
    monkeypatch.setattr(model, "recorded", fresh)
    driver = Driver(model, num_blocks=64)
    driver.run([("a", [3, 4, 5]), ("b", [6, 7, 8])], "prefill")
    driver.run([("a", [9, 10]), ("b", [11, 12])], "decode")
    driver.run([("a", [9]), ("b", [11])], "decode", padding=2)
    assert not fresh._programs and fresh.refused is None
    driver.run([("a", [9]), ("b", [11])], "decode")
    assert len(fresh._programs) == 1
