"""What a running router and kvstore have mapped and hold resident, after they have done some work."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.client import AsyncClient
from headrace.clock import Deadline, SystemClock
from headrace.errors import HeadraceError
from headrace.launch.children import start_child, stop_child, wait_ready
from headrace.launch.redis_server import BundledRedis
from headrace.model.weights.random_checkpoint import write_random_checkpoint
from headrace.protocol.common import WorkerIdentity
from headrace.protocol.kvstore import PublishCommand
from headrace.protocol.link import Done
from headrace.rpc.clients import Peers, RouterClient
from headrace.rpc.links import CATALOGUE_LINK, LinkOpener, LinkSettings
from tests.link_fakes import Recorder

ROOT = Path(__file__).resolve().parents[2]
SHAPE = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
MAX_RESIDENT_MB = 150
FORBIDDEN = re.compile(
    r"torch(?!_tokenizers)|mooncake|transfer_engine|libcuda|safetensors|openblas64_torch", re.IGNORECASE
)
RUST_MARK = b"/rustc/"
"""Path prefix of the standard library's sources; every Rust binary carries it in its panic messages."""
RUST_NAMES = re.compile(
    r"tokenizers\.abi3|/tiktoken/|pydantic_core|orjson|rpds|cryptography/hazmat|_rust|safetensors_rust|hf_xet|jiter|polars"
)


@dataclass
class Running:
    """A service process."""

    child: subprocess.Popen
    address: str

    @property
    def mapped(self) -> list[str]:
        """Every file mapped into it."""
        lines = Path(f"/proc/{self.child.pid}/maps").read_text().splitlines()
        return sorted({fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6 and "/" in fields[5]})

    @property
    def resident_mb(self) -> float:
        """Resident set in MB of 10^6 bytes."""
        status = Path(f"/proc/{self.child.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024 / 1e6  # type: ignore[index]


def rust_files(mapped: list[str]) -> list[str]:
    """Which of these files hold Rust, by name or by what is in them."""
    files = (path for path in map(Path, mapped) if path.is_file() and (".so" in path.name or "/bin/" in str(path)))
    return [str(path) for path in files if RUST_NAMES.search(str(path)) or RUST_MARK in path.read_bytes()]


@pytest.fixture(scope="module")
def services(tmp_path_factory, tiny_directory):
    """A router and a kvstore on one Redis, with the shipped tokenizer and nobody to compute."""
    directory = tmp_path_factory.mktemp("control")
    checkpoint = write_random_checkpoint(directory / "checkpoint", SHAPE)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny_directory / name, checkpoint / name)
    running: dict[str, Running] = {}
    with BundledRedis() as redis:
        flags = [f"registry.url={redis.url}", f"mesh.run_directory={directory}", f"model.directory={checkpoint}"]
        try:
            for name in ("router", "kvstore"):
                command = [
                    sys.executable,
                    "-m",
                    f"services.{name}",
                    *(word for flag in flags for word in ("--set", flag)),
                ]
                with (directory / f"{name}.log").open("w") as log:
                    child = start_child(command, stdout=subprocess.PIPE, stderr=log, directory=ROOT)
                running[name] = Running(child, "")
                running[name].address = wait_ready(child, 30.0)["address"]
            asyncio.run(use(running))
            yield running
        finally:
            for service in running.values():
                stop_child(service.child, 10.0)
                service.child.stdout.close()


async def publish(address: str, worker: WorkerIdentity, keys: tuple[bytes, ...]) -> None:
    """What a worker says over its catalogue link."""
    clock = SystemClock()
    opener = LinkOpener(CATALOGUE_LINK, address, worker, "", Recorder(), clock, LinkSettings())
    async with asyncio.TaskGroup() as tasks:
        keeping = tasks.create_task(opener.run())
        assert await opener.link.ask(PublishCommand(keys, 30.0), Deadline.after(clock, 5.0)) == Done()
        keeping.cancel()


async def use(running: dict[str, Running]) -> None:
    """Every kind of work a control-plane process can do without workers, so that nothing is left unloaded."""
    peers = Peers()
    store, worker = peers.kvstore(running["kvstore"].address), WorkerIdentity("a:1", "e1")
    keys = tuple(number.to_bytes(16, "big") for number in range(2000))
    await publish(running["kvstore"].address, worker, keys)
    assert (await store.lookup(keys, 5.0))[0].num_blocks == len(keys)
    await RouterClient(peers.channel(running["router"].address)).ledger()
    await peers.close()
    async with AsyncClient(running["router"].address) as client:
        assert (await client.model()).vocabulary_size > 0
        with pytest.raises(HeadraceError):  # tokenised, then nobody computes it
            await client.generate("Once upon a time there was a heron. " * 50, timeout_s=1.0)


@pytest.mark.parametrize("name", ["router", "kvstore"])
def test_neither_torch_nor_mooncake_is_mapped(services, name):
    mapped = services[name].mapped
    assert any("cygrpc" in path for path in mapped), "the list of mapped files is not what it should be"
    assert [path for path in mapped if FORBIDDEN.search(path)] == []


@pytest.mark.parametrize("name", ["router", "kvstore"])
def test_no_rust_is_mapped(services, name):
    assert rust_files(services[name].mapped) == []


@pytest.mark.parametrize("name", ["router", "kvstore"])
def test_the_resident_set_stays_small(services, name):
    assert services[name].resident_mb <= MAX_RESIDENT_MB


@pytest.mark.parametrize("module", ["tokenizers", "safetensors"])
def test_the_search_for_rust_finds_rust(module):
    """A control: the same search in a process that has loaded a Rust extension."""
    pytest.importorskip(module, reason="needs a Rust extension to find")
    program = f"import {module}, sys; print('ready', flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        child.stdout.readline()
        found = Running(child, "").mapped
        assert any(module in path for path in rust_files(found))
        by_content = [path for path in found if ".so" in path and RUST_MARK in Path(path).read_bytes()]
        assert any(module in path for path in by_content), "the mark in the binary would be found without its name"
    finally:
        child.communicate()
