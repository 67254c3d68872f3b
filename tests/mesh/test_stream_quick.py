"""`headrace bench stream --quick` from end to end: real services with mock engines, a floor, a fit for every process."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_quick_bench_measures_every_process_and_compares_with_its_own_floor(tmp_path):
    kept = tmp_path / "stream.json"
    command = [sys.executable, "-m", "headrace.cli.main", "bench", "stream", "--quick", "--no-rivals", "--json"]
    run = subprocess.run(
        [*command, "--keep", str(kept)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    result = json.loads(run.stdout)
    assert json.loads(kept.read_text()) == result

    floor, processes = result["floor"], result["processes"]
    assert floor["us_per_call"] > 0 and floor["us_per_message"] > 0
    for name in ("router", "kvstore", "prefill", "decode"):
        assert processes[name]["us_per_request"] > 0, name
        assert set(processes[name]["us_per_token"]) == {"1", "10"}
    for name in ("router", "prefill", "decode"):  # the kvstore's few microseconds are mostly its own heartbeat
        assert processes[name]["residual"] < 0.5, (name, result["points"])
    router = processes["router"]["us_per_token"]
    assert router["1"] > router["10"] > 0, "a message of ten tokens costs less a token than one of one"
    for point in result["points"]:
        tokens, interval = point["output_tokens"], point["interval"]
        most = 2 + math.ceil((tokens - 1) / interval)  # the first token, the others by interval, the summary
        assert 0.8 * most < point["messages_per_request"] <= most, "a mock engine runs ahead of the mesh"

    assert result["first_token"]["mesh"]["p99"] > 0 and result["first_token"]["chain"]["p99"] > 0
    streams = result["streams_1024"]
    assert streams["failures"] == {}
    assert abs(streams["gap_ms"]["p50"] / streams["pace_gap_ms"] - 1) < 0.3
    assert all({"measured", "goal", "met"} <= set(goal) for goal in result["goals"]) and len(result["goals"]) == 10
    assert result["host"]["cpu"] and result["host"]["grpcio"]
