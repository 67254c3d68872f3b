"""What people type: meshes side by side, started and ended from the command line; nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace import config as configuration
from headrace.client import Client
from headrace.launch.children import stop_child

ROOT = Path(__file__).resolve().parents[2]
MAX_RESIDENT_MB = 150
HEAVY = re.compile(r"torch(?!_tokenizers)|mooncake|transfer_engine|libcuda|safetensors|pydantic_core|tokenizers\.abi3")

pytestmark = pytest.mark.timeout(300)


@dataclass
class Up:
    """A `headrace up` that runs: its process, its run directory, when it was started and ready, what it printed."""

    child: subprocess.Popen
    directory: Path
    started: float
    ready: float = 0.0
    router: str = ""

    @property
    def plan(self) -> dict:
        return json.loads((self.directory / "mesh.json").read_text())

    def wait_ready(self) -> None:
        """Reads the one line on stdout."""
        line = self.child.stdout.readline()
        assert line, f"it ended before it was ready: {(self.directory / 'up.log').read_text()}"
        self.router = json.loads(line)["router"]
        self.ready = time.monotonic()

    def ports(self) -> list[int]:
        plan = self.plan
        return [process["port"] for process in plan["processes"]] + [plan["redis_port"]]


def headrace(*words: str) -> list[str]:
    return [sys.executable, "-m", "headrace.cli.main", *words]


def run(*words: str, timeout_s: float = 90.0) -> subprocess.CompletedProcess:
    return subprocess.run(headrace(*words), capture_output=True, text=True, cwd=ROOT, timeout=timeout_s)


def start_up(directory: Path, checkpoint: Path, name: str) -> Up:
    """`headrace up` in the background; Ctrl-C is `child.send_signal(SIGINT)`."""
    directory.mkdir(parents=True, exist_ok=True)
    settings = [f"mesh.run_directory={directory}", f"mesh.name={name}", f"model.directory={checkpoint}"]
    settings += ["engine.num_blocks=512"]
    words = headrace("up", "--json", *(word for setting in settings for word in ("--set", setting)))
    with (directory / "up.log").open("w") as log:
        child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT)
    return Up(child, directory, time.monotonic())


@contextlib.contextmanager
def ended_in_the_end(*meshes: Up) -> Iterator[None]:
    try:
        yield
    finally:
        for mesh in meshes:
            if mesh.child.poll() is None:
                mesh.child.send_signal(signal.SIGINT)
        for mesh in meshes:
            mesh.child.wait(40)
            mesh.child.stdout.close()


@pytest.fixture(scope="module")
def two_meshes(tmp_path_factory, tiny_directory):
    """Two meshes with the same settings but their names, started at the same moment."""
    meshes = [start_up(tmp_path_factory.mktemp(name) / "run", tiny_directory, name) for name in ("left", "right")]
    with ended_in_the_end(*meshes):
        for mesh in meshes:
            mesh.wait_ready()
        yield meshes


def descendants(pid: int) -> set[int]:
    """Every process below `pid`."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found, size = {pid}, 0
    while len(found) > size:
        size = len(found)
        found |= {child for child, parent in parents.items() if parent in found}
    return found - {pid}


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


# --- two meshes on one host ------------------------------------------------------------------------------------------


def test_two_meshes_started_together_share_no_port_and_each_answers(two_meshes):
    left, right = two_meshes
    assert not set(left.ports()) & set(right.ports())
    assert all(listens(port) for mesh in two_meshes for port in mesh.ports())
    answers = [ask(mesh) for mesh in two_meshes]
    assert answers[0]["token_ids"] == answers[1]["token_ids"]
    assert answers[0]["trace_id"] != answers[1]["trace_id"]


def ask(mesh: Up) -> dict:
    """A greedy answer by the command line; stdout is the JSON object and nothing else."""
    words = (
        "generate",
        "--json",
        "--address",
        mesh.router,
        "--max-tokens",
        "6",
        "--temperature",
        "0",
        "Once upon a time",
    )
    done = run(*words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_plan_names_every_port_before_anything_starts(tmp_path):
    done = run("up", "--dry-run", "--json", "--set", f"mesh.run_directory={tmp_path}", "--set", "prefill.groups=3")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    services = [(process["service"], process["rank"]) for process in plan["processes"]]
    assert sorted(services) == [
        ("decode", 0),
        ("kvstore", 0),
        ("prefill", 0),
        ("prefill", 1),
        ("prefill", 2),
        ("router", 0),
    ]
    ports = [process["port"] for process in plan["processes"]] + [plan["redis_port"]]
    assert len(set(ports)) == len(ports)
    first, last = plan["transfer_ports"]
    assert all(1024 < port < 32768 and not first <= port <= last for port in ports)
    assert not any(listens(port) for port in ports), "a dry run starts nothing"
    table = run("up", "--dry-run", "--set", f"mesh.run_directory={tmp_path}")
    assert all(word in table.stdout for word in ("prefill-0", "decode-0", "router-0", "kvstore-0", "redis", "mooncake"))


def test_generate_prints_exactly_the_documented_object(two_meshes):
    answer = ask(two_meshes[0])
    documented = {"request_id", "trace_id", "text", "token_ids", "finish_reason", "usage", "stages"}
    beside = {"seed", "time_to_first_token_s", "duration_s", "samples"}
    assert set(answer) == documented | beside
    assert len(answer["token_ids"]) == 6 == answer["usage"]["generated_tokens"]
    assert answer["finish_reason"] == "length" and re.fullmatch(r"[0-9a-f]{32}", answer["trace_id"])
    assert {"name", "start_s", "duration_s", "tokens", "bytes"} == set(answer["stages"][0])
    assert answer["samples"][0]["text"] == answer["text"]
    words = ("--address", two_meshes[0].router, "--max-tokens", "6", "--temperature", "0", "Once upon a time")
    assert run("generate", *words).stdout == answer["text"] + "\n"


def test_generate_without_an_address_finds_the_mesh_of_this_host_or_says_that_there_is_none(two_meshes, tmp_path):
    words = ("generate", "--max-tokens", "2", "Once", "--set")
    found = run(*words, f"mesh.run_directory={two_meshes[1].directory}")
    assert found.returncode == 0, found.stderr
    missing = run(*words, f"mesh.run_directory={tmp_path}")
    assert missing.returncode == 2 and "headrace up" in missing.stderr


@pytest.mark.parametrize("service", ["router", "kvstore"])
def test_router_and_kvstore_of_a_mesh_that_has_served_are_small_and_compute_nothing(two_meshes, service):
    ask(two_meshes[0])
    pid = next(pid for pid in descendants(two_meshes[0].child.pid) if f"services.{service}" in command_line(pid))
    mapped = {line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/" in line}
    assert any("cygrpc" in path for path in mapped)
    assert not [path for path in mapped if HEAVY.search(path)]
    resident_kb = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert resident_kb and int(resident_kb[1]) * 1024 / 1e6 <= MAX_RESIDENT_MB


def command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def test_ctrl_c_ends_a_mesh_with_status_0_and_leaves_no_process_and_no_port(two_meshes):
    """The other mesh goes on. The last test with these two."""
    left, right = two_meshes
    ports, below = left.ports(), descendants(left.child.pid)
    assert len(below) >= 5, "router, kvstore, prefill, decode, redis"
    left.child.send_signal(signal.SIGINT)
    assert left.child.wait(30) == 0
    check_nothing_left(below, ports)
    assert not (left.directory / "mesh.json").exists()
    assert ask(right)["token_ids"]


def check_nothing_left(pids: set[int], ports: list[int]) -> None:
    """Soon, not at once: the kernel ends orphans a moment after their parent."""
    end = time.monotonic() + 5.0
    while any(is_running(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert not [command_line(pid) for pid in pids if is_running(pid)]
    assert not [port for port in ports if listens(port)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_mesh_that_ends_while_it_starts_leaves_nothing_behind(tmp_path, tiny_directory, number):
    mesh = start_up(tmp_path / "run", tiny_directory, "early")
    with ended_in_the_end(mesh):
        end = time.monotonic() + 30.0
        while len(below := descendants(mesh.child.pid)) < 5 and time.monotonic() < end:
            time.sleep(0.05)
        assert len(below) >= 5, (mesh.directory / "up.log").read_text()
        mesh.child.send_signal(number)
        assert mesh.child.wait(30) == (-number if number is signal.SIGKILL else 0)
        check_nothing_left(below, [])


# --- commands that end by themselves ---------------------------------------------------------------------------------


def test_the_demo_answers_shows_its_stages_and_ends_within_a_minute(tiny_directory):
    began = time.monotonic()
    done = run("demo", "--set", f"model.directory={tiny_directory}", timeout_s=120.0)
    took_s = time.monotonic() - began
    shipped = tiny_directory == ROOT / configuration.Config().model.directory
    assert done.returncode == 0 or (not shipped and "WRONG_ANSWER" in done.stderr), done.stderr
    assert took_s <= 60.0
    ready = re.search(r"Ready after ([0-9.]+) s", done.stdout)
    assert ready and float(ready[1]) <= 25.0
    for stage in ("prefill.forward", "prefill.push", "decode.generate", "bytes"):
        assert stage in done.stdout
    if shipped:
        assert "Right: the prompt said" in done.stdout
        assert "Every process has stopped." in done.stdout


def test_doctor_says_what_runs_here(tiny_directory):
    done = run("doctor", "--json", "--set", f"model.directory={tiny_directory}")
    assert done.returncode == 0, done.stderr
    found = {finding["what"]: finding["runs"] for finding in json.loads(done.stdout)}
    assert found["grpc transfer"] and found["torch"] and found["exact mode"]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("prefill.expiry_margin_s=4", ("prefill.expiry_margin_s", "transfer.timeout_s", "4")),
        ("decode.max_bach_size=4", ("decode.max_bach_size",)),
        ("engine.num_blocks=0", ("engine.num_blocks",)),
        ("faults=prefill.push:explode", ("faults[0]", "explode")),
        ("model.directory=/nowhere", ("/nowhere",)),
    ],
)
def test_settings_that_cannot_work_are_refused_at_start_by_their_key(tmp_path, setting, said):
    done = run("up", "--set", f"mesh.run_directory={tmp_path}", "--set", setting)
    assert done.returncode != 0
    assert all(word in done.stderr for word in said), done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_workers_of_one_host_wait_for_their_threads_without_spinning(mesh):
    for name in ("prefill-0", "decode-0"):
        environment = Path(f"/proc/{mesh.running[name].child.pid}/environ").read_bytes().split(b"\0")
        assert b"OMP_WAIT_POLICY=PASSIVE" in environment


def test_every_process_of_a_mesh_runs_the_code_of_this_checkout(mesh):
    checkout = Path(__file__).resolve().parents[2]
    assert {Path(f"/proc/{one.child.pid}/cwd").resolve() for one in mesh.running.values()} == {checkout}


def test_two_router_processes_share_a_port_and_the_other_serves_when_one_dies(start_mesh):
    with start_mesh("router.processes=2") as mesh:
        assert mesh.running["router-0"].plan.port == mesh.running["router-1"].plan.port
        right = mesh.ask("Once upon a time", max_tokens=6, temperature=0.0)

        def answers(count: int) -> list[str]:
            texts = []
            for _ in range(count):
                with Client(mesh.router_address) as client:  # a connection of its own: the kernel picks the process
                    texts.append(client.generate("Once upon a time", max_tokens=6, temperature=0.0).text)
            return texts

        assert answers(12) == [right.text] * 12
        stop_child(mesh.running["router-1"].child, 0.0)
        assert answers(8) == [right.text] * 8
