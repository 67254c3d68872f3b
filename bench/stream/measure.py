"""One part of the bench each: the floor, what a request costs each process, first tokens at a rate, many streams at once."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from bench.stream.fit import Fit, Point, fit
from bench.stream.load import Job
from bench.stream.mesh import Account, Processes, resident_bytes
from bench.stream.plan import Plan
from headrace.errors import InternalError
from headrace.launch.children import start_child, stop_child, wait_ready

ROOT = Path(__file__).resolve().parents[2]
JOB_TIMEOUT_S = 900.0
WATCH_EVERY_S = 0.25
Progress = Callable[[str], None]


class Sent:
    """A job that was sent: what the load `saw`, CPU seconds `used` by each process meanwhile, their `peak_bytes`."""

    def __init__(self, job: Job, processes: Processes):
        self.job = job
        self.used: dict[str, float] = {}
        self.peak_bytes = {name: resident_bytes(pid) for name, (pid, _) in processes.items()}
        self.saw = self._send(processes)

    def us_per_request(self, name: str) -> float:
        """CPU of a process for one request, microseconds."""
        return 1e6 * self.used[name] / self.job.requests

    def _send(self, processes: Processes) -> dict[str, Any]:
        with child(self.job.command()) as load:
            wait_ready(load, 60.0)
            account = Account(processes)
            with _watching(processes, self.peak_bytes):
                line = load.stdout.readline()
            self.used = account.used()
        if not line:
            raise InternalError(f"the load ended without a result: {self.job}")
        return json.loads(line)


def send(job: Job, processes: Processes) -> Sent:
    """Sends a job of which every request must succeed; raises InternalError with what failed."""
    sent = Sent(job, processes)
    if sent.saw["failures"]:
        raise InternalError(f"{job}: {sent.saw['failures']}")
    return sent


@contextlib.contextmanager
def child(words: Sequence[str], output: IO[Any] | int = subprocess.PIPE) -> Iterator[subprocess.Popen]:
    """A process that is killed when it takes too long, so that no read of its output waits for ever. A file as `output`
    takes stdout and stderr."""
    errors = None if output == subprocess.PIPE else output
    process = start_child(words, stdout=output, stderr=errors, directory=ROOT)
    limit = threading.Timer(JOB_TIMEOUT_S, process.kill)
    limit.daemon = True
    limit.start()
    try:
        yield process
    finally:
        limit.cancel()
        stop_child(process, 2.0)
        if process.stdout is not None:
            process.stdout.close()


@contextlib.contextmanager
def _watching(processes: Processes, peak: dict[str, int]) -> Iterator[None]:
    """Keeps the largest memory of each process in `peak`."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(WATCH_EVERY_S):
            for name, (pid, _) in processes.items():
                peak[name] = max(peak[name], resident_bytes(pid))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextlib.contextmanager
def _bare(*arguments: str) -> Iterator[dict[str, Any]]:
    """A process of bench/stream/bare.py: {address, pid}."""
    with child([sys.executable, "-m", "bench.stream.bare", *arguments]) as server:
        yield wait_ready(server, 20.0)


def floor(plan: Plan, progress: Progress) -> dict[str, Any]:
    """{us_per_call, us_per_message, residual}: CPU of the process that serves a bare stream."""
    points = []
    with _bare() as server:
        processes: Processes = {"server": (server["pid"], None)}
        send(Job("Stream", server["address"], 100, in_flight=16), processes)
        for in_flight in plan.in_flight:
            for messages in plan.floor_messages:
                progress(f"bare stream: {in_flight} in flight, {messages} messages")
                count = max(100, plan.floor_requests // (1 + messages // 32))
                sent = send(Job("Stream", server["address"], count, in_flight=in_flight, output=messages), processes)
                points.append(Point(1, messages, sent.us_per_request("server")))
    line = fit(points)
    return {
        "us_per_call": round(line.us_per_request, 1),
        "us_per_message": round(line.us_per_token[1], 2),
        "residual": round(line.residual, 3),
        "what": "a generic grpc.aio handler of bytes, 48 a message, no interceptor",
    }


def costs(plan: Plan, address: str, processes: Processes, progress: Progress) -> dict[str, Any]:
    """{fits: {process: Fit}, points: [...]}: every combination of in flight, output and interval, engines unpaced."""
    points, by_process = [], {name: [] for name in processes}
    for interval in plan.intervals:
        for in_flight in plan.in_flight:
            for output in plan.outputs:
                job = Job("mesh", address, plan.requests, in_flight=in_flight, output=output, interval=interval)
                sent = send(job, processes)
                progress(_line(sent))
                for name, made in by_process.items():
                    made.append(Point(interval, output, sent.us_per_request(name)))
                points.append(_point(sent))
    fits: dict[str, Fit] = {name: fit(made) for name, made in by_process.items()}
    return {"fits": fits, "points": points}


def _point(sent: Sent) -> dict[str, Any]:
    job, saw = sent.job, sent.saw
    return {
        "in_flight": job.in_flight,
        "output_tokens": job.output,
        "interval": job.interval,
        "requests": job.requests,
        "seconds": saw["seconds"],
        "messages_per_request": round(saw["messages"] / job.requests, 2),
        "us_per_request": {name: round(sent.us_per_request(name), 1) for name in sent.used},
        "load_us_per_request": round(1e6 * saw["load_cpu_s"] / job.requests, 1),
        "first_token_ms": saw["first_token_ms"],
    }


def _line(sent: Sent) -> str:
    job = sent.job
    used = ", ".join(f"{name} {sent.us_per_request(name):.0f}" for name in sent.used)
    return f"interval {job.interval}, {job.in_flight} in flight, {job.output} tokens: us a request: {used}"


def first_token(plan: Plan, address: str, processes: Processes, progress: Progress) -> dict[str, Any]:
    """First tokens at a rate of arrivals, through the mesh and through a bare chain of the same hops, by the same load."""
    shape = {"requests": plan.rate_requests, "rate": plan.rate, "output": 16, "interval": 10}
    with _bare() as decode, _bare("--decode", decode["address"]) as prefill:
        with _bare("--decode", decode["address"], "--prefill", prefill["address"]) as relay:
            send(Job("Relay", relay["address"], 50, in_flight=8), {})
            progress(f"first tokens at {plan.rate:g} requests/s: bare chain")
            chain = send(Job("Relay", relay["address"], **shape), {}).saw["first_token_ms"]
    progress(f"first tokens at {plan.rate:g} requests/s: mesh")
    mesh = send(Job("mesh", address, **shape), processes).saw["first_token_ms"]
    hops = "client -> router; router -> decode (unary); router -> prefill (stream); prefill -> decode (unary)"
    return {"requests_per_s": plan.rate, "requests": plan.rate_requests, "mesh": mesh, "chain": chain, "hops": hops}


def streams(plan: Plan, address: str, processes: Processes, progress: Progress) -> dict[str, Any]:
    """Many streams at a fixed pace, at interval 10: gaps, refusals, CPU and memory a stream; then unpaced, 20 against 1."""
    idle = {name: resident_bytes(pid) for name, (pid, _) in processes.items()}
    pace_us = int(1e6 * plan.stream_pace_s)
    rate = {"requests": plan.streams, "rate": plan.stream_rate}
    progress(f"{plan.streams} streams at {1 / plan.stream_pace_s:g} tokens/s each")
    paced = Sent(Job("mesh", address, output=plan.stream_output, interval=10, pace_us=pace_us, **rate), processes)
    saw, stream_s = paced.saw, plan.streams * plan.stream_output * plan.stream_pace_s
    gap_ms = 1e4 * plan.stream_pace_s
    return {
        "streams": plan.streams,
        "tokens_per_s_each": 1 / plan.stream_pace_s,
        "interval": 10,
        "failures": saw["failures"],
        "refusals": sum(count for why, count in saw["failures"].items() if why.startswith("RESOURCE_EXHAUSTED")),
        "gap_ms": saw["gap_ms"],
        "pace_gap_ms": gap_ms,
        "cpu_ms_per_stream_second": {name: round(1e3 * used / stream_s, 3) for name, used in paced.used.items()},
        "kib_per_stream": {
            name: round((paced.peak_bytes[name] - idle[name]) / plan.streams / 1024, 1) for name in idle
        },
        "unpaced": _unpaced(plan, address, processes, progress),
    }


def _unpaced(plan: Plan, address: str, processes: Processes, progress: Progress) -> dict[str, Any]:
    """Tokens per second of all streams together, by interval."""
    made: dict[str, Any] = {"output_tokens": plan.unpaced_output}
    for interval in (1, 20):
        progress(f"{plan.streams} streams unpaced at interval {interval}")
        job = Job("mesh", address, plan.streams, in_flight=plan.streams, output=plan.unpaced_output, interval=interval)
        sent = send(job, processes)
        made[str(interval)] = round(sent.saw["tokens"] / sent.saw["seconds"], 1)
    made["ratio"] = round(made["20"] / made["1"], 3)
    return made
