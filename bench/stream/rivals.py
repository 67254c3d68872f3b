"""Routers written in Rust, relaying from a mock HTTP worker: the same measure of cost. `make routers` installs them.

A rival that is not there, does not start or loses a request stands in the result with the reason, and with no figure.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.stream.fit import Point, fit
from bench.stream.load import Job
from bench.stream.measure import ROOT, Progress, child, send
from bench.stream.plan import Plan
from headrace.errors import HeadraceError, Unavailable
from headrace.launch.children import wait_ready
from headrace.launch.sockets import unused_port

PYTHON = ROOT / ".venv-routers" / "bin" / "python"
RIVALS = {"sglang-router": "sglang_router", "smg": "smg"}
"""Distribution -> the module that starts it."""
IN_FLIGHT = 16
CHUNK_PACE_US = 2000
READY_TIMEOUT_S = 30.0


def measure_all(plan: Plan, progress: Progress) -> list[dict[str, Any]]:
    """[{name, version, us_per_request, us_per_token: {"1": x, "10": y}, residual} or {name, why_not}]."""
    return [measure(name, plan, progress) for name in RIVALS]


def measure(name: str, plan: Plan, progress: Progress) -> dict[str, Any]:
    """One rival; never raises for what the rival does."""
    if not PYTHON.exists():
        return {"name": name, "why_not": "not installed here: `make routers` makes its environment"}
    try:
        version = _version(name)
        points = [point for size in plan.rival_chunks for point in _points(name, size, plan, progress)]
    except HeadraceError as error:
        return {"name": name, "why_not": error.message}
    what = f"{IN_FLIGHT} in flight, a chunk every {CHUNK_PACE_US} us, default policy, log level warn"
    return {"name": name, "version": version, "what": what, "requests_per_point": plan.rival_requests} | fit(
        points
    ).as_json()


def _points(name: str, size: int, plan: Plan, progress: Progress) -> Iterator[Point]:
    worker_words = [sys.executable, "-m", "bench.stream.http_worker", "--tokens-per-chunk", str(size)]
    with child([*worker_words, "--pace-us", str(CHUNK_PACE_US)]) as process:
        worker = wait_ready(process, 20.0)
        with _router(name, worker["address"]) as (address, pid):
            processes = {"router": (pid, None)}
            send(Job("http", address, 50, in_flight=IN_FLIGHT), processes)
            for output in (2, 64):
                sent = send(Job("http", address, plan.rival_requests, in_flight=IN_FLIGHT, output=output), processes)
                progress(f"{name}, {size} tokens a chunk, {output} tokens: {sent.us_per_request('router'):.0f} us")
                yield Point(size, output, sent.us_per_request("router"))


@contextmanager
def _router(name: str, worker: str) -> Iterator[tuple[str, int]]:
    """A router in front of one worker: its address and process id. Raises Unavailable with the end of its log."""
    port, metrics_port = unused_port("127.0.0.1"), unused_port("127.0.0.1")
    words = [str(PYTHON), "-m", f"{RIVALS[name]}.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    words += ["--prometheus-port", str(metrics_port), "--worker-urls", f"http://{worker}", "--log-level", "warn"]
    with tempfile.TemporaryFile("w+") as log:
        with child([*words, "--worker-startup-check-interval", "1"], output=log) as process:
            address = f"127.0.0.1:{port}"
            if not _wait_relaying(address, process):
                log.seek(0)
                raise Unavailable(f"{name} did not relay within {READY_TIMEOUT_S:g} s: {log.read()[-500:]}")
            yield address, process.pid


def _wait_relaying(address: str, process: subprocess.Popen) -> bool:
    body = json.dumps({"text": "x", "stream": True, "sampling_params": {"max_new_tokens": 1}}).encode()
    request = urllib.request.Request(f"http://{address}/generate", body, {"Content-Type": "application/json"})
    end = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(request, timeout=2.0) as answer:
                if b"output_ids" in answer.read():
                    return True
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.2)
    return False


def _version(name: str) -> str:
    program = f"import importlib.metadata; print(importlib.metadata.version({name!r}))"
    run = subprocess.run([str(PYTHON), "-c", program], capture_output=True, text=True, timeout=20, check=False)
    if run.returncode:
        raise Unavailable(f"not installed in {PYTHON.parent.parent.name}: `make routers` does it")
    return run.stdout.strip()
