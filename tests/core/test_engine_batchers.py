"""Prefill and decode batchers over the toy model."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest
from engine_fakes import NUM_LAYERS, VOCAB, small_config, toy_parts

from headrace.engine import prefill
from headrace.engine.decode import DecodeBatcher
from headrace.engine.offline import Engine
from headrace.engine.prefill import PrefillBatcher
from headrace.engine.request import DecodeSequence, PrefillJob, PrefillSequence
from headrace.errors import Cancelled, InvalidRequest
from headrace.protocol.common import FinishReason, SamplingParams


class Recorded:
    """A prefill job that writes down what it hears."""

    def __init__(self, parts, key, prompt, sampling=SamplingParams(max_tokens=4), sample_indices=(0,)):
        self.heard: list[object] = []
        self.tokens = None
        self.table = list(parts.blocks.allocate(parts.blocks.blocks_for(len(prompt) + sampling.max_tokens)))
        self.job = PrefillJob(
            key,
            [PrefillSequence(sample_indices[0], list(prompt), self.table)],
            sampling,
            sample_indices,
            (0,) * len(sample_indices),
            len(prompt),
            on_start=lambda: self.heard.append("start"),
            on_layer=self.on_layer,
            on_tokens=self.on_tokens,
            on_error=self.heard.append,
        )

    def on_layer(self, layer, ready):
        self.heard.append(layer)

    def on_tokens(self, tokens):
        self.heard.append("tokens")
        self.tokens = tokens


EVERYTHING = ["start", *range(NUM_LAYERS), "tokens"]


def prompts_of(*lengths, seed=0):
    draws = np.random.default_rng(seed)
    return [draws.integers(0, VOCAB, length).tolist() for length in lengths]


def test_whole_prompts_run_first_come_first_served_within_the_budget():
    parts = toy_parts()
    batcher = PrefillBatcher(parts.runner, max_batch_tokens=20)
    jobs = [Recorded(parts, str(place), prompt) for place, prompt in enumerate(prompts_of(8, 8, 8, 50, 3, 17))]
    for one in jobs:
        batcher.add(one.job)
    assert batcher.queued_tokens == 94 and batcher.queued_jobs == 6
    while batcher.has_work():
        batcher.run_once()
    assert [lens for _, lens in parts.transformer.batches] == [[8, 8], [8], [50], [3, 17]]
    assert batcher.queued_tokens == 0 and batcher.running_jobs == 0 and batcher.batches == 4
    assert all(one.heard == EVERYTHING for one in jobs)


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_prompt_with_a_token_the_model_does_not_have_is_never_queued(token):
    parts = toy_parts()
    batcher = PrefillBatcher(parts.runner, max_batch_tokens=20)
    with pytest.raises(InvalidRequest) as caught:
        batcher.add(Recorded(parts, "bad", [1, token, 2]).job)
    assert caught.value.field == "prompt_token_ids" and not batcher.has_work()


def test_a_queued_job_is_forgotten_and_a_running_one_stops_hearing_of_layers():
    parts = toy_parts()
    batcher = PrefillBatcher(parts.runner, 100)
    queued, running, other = (
        Recorded(parts, key, prompt) for key, prompt in zip("qro", prompts_of(5, 6, 7), strict=True)
    )
    for one in (queued, running, other):
        batcher.add(one.job)
    assert batcher.cancel("q") is True and batcher.queued_tokens == 13
    outcome = []
    other.job.on_layer = lambda layer, ready: (other.heard.append(layer), outcome.append(batcher.cancel("r")))
    batcher.run_once()
    assert outcome == [False] * NUM_LAYERS and queued.heard == []
    assert running.heard[:2] == ["start", 0] and isinstance(running.heard[2], Cancelled) and len(running.heard) == 3
    assert other.heard == EVERYTHING
    assert batcher.cancel("r") is False and batcher.cancel("nobody") is False


@pytest.mark.parametrize("at", ["on_start", "on_layer", "on_tokens"])
def test_a_callback_that_raises_concerns_its_own_job_only(at):
    parts = toy_parts()
    batcher = PrefillBatcher(parts.runner, 100)
    bad, good = (Recorded(parts, key, prompt) for key, prompt in zip("bg", prompts_of(5, 6), strict=True))

    def fail(*_):
        raise RuntimeError(at)

    setattr(bad.job, at, fail)
    for one in (bad, good):
        batcher.add(one.job)
    batcher.run_once()
    assert good.heard == EVERYTHING
    assert [str(error) for error in bad.heard if isinstance(error, Exception)] == [at] and bad.tokens is None


class LateDevice:
    """A device that has got nowhere until somebody waits for it; `waits` are the threads that did."""

    def __init__(self, monkeypatch):
        self.waits = []
        monkeypatch.setattr(prefill, "event_now", lambda device: self)

    def synchronize(self):
        self.waits.append(threading.current_thread())


@pytest.mark.parametrize("max_tokens", [4, 0])
def test_no_job_hears_of_its_end_before_the_device_is_there(monkeypatch, max_tokens):
    """Blocks go back then, and with max_tokens 0 nothing is sampled that would have waited."""
    device, parts = LateDevice(monkeypatch), toy_parts()
    batcher = PrefillBatcher(parts.runner, 100)
    one = Recorded(parts, "a", prompts_of(5)[0], SamplingParams(max_tokens=max_tokens))
    waits_at_the_end = []
    one.job.on_tokens = lambda tokens: waits_at_the_end.append(len(device.waits))
    batcher.add(one.job)
    batcher.run_once()
    assert waits_at_the_end == [1]


def test_a_layer_comes_with_a_wait_that_only_its_receiver_makes(monkeypatch):
    device, parts = LateDevice(monkeypatch), toy_parts()
    batcher, waits = PrefillBatcher(parts.runner, 100), []
    one = Recorded(parts, "a", prompts_of(5)[0])
    one.job.on_layer = lambda layer, ready: waits.append(ready)
    batcher.add(one.job)
    batcher.run(batcher.plan())
    assert len(waits) == NUM_LAYERS and device.waits == []
    waits[0]()
    assert device.waits == [threading.current_thread()]


def test_a_model_may_name_the_moment_of_a_layers_rows_itself():
    parts = toy_parts()
    batcher, heard, forward = PrefillBatcher(parts.runner, 100), [], parts.transformer.forward

    def named(batch, pool, *, phase, on_layer=None):
        return forward(batch, pool, phase=phase, on_layer=lambda layer: on_layer(layer, lambda: heard.append(layer)))

    parts.transformer.forward = named
    one = Recorded(parts, "a", prompts_of(5)[0])
    one.job.on_layer = lambda layer, ready: ready()
    batcher.add(one.job)
    batcher.run_once()
    assert heard == list(range(NUM_LAYERS))


def test_layers_count_once_they_are_computed_and_not_when_they_are_queued(monkeypatch):
    class Event:
        done = False

        def query(self):
            return Event.done

        def synchronize(self):
            Event.done = True

    parts = toy_parts()
    batcher = PrefillBatcher(parts.runner, 100)
    batcher.add(Recorded(parts, "a", prompts_of(5)[0]).job)
    assert (batcher.pending_batches, batcher.completed_layers) == (1, 0)
    batcher.run_once()
    assert (batcher.pending_batches, batcher.completed_layers) == (0, NUM_LAYERS), (
        "on a CPU a layer has run when it is told of"
    )
    monkeypatch.setattr(prefill, "event_now", lambda device: Event())
    batcher.add(Recorded(parts, "b", prompts_of(5)[0]).job)
    logits = batcher.run(plan := batcher.plan())
    batcher.add(Recorded(parts, "c", prompts_of(5)[0]).job)
    assert (batcher.pending_batches, batcher.completed_layers) == (2, NUM_LAYERS)
    batcher.finish(plan, logits)
    assert (batcher.pending_batches, batcher.completed_layers) == (1, 2 * NUM_LAYERS)


def test_a_failed_forward_is_told_when_the_device_has_ended_what_was_queued(monkeypatch):
    device, parts = LateDevice(monkeypatch), toy_parts()
    batcher, waits = PrefillBatcher(parts.runner, 100), []
    one = Recorded(parts, "a", prompts_of(5)[0])
    one.job.on_error = lambda error: waits.append(len(device.waits))
    batcher.add(one.job)
    parts.transformer.fail_with = error = RuntimeError("out of memory")
    with pytest.raises(RuntimeError):
        batcher.run_once()
    batcher.on_error(error)
    assert waits == [1]


def test_a_failed_forward_is_told_to_every_job_of_its_batch():
    parts = toy_parts()
    batcher = PrefillBatcher(parts.runner, 100)
    first, second, later = (
        Recorded(parts, key, prompt) for key, prompt in zip("abc", prompts_of(5, 6, 7), strict=True)
    )
    for one in (first, second):
        batcher.add(one.job)
    parts.transformer.fail_with = error = RuntimeError("out of memory")
    with pytest.raises(RuntimeError):
        batcher.run_once()
    batcher.on_error(error)
    assert first.heard == second.heard == ["start", 0, error]
    parts.transformer.fail_with = None
    batcher.add(later.job)
    batcher.run_once()
    assert later.heard == EVERYTHING


def test_samples_draw_from_one_prompt_and_max_tokens_zero_draws_nothing():
    parts = toy_parts()
    batcher = PrefillBatcher(parts.runner, 100)
    prompt = prompts_of(9)[0]
    sampling = SamplingParams(temperature=1.0, seed=5, n=4, max_tokens=4)
    many = Recorded(parts, "many", prompt, sampling, (0, 1, 2, 3))
    none = Recorded(parts, "none", prompt, dataclasses.replace(sampling, max_tokens=0))
    alone = Recorded(parts, "alone", prompt, sampling, (2,))
    for one in (many, none, alone):
        batcher.add(one.job)
    batcher.run_once()
    assert none.tokens == [] and none.heard == EVERYTHING
    assert [token.sample_index for token in many.tokens] == [0, 1, 2, 3]
    assert len({token.token_id for token in many.tokens}) > 1
    assert alone.tokens == [many.tokens[2]]


def expected_outputs(prompts, sampling, **engine):
    return [
        [output.token_ids for output in outputs]
        for outputs in Engine(toy_parts(**engine), small_config()).generate(prompts, sampling)
    ]


def test_delivered_tokens_continue_as_if_nothing_had_happened():
    """A replay of two samples: the prompt's full blocks are shared, each sample brings its own tail and output."""
    parts = toy_parts(block_size=4)
    sampling = SamplingParams(
        temperature=1.0, seed=9, n=3, max_tokens=12, repetition_penalty=1.3, frequency_penalty=0.2
    )
    prompt = prompts_of(10)[0]
    whole = expected_outputs([prompt], sampling)[0]
    delivered = {1: whole[1][:5], 2: whole[2][:2]}
    shared = parts.blocks.allocate(2)
    sequences = [
        PrefillSequence(1, prompt + delivered[1], [*shared, *parts.blocks.allocate(4)]),
        PrefillSequence(2, prompt + delivered[2], [*shared, *parts.blocks.allocate(4)], first_computed=8),
    ]
    tokens = []
    job = PrefillJob("replay", sequences, sampling, (1, 2), (5, 2), len(prompt), on_tokens=tokens.extend)
    batcher = PrefillBatcher(parts.runner, 100)
    batcher.add(job)
    batcher.run_once()
    assert [(token.sample_index, token.position, token.token_id) for token in tokens] == [
        (1, 5, whole[1][5]),
        (2, 2, whole[2][2]),
    ]
    made: dict[int, list[int]] = {1: [], 2: []}
    decode = DecodeBatcher(parts.runner, 8, lambda step: [made[one.sample_index].append(one.token_id) for one in step])
    decode.add(
        DecodeSequence(
            7,
            token.sample_index,
            sampling,
            tuple(prompt),
            [*delivered[token.sample_index], token.token_id],
            one.block_table,
        )
        for token, one in zip(tokens, sequences, strict=True)
    )
    while decode.has_work():
        decode.run_once()
    assert made == {1: whole[1][6:], 2: whole[2][3:]}


def started(parts, prompts, sampling):
    """Decode sequences whose prompts have been prefilled."""
    sequences = []
    for handle, prompt in enumerate(prompts):
        one = Recorded(parts, str(handle), prompt, sampling)
        batcher = PrefillBatcher(parts.runner, 1000)
        batcher.add(one.job)
        batcher.run_once()
        sequences.append(DecodeSequence(handle, 0, sampling, tuple(prompt), [one.tokens[0].token_id], one.table))
    return sequences


def test_more_samples_than_fit_take_turns_and_none_starves():
    parts, sampling = toy_parts(num_blocks=256), SamplingParams(max_tokens=9)
    prompts = prompts_of(*range(3, 13))
    steps: list[list[int]] = []
    outputs = {handle: [] for handle in range(10)}

    def on_step(tokens):
        steps.append([token.handle for token in tokens])
        for token in tokens:
            outputs[token.handle].append(token.token_id)

    decode = DecodeBatcher(parts.runner, 4, on_step)
    sequences = started(parts, prompts, sampling)
    decode.add(sequences)
    assert decode.running == 10
    while decode.has_work():
        decode.run_once()
    assert max(map(len, steps)) == 4 and steps[:3] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]
    for handle in range(10):
        turns = [place for place, step in enumerate(steps) if handle in step]
        assert len(turns) == 8 and max(np.diff(turns)) <= 3, "somebody waited for longer than a round"
    expected = expected_outputs(prompts, sampling, num_blocks=256)
    assert [[one.output_token_ids[0], *outputs[one.handle]] for one in sequences] == [one[0] for one in expected]
    assert decode.steps == len(steps) and decode.running == 0


def test_samples_join_and_leave_between_steps():
    parts, sampling = (
        toy_parts(num_blocks=256),
        SamplingParams(max_tokens=20, temperature=1.0, top_p=0.9, presence_penalty=0.4),
    )
    prompts = prompts_of(5, 9, 14, 3, 30)
    expected = [one[0] for one in expected_outputs(prompts, sampling, num_blocks=256)]
    outputs: dict[int, list[int]] = {handle: [] for handle in range(5)}
    ended: dict[int, FinishReason] = {}

    def on_step(tokens):
        for token in tokens:
            assert token.position == len(outputs[token.handle]) + 1
            outputs[token.handle].append(token.token_id)
            if token.finish_reason:
                ended[token.handle] = token.finish_reason

    decode = DecodeBatcher(parts.runner, 2, on_step)
    sequences = started(parts, prompts, sampling)
    decode.add(sequences[:2])
    for _ in range(4):
        decode.run_once()
    decode.add(sequences[2:4])
    for _ in range(3):
        decode.run_once()
    assert decode.remove(1) == 1 and decode.remove(1) == 0
    decode.add(sequences[4:])
    assert decode.remove(3, sample_index=5) == 0 and decode.remove(3, sample_index=0) == 1
    frozen = {handle: list(outputs[handle]) for handle in (1, 3)}
    while decode.has_work():
        decode.run_once()
    for handle in (0, 2, 4):
        assert [sequences[handle].output_token_ids[0], *outputs[handle]] == expected[handle]
    for handle in (1, 3):
        assert outputs[handle] == frozen[handle] == expected[handle][1 : 1 + len(frozen[handle])]
    assert ended == dict.fromkeys((0, 2, 4), FinishReason.LENGTH)


def test_a_removed_request_that_had_not_joined_yet_never_steps():
    parts, sampling = toy_parts(), SamplingParams(max_tokens=5)
    decode = DecodeBatcher(parts.runner, 4, lambda tokens: pytest.fail("it stepped"))
    decode.add(started(parts, prompts_of(5), sampling))
    assert decode.remove(0) == 1
    assert not decode.has_work()
    decode.run_once()


def test_a_failed_step_is_told_with_its_samples_and_a_bad_one_never_joins():
    parts, sampling = toy_parts(num_blocks=128), SamplingParams(max_tokens=6)
    lost: list[tuple[list[int], Exception]] = []
    done: list[int] = []
    decode = DecodeBatcher(
        parts.runner,
        2,
        lambda tokens: done.extend(token.handle for token in tokens if token.finish_reason),
        lambda sequences, error: lost.append(([one.handle for one in sequences], error)),
    )
    sequences = started(parts, prompts_of(4, 5, 6, 7), sampling)
    sequences[3].sampling = dataclasses.replace(sampling, logit_bias=((VOCAB, 1.0),))
    decode.add(sequences)
    parts.transformer.fail_with = error = RuntimeError("a kernel failed")
    with pytest.raises(RuntimeError):
        decode.run_once()
    decode.on_error(error)
    assert lost[0][0] == [3] and isinstance(lost[0][1], InvalidRequest)
    assert lost[1] == ([0, 1], error) and decode.running == 1
    parts.transformer.fail_with = None
    while decode.has_work():
        decode.run_once()
    assert done == [2] and len(lost) == 2


def test_tables_grow_with_many_samples_and_long_contexts():
    parts, sampling = toy_parts(num_blocks=600, max_context=256), SamplingParams(max_tokens=3)
    prompts = prompts_of(*([3] * 40), 200)
    expected = [one[0] for one in expected_outputs(prompts, sampling, num_blocks=600)]
    outputs = {handle: [] for handle in range(41)}
    decode = DecodeBatcher(parts.runner, 3, lambda tokens: [outputs[one.handle].append(one.token_id) for one in tokens])
    sequences = started(parts, prompts, sampling)
    decode.add(sequences)
    while decode.has_work():
        decode.run_once()
    assert [[one.output_token_ids[0], *outputs[one.handle]] for one in sequences] == expected
