"""One end of a Mooncake transfer in a process of its own, and `Peer`, which starts it and talks to it.

Reads one JSON object a line from stdin, does it, answers one JSON object a line on stdout. The pool is fp32
`[layers, blocks, block_size, row_dim]` on the device asked for: `pattern` on the writing side, zeros on the written one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from headrace.errors import ConfigError, TransferError
from headrace.transfer import RowRun, TargetDescriptor, is_drained, open_source, open_target

ROOT = Path(__file__).resolve().parents[2]


class Peer:
    """A process with one end of a transfer. It inherits this process's environment, and with it the link."""

    def __init__(self, shape: list[int], seed: int = 1, role: str = "source", device: str = "cpu"):
        self.process = subprocess.Popen(
            [sys.executable, __file__, json.dumps([shape, seed, role, device])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        )
        answer = self.answer()
        assert answer == {"ready": True}, answer

    def ask(self, **command) -> None:
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict:
        return json.loads(self.process.stdout.readline())

    def push(self, target: TargetDescriptor, layer: int, runs: list[RowRun], **more) -> dict:
        self.ask_push(target, layer, runs, **more)
        return self.answer()

    def ask_push(self, target: TargetDescriptor, layer: int, runs: list[RowRun], **more) -> None:
        plain = [[run.source_row, run.target_row, run.num_rows] for run in runs]
        self.ask(do="push", target=vars(target), layer=layer, runs=plain, **more)

    def freeze(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def pattern(shape: list[int], seed: int) -> torch.Tensor:
    """A pool both sides can compute: whole numbers from 1 on, exact in fp32, no row like another, seeds apart."""
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).remainder_(1_000_003)
    return numbers.float().add_(1 + seed * 1_000_003).view(shape)


def push(source, command: dict) -> dict:
    """Push `repeat` times; the answer carries what the last one gave."""
    target = TargetDescriptor(**command["target"])
    runs = [RowRun(*run) for run in command["runs"]]
    written, began, cpu = 0, time.perf_counter(), time.process_time()
    try:
        for _ in range(command.get("repeat", 1)):
            written += source.push(target, command["layer"], runs)
    except TransferError as error:
        took_s = time.perf_counter() - began
        return {"error": str(error), "reason": error.reason, "drained": is_drained(error), "took_s": took_s}
    return {"written": written, "took_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}


def main() -> None:
    shape, seed, role, device = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    rows = (pattern(shape, seed) if role == "source" else torch.zeros(shape)).to(device)
    try:
        opened = open_source if role == "source" else open_target
        end = opened("mooncake", rows, "127.0.0.1")
    except (ConfigError, TransferError) as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "push":
            answer = push(end, command)
        elif command["do"] == "descriptor":
            answer = vars(end.descriptor())
        elif command["do"] == "nonzero":
            answer = {"nonzero": int(rows.count_nonzero())}
        else:
            break
        print(json.dumps(answer), flush=True)
    end.close()
    os._exit(0)


if __name__ == "__main__":
    main()
