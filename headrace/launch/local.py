"""A mesh on this host: which processes, on which ports, started and stopped together.

`plan` says what would run and is what `headrace up --dry-run` prints. `Mesh` starts it: the bundled Redis when none is
configured, then kvstore, prefill, decode, router, each a process of its own that ends with us whatever becomes of us. Logs go to
`<run directory>/logs`, the plan of the running mesh to `<run directory>/mesh.json`.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from headrace import config as configuration
from headrace.config import Config
from headrace.errors import ConfigError, Unavailable
from headrace.launch.children import start_child, stop_child, wait_ready
from headrace.launch.redis_server import BundledRedis
from headrace.launch.sockets import PortClaims
from headrace.rpc.channel import is_serving
from headrace.rpc.promises import MeshKeys

WORKERS = {"prefill": "prefill", "decode": "decode", "aggregated": "decode"}
"""Services that compute -> the part of the settings that lists their devices."""


@dataclass(frozen=True)
class ProcessPlan:
    """One process: service name, rank within the service, gRPC port."""

    service: str
    rank: int
    port: int

    @property
    def name(self) -> str:
        """`decode-0`."""
        return f"{self.service}-{self.rank}"


@dataclass(frozen=True)
class MeshPlan:
    """Everything that would listen. `redis_port` is None when a Redis is configured."""

    mesh: str
    host: str
    redis_port: int | None
    redis_url: str
    transfer_ports: tuple[int, int]
    processes: tuple[ProcessPlan, ...]
    run_directory: str
    aggregated: bool

    def port_of(self, service: str) -> int:
        """The port of rank 0 of a service."""
        return next(process.port for process in self.processes if process.service == service)


def plan(config: Config, *, aggregated: bool = False, claims: PortClaims | None = None) -> MeshPlan:
    """Ports for every process, each free at this moment and held in `claims` against other plans of this host. Raises
    ConfigError when the range is used up, or for settings that these processes cannot share."""
    if not aggregated:
        configuration.check_separate(config)
    held = claims or PortClaims()
    try:
        return _plan(config, aggregated, held)
    finally:
        if claims is None:
            held.close()


def _plan(config: Config, aggregated: bool, claims: PortClaims) -> MeshPlan:
    ranks = [("router", config.router.processes), ("kvstore", 1)]
    if aggregated:
        ranks.append(("aggregated", configuration.num_ranks(config.decode)))
    else:
        ranks += [(role, configuration.num_ranks(getattr(config, role))) for role in ("prefill", "decode")]

    def next_port() -> int:
        return claims.take(config.mesh.host, config.mesh.base_port)

    processes: list[ProcessPlan] = []
    for service, count in ranks:
        for rank in range(count):
            shared = config.router.port or (processes[0].port if processes else 0) if service == "router" else 0
            processes.append(ProcessPlan(service, rank, shared or next_port()))
    redis_port = None if config.registry.url else next_port()
    return MeshPlan(
        mesh=config.mesh.name,
        host=config.mesh.host,
        redis_port=redis_port,
        redis_url=config.registry.url or f"redis://{config.mesh.host}:{redis_port}/0",
        transfer_ports=(config.transfer.min_port, config.transfer.max_port),
        processes=tuple(processes),
        run_directory=str(configuration.run_directory(config)),
        aggregated=aggregated,
    )


@dataclass
class Running:
    """A process of the mesh and what it said when it was ready."""

    plan: ProcessPlan
    child: subprocess.Popen
    log: Path
    said: dict[str, object] = field(default_factory=dict)


class Mesh:
    """A running mesh: `with Mesh(config) as mesh: mesh.router_address`. `flags` are given on to every process."""

    def __init__(
        self,
        config: Config,
        *,
        aggregated: bool = False,
        config_file: str | None = None,
        flags: Sequence[str] = (),
        say: Callable[[str], None] = lambda text: None,
    ):
        self.config = config
        self._claims = PortClaims()
        self.plan = plan(config, aggregated=aggregated, claims=self._claims)
        self.running: dict[str, Running] = {}
        self.redis: BundledRedis | None = None
        self._config_file = config_file
        self._flags = list(flags)
        self._say = say
        self._is_described = False

    @property
    def router_address(self) -> str:
        """Where clients connect."""
        return f"{self.plan.host}:{self.plan.port_of('router')}"

    @property
    def _key_file(self) -> Path:
        """What promises of room are signed with: as configured, else made at every start of this mesh."""
        return Path(self.config.mesh.key_file or Path(self.plan.run_directory) / "mesh.key").absolute()

    def address(self, name: str) -> str:
        """Where process `decode-0` listens."""
        return f"{self.plan.host}:{self.running[name].plan.port}"

    def __enter__(self) -> Mesh:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts everything and waits until the router serves. Raises ConfigError when a mesh of this name runs here, Unavailable
        with the tail of the log that says why."""
        directory = Path(self.plan.run_directory)
        self._refuse_second(directory / "mesh.json")
        try:
            (directory / "logs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            text = f"mesh.run_directory: cannot make {directory}: {error.strerror}"
            raise ConfigError(text, field="mesh.run_directory") from error
        if self.plan.redis_port is not None:
            self.redis = BundledRedis(self.plan.redis_port, self.plan.host).start()
        if not self.config.mesh.key_file:
            MeshKeys.make(self._key_file)
        for process in self.plan.processes:
            self.spawn(process)
        deadline = time.monotonic() + self.config.mesh.start_timeout_s
        for running in self.running.values():
            self._wait_ready(running, deadline)
        self.wait_serving(max(0.0, deadline - time.monotonic()))
        described = asdict(self.plan) | {"router": self.router_address, "pid": os.getpid()}
        (directory / "mesh.json").write_text(json.dumps(described, indent=2))
        self._is_described = True

    def spawn(self, process: ProcessPlan) -> Running:
        """Starts one process; does not wait for it. Call it from the main thread."""
        log = Path(self.plan.run_directory) / "logs" / f"{process.name}.log"
        with log.open("ab") as output:
            child = start_child(
                self._command(process),
                environment=configuration.THREAD_ENVIRONMENT,
                stdout=subprocess.PIPE,
                stderr=output,
                directory=configuration.CHECKOUT,
            )
        self.running[process.name] = Running(process, child, log)
        return self.running[process.name]

    def restart(self, name: str) -> Running:
        """Starts a process again at its old port; it must have ended."""
        running = self.spawn(self.running[name].plan)
        self._wait_ready(running, time.monotonic() + self.config.mesh.start_timeout_s)
        return running

    def wait_serving(self, timeout_s: float) -> None:
        """Waits until the router says SERVING: a canary token went through prefill and decode."""
        end = time.monotonic() + timeout_s
        while not asyncio.run(is_serving(self.router_address)):
            self._check_alive()
            if time.monotonic() > end:
                raise Unavailable(f"the mesh was not ready within {self.config.mesh.start_timeout_s} s")
            time.sleep(0.1)

    def check(self) -> None:
        """Raises Unavailable when a process has ended by itself."""
        self._check_alive()

    def stop(self) -> None:
        """SIGTERM to all at once; SIGKILL to what outlives the grace. Safe to repeat."""
        for running in self.running.values():
            if running.child.poll() is None:
                running.child.terminate()
        end = time.monotonic() + self.config.mesh.drain_grace_s + 5
        for running in self.running.values():
            stop_child(running.child, max(0.1, end - time.monotonic()))
            if running.child.stdout is not None:
                running.child.stdout.close()
        if self.redis is not None:
            self.redis.stop()
            self.redis = None
        self._claims.close()
        if self._is_described:
            (Path(self.plan.run_directory) / "mesh.json").unlink(missing_ok=True)

    def _refuse_second(self, file: Path) -> None:
        """Two meshes in one run directory would overwrite each other's plan; the file of one that was killed is nothing."""
        try:
            router = str(json.loads(file.read_text())["router"])
        except (OSError, ValueError, KeyError, TypeError):
            return
        if asyncio.run(is_serving(router)):
            raise ConfigError(
                f"a mesh named {self.config.mesh.name!r} runs here already, its router is {router}: stop it, or give this "
                "one another name with --set mesh.name=NAME",
                field="mesh.name",
            )

    def _command(self, process: ProcessPlan) -> list[str]:
        command = [sys.executable, "-m", f"services.{process.service}", "--port", str(process.port)]
        command += ["--rank", str(process.rank)]
        if self._config_file:
            command += ["--config", str(Path(self._config_file).absolute())]
        for flag in (
            *self._flags,
            f"registry.url={self.plan.redis_url}",
            f"mesh.run_directory={self.plan.run_directory}",
            f"mesh.key_file={self._key_file}",
            f"transfer.backend={self.config.transfer.backend}",
            f"model.directory={configuration.model_directory(self.config)}",
            f"engine.num_threads={self._threads_of(process)}",
        ):
            command += ["--set", flag]
        return command

    def _threads_of(self, process: ProcessPlan) -> int:
        """Torch threads of a process: as configured, else this host's cores shared between the ranks that compute on them."""
        sharing = [one for one in self.plan.processes if self._computes_on_cpu(one)]
        if self.config.engine.num_threads or process not in sharing:
            return self.config.engine.num_threads
        return max(1, len(os.sched_getaffinity(0)) // len(sharing))

    def _computes_on_cpu(self, process: ProcessPlan) -> bool:
        if process.service not in WORKERS:
            return False
        engine = configuration.engine_of(self.config, WORKERS[process.service], process.rank)
        return engine.device.partition(":")[0] == "cpu"

    def _wait_ready(self, running: Running, deadline: float) -> None:
        try:
            running.said = wait_ready(running.child, max(0.1, deadline - time.monotonic()))
        except Unavailable as error:
            raise Unavailable(f"{running.plan.name} did not start: {_tail(running.log)}") from error
        self._say(f"{running.plan.name} listens on {running.said['address']}")

    def _check_alive(self) -> None:
        for running in self.running.values():
            code = running.child.poll()
            if code is not None:
                raise Unavailable(f"{running.plan.name} ended with code {code}: {_tail(running.log)}")


def find_router(config: Config) -> str:
    """Address of the router of the mesh that runs on this host. Raises ConfigError when there is none."""
    file = configuration.run_directory(config) / "mesh.json"
    try:
        return str(json.loads(file.read_text())["router"])
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"no mesh named {config.mesh.name!r} runs here: start one with `headrace up`, or give --address host:port",
            field="address",
        ) from error


def _tail(log: Path, lines: int = 12) -> str:
    try:
        return "\n" + "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return "(no log)"
