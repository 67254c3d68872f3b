"""One end of a Mooncake transfer in a process of its own; started by test_mooncake_transfer.py.

Reads one JSON object a line from stdin, does it, answers one JSON object a line on stdout. The pool is fp32
`[layers, blocks, block_size, row_dim]`: `pattern` on the writing side, zeros on the written one.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch

from headrace.errors import TransferError
from headrace.transfer import RowRun, TargetDescriptor, is_drained, open_source, open_target


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
    shape, seed, role = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    rows = pattern(shape, seed) if role == "source" else torch.zeros(shape)
    end = open_source("mooncake", rows, "127.0.0.1") if role == "source" else open_target("mooncake", rows, "127.0.0.1")
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "push":
            answer = push(end, command)
        elif command["do"] == "descriptor":
            answer = vars(end.descriptor())
        else:
            break
        print(json.dumps(answer), flush=True)
    end.close()
    os._exit(0)


if __name__ == "__main__":
    main()
