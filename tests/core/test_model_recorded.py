"""Replayed decode steps have the bits of steps that went op by op, and what cannot be replayed is not."""

from __future__ import annotations

import pytest
import torch

from headrace.engine.steps.replayed import RecordedSteps
from headrace.model.deepseek.loading import load_transformer
from headrace.model.weights.random_checkpoint import write_random_checkpoint
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


def steps_of(model, crowds, recorded=None, threads=None) -> list[dict[str, torch.Tensor]]:
    """Logits of a decode step of each crowd of names in turn, after everyone's prefill; op by op without `recorded`.

    `threads`: of the steps alone. Fast mode prefills with torch's products, whose bits may depend on how many there are.
    """
    driver, before = Driver(model, num_blocks=64, recorded=recorded), torch.get_num_threads()
    for name, length in PROMPTS.items():
        driver.run([(name, [(3 * i + length) % model.config.vocab_size for i in range(length)])], "prefill")
    try:
        torch.set_num_threads(threads or before)
        return [driver.run([(name, [7 + place]) for name in names], "decode") for place, names in enumerate(crowds)]
    finally:
        torch.set_num_threads(before)


@needs_c
def test_replayed_steps_have_the_bits_of_steps_that_ran_op_by_op(model):
    crowds = ["a", "abcd", "db", "abcd", "c", "cab", "abcd"]
    recorded = RecordedSteps(model)
    replayed = steps_of(model, crowds, recorded)
    assert recorded.refused is None
    for place, (got, wanted) in enumerate(zip(replayed, steps_of(model, crowds), strict=True)):
        for name in wanted:
            assert torch.equal(got[name], wanted[name]), f"step {place}, sequence {name}"


@needs_c
def test_a_size_is_walked_once_and_then_replayed(model, monkeypatch):
    walked, finish = [], type(model.blocks[0]).finish

    def counted(block, *arguments):
        walked.append(block)
        return finish(block, *arguments)

    driver = Driver(model, num_blocks=64, recorded=RecordedSteps(model))
    driver.run([("a", [3, 4, 5]), ("b", [6, 7, 8])], "prefill")
    monkeypatch.setattr(type(model.blocks[0]), "finish", counted)
    for token in range(20):
        driver.run([("a", [token]), ("b", [token + 1])], "decode")
    assert walked == model.blocks


@needs_c
def test_a_step_that_computes_in_torch_is_refused_and_runs_op_by_op(model, monkeypatch):
    expected = steps_of(model, ["ab"])[0]
    fresh = RecordedSteps(model)
    monkeypatch.setattr(model.kernels, "add_rows", torch.Tensor.add_)
    got = steps_of(model, ["ab"], fresh)[0]
    assert "add_" in fresh.refused
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@needs_c
def test_other_threads_are_recorded_anew_and_chunks_change_nothing(model):
    other, recorded = 2 if torch.get_num_threads() == 1 else 1, RecordedSteps(model)
    expected = steps_of(model, ["abcd"], recorded)[0]
    chunked = model.with_chunks(activation_tokens=3)
    others = [
        steps_of(model, ["abcd"], recorded, other)[0],
        steps_of(chunked, ["abcd"], RecordedSteps(chunked), other)[0],
    ]
    for got in others:
        assert all(torch.equal(got[name], expected[name]) for name in expected)


@needs_c
def test_only_one_new_token_a_sequence_is_recorded(model):
    fresh = RecordedSteps(model)
    driver = Driver(model, num_blocks=64, recorded=fresh)
    driver.run([("a", [3, 4, 5]), ("b", [6, 7, 8])], "prefill")
    driver.run([("a", [9, 10]), ("b", [11, 12])], "decode")
    driver.run([("a", [9]), ("b", [11])], "decode", padding=2)
    assert not fresh._programs and fresh.refused is None
    driver.run([("a", [9]), ("b", [11])], "decode")
    assert len(fresh._programs) == 1
