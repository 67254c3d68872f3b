"""Fast mode on a CPU takes what one real step of the model says, is never slower than exact mode, and depends on no kind of CPU."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from engine_fakes import random_checkpoint, small_config

from headrace.engine import fast_choice
from headrace.engine.fast_choice import PHASES, choose
from headrace.engine.offline import load_configured
from headrace.model.base import Candidate, ModelOptions
from headrace.model.families import family_of
from kernels.toolchain import cpu_library

OURS, TORCH, BF16 = Candidate(torch.float32, "c"), Candidate(torch.float32, "torch"), Candidate(torch.bfloat16, "torch")
needs_c = pytest.mark.skipif(
    cpu_library.why_not() is not None, reason=f"needs the CPU kernels: {cpu_library.why_not()}"
)


def timings(**by_phase: dict[Candidate, float]):
    return lambda candidate: {phase: seconds[candidate] for phase, seconds in by_phase.items()}


def test_what_exact_mode_computes_with_stays_when_another_is_slower_in_one_phase():
    measured = timings(decode={OURS: 1.0, BF16: 1.1}, prefill={OURS: 1.0, BF16: 0.1})
    assert choose([OURS, BF16], measured).taken == OURS


def test_another_candidate_must_win_by_more_than_a_busy_host_errs():
    measured = timings(decode={OURS: 1.0, BF16: 0.95}, prefill={OURS: 1.0, BF16: 0.5})
    assert choose([OURS, BF16], measured).taken == OURS


def test_a_candidate_that_is_faster_in_every_phase_is_taken():
    measured = timings(decode={TORCH: 1.0, BF16: 0.5}, prefill={TORCH: 1.0, BF16: 0.8})
    made = choose([TORCH, BF16], measured)
    assert made.taken == BF16 and made.seconds[TORCH] == {"decode": 1.0, "prefill": 1.0}
    assert "bf16 torch: decode 500.00 ms" in made.table()


def test_one_candidate_is_taken_without_a_measurement():
    def never(candidate):
        raise AssertionError(candidate)

    assert choose([OURS], never).taken == OURS


@pytest.fixture()
def checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(fast_choice, "_CHOSEN", {})
    return random_checkpoint(tmp_path / "model")


FAST = small_config(exact=False)


def pretend(monkeypatch, milliseconds: dict[torch.dtype, float]):
    monkeypatch.setattr(
        fast_choice, "time_steps", lambda model: dict.fromkeys(PHASES, milliseconds[model.dtype] / 1000)
    )


@needs_c
def test_fast_mode_keeps_the_c_kernels_where_bf16_is_slower(checkpoint, monkeypatch):
    pretend(monkeypatch, {torch.float32: 1.0, torch.bfloat16: 4.0})
    model = load_configured(checkpoint, FAST)
    assert (model.kernels.family, model.dtype, model.pool_dtype) == ("c", torch.float32, torch.bfloat16)


def test_fast_mode_takes_bf16_where_it_is_faster(checkpoint, monkeypatch):
    pretend(monkeypatch, {torch.float32: 4.0, torch.bfloat16: 1.0})
    assert load_configured(checkpoint, FAST).dtype == torch.bfloat16


def test_what_was_asked_for_is_not_timed(checkpoint, monkeypatch):
    pretend(monkeypatch, {})
    family = family_of(checkpoint)
    for asked in (ModelOptions(False, torch.bfloat16), ModelOptions(False, torch.float32, "torch")):
        made = fast_choice.chosen(family, checkpoint, torch.device("cpu"), asked)
        assert (made.dtype, made.kernels) == (asked.dtype, "torch")


def test_the_choice_is_made_once_a_process_and_logged(checkpoint, monkeypatch, caplog):
    asked = []
    monkeypatch.setattr(
        fast_choice, "time_steps", lambda model: asked.append(model.dtype) or dict.fromkeys(PHASES, 1.0)
    )
    with caplog.at_level(logging.INFO):
        first, second = (load_configured(checkpoint, FAST) for _ in range(2))
    assert asked == [torch.float32, torch.bfloat16] and first.dtype == second.dtype
    assert [record.message for record in caplog.records].count("fast mode chosen") == 1


@needs_c
def test_the_start_up_table_shows_the_timings_and_the_back_end_of_every_op(checkpoint, monkeypatch):
    pretend(monkeypatch, {torch.float32: 1.0, torch.bfloat16: 4.0})
    table = dict(load_configured(checkpoint, FAST).precision_table())
    assert (
        "fp32 c: decode of 1 1.00 ms" in table["timed at load"]
        and "bf16 torch: decode of 1 4.00 ms" in table["timed at load"]
    )
    ops = {part.removeprefix("kernel "): name for part, name in table.items() if part.startswith("kernel ")}
    in_c = dict.fromkeys(("linear", "rms_norm", "latent_store", "gate", "expert_ffn", "mla_decode", "mla_prefill"), "c")
    assert ops == in_c | {"mla_prefill_naive": "torch"}


def test_a_real_trial_times_every_phase_of_two_layers_of_this_model(checkpoint):
    family, options = family_of(checkpoint), ModelOptions(exact=False)
    trial = family.trial(checkpoint, torch.device("cpu"), options)
    layers = json.loads((checkpoint / "config.json").read_text())
    kinds = 2 if 0 < layers["first_k_dense_replace"] < layers["num_hidden_layers"] else 1
    assert len(trial.blocks) == trial.kv_regions[0].num_layers == kinds
    seconds = fast_choice.time_steps(trial)
    assert set(seconds) == set(PHASES) and all(0 < took < 10 for took in seconds.values())
