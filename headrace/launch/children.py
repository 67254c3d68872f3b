"""Processes we start: none outlives us, each says when it is ready, each is asked to stop before it is killed."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from headrace import config as settings
from headrace import errors

_BOND = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: die with the process that started us
if os.getppid() != int(sys.argv[1]):  # it ended before the line above
    os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Runs in the child before the command replaces it. Not a `preexec_fn`: that forks under gRPC's threads, and such a child
may never reach its command."""


def start_child(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
    directory: Path | None = None,
) -> subprocess.Popen:
    """Starts a process that cannot outlive this one, in a process group of its own (Ctrl-C reaches us, not it).

    Call it from the main thread: Linux ends the child when the thread that started it ends. `environment` adds to ours.
    """
    words = list(command)
    if sys.platform == "linux":
        words[0] = shutil.which(words[0]) or words[0]
        words = [sys.executable, "-I", "-S", "-c", _BOND, str(os.getpid()), *words]
    child = subprocess.Popen(
        words,
        env=settings.child_environment(environment or {}),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        cwd=directory,
        process_group=0,
    )
    child.args = list(command)  # what messages should name
    return child


def stop_child(child: subprocess.Popen, grace_s: float) -> int:
    """SIGTERM, then SIGKILL after `grace_s`. Returns the exit status; safe to repeat."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(grace_s)
        except subprocess.TimeoutExpired:
            child.kill()
    return child.wait()


def wait_ready(child: subprocess.Popen, timeout_s: float) -> dict[str, Any]:
    """Reads a child's ready line from its stdout pipe. Raises Unavailable when it ends, or says nothing, before then."""
    assert child.stdout is not None, "start the child with stdout=subprocess.PIPE"
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        if not selector.select(timeout_s):
            raise errors.Unavailable(f"{child.args} was not ready within {timeout_s:g} s")
    line = child.stdout.readline()
    if not line:
        raise errors.Unavailable(f"{child.args} ended with status {child.wait()} before it was ready")
    return json.loads(line)
