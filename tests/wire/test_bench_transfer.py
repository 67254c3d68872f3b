"""The transfer bench measures real pushes, and says what it could not measure."""

from __future__ import annotations

import os

import pytest
import torch

from bench import transfer
from headrace.transfer import mooncake_environment, why_not_mooncake

os.environ.update(mooncake_environment())  # before anything in this process loads the library
pytestmark = pytest.mark.skipif(why_not_mooncake() is not None, reason=str(why_not_mooncake()))


def test_rows_arrive_and_what_cannot_run_says_why(monkeypatch):
    monkeypatch.setattr(transfer, "BUDGET_S", 0.05)
    cases = (("tcp", "cpu"), ("nvlink_intra", "cpu"), ("tcp", "cuda"))
    result = transfer.run(cases=cases, sizes=(1, 3))
    rows = [row for row in result["rows"] if row["memory"] == "cpu"]
    sizes = [1, 1, 3, 3]
    assert [row["bytes"] for row in rows] == [blocks * transfer.BLOCK_BYTES for blocks in sizes]
    assert [row["shape"] for row in rows] == ["one run", "blocks"] * 2
    assert all(row["equal"] and row["us"] > 0 and row["gb_s"] > 0 for row in rows)
    why = {(entry["link"], entry["memory"]): entry["why"] for entry in result["skipped"]}
    assert "engine.device" in why["nvlink_intra", "cpu"]
    if not torch.cuda.is_available():
        assert "GPU" in why["tcp", "cuda"]
