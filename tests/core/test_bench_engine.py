"""The measurement itself: figures for every stream count and mode, and an honest word where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_fakes import random_checkpoint

from bench import engine as bench
from headrace.errors import ConfigError


def test_every_stream_count_and_mode_gets_a_row_and_what_is_missing_says_why(tmp_path):
    directory = random_checkpoint(tmp_path / "model")
    heard: list[str] = []
    result = bench.run(directory, streams=(1, 3), repeats=1, num_threads=1, agreement_prompts=3, progress=heard.append)
    assert [(row["mode"], row["streams"]) for row in result["rows"]] == [
        (mode, count) for mode in ("exact", "fast") for count in (1, 3)
    ]
    for row in result["rows"]:
        assert row["decode_tokens_per_s"] > 0 and row["prefill_tokens_per_s"] > 0
        assert row["total_tokens_per_s"] < row["decode_tokens_per_s"] * 64 / 63, "prefill time is part of the total"
    assert result["ratios"] == []
    agreement = result["agreement"]
    assert (
        agreement["tokens"] == 3 * 64
        and 0 < agreement["equal_until_first_difference"] <= agreement["equal_tokens"] <= 1
    )
    assert heard


def test_an_unknown_mode_and_a_broken_interpreter_are_refused(tmp_path):
    directory = random_checkpoint(tmp_path / "model")
    with pytest.raises(ConfigError, match="sloppy"):
        bench.run(directory, modes=("sloppy",))
    with pytest.raises(ConfigError, match="nobody"):
        bench.run(directory, rivals={"nobody": Path("/bin/false")})
    one = {"streams": (1,), "repeats": 1, "num_threads": 1, "rivals": {"llama.cpp": Path("/bin/false")}}
    with pytest.raises(ConfigError, match="llama_cpp_generate.py ended with code 1"):
        bench.run(directory, modes=("fast",), **one)
    skipped = bench.run(directory, modes=("exact",), agreement_prompts=0, **one)["ratios"]
    assert [entry["against"] for entry in skipped] == ["llama.cpp"] and "fast" in skipped[0]["skipped"]
