"""What `headrace doctor` says of the ops."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from headrace.cli import doctor
from kernels.select import Backend

KERNELS = Path(__file__).resolve().parents[2] / "kernels"


def lists_in_source() -> set[tuple[str, str]]:
    """(file, name) of every list of back ends that is written down in a kernel file."""
    found = set()
    for path in KERNELS.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            found |= {
                (path.stem, t.id)
                for t in targets
                if isinstance(t, ast.Name) and t.id.endswith("BACKENDS") and node.value
            }
    return found


def test_every_list_of_back_ends_is_looked_at_once():
    told = {op for op, _ in doctor.ops()}
    wanted = lists_in_source()
    assert len(wanted) > 15
    named = {name.lower().removesuffix("backends").strip("_").replace("_", " ") for _, name in wanted}
    assert {op.partition(", ")[2] for op in told} == named
    assert len(told) == len(wanted)
    assert len(set(doctor.ops())) == len(list(doctor.ops()))


def test_a_back_end_nobody_has_run_says_so_in_words():
    def run():
        """Never run: no such device was at hand."""

    def tried():
        """Runs."""

    def refuse(device):
        return "needs a Blackwell"

    found = doctor._look("gate", Backend("new", run, why_not=refuse), torch.device("cpu"))
    assert not found.runs and found.note == "needs a Blackwell; never run on such a device"
    assert doctor._look("gate", Backend("old", tried), torch.device("cpu")) == doctor.Finding("op gate: old", True, "")


def test_a_back_end_that_cannot_even_be_asked_is_a_finding_and_no_crash():
    def broken(device):
        raise ImportError("libnothing.so.1")

    found = doctor._look("gate", Backend("new", print, why_not=broken), torch.device("cpu"))
    assert not found.runs and "libnothing" in found.note


@pytest.mark.parametrize("word", ["sm_100", "MNNVL", "RDMA", "DeepEP"])
def test_what_no_one_has_run_is_listed_with_its_reason(word):
    assert any(word in what and "never run" in note for what, note in doctor.NEVER_RUN)
