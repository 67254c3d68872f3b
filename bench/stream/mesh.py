"""A mesh of this host whose workers have mock engines, and what its processes use of the host."""

from __future__ import annotations

import os
import time
from pathlib import Path

from headrace.launch.local import Mesh, ProcessPlan

PREFILL_BLOCKS = 4096
"""So few that a prompt is evicted before the bench sends it again: no request finds its prefix."""
MOCKED = ("prefill", "decode")
Processes = dict[str, tuple[int, int | None]]
"""Name -> process id and, when only one thread of it is meant, that thread's."""
_CLOCK_OF_A_PROCESS = 2
"""As clock_getcpuclockid(3) makes the clock of another process: CPUCLOCK_SCHED of the kernel, all threads."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class MockMesh(Mesh):
    """As Mesh, with the workers of bench/stream/workers.py."""

    def _command(self, process: ProcessPlan) -> list[str]:
        command = super()._command(process)
        if process.service not in MOCKED:
            return command
        place = command.index(f"services.{process.service}")
        command[place : place + 1] = ["bench.stream.workers", process.service]
        if process.service == "prefill":
            command += ["--set", f"engine.num_blocks={PREFILL_BLOCKS}"]
        return command

    def processes(self) -> Processes:
        """Every service, the bundled Redis, and the threads of the mock engines as `prefill_engine` and `decode_engine`."""
        found: Processes = {running.plan.service: (running.child.pid, None) for running in self.running.values()}
        for service in MOCKED:
            thread = int(engine_thread_file(Path(self.plan.run_directory), service).read_text())
            found[f"{service}_engine"] = found[service][0], thread
        if self.redis is not None:
            found["redis"] = self.redis.pid, None
        return found


def engine_thread_file(run_directory: Path, service: str) -> Path:
    """Where a worker with a mock engine writes the kernel's number of its engine thread."""
    return run_directory / f"{service}.engine-thread"


def cpu_s(pid: int, thread: int | None = None) -> float:
    """Seconds that a process with all its threads, or one thread of it, has run, user and system. Raises OSError when it has
    ended. The kernel counts nanoseconds; /proc/<pid>/stat has ticks of 10 ms."""
    if thread is None:
        return time.clock_gettime((~pid << 3) | _CLOCK_OF_A_PROCESS)
    return int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0]) / 1e9


def resident_bytes(pid: int) -> int:
    """Memory that a process occupies now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES


class Account:
    """CPU of processes from the moment it is made: `account.used()` says seconds by name."""

    def __init__(self, processes: Processes):
        self._processes = processes
        self._before = self._read()

    def used(self) -> dict[str, float]:
        """Seconds by name."""
        return {name: now - self._before[name] for name, now in self._read().items()}

    def _read(self) -> dict[str, float]:
        return {name: cpu_s(*process) for name, process in self._processes.items()}
