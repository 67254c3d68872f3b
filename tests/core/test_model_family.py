"""A second family is one package: this one lives in this file, and the engine serves it without knowing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from engine_fakes import NUM_LAYERS, ToyTransformer, random_checkpoint, small_config

from headrace.engine.fast_choice import PHASES, time_steps
from headrace.engine.offline import Engine, EngineParts
from headrace.errors import CheckpointError
from headrace.model import families
from headrace.model.base import Candidate, Family, Model, ModelOptions
from headrace.protocol.common import SamplingParams


class Unread(ToyTransformer):
    """Timed over a pool that nobody has filled, so it does not look at what it reads."""

    def _logits(self, batch, pool, token):
        return self.shift


class ToyFamily:
    """Checkpoints of one file: config.json, which says a context and a vocabulary."""

    name = "toy"

    def __init__(self) -> None:
        self.loaded: list[ModelOptions] = []

    def serves(self, config) -> bool:
        return config.get("architectures") == ["ToyForCausalLM"]

    def load(self, directory: Path, device: torch.device, options: ModelOptions) -> Model:
        self.loaded.append(options)
        said = json.loads((directory / "config.json").read_text())
        return ToyTransformer(said["vocab_size"], said["context"])

    def candidates(self, directory: Path, device: torch.device, options: ModelOptions) -> list[Candidate]:
        return [Candidate(torch.float32, "torch"), Candidate(torch.bfloat16, "torch")]

    def trial(self, directory: Path, device: torch.device, options: ModelOptions) -> Model:
        self.loaded.append(options)
        return Unread()


@pytest.fixture()
def toy(tmp_path, monkeypatch) -> tuple[ToyFamily, Path]:
    family: Family = ToyFamily()
    monkeypatch.setattr(families, "FAMILIES", (*families.FAMILIES, family))
    said = {"architectures": ["ToyForCausalLM"], "vocab_size": 97, "context": 128}
    (tmp_path / "config.json").write_text(json.dumps(said))
    return family, tmp_path


def test_the_engine_loads_and_steps_a_family_that_it_does_not_know(toy):
    family, directory = toy
    config = small_config(exact=False, block_size=4, moe_dp_chunk_tokens=7)
    parts = EngineParts.load(directory, config)
    assert parts.max_context == 128 and parts.pool.num_layers == NUM_LAYERS and parts.pool.row_dim == 2
    outputs = Engine(parts, config).generate([[1, 2, 3], [4]], SamplingParams(max_tokens=5, ignore_eos=True))
    assert [len(samples[0].token_ids) for samples in outputs] == [5, 5]
    assert all(0 <= token < 97 for samples in outputs for token in samples[0].token_ids)


def test_options_reach_a_family_at_construction_and_fast_mode_fills_in_what_it_chose(toy):
    family, directory = toy
    EngineParts.load(directory, small_config(exact=False, block_size=4, moe_dp_chunk_tokens=7))
    *trials, served = family.loaded
    assert {trial.dtype for trial in trials} == {torch.float32, torch.bfloat16}
    assert (served.exact, served.moe_dp_chunk_tokens, served.kernels) == (False, 7, "torch")


def test_a_familys_model_is_timed_through_its_own_way_of_stepping(toy):
    assert set(time_steps(Unread())) == set(PHASES)


def test_a_checkpoint_that_no_family_serves_is_refused_by_its_architecture(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(CheckpointError, match=r"LlamaForCausalLM.*deepseek"):
        families.family_of(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="config.json"):
        families.family_of(tmp_path)
    with pytest.raises(CheckpointError, match="nowhere"):
        families.family_of(tmp_path / "nowhere")


def test_a_deepseek_checkpoint_is_found_by_its_architecture(tmp_path):
    assert families.family_of(random_checkpoint(tmp_path)).name == "deepseek"
