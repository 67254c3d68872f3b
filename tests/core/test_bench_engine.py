"""The measurement itself: figures for every stream count and mode, and an honest word where there is none."""

from __future__ import annotations

import sys
import textwrap
import time
from pathlib import Path

import pytest
from engine_fakes import random_checkpoint

from bench import against, step_profile
from bench import engine as bench
from bench.against import Rival, Timing
from headrace.errors import ConfigError
from kernels.toolchain import cpu_library


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
    one = result["one_stream"]
    if cpu_library.why_not() is not None:
        assert "C kernels" in one["skipped"]
        return
    assert one["mode"] == "fast" and one["streams"] == 1 and one["tokens_alike"]
    eager, replayed = one["eager"], one["replayed"]
    assert eager["c_calls"] > 10 and eager["torch_calls"] > 10
    assert 0 < eager["c_kernels_us"] < eager["step_us"] and 0 < replayed["c_kernels_us"]
    assert eager["torch_us"] > 0 and eager["python_us"] > 0 and replayed["c_calls"] == 3  # the layers; the head's two
    assert set(replayed["phases_us"]) == {*step_profile.PHASES, "output"}
    assert replayed["phases_us"]["forward"] == max(replayed["phases_us"].values())


class Script:
    """A rival that does what it is told, in a file of its own."""

    def __init__(self, tmp_path: Path, body: str):
        self.path = tmp_path / "rival.py"
        self.path.write_text(
            "import json, sys, time\ndef say(what): print(json.dumps(what), flush=True)\n" + textwrap.dedent(body)
        )

    def compare(self, **limits: float) -> dict:
        rival = Rival("scripted", str(self.path), "", ("a", "b"), **limits)
        ours = lambda batch: (Timing(0.5, 0.5, 1.0), [7] * len(batch))  # noqa: E731
        return against.compare(rival, Path(sys.executable), "", 1, ours, [[[1, 2]], [[3, 4]]], 4, lambda message: None)


ANSWERS = """
say({"version": "1"})
for line in sys.stdin:
    asked = json.loads(line)
    slow = asked["dtype"] == "b"
    say({"seconds": 5.0 if slow else 2.0, "cpu_seconds": 3.0, "token_ids": [[7] * asked["output_tokens"]] * len(asked["prompts"])})
"""


def test_a_rival_is_measured_in_its_better_dtype_and_a_hopeless_one_is_dropped(tmp_path):
    made = Script(tmp_path, ANSWERS).compare()
    assert made["ratio"] == 2.0 and made["cpu_ratio"] == 3.0 and made["other_dtype"] == "a"
    assert made["probe_seconds"] == {"a": 2.0, "b": 5.0} and set(made["seconds"]["other"]) == {"a"}
    assert made["first_tokens_alike"] == 1.0 and made["version"] == "1"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("time.sleep(60)", "did not start within 0.5 s"),
        ("say({})\ntime.sleep(60)", "did not finish 1 prompts and 2 tokens of each in a within 0.5 s"),
        ("say({})\nsys.stdin.readline()\nsys.exit(3)", "ended with code 3"),
    ],
    ids=["at the start", "at an answer", "ended"],
)
def test_a_rival_that_is_late_or_gone_is_an_error_about_against(tmp_path, body, words):
    limits = {} if "exit" in body else {"start_s": 0.5, "answer_s": 0.5}
    if body.startswith("say"):
        limits["start_s"] = 60.0
    started = time.monotonic()
    with pytest.raises(ConfigError, match=words) as caught:
        Script(tmp_path, body).compare(**limits)
    assert caught.value.field == "against"
    assert time.monotonic() - started < 40, "the rival is ended, not waited for"


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
