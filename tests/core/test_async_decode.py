"""The decode pipeline one step ahead: the same tokens as step by step, and blocks are told free only when they are."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from engine_fakes import VOCAB, small_config, toy_parts

from headrace.engine.decode import DecodeBatcher
from headrace.engine.offline import Engine
from headrace.engine.prefill import PrefillBatcher
from headrace.engine.request import DecodeSequence, PrefillJob, PrefillSequence, SampledToken
from headrace.engine.step import StepTokens, TopColumns
from headrace.errors import InternalError
from headrace.protocol.common import FinishReason, SamplingParams

STOPS = tuple(range(0, VOCAB, 7))
SAMPLINGS = (
    SamplingParams(max_tokens=12),
    SamplingParams(max_tokens=40, eos_token_ids=STOPS),
    SamplingParams(max_tokens=15, temperature=1.0, seed=5, stop_token_ids=STOPS[:9], min_tokens=4, logprobs=2),
    SamplingParams(max_tokens=1, temperature=1.0, seed=4),
    SamplingParams(max_tokens=25, temperature=0.9, top_k=30, seed=6, n=3, logprobs=0, stop_token_ids=STOPS[4:12]),
    SamplingParams(max_tokens=20, temperature=0.7, top_p=0.9, seed=7, logit_bias=((3, 2.0), (14, 3.0)), eos_token_ids=(14,)),
    SamplingParams(max_tokens=1000, ignore_eos=True, eos_token_ids=STOPS, temperature=1.2, seed=8),
)  # fmt: skip
PENALISED = (
    SamplingParams(max_tokens=18, repetition_penalty=1.4, stop_token_ids=STOPS),
    SamplingParams(max_tokens=9, temperature=1.0, frequency_penalty=3.0, presence_penalty=0.4, seed=9),
)


class Device:
    """Stands between a batcher and its runner as a device that works late: a step's forward has happened, but who looks
    at its tokens, or at blocks that it may still write, before it was waited for, is caught."""

    def __init__(self, runner):
        self.runner, self.launched, self.waited, self.plans = runner, [], [], []
        self.fail_launch: Exception | None = None
        self.fail_wait: Exception | None = None
        self.settled = 0
        runner.launch, self._launch = self.launch, runner.launch
        runner.settle = self.settle

    def launch(self, plan, table, before):
        if before is None:
            assert (plan.sources == -1).all()
        if self.fail_launch is not None:
            raise self.fail_launch
        drawn = self._launch(plan, table, before)
        self.launched.append(drawn)
        self.plans.append(plan)
        drawn.blocks = {plan.tables.of(plan.rows, 64)[place, at // 4] for place, at in enumerate(plan.context_lens - 1)}
        wait = drawn.wait

        def waits():
            if self.fail_wait is not None:
                raise self.fail_wait
            self.waited.append(drawn)
            return wait()

        drawn.wait = waits
        return drawn

    def settle(self):
        self.settled += 1
        self.waited = list(self.launched)

    @property
    def running(self):
        """Steps that nobody has waited for."""
        return [drawn for drawn in self.launched if drawn not in self.waited]

    def written(self):
        """Blocks that some running step may write."""
        return set().union(*(drawn.blocks for drawn in self.running))


def ahead(**changes):
    parts = toy_parts(**{"num_blocks": 400, **changes})
    parts.runner.steps_ahead = 1
    return parts


def mixed(count, samplings, seed=0):
    draws = np.random.default_rng(seed)
    prompts = [draws.integers(0, VOCAB, length).tolist() for length in draws.integers(1, 40, count)]
    return prompts, [samplings[place] for place in draws.integers(0, len(samplings), count)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("samplings", [SAMPLINGS, PENALISED, SAMPLINGS + PENALISED], ids=["free", "penalised", "all"])
def test_one_step_ahead_draws_the_same_tokens(samplings, seed):
    prompts, chosen = mixed(14, samplings, seed)
    config = small_config(max_batch_size=(32, 5)[seed % 2])
    expected = Engine(toy_parts(num_blocks=400, max_context=64), config).generate(prompts, chosen)
    parts = ahead(max_context=64)
    device = Device(parts.runner)
    heard: dict = {}

    def on_token(index, token):
        place = heard.setdefault((index, token.sample_index), [])
        assert token.position == len(place), "a token is missing, or came after the end"
        place.append(token)

    engine = Engine(parts, config)
    made = engine.generate(prompts, chosen, on_token)
    assert made == expected
    assert parts.blocks.ledger().free == parts.blocks.num_blocks
    assert not device.running and not engine.decode.has_work() and engine.decode.running == 0
    for (index, sample), tokens in heard.items():
        assert [token.token_id for token in tokens] == expected[index][sample].token_ids
        assert [bool(token.finish_reason) for token in tokens] == [False] * (len(tokens) - 1) + [True]


def test_the_next_step_is_launched_before_tokens_are_read_and_lengths_are_foreseen():
    parts = ahead()
    device = Device(parts.runner)
    most = []
    engine = Engine(parts, small_config())
    complete = engine.decode.completed
    engine.decode.completed = lambda *_: (most.append(len(device.running)), complete(*_))
    output = engine.generate([[1, 2, 3]] * 3, SamplingParams(max_tokens=10))[0][0]
    assert len(output.token_ids) == 10
    assert most == [1] * 8 + [0], "each step but the last was read with the next one in flight"
    assert len(device.launched) == 9, "a step too many for an end that could be foreseen"


def test_an_unforeseen_end_costs_one_dropped_token_and_is_told_after_that_step():
    parts = ahead()
    device = Device(parts.runner)
    engine = Engine(parts, small_config())
    parts.transformer.shift[9] = 100.0
    sampling = SamplingParams(max_tokens=30, eos_token_ids=(9,), min_tokens=4)
    ends = []
    output = engine.generate(
        [[1, 2]], sampling, lambda _, token: token.finish_reason and ends.append(len(device.running))
    )[0][0]
    assert output.token_ids[4:] == [9] and output.finish_reason is FinishReason.EOS
    assert ends == [0], "told while a step with it ran"
    assert len(device.launched) == 5  # positions 1 to 4, and the one too many


def test_penalties_read_tokens_first_and_leave_others_alone():
    parts = ahead()
    device = Device(parts.runner)
    before = []
    launch = parts.runner.launch
    parts.runner.launch = lambda plan, table, given: (before.append(given is not None), launch(plan, table, given))[1]
    Engine(parts, small_config()).generate([[1]], SamplingParams(max_tokens=6, frequency_penalty=1.0))
    assert before == [False] * 5
    before.clear()
    free = SamplingParams(max_tokens=6, min_tokens=3, logprobs=3, logit_bias=((4, 1.0),), temperature=1.0, top_k=5)
    Engine(parts, small_config()).generate([[1]], free)
    assert before == [False] + [True] * 4
    assert not device.running


def started(parts, count, sampling, seed=0):
    """Decode sequences whose prompts have been prefilled, with blocks of their own."""
    draws, sequences = np.random.default_rng(seed), []
    for handle in range(count):
        prompt = draws.integers(0, VOCAB, 3 + handle).tolist()
        table = list(parts.blocks.allocate(parts.blocks.blocks_for(len(prompt) + sampling.max_tokens)))
        tokens = []
        prefill = PrefillBatcher(parts.runner, 1000)
        prefill.add(PrefillJob(str(handle), [PrefillSequence(0, prompt, table)], sampling, on_tokens=tokens.extend))
        prefill.run_once()
        sequences.append(DecodeSequence(handle, 0, sampling, tuple(prompt), [tokens[0].token_id], table))
    return sequences


class Owner:
    """Holds blocks as a service does: gives them back when an end, a failure or a removal is told, and checks then that
    no running step can write them; what was given back is poisoned at once, as a remote writer would."""

    def __init__(self, parts, device, max_batch_size=4):
        self.parts, self.device = parts, device
        self.outputs: dict[int, list[int]] = {}
        self.ended: dict[int, FinishReason] = {}
        self.lost: dict[int, Exception] = {}
        self.sequences: dict[int, DecodeSequence] = {}
        self.decode = DecodeBatcher(parts.runner, max_batch_size, self.on_step, self.on_failure)

    def add(self, sequences):
        self.sequences |= {one.handle: one for one in sequences}
        self.decode.add(sequences)

    def on_step(self, tokens):
        for token in tokens:
            assert token.handle in self.sequences, "a token after the end"
            made = self.outputs.setdefault(token.handle, [])
            assert token.position == len(made) + 1
            made.append(token.token_id)
            if token.finish_reason:
                self.ended[token.handle] = token.finish_reason
                self.give_back(token.handle)

    def on_failure(self, sequences, error):
        for one in sequences:
            self.lost[one.handle] = error
            self.give_back(one.handle)

    def remove(self, handle):
        left = self.decode.remove(handle)
        if left:
            self.give_back(handle)
        return left

    def give_back(self, handle):
        table = self.sequences.pop(handle).block_table
        assert not self.device.written() & set(table), "blocks given back while a step may write them"
        self.parts.pool.rows[:, table] = -1.0
        self.parts.blocks.free(table)


def test_random_joins_cancels_and_ends_never_touch_blocks_that_were_given_back(full):
    sampling = SamplingParams(max_tokens=14, temperature=1.0, seed=3, stop_token_ids=STOPS)
    reference = toy_parts(num_blocks=2000)
    plain = Owner(reference, Device(reference.runner))
    plain.add(started(reference, 24, sampling))
    while plain.decode.has_work():
        plain.decode.run_once()
    assert {FinishReason.STOP, FinishReason.LENGTH} <= set(plain.ended.values())
    for seed in range(30 if full else 8):
        parts, draws = ahead(num_blocks=2000), np.random.default_rng(seed)
        owner = Owner(parts, Device(parts.runner), max_batch_size=int(draws.integers(1, 9)))
        waiting = started(parts, 24, sampling)
        while waiting or owner.decode.has_work():
            for _ in range(int(draws.integers(0, 3))):
                if waiting:
                    owner.add([waiting.pop()])
            if draws.random() < 0.15 and owner.sequences:
                owner.remove(int(draws.choice(list(owner.sequences))))
            if owner.decode.has_work():
                owner.decode.run_once()
        for handle, made in owner.outputs.items():
            whole = plain.outputs[handle]
            assert made == (whole if handle in owner.ended else whole[: len(made)])
        assert all(owner.ended[handle] is plain.ended[handle] for handle in owner.ended)
        assert not owner.sequences and parts.blocks.ledger().free == 2000 and owner.decode.running == 0


def running(sampling=SamplingParams(max_tokens=20), count=3, steps=3):
    """An owner whose samples have stepped and have a step in flight."""
    parts = ahead()
    owner = Owner(parts, Device(parts.runner))
    owner.add(started(parts, count, sampling))
    for _ in range(steps):
        owner.decode.run_once()
    assert len(owner.device.running) == 1
    return owner


def test_remove_waits_for_the_step_in_flight_and_reports_it():
    owner = running()
    before = {handle: len(made) for handle, made in owner.outputs.items()}
    assert owner.remove(1) == 1 and owner.remove(1) == 0
    assert not owner.device.running
    assert {handle: len(made) for handle, made in owner.outputs.items()} == {h: n + 1 for h, n in before.items()}
    while owner.decode.has_work():
        owner.decode.run_once()
    assert set(owner.ended) == {0, 2} and len(owner.outputs[1]) == before[1] + 1


def test_remove_of_a_sample_that_is_not_in_flight_does_not_wait():
    owner = running()
    owner.add(started(owner.parts, 5, SamplingParams(max_tokens=4), seed=1)[4:])
    assert owner.remove(4) == 1
    assert len(owner.device.running) == 1


def test_a_failed_launch_loses_its_samples_after_the_step_before_was_reported():
    owner = running()
    before = {handle: len(made) for handle, made in owner.outputs.items()}
    late = started(owner.parts, 5, SamplingParams(max_tokens=4), seed=1)[4]
    owner.device.fail_launch = error = InternalError("no")
    with pytest.raises(InternalError):
        owner.decode.run_once()
    owner.decode.on_error(error)
    assert owner.lost == dict.fromkeys((0, 1, 2), error) and owner.device.settled == 1
    assert {handle: len(made) for handle, made in owner.outputs.items()} == {h: n + 1 for h, n in before.items()}
    assert not owner.decode.has_work()
    owner.device.fail_launch = None
    owner.add([late])
    while owner.decode.has_work():
        owner.decode.run_once()
    assert set(owner.ended) == {4}


def test_a_step_whose_tokens_cannot_be_read_loses_the_next_one_too():
    owner = running()
    owner.device.fail_wait = error = RuntimeError("an illegal address")
    with pytest.raises(RuntimeError):
        owner.decode.run_once()
    owner.decode.on_error(error)
    assert owner.lost == dict.fromkeys((0, 1, 2), error) and not owner.decode.has_work()
    assert owner.decode.running == 0


def test_tokens_that_cannot_be_sorted_out_are_reported_as_lost_and_never_skipped():
    owner = running()
    before = {handle: list(made) for handle, made in owner.outputs.items()}

    def fails(*_):
        raise RuntimeError("columns")

    owner.decode._samples.reasons = fails
    with pytest.raises(RuntimeError, match="columns") as raised:
        owner.decode.run_once()
    owner.decode.on_error(raised.value)
    assert owner.lost == dict.fromkeys((0, 1, 2), raised.value)
    assert owner.outputs == before and not owner.decode.has_work()


def test_an_end_that_was_held_survives_the_failure_of_the_step_it_waited_for():
    parts = ahead()
    owner = Owner(parts, Device(parts.runner))
    parts.transformer.shift[9] = 100.0
    sequences = started(parts, 2, SamplingParams(max_tokens=20))
    sequences[0].sampling = dataclasses.replace(sequences[0].sampling, eos_token_ids=(9,))
    owner.add(sequences)
    owner.decode.run_once()
    owner.decode.run_once()  # reads the first step: sample 0 has ended, and is in the second step
    assert owner.decode.running == 2 and owner.ended == {} and len(owner.outputs[1]) == 1
    owner.device.fail_wait = error = RuntimeError("an illegal address")
    with pytest.raises(RuntimeError):
        owner.decode.run_once()
    owner.decode.on_error(error)
    assert owner.ended == {0: FinishReason.EOS} and owner.lost == {1: error} and owner.outputs[0] == [9]


def test_remove_survives_a_step_in_flight_that_fails():
    owner = running()
    owner.device.fail_wait = error = RuntimeError("an illegal address")
    assert owner.remove(1) == 0
    assert owner.lost == dict.fromkeys((0, 1, 2), error) and not owner.decode.has_work()


def test_a_listener_that_raises_loses_nothing():
    owner = running()
    heard, owner.decode.on_step = owner.decode.on_step, lambda tokens: 1 // 0
    with pytest.raises(ZeroDivisionError) as caught:
        owner.decode.run_once()
    owner.decode.on_error(caught.value)
    assert owner.lost == {} and owner.decode.running == 3
    owner.decode.on_step = heard
    for made in owner.outputs.values():
        made.append(-1)  # the step it did not hear
    while owner.decode.has_work():
        owner.decode.run_once()
    assert set(owner.ended) == {0, 1, 2} and owner.lost == {}


def test_an_abandoned_generate_frees_its_blocks_after_the_step_in_flight():
    parts = ahead(num_blocks=40)
    device, engine, heard = Device(parts.runner), Engine(parts, small_config()), []

    def on_token(index, token):
        heard.append(token)
        if len(heard) == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1, 2], [3]], SamplingParams(max_tokens=20), on_token)
    assert parts.blocks.ledger().free == 40 and not device.running and not engine.decode.has_work()
    assert len(engine.generate([[1, 2], [3]], SamplingParams(max_tokens=4))[0][0].token_ids) == 4


def test_step_tokens_are_a_sequence_of_tokens():
    columns = [np.array(column, np.int64) for column in ([4, 5, 6], [0, 1, 0], [7, 8, 9], [20, 21, 22])]
    reasons, logprobs = np.array([0, 2, 0], np.int8), np.array([-1.0, np.nan, -2.0], np.float32)
    top = TopColumns(
        np.array([[1, 2], [3, 4]]), np.array([[-0.5, -1.5], [-0.25, -9.0]]), {0: 0, 2: 1}, {0: 2, 1: 0, 2: 1}
    )
    tokens = StepTokens(*columns, reasons, logprobs, top)
    expected = [
        SampledToken(4, 0, 7, 20, -1.0, ((1, -0.5), (2, -1.5)), FinishReason.NONE),
        SampledToken(5, 1, 8, 21, None, (), FinishReason.STOP),
        SampledToken(6, 0, 9, 22, -2.0, ((3, -0.25),), FinishReason.NONE),
    ]  # fmt: skip
    assert (
        list(tokens) == expected
        and tokens[1:] == expected[1:]
        and tokens[-1] == expected[2]
        and tokens[::2] == expected[::2]
    )
    assert list(tokens.take(np.array([2, 0]))) == [expected[2], expected[0]]
    plain = StepTokens(*columns, reasons)
    both = list(plain + tokens)
    assert both[3:] == expected and [one.logprob for one in both[:3]] == [None] * 3
    assert list(tokens + plain)[:3] == expected and len(plain + tokens) == 6
    with pytest.raises(IndexError):
        tokens[3]
