"""`headrace bench stream`: the parts in turn, on one mesh, against the floor of the same run."""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.stream import goals, measure, rivals
from bench.stream.host import describe
from bench.stream.load import PROMPT_TOKENS, Job
from bench.stream.mesh import MockMesh
from bench.stream.plan import Plan
from headrace import config as configuration

FLAGS = (
    "mesh.name=bench-stream",
    "engine.num_blocks=65536",
    "engine.max_batch_size=2048",
    "router.reserve_ahead_tokens=65536",
)
"""Room for 1,024 streams. Everything else, telemetry too, is as a mesh has it by default."""


def run(
    plan: Plan,
    *,
    with_rivals: bool = True,
    progress: measure.Progress = lambda message: None,
    keep: Path | None = None,
) -> dict[str, Any]:
    """{host, floor, processes, points, first_token, streams_1024, rivals, goals}; `keep` is written after every part."""
    began = time.monotonic()
    result: dict[str, Any] = {"host": describe(), "plan": asdict(plan), "workload": _workload()}

    def have(**parts: Any) -> None:
        result.update(parts)
        result["seconds"] = round(time.monotonic() - began, 1)
        if keep is not None:
            keep.write_text(json.dumps(result, indent=1) + "\n")

    have(floor=measure.floor(plan, progress))
    with tempfile.TemporaryDirectory(prefix="headrace-bench-stream-") as state:
        flags = [*FLAGS, f"mesh.run_directory={state}"]
        progress("starting the mesh with mock engines")
        with MockMesh(configuration.load(flags=flags), flags=flags) as mesh:
            address, processes = mesh.router_address, mesh.processes()
            measure.send(Job("mesh", address, 200, in_flight=16), processes)
            found = measure.costs(plan, address, processes, progress)
            have(processes={name: line.as_json() for name, line in found["fits"].items()}, points=found["points"])
            have(first_token=measure.first_token(plan, address, processes, progress))
            have(streams_1024=measure.streams(plan, address, processes, progress))
    have(goals=goals.check(result))
    have(rivals=rivals.measure_all(plan, progress) if with_rivals else [])
    return result


def _workload() -> dict[str, Any]:
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "prompts": "text, no prefix is ever found",
        "engines": "mock; their threads are part of prefill and decode, and stand alone as *_engine",
        "client": "one process with a raw stub of the public service, every token compared",
        "cost": "CPU of the process, user and system, by request; a + b x output tokens",
        "tls": "off: the mesh has none yet",
    }
