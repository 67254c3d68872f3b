"""How service processes begin and end, seen from outside; the kvstore stands for all of them."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.errors import ConfigError, Unavailable
from headrace.launch import sockets
from headrace.launch.children import start_child, stop_child, wait_ready
from headrace.launch.redis_server import BundledRedis
from headrace.observe import ring
from headrace.process.start import parse, run_service
from headrace.rpc.channel import is_serving
from services.kvstore import __main__ as kvstore

ROOT = Path(__file__).resolve().parents[2]


def command(*flags: str, words=()) -> list[str]:
    """The command line of a kvstore process."""
    return [sys.executable, "-m", "services.kvstore", *words, *(word for flag in flags for word in ("--set", flag))]


def ended(*flags: str, words=()) -> subprocess.CompletedProcess:
    """A process that is expected to end by itself."""
    return subprocess.run(
        command(*flags, words=words), cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
    )


@pytest.fixture
def plain_logging():
    """Gives the root logger back as it was."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)


def test_a_process_says_one_line_when_it_is_ready_and_drains_at_sigterm(tmp_path):
    with BundledRedis() as redis:
        flags = (f"registry.url={redis.url}", f"mesh.run_directory={tmp_path}")
        child = start_child(command(*flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, directory=ROOT)
        try:
            said = wait_ready(child, 30.0)
            assert (said["service"], said["pid"]) == ("kvstore", child.pid)
            assert said.keys() == {"service", "address", "epoch", "pid"}
            assert asyncio.run(is_serving(said["address"]))
            assert asyncio.run(is_serving(said["address"], "headrace.v1.KvStoreService"))
        finally:
            status = stop_child(child, 10.0)
        rest, errors = child.communicate()
    assert (status, rest) == (0, b"")
    lines = [json.loads(line) for line in errors.splitlines()]
    assert lines[-1]["event"] == "stopped" and lines[-1]["epoch"] == said["epoch"]


def test_every_start_draws_another_epoch():
    assert len({parse("kvstore", []).epoch for _ in range(10)}) == 10


def test_command_line_wins_over_file_and_environment(tmp_path, monkeypatch):
    file = tmp_path / "mesh.toml"
    file.write_text('[mesh]\nname = "file"\n[kvstore]\npublish_ttl_s = 5.0\n')
    monkeypatch.setenv("HEADRACE__MESH__NAME", "environment")
    start = parse("kvstore", ["--config", str(file), "--set", "mesh.name=flag", "--port", "20777", "--rank", "3"])
    assert (start.config.mesh.name, start.config.kvstore.publish_ttl_s) == ("flag", 5.0)
    assert (start.port, start.rank, start.service) == (20777, 3, "kvstore")


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("kvstore.ttl=1", "kvstore.ttl"),
        ("registry.url=", "registry.url"),
        ("registry.url=nonsense", "registry.url"),
        ("telemetry.log_level=LOUD", "telemetry.log_level"),
        ("faults=decode.stpe:fail", "faults[0]"),
    ],
)
def test_a_wrong_setting_ends_the_start_with_one_sentence(tmp_path, capsys, plain_logging, flag, said):
    flags = ["registry.url=redis://127.0.0.1:9", f"mesh.run_directory={tmp_path}", flag]
    with pytest.raises(SystemExit) as ended_with:
        run_service("kvstore", kvstore.main, [word for each in flags for word in ("--set", each)])
    output = capsys.readouterr()
    assert (ended_with.value.code, output.out) == (2, "")
    assert output.err.startswith("headrace kvstore: ") and said in output.err and "Traceback" not in output.err


def test_a_taken_port_ends_the_start_with_one_sentence(tmp_path):
    with BundledRedis() as redis:
        flags = (f"registry.url={redis.url}", f"mesh.run_directory={tmp_path}")
        run = ended(*flags, words=("--port", str(redis.port)))
    assert (run.returncode, run.stdout) == (2, "")
    assert str(redis.port) in run.stderr and "Traceback" not in run.stderr


def test_a_process_starts_before_redis_does(tmp_path):
    later = BundledRedis(sockets.free_port("127.0.0.1", 28000 + os.getpid() % 4000))
    flags = (f"registry.url={later.url}", f"mesh.run_directory={tmp_path}")
    child = start_child(command(*flags), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, directory=ROOT)
    try:
        said = wait_ready(child, 30.0)
        assert asyncio.run(is_serving(said["address"])) and child.poll() is None
    finally:
        status = stop_child(child, 10.0)
        child.stdout.close()
    assert status == 0


def test_a_child_that_ends_before_it_is_ready_is_told_from_a_slow_one():
    quick = start_child([sys.executable, "-c", "raise SystemExit(7)"], stdout=subprocess.PIPE)
    with pytest.raises(Unavailable, match="status 7"):
        wait_ready(quick, 10.0)
    slow = start_child(["sleep", "60"], stdout=subprocess.PIPE)
    with pytest.raises(Unavailable, match="not ready"):
        wait_ready(slow, 0.1)
    assert stop_child(slow, 5.0) == -signal.SIGTERM
    for child in (quick, slow):
        child.stdout.close()


def test_a_child_that_ignores_sigterm_is_killed():
    program = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('{}', flush=True); time.sleep(60)"
    )
    child = start_child([sys.executable, "-c", program], stdout=subprocess.PIPE)
    wait_ready(child, 10.0)
    begin = time.monotonic()
    assert stop_child(child, 0.2) == -signal.SIGKILL and time.monotonic() - begin < 5
    assert stop_child(child, 0.2) == -signal.SIGKILL
    child.stdout.close()


def test_settings_errors_are_typed():
    with pytest.raises(ConfigError):
        parse("kvstore", ["--set", "no.such=1"])


def test_spans_of_a_stopped_process_are_on_disk(tmp_path):
    """SIGTERM right after a span: nothing is lost."""
    program = (
        "import sys, pathlib; from headrace.observe import telemetry; from headrace.process.start import run_service\n"
        "async def main(start):\n"
        "    with telemetry.span('router.generate'): pass\n"
        f"run_service('router', main, ['--set', 'mesh.run_directory={tmp_path}'])"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=30, check=False).returncode == 0
    assert [span.name for span in ring.read_ring(tmp_path / "traces")] == ["router.generate"]
