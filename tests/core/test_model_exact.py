"""Exact mode's promise: a request's bits depend on nothing but the request."""

from __future__ import annotations

import random

import pytest
import torch

from headrace import config as configuration
from headrace.engine.exact import exact_self_test
from headrace.engine.offline import EngineParts
from headrace.engine.rank import load_model
from headrace.errors import ConfigError
from headrace.model.deepseek import reference
from headrace.model.deepseek.loading import load_transformer
from headrace.model.weights.random_checkpoint import write_random_checkpoint
from kernels.attention.mla_decode import KEY_CHUNK
from kernels.linear.dense import TorchLinear
from kernels.toolchain import cpu_library
from tests.core.model_driver import Driver
from tests.golden import cases

NEIGHBOUR = "neighbour"


MODELS = [("tiny_shape", "c"), ("tiny_shape", "torch"), *((case, "c") for case in cases.CASES)]
ODD = "odd_heads_no_limits_unnormalised"


@pytest.fixture(scope="module", params=[*MODELS, (ODD, "torch")], ids="-".join)
def model(request, tmp_path_factory):
    name, kernels = request.param
    if kernels == "c" and cpu_library.why_not():
        pytest.skip(f"needs the CPU kernels: {cpu_library.why_not()}")
    config = {"num_hidden_layers": 3} if name == "tiny_shape" else cases.config_of(name)
    where = write_random_checkpoint(tmp_path_factory.mktemp(name), config, seed=7)
    made = load_transformer(where, exact=True, kernels=kernels)
    if kernels == "torch" and (
        refusal := exact_self_test(made)
    ):  # torch's products promise nothing: a start is refused with it
        pytest.skip(f"needs a host on which torch's own products are stable: {refusal}")
    return made


@pytest.fixture(autouse=True)
def one_thread():
    """Unless a test says otherwise: small products on two busy cores only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[1, 2], ids=["1thread", "2threads"])
def threads(request, one_thread, model, full):
    if request.param == 2 and model.config.hidden_size < 256 and not full:
        pytest.skip("two threads on the small configs: needs --full")
    torch.set_num_threads(request.param)
    return request.param


def tokens_of(model, length: int, seed: int = 1) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(model.config.vocab_size) for _ in range(length)]


def alone(model, tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of every position and rows of every layer: one prefill, nobody else, one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    driver = Driver(model, num_blocks=64)
    logits = driver.run([("a", tokens)], "prefill")["a"]
    torch.set_num_threads(before)
    return logits, driver.rows("a")


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    differs = (got != expected) | got.isnan()
    assert not differs.any(), f"{what}: {int(differs.sum())} of {differs.numel()} values differ"


def test_a_prefix_prefills_to_the_same_bits_at_every_length_around_block_borders(model, threads):
    lengths = [1, 2, 5, 15, 16, 17, 32, 33, 64, 65, KEY_CHUNK - 1, KEY_CHUNK, KEY_CHUNK + 1]
    tokens = tokens_of(model, 2 * KEY_CHUNK + 9)
    logits, rows = alone(model, tokens)
    for length in lengths:
        driver = Driver(model, num_blocks=32, seed=length)
        got = driver.run([("a", tokens[:length])], "prefill")["a"]
        assert_same_bits(got, logits[:length], f"logits of {length} tokens")
        assert_same_bits(driver.rows("a"), rows[:, :length], f"rows of {length} tokens")


def test_decode_gives_the_bits_of_prefill(model, threads):
    tokens = tokens_of(model, KEY_CHUNK + 12)
    logits, rows = alone(model, tokens)
    for start in (1, 14, KEY_CHUNK - 6):
        driver = Driver(model, num_blocks=32, seed=start)
        driver.run([("a", tokens[:start])], "prefill")
        for place in range(start, start + 8):
            got = driver.run([("a", [tokens[place]])], "decode")["a"]
            assert_same_bits(got, logits[place : place + 1], f"position {place}")
        assert_same_bits(driver.rows("a"), rows[:, : start + 8], "rows")


def test_several_new_tokens_at_once_give_the_bits_of_prefill(model):
    tokens = tokens_of(model, 60)
    logits, _ = alone(model, tokens)
    driver = Driver(model)
    driver.run([("a", tokens[:20]), ("b", tokens[:44])], "prefill")
    for phase, work in (("decode", [("a", tokens[20:23]), ("b", tokens[44:47])]), ("prefill", [("a", tokens[23:40])])):
        for name, got in driver.run(work, phase).items():
            end = driver.length[name]
            assert_same_bits(got, logits[end - len(got) : end], f"{phase} {name}")


def test_neighbours_and_block_placement_change_nothing(model, threads, full):
    """One request among changing crowds: in its prefill batch, and in every decode step."""
    tokens = tokens_of(model, 50)
    logits, rows = alone(model, tokens)
    crowds = [[1, 200, 17, 90], list(range(1, 31)), [64] * 13, [3]]
    for seed, crowd in enumerate(crowds if full else crowds[:2]):
        driver = Driver(model, num_blocks=400, seed=seed)
        work = [(f"n{i}", tokens_of(model, length, seed + i)) for i, length in enumerate(crowd)]
        work.insert(seed % (len(crowd) + 1), ("a", tokens[:40]))
        assert_same_bits(driver.run(work, "prefill")["a"], logits[:40], f"prefill beside {crowd}")
        for place in range(40, 50 if full else 44):
            step = [(f"n{i}", [i]) for i in range(len(crowd)) if (i + place) % 3]
            step.insert(place % (len(step) + 1), ("a", [tokens[place]]))
            got = driver.run(step, "decode", padding=place % 4)["a"]
            assert_same_bits(got, logits[place : place + 1], f"step {place} beside {crowd}")
        assert_same_bits(driver.rows("a"), rows[:, : driver.length["a"]], f"rows beside {crowd}")


def test_cached_prefix_rows_give_the_bits_of_one_prefill(model):
    tokens = tokens_of(model, KEY_CHUNK + 40)
    logits, _ = alone(model, tokens)
    for cut in (16, 48, KEY_CHUNK, KEY_CHUNK + 39):
        driver = Driver(model)
        driver.run([("a", tokens[:cut])], "prefill")
        got = driver.run([("b", tokens[:9]), ("a", tokens[cut:])], "prefill")
        assert_same_bits(got["a"], logits[cut:], f"cut at {cut}")
        assert_same_bits(got["b"], logits[:9], f"beside a cut at {cut}")


def test_the_moe_chunk_knobs_never_change_a_bit(model):
    tokens = tokens_of(model, 75)
    logits, _ = alone(model, tokens)
    for dp, activation in ((1, 0), (0, 33), (50, 17), (1000, 1000)):
        chunked = model.with_chunks(dp_tokens=dp, activation_tokens=activation)
        assert {(x.ffn.dp_chunk_tokens, x.ffn.activation_chunk_tokens) for x in moe_blocks(chunked)} == {
            (dp, activation)
        }
        assert {x.ffn.dp_chunk_tokens for x in moe_blocks(model)} == {0}, "the model it was made from stays as it is"
        assert_same_bits(Driver(chunked).run([("a", tokens)], "prefill")["a"], logits, f"chunks {dp}, {activation}")


def moe_blocks(model):
    return [block for block in model.blocks if hasattr(block.ffn, "dp_chunk_tokens")]


def test_on_layer_is_called_when_that_layer_is_stored_and_the_next_is_not(model):
    driver = Driver(model, num_blocks=8)
    seen = []

    def on_layer(layer: int) -> None:
        stored = ~driver.rows("a").isnan().any(-1).any(-1)
        seen.append((layer, stored.tolist()))

    driver.run([("a", tokens_of(model, 20))], "prefill", on_layer=on_layer)
    layers = model.config.num_hidden_layers
    assert seen == [(layer, [other <= layer for other in range(layers)]) for layer in range(layers)]


def test_the_self_test_passes_with_our_kernels_and_names_what_a_broken_one_breaks(model, monkeypatch):
    assert exact_self_test(model) is None
    monkeypatch.setattr(model.kernels, "decode", Blurred(model.kernels.decode))
    assert "decode" in exact_self_test(model)


def test_a_start_on_products_that_depend_on_neighbours_is_refused_with_the_reason(tmp_path, monkeypatch):
    """Whatever this host's own products do: these differ by how many rows they are given together."""
    where, run = write_random_checkpoint(tmp_path / "model", cases.config_of(ODD), seed=7), TorchLinear.run
    monkeypatch.setattr(reference, "why_not_c", lambda *_: "no compiler here")
    monkeypatch.setattr(TorchLinear, "run", lambda x, w, add_to=None: run(x * (1 + len(x) * 2**-20), w, add_to))
    settings = configuration.load(flags=[f"model.directory={where}", "engine.exact=true"], environment={})
    for start in (lambda: load_model(settings), lambda: EngineParts.load(where, settings.engine)):
        with pytest.raises(
            ConfigError, match="exact mode is not available on this host: .* differs in its bits"
        ) as told:
            start()
        assert told.value.field == "engine.exact"


class Blurred:
    """A decode kernel whose last bit is wrong."""

    def __init__(self, kernel):
        self.plan, self._run = kernel.plan, kernel.run

    def run(self, *arguments):
        return self._run(*arguments) * (1 + 2**-23)
