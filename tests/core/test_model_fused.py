"""The GPU model, on the CPU with the reference kernels: the code path of an H200 without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.model.base import DecodeInputs
from headrace.model.deepseek.config import ModelConfig
from headrace.model.deepseek.fused import FusedTransformer, packed_context_slots
from headrace.model.deepseek.fused_builder import CheckpointSource, FusedBuilder
from headrace.model.deepseek.fused_kernels import FusedKernels
from headrace.model.deepseek.fused_layers import FusedMoE
from headrace.model.deepseek.fused_linear import ByRows, PreparedLinear, Rows
from headrace.model.deepseek.loading import load_fused_transformer, load_transformer
from headrace.model.deepseek.reference import _packed_context_slots
from headrace.model.weights import precision
from headrace.model.weights.checkpoint import CheckpointFiles
from headrace.model.weights.random_checkpoint import write_random_checkpoint
from headrace.parallel.experts import LocalExchange
from kernels.formats.fp8 import Fp8Weight
from kernels.linear import grouped_linear
from kernels.select import BackendUnavailable
from tests.core.model_driver import Driver

CPU = torch.device("cpu")
SMALL = {"vocab_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 256}
ALL_CHOSEN = {"n_routed_experts": 4, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1}  # no near-tie can flip
PROMPT = list(range(5, 26))
NEXT = [100, 7, 61, 3]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("gpu"), SMALL, seed=11)


@pytest.fixture(scope="module")
def all_chosen(tmp_path_factory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("all_chosen"), SMALL | ALL_CHOSEN, seed=12)


@pytest.fixture(scope="module")
def model(directory) -> FusedTransformer:
    return loaded(directory)


def loaded(directory: Path, weight_dtype: str = "", kv_dtype: str = "") -> FusedTransformer:
    return load_fused_transformer(CheckpointFiles(directory, ModelConfig.load(directory)), CPU, weight_dtype, kv_dtype)


def prefill_then_decode(model) -> torch.Tensor:
    """Logits of PROMPT and of NEXT after it, the latter one token at a time beside another sequence and padding."""
    driver = Driver(model, num_blocks=32)
    first = driver.run([("other", PROMPT[::-1]), ("a", PROMPT)], "prefill")["a"]
    steps = [driver.run([("a", [token]), ("other", [9])], "decode", padding=2)["a"] for token in NEXT]
    return torch.cat((first, *steps))


def relative(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """[tokens] mean difference of a token's logits beside the spread of all."""
    assert got.isfinite().all()
    return (got - expected).abs().mean(-1) / expected.std()


def test_logits_are_those_of_the_cpu_model_to_bf16(directory, model):
    expected = prefill_then_decode(load_transformer(directory, exact=True))
    got = prefill_then_decode(model)
    assert got.dtype == torch.float32 and got.shape == expected.shape
    difference = relative(got, expected)
    assert difference.median() < 0.03, difference  # a router's near-tie may flip an expert in a few tokens
    assert (got.argmax(-1) == expected.argmax(-1)).float().mean() > 0.9


@pytest.mark.parametrize(
    "recipe, kv_dtype, bound", [("", "bf16", 0.03), ("", "fp8", 0.08), ("fp8", "bf16", 0.2), ("nvfp4", "fp8", 0.2)]
)
def test_a_recipe_computes_what_its_own_weights_say(all_chosen, recipe, kv_dtype, bound):
    """The oracle is the same model over the dequantised weights in bf16: what is left is the rounding of activations."""
    served = loaded(all_chosen, recipe, kv_dtype)
    twin = FusedBuilder(served.config, Dequantised(all_chosen, recipe), FusedKernels(CPU)).transformer()
    difference = relative(prefill_then_decode(served), prefill_then_decode(twin))
    assert difference.max() < bound, difference
    formats = dict(served.precision_table())
    assert formats["experts"].startswith(recipe or "bf16")
    assert formats["KV rows"].startswith(kv_dtype)


class Dequantised(CheckpointSource):
    """A checkpoint through a recipe and back to bf16."""

    def __init__(self, directory: Path, recipe: str):
        super().__init__(CheckpointFiles(directory, ModelConfig.load(directory)), CPU, recipe)

    def part(self, part, names):
        return precision.converted(super().part(part, names), "bf16")


def test_decode_continues_what_prefill_began(model):
    whole = Driver(model, num_blocks=32).run([("a", PROMPT + NEXT)], "prefill")["a"]
    assert relative(prefill_then_decode(model), whole).median() < 0.02


def test_several_new_tokens_of_a_sequence_decode_as_one_by_one(model):
    driver = Driver(model, num_blocks=32)
    driver.run([("a", PROMPT), ("b", PROMPT[:3])], "prefill")
    together = driver.run([("b", NEXT[:2]), ("a", NEXT)], "decode", padding=1)["a"]
    assert relative(together, prefill_then_decode(model)[len(PROMPT) :]).median() < 0.01


def test_prefill_behind_a_cached_prefix_equals_prefill_of_the_whole(model):
    driver = Driver(model, num_blocks=32)
    driver.run([("a", PROMPT[:13]), ("b", NEXT)], "prefill")
    rest = driver.run([("b", NEXT), ("a", PROMPT[13:])], "prefill", padding=3)["a"]
    whole = Driver(model, num_blocks=32).run([("a", PROMPT)], "prefill")["a"]
    assert relative(rest, whole[13:]).median() < 0.01


class LastTokens:
    """A model asked for the logits of each sequence's last token only, as the engine's runner does; zeros elsewhere."""

    def __init__(self, model: FusedTransformer):
        self.model, self.device, self.pool_dtype = model, model.device, model.pool_dtype
        self.vocab_size, self.kv_regions = model.vocab_size, model.kv_regions

    def forward(self, batch, pool, **options):
        ends = torch.tensor(batch.query_starts[1:]) - 1
        batch.logit_indices, batch.last_token_logits = ends, True
        full = torch.zeros(batch.query_starts[-1], self.vocab_size)
        full[ends] = self.model.forward(batch, pool, **options)
        return full


def test_only_last_tokens_are_computed_when_only_they_are_asked_for(model, monkeypatch):
    work = [("a", PROMPT), ("b", NEXT)]
    every = Driver(model, num_blocks=32).run(work, "prefill")
    seen = []
    monkeypatch.setattr(FusedMoE, "prefill", lambda self, rows: seen.append(rows.num_tokens) or self.decode(rows))
    last = Driver(LastTokens(model), num_blocks=32).run(work, "prefill")
    for name in ("a", "b"):
        assert relative(last[name][-1:], every[name][-1:]).max() < 0.01
    assert seen == [2], "the last layer has run its experts on more than two tokens"


class OnePlan:
    """A prefill attention that keeps one plan at a time, as FlashInfer's does."""

    def __init__(self, attention):
        self.attention, self.latest = attention, None

    def plan(self, *sizes):
        self.latest = self.attention.plan(*sizes)
        return self.latest

    def run(self, q, k, v, plan):
        assert plan is self.latest, "a newer plan has replaced this one"
        return self.attention.run(q, k, v, plan)


def test_a_prefill_runs_each_plan_before_it_makes_the_next(model, monkeypatch):
    monkeypatch.setattr(model, "prefill_attention", OnePlan(model.prefill_attention))
    last = Driver(LastTokens(model), num_blocks=32).run([("a", PROMPT), ("b", NEXT)], "prefill")
    assert last["b"][-1].abs().sum() > 0


@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
@pytest.mark.parametrize("dp, activation", [(7, 0), (0, 5), (16, 3)])
def test_moe_chunks_change_no_result(directory, recipe, dp, activation):
    chunked = loaded(directory, recipe)
    whole = Driver(chunked, num_blocks=32).run([("a", PROMPT)], "prefill")["a"]
    got = Driver(chunked.with_chunks(dp_tokens=dp, activation_tokens=activation), num_blocks=32).run(
        [("a", PROMPT)], "prefill"
    )["a"]
    assert relative(got, whole).median() < 0.003


def test_decode_takes_its_inputs_as_they_lie_and_padding_touches_nothing(model):
    driver = Driver(model, num_blocks=32)
    driver.run([("a", PROMPT), ("b", NEXT)], "prefill")
    before = driver.pool.rows.clone()
    alone, padded = (decode_inputs(driver, count) for count in (0, 3))
    got = model.decode(padded, driver.pool)
    changed = (driver.pool.rows.nan_to_num() != before.nan_to_num()).any(-1).any(0).nonzero().tolist()
    slots = [divmod(slot, driver.pool.block_size) for slot in alone.slots.tolist()]
    assert sorted(changed) == sorted([list(slot) for slot in slots]), "padding has written rows"
    assert relative(got[:2], model.decode(alone, driver.pool)).max() < 0.01


def decode_inputs(driver: Driver, padding: int) -> DecodeInputs:
    """One more token for sequences a and b, then rows of padding."""
    lens = [len(PROMPT) + 1, len(NEXT) + 1]
    driver._grow("a", lens[0])
    driver._grow("b", lens[1])
    slots = [driver._slot("a", lens[0] - 1), driver._slot("b", lens[1] - 1)]
    tables = driver._tables(["a", "b"])
    return DecodeInputs(
        token_ids=torch.tensor([50, 51] + [0] * padding),
        positions=torch.tensor([lens[0] - 1, lens[1] - 1] + [0] * padding),
        slots=torch.tensor(slots + [-1] * padding),
        block_tables=torch.cat((tables, tables.new_zeros(padding, tables.shape[1]))),
        context_lens=torch.tensor(lens + [1] * padding, dtype=torch.int32),
    )


def test_layers_are_told_of_in_order(model):
    heard = []
    driver = Driver(model, num_blocks=32)
    driver.run([("a", PROMPT)], "prefill", on_layer=heard.append)
    driver.run([("a", NEXT[:1])], "decode", on_layer=heard.append)
    assert heard == [0, 1, 0, 1]


def test_ranks_shares_of_the_experts_add_up(all_chosen):
    """What two ranks would send back is what one rank with all experts computes (the shared expert counted once)."""
    whole, parts = layer_of(all_chosen), [layer_of(all_chosen, first_expert=first, num_local=2) for first in (0, 2)]
    x = torch.randn(9, whole.router.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
    rows = Rows(x)
    total = sum(part.decode(rows).float() for part in parts) - whole.shared(rows).float()
    expected = whole.decode(rows).float()
    assert (total - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.parametrize(
    "recipe, bound", [("", 0), ("fp8", 0.01), ("nvfp4", 0.01)]
)  # nvfp4: bf16 rows apart, fp8 rows merged
def test_the_shared_expert_may_be_one_more_expert(directory, recipe, bound):
    merged, apart = (layer_of(directory, recipe, takes_own=takes_own) for takes_own in (True, False))
    assert merged.own_rows and merged.shared is None
    assert not apart.own_rows and apart.shared is not None
    x = torch.randn(11, merged.router.shape[1], generator=torch.Generator().manual_seed(2)).bfloat16()
    rows = Rows(x, merged.kernels.quantise(x))
    expected = apart.decode(rows).float()
    assert (merged.decode(rows).float() - expected).abs().max() <= bound * expected.abs().max()


def layer_of(directory: Path, recipe: str = "", *, takes_own: bool = False, **share) -> FusedMoE:
    config, kernels = ModelConfig.load(directory), FusedKernels(CPU)
    exchange = LocalExchange(kernels, config.n_routed_experts, **share)
    exchange.takes_own = exchange.takes_own and takes_own
    source = CheckpointSource(CheckpointFiles(directory, config), CPU, recipe)
    return FusedBuilder(config, source, kernels, exchange=exchange).moe("model.layers.1.mlp.")


def test_fp8_and_nvfp4_weights_stay_in_their_codes(directory):
    fp8, nvfp4 = loaded(directory, "fp8"), loaded(directory, "nvfp4")
    kept = fp8.blocks[1].attention.out.prepared
    assert isinstance(kept, Fp8Weight) and kept.data.dtype == torch.float8_e4m3fn
    assert fp8.blocks[1].ffn.experts.gate_up.prepared.data.dtype == torch.float8_e4m3fn
    assert dict(nvfp4.precision_table())["q_b"].startswith("fp8")
    assert dict(nvfp4.precision_table())["o_proj"].startswith("nvfp4")


def test_sizes_that_do_not_suit_a_format_fall_back_and_say_so(tmp_path):
    odd = {"hidden_size": 160, "moe_intermediate_size": 144, "num_hidden_layers": 2, "q_lora_rank": None}
    directory = write_random_checkpoint(tmp_path, SMALL | odd, seed=13)
    served = loaded(directory, "fp8")
    formats = dict(served.precision_table())
    assert (
        formats["experts"]
        == "bf16 (fp8 asked: 144 columns are no multiple of 128) / bf16 (fp8 asked: 160 columns are no multiple of 128)"
    )
    assert formats["kv_b"] == "fp8 from bf16"
    assert "q_b" not in formats
    expected = prefill_then_decode(load_transformer(directory, exact=True))
    assert relative(prefill_then_decode(served), expected).median() < 0.2


class Doubling:
    """A linear back end that tells who it is."""

    def __init__(self, factor: float):
        self.factor = factor

    def prepare(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.factor

    def run(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w.T


def test_many_rows_may_go_to_another_back_end():
    few, many = (PreparedLinear(Doubling(factor), torch.eye(2), "plain") for factor in (2.0, 3.0))
    linear = ByRows(few, many, 4)
    assert torch.equal(linear(Rows(torch.ones(3, 2))), torch.full((3, 2), 2.0))
    assert torch.equal(linear(Rows(torch.ones(4, 2))), torch.full((4, 2), 3.0))


@pytest.mark.parametrize(
    ("sizes", "fits"),
    [((128, 256, 128), True), ((129, 256, 128), False), ((8, 252, 128), False), ((8, 256, 136), False)],
)
def test_sizes_that_hoppers_grouped_kernel_does_not_take_go_to_another(sizes, fits):
    def hopper(rows, weight, starts):
        raise AssertionError("not on this host")

    def kernels(wanted: dict[str, str]) -> FusedKernels:
        made = FusedKernels(CPU, wanted)
        made.grouped_fp8, made.chosen["grouped_fp8"] = hopper, "cuda"  # as on a Hopper GPU
        return made

    experts, n, k = sizes
    scale = torch.ones(experts, -(-n // 128), -(-k // 128))
    weight = Fp8Weight(torch.zeros(experts, n, k, dtype=torch.float8_e4m3fn), scale)
    plain = kernels({})
    assert (plain.groups(weight).run is hopper) == fits
    assert plain.groups(weight).run in (hopper, grouped_linear.reference)
    asked = kernels({"grouped_fp8": "reference"})  # stands for "cuda", which no CPU would let us ask for
    if fits:
        assert asked.groups(weight).run is hopper
    else:
        with pytest.raises(BackendUnavailable, match="was asked for and takes"):
            asked.groups(weight)


def test_context_slots_are_packed_without_asking_the_device():
    tables = torch.tensor([[3, 1, 0], [2, 0, 0], [5, 4, 7]], dtype=torch.int32)
    lens = [7, 4, 9]
    assert torch.equal(packed_context_slots(tables, lens, 4), _packed_context_slots(tables, lens, 4))
