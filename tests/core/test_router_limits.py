"""What is refused before any worker hears of it, and which defaults win."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from router_fakes import BLOCK, CONTEXT, EOS, VOCABULARY, checkpoint, command

from headrace.cache.seats import blocks_needed
from headrace.errors import CheckpointError, InvalidRequest
from headrace.protocol.common import SamplingParams
from headrace.protocol.inference import ChatMessage, GenerateCommand
from services.router import limits
from services.router.checkpoint import _checked, _read_generation, _sampling_defaults
from services.router.limits import Capacity


def chat(*messages: tuple[str, str]) -> GenerateCommand:
    return GenerateCommand(chat=tuple(ChatMessage(*message) for message in messages))


BAD = [
    (GenerateCommand(), "prompt"),
    (command(""), "text"),
    (command(()), "tokens.token_ids"),
    (command((0, VOCABULARY)), "tokens.token_ids"),
    (command((-1,)), "tokens.token_ids"),
    (command(tuple([1] * (CONTEXT + 1))), "tokens.token_ids"),
    (command(tuple([1] * 600_000)), "tokens.token_ids"),
    (command("x" * (CONTEXT * 8 + 1)), "text"),
    (chat(), "chat.messages"),
    (chat(("robot", "hi")), "chat.messages[0].role"),
    (chat(("user", "hi"), ("user", "")), "chat.messages[1].content"),
    (command(stream_interval=1025), "stream_interval"),
    (command(stream_interval=-1), "stream_interval"),
    (command(cache_salt="s" * 129), "cache_salt"),
    (command(priority=101), "priority"),
    (command(temperature=-0.1), "sampling.temperature"),
    (command(temperature=10.1), "sampling.temperature"),
    (command(temperature=math.nan), "sampling.temperature"),
    (command(top_k=-1), "sampling.top_k"),
    (command(top_p=0.0), "sampling.top_p"),
    (command(top_p=1.01), "sampling.top_p"),
    (command(min_p=1.0), "sampling.min_p"),
    (command(min_p=-0.1), "sampling.min_p"),
    (command(repetition_penalty=0.0), "sampling.repetition_penalty"),
    (command(repetition_penalty=10.5), "sampling.repetition_penalty"),
    (command(repetition_penalty=1e-300), "sampling.repetition_penalty"),
    (command(presence_penalty=2.1), "sampling.presence_penalty"),
    (command(frequency_penalty=-2.1), "sampling.frequency_penalty"),
    (command(n=17), "sampling.n"),
    (command(n=-1), "sampling.n"),
    (command(max_tokens=-1), "sampling.max_tokens"),
    (command(min_tokens=-1), "sampling.min_tokens"),
    (command(logprobs=21), "sampling.logprobs"),
    (command(logprobs=-1), "sampling.logprobs"),
    (command(stop=("",)), "sampling.stop"),
    (command(stop=("x" * 257,)), "sampling.stop"),
    (command(stop=("x",) * 17), "sampling.stop"),
    (command(stop_token_ids=(VOCABULARY,)), "sampling.stop_token_ids"),
    (command(stop_token_ids=(1,) * 65), "sampling.stop_token_ids"),
    (command(logit_bias=((1, 100.5),)), "sampling.logit_bias"),
    (command(logit_bias=((1, 1.0), (1, 2.0))), "sampling.logit_bias"),
    (command(logit_bias=((-1, 1.0),)), "sampling.logit_bias"),
    (command(logit_bias=tuple((k % VOCABULARY, 0.0) for k in range(1025))), "sampling.logit_bias"),
    (command(surprise=1), "sampling.surprise"),
]


@pytest.mark.parametrize("request_, field", BAD, ids=[f"{k}-{field}" for k, (_, field) in enumerate(BAD)])
def test_a_malformed_request_is_refused_and_the_field_is_named(request_, field):
    with pytest.raises(InvalidRequest) as caught:
        limits.check_shape(request_, checkpoint())
    assert caught.value.field == field and field in caught.value.message


@pytest.mark.parametrize(
    "good",
    [
        command(" "),
        command((0, VOCABULARY - 1)),
        command(tuple([1] * CONTEXT)),
        command(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=10.0, n=16, max_tokens=0),
        command(stop=("x" * 256,) * 16, stop_token_ids=(1,) * 64, logprobs=20, min_tokens=0),
        command(logit_bias=((0, 100.0), (1, -100.0)), priority=-100, stream_interval=1024, cache_salt="s" * 128),
        chat(("system", "a"), ("user", "b"), ("assistant", "c")),
    ],
)
def test_the_borders_of_every_range_are_inside(good):
    limits.check_shape(good, checkpoint())


@pytest.mark.parametrize("bad", ["", "x" * 129, "tab\t", "caf\u00e9", " led", "trailed ", "new\nline"])
def test_request_ids_that_cannot_travel_are_refused(bad):
    with pytest.raises(InvalidRequest) as caught:
        limits.check_request_id(bad)
    assert caught.value.field == "request_id"


def test_a_request_id_of_128_printable_characters_is_taken():
    limits.check_request_id("a b~!" + "x" * 123)


def resolve(given: dict, prompt: int = 10, model=None) -> SamplingParams:
    return limits.resolve_sampling(given, model or checkpoint(), prompt, CONTEXT, 256, lambda: 42)


def test_the_request_wins_over_the_checkpoint_and_that_over_the_proto():
    model = checkpoint(default_sampling={"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1})
    resolved = resolve({"temperature": 0.0}, model=model)
    assert (resolved.temperature, resolved.top_p, resolved.repetition_penalty) == (0.0, 0.9, 1.1)
    assert (resolved.min_p, resolved.top_k, resolved.n, resolved.logprobs) == (0.0, 0, 1, None)
    assert (resolved.seed, resolved.eos_token_ids) == (42, (EOS,))
    assert resolve({"seed": 7, "temperature": None}).seed == 7


@pytest.mark.parametrize("prompt, expected", [(10, 256), (CONTEXT - 3, 3), (CONTEXT, 0)])
def test_absent_max_tokens_takes_what_the_context_still_holds(prompt, expected):
    assert resolve({}, prompt).max_tokens == expected


def test_one_token_beyond_the_context_is_refused_and_one_less_is_not():
    assert resolve({"max_tokens": CONTEXT - 10}).max_tokens == CONTEXT - 10
    with pytest.raises(InvalidRequest) as caught:
        resolve({"max_tokens": CONTEXT - 9})
    assert caught.value.field == "sampling.max_tokens"


def test_min_tokens_above_max_tokens_cannot_work():
    with pytest.raises(InvalidRequest) as caught:
        resolve({"min_tokens": 5, "max_tokens": 4})
    assert caught.value.field == "sampling.min_tokens"


def test_a_whole_answer_that_cannot_fit_one_message_is_refused_with_the_limit():
    sampling = SamplingParams(n=16, max_tokens=4000, logprobs=20)
    with pytest.raises(InvalidRequest, match="524288") as caught:
        limits.check_final_only(sampling)
    assert caught.value.field == "final_only"
    limits.check_final_only(replace(sampling, logprobs=None))


CAPACITY = Capacity(CONTEXT, 16, 24, BLOCK, 8)


@pytest.mark.parametrize(
    "sampling, prompt, field",
    [
        (SamplingParams(max_tokens=CONTEXT), 1, "sampling.max_tokens"),
        (SamplingParams(max_tokens=1), CONTEXT + 1, "text"),
        (SamplingParams(max_tokens=1), 17 * BLOCK, "text"),
        (SamplingParams(max_tokens=24 * BLOCK), 1, "sampling.max_tokens"),
        (SamplingParams(max_tokens=2, n=9), 1, "sampling.n"),
    ],
)
def test_what_no_worker_can_hold_is_refused(sampling, prompt, field):
    with pytest.raises(InvalidRequest) as caught:
        limits.check_capacity(sampling, prompt, "text", CAPACITY)
    assert caught.value.field == field


def test_samples_share_the_full_blocks_of_the_prompt():
    assert blocks_needed(BLOCK, [2 * BLOCK], BLOCK) == 2
    assert blocks_needed(BLOCK, [2 * BLOCK] * 4, BLOCK) == 2 + 3
    assert blocks_needed(BLOCK + 1, [2 * BLOCK + 1] * 4, BLOCK) == 3 + 3 * 2
    limits.check_capacity(SamplingParams(max_tokens=BLOCK), 23 * BLOCK - BLOCK * 8, "text", CAPACITY)


def test_sampling_defaults_are_read_from_generation_config(tmp_path):
    path = tmp_path / "generation_config.json"
    assert _read_generation(path) == {}
    path.write_text(json.dumps({"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1, "do_sample": True}))
    expected = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1}
    assert _sampling_defaults(_read_generation(path)) == expected
    assert _sampling_defaults({"do_sample": False, "temperature": 0.7})["temperature"] == 0.0


@pytest.mark.parametrize("defaults", [{"top_p": 7}, {"temperature": "hot"}, {"repetition_penalty": 0.0}])
def test_a_checkpoint_whose_own_defaults_no_request_could_use_is_refused(defaults, tmp_path):
    with pytest.raises(CheckpointError, match="generation_config.json"):
        _checked(_sampling_defaults(defaults), 100, tmp_path)
