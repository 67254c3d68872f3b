"""How fast rows move between two processes of this host, by size and link; `headrace bench transfer`.

A target and a source run as processes of their own, with the transfer code and settings that workers use. A push is timed from
call to return: Mooncake says that it is done when the target has applied the last byte. Two shapes of push: `one run`, and
`blocks`, a run of 64 rows for each block, which is what scattered block tables give. Rows are 576 bf16 values, random anew in
each case; a case ends with the 64-bit checksum of the target's rows against the source's.

Each row of the result: {link, memory, shape, bytes, us, gb_s, cpu_s_per_gb, equal}; us is the median, cpu_s both processes'.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BLOCK_SIZE, ROW_DIM = 64, 576
BLOCK_BYTES = BLOCK_SIZE * ROW_DIM * 2
SIZES = (1, 16, 256, 2048)
"""Blocks of one push: 74 KB, 1.2 MB, 19 MB, 151 MB."""
CASES = (("tcp", "cpu"), ("tcp", "cuda"), ("nvlink_intra", "cuda"))
BUDGET_S, FEWEST, MOST = 0.3, 3, 200
"""Pushes of one case: as many as fit the budget, between these counts."""


def run(
    *,
    cases: Sequence[tuple[str, str]] = CASES,
    sizes: Sequence[int] = SIZES,
    environment: dict[str, str] | None = None,
    progress: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """{hardware, rows, skipped}. A case that cannot run here is in `skipped`, with the reason in words. `environment` adds
    variables for both processes."""
    rows: list[dict[str, Any]] = []
    skipped: list[dict[str, str]] = []
    with _pair(environment or {}) as (source, target):
        hardware = source.ask(do="hardware")
        for link, memory in cases:
            progress(f"{link}, {memory} memory")
            try:
                for end in (source, target):
                    end.ask(do="open", link=link, memory=memory, blocks=max(sizes))
                for blocks in sizes:
                    rows += [_measure(source, target, link, memory, shape, blocks) for shape in ("one run", "blocks")]
            except _CannotRun as error:
                skipped.append({"link": link, "memory": memory, "why": str(error)})
    return {"hardware": hardware, "rows": rows, "skipped": skipped}


class _CannotRun(Exception):
    """A process of the pair said why a case cannot run."""


class _Process:
    """One end, asked in JSON lines."""

    def __init__(self, role: str, environment: dict[str, str]):
        self._child = subprocess.Popen(
            [sys.executable, "-m", "bench.transfer", role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **environment, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        )

    def ask(self, **question: Any) -> dict[str, Any]:
        """Its answer. Raises _CannotRun for an error or an end."""
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(question) + "\n")
        self._child.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The next line it says."""
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        answer = json.loads(line) if line.startswith("{") else {"error": f"ended with code {self._child.wait()}"}
        if "error" in answer:
            raise _CannotRun(answer["error"])
        return answer

    def end(self) -> None:
        """Ends it, however it stands."""
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def _pair(environment: dict[str, str]) -> Iterator[tuple[_Process, _Process]]:
    """(source, target), ready."""
    ends = [_Process(role, environment) for role in ("source", "target")]
    try:
        for end in ends:
            end.answer()
        yield ends[0], ends[1]
    finally:
        for end in ends:
            end.end()


def _measure(source: _Process, target: _Process, link: str, memory: str, shape: str, blocks: int) -> dict[str, Any]:
    descriptor = target.ask(do="descriptor")
    cpu = target.ask(do="cpu")["cpu_s"]
    took = source.ask(do="push", target=descriptor, shape=shape, blocks=blocks)
    cpu = took["cpu_s"] + target.ask(do="cpu")["cpu_s"] - cpu
    order = took["target_blocks"]
    there = target.ask(do="checksum", blocks=order)["checksum"]
    num_bytes, us = blocks * BLOCK_BYTES, statistics.median(took["us"])
    return {
        "link": link,
        "memory": memory,
        "shape": shape,
        "bytes": num_bytes,
        "us": round(us, 1),
        "gb_s": round(num_bytes / us / 1e3, 3),
        "cpu_s_per_gb": round(cpu / (num_bytes * (len(took["us"]) + 1) / 1e9), 3),
        "equal": there == took["checksum"],
    }


# --- one end ---------------------------------------------------------------------------------------------------------


def _main(role: str) -> None:
    from headrace.errors import HeadraceError

    end = _End(role)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer = getattr(end, question.pop("do"))(**question)
        except (HeadraceError, RuntimeError) as error:
            answer = {"error": str(error).partition("\n")[0]}
        print(json.dumps(answer), flush=True)
    os._exit(0)


class _End:
    """A pool and its source or target, opened anew for each case. Each public method answers one question."""

    def __init__(self, role: str):
        import torch

        torch.set_num_threads(1)
        self._role = role
        self._end: Any = None

    def open(self, link: str, memory: str, blocks: int) -> dict[str, Any]:
        """Room for `blocks` twice, in this memory, written over this link. Mooncake looks for the link at each engine's start."""
        import torch

        from headrace.cache.latent import LatentPool
        from headrace.cache.rows import Rows
        from headrace.transfer import mooncake, mooncake_environment, open_source, open_target

        if memory == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("no GPU is visible to torch")
        if self._end is not None:
            self._end.close()
        for variable in mooncake.LINKS.values():
            os.environ.pop(variable, None)
        os.environ.update(mooncake_environment(link=link))
        self._device, self._blocks = torch.device(memory), 2 * blocks
        self._latent = LatentPool(1, self._blocks, BLOCK_SIZE, ROW_DIM, torch.bfloat16, self._device)
        self._rows = Rows(self._latent)
        opened: Any = open_source if self._role == "source" else open_target
        self._end = opened("mooncake", self._latent.rows, "127.0.0.1")
        return {"opened": True}

    def hardware(self) -> dict[str, Any]:
        """What this runs on."""
        import torch

        gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
        return {"gpu": gpu, "cores": len(os.sched_getaffinity(0)), "torch": torch.__version__}

    def descriptor(self) -> dict[str, Any]:
        """How to write here."""
        return dict(vars(self._end.descriptor()))

    def cpu(self) -> dict[str, float]:
        """CPU seconds of this process so far."""
        return {"cpu_s": time.process_time()}

    def checksum(self, blocks: list[int]) -> dict[str, int]:
        """Of all rows of these blocks, in this order."""
        return {"checksum": self._rows.layer_checksums(blocks, 0, len(blocks) * BLOCK_SIZE)[0]}

    def push(self, target: dict[str, Any], shape: str, blocks: int) -> dict[str, Any]:
        """Pushes `blocks` blocks again and again; the times in microseconds, after one that is not counted."""
        import torch

        from headrace.transfer import TargetDescriptor, plan_runs

        self._latent.rows.random_(-128, 128)
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        step = 1 if shape == "one run" else 2  # every second block: no two are neighbours
        mine = list(range(0, blocks * step, step))
        theirs = [self._blocks - 1 - block for block in reversed(mine)]
        descriptor, runs = TargetDescriptor(**target), plan_runs(mine, theirs, 0, blocks * BLOCK_SIZE, BLOCK_SIZE)
        us: list[float] = []
        began, cpu = time.perf_counter(), time.process_time()
        while len(us) <= FEWEST or (len(us) <= MOST and time.perf_counter() - began < BUDGET_S):
            start = time.perf_counter()
            self._end.push(descriptor, 0, runs)
            us.append((time.perf_counter() - start) * 1e6)
        cpu = time.process_time() - cpu
        return {"us": us[1:], "cpu_s": cpu, "target_blocks": theirs, **self.checksum(mine)}


if __name__ == "__main__":
    _main(sys.argv[1])
