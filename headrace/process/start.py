"""How a process of the mesh begins and ends: arguments, settings, logs, telemetry, its epoch, one line that says "ready".

    python -m services.<name> [--config FILE] [--set part.key=value ...] [--port N] [--rank N]

A service's `__main__.py` is `run_service("kvstore", main)`, its `main(start)` opens the core and ends in `serve`. On
stdout there is exactly one line, once the service is ready: {"service", "address", "epoch", "pid"}. Exit status: 0 after a
drain, 2 for settings that cannot work, 130 after Ctrl-C before it was ready, 1 for everything else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace import config as settings
from headrace import errors
from headrace.clock import SystemClock
from headrace.observe import logs, telemetry
from headrace.process import faults
from headrace.process.registry import Registry
from headrace.protocol.common import WorkerIdentity
from headrace.rpc.server import Server, new_epoch, serve_until_signal, start_server

log = logs.get(__name__)


@dataclass(frozen=True)
class Start:
    """What a process knows before it serves. `port` 0 lets the kernel choose; `rank` counts within the service."""

    service: str
    config: settings.Config
    epoch: str
    port: int = 0
    rank: int = 0
    clock: SystemClock = field(default_factory=SystemClock)

    @property
    def run_directory(self) -> Path:
        """State of the mesh: plan, logs, traces."""
        return settings.run_directory(self.config)

    def faults(self) -> faults.Faults:
        """The fault injection rules meant for this rank."""
        return faults.Faults.parse(self.config.faults, self.rank)

    async def listen(
        self, register: Callable[[Any], None], service_names: Sequence[str], *, share_port: bool = False
    ) -> tuple[Server, WorkerIdentity]:
        """A server at the mesh's host, NOT_SERVING yet, and the identity under which others know this process."""
        host = self.config.mesh.host
        server = await start_server(host, self.port, register, service_names, share_port=share_port)
        return server, WorkerIdentity(server.address, self.epoch)

    def open_registry(self):
        """`async with start.open_registry() as registry`: this mesh's view of who is alive."""
        return Registry.open(self.config.registry.url, self.config.mesh.name, self.config.registry, self.clock)


async def serve(
    start: Start,
    server: Server,
    registry: Registry,
    details: Mapping[str, Any],
    drain: Callable[[float], Awaitable[None]],
    *,
    roles: Sequence[str] = (),
) -> None:
    """Serves until a signal: SERVING, announced under `roles` (the service's name), the ready line; then out of the
    registry, `drain(grace_s)`, stop. Returns when nothing runs any more."""
    await server.set_serving(True)
    identity = WorkerIdentity(server.address, start.epoch)
    for role in roles or (start.service,):
        await registry.announce(role, identity, {"rank": start.rank, **details})

    async def leave_and_drain(grace_s: float) -> None:
        await registry.withdraw()
        await drain(grace_s)

    await serve_until_signal(
        server, leave_and_drain, start.config.mesh.drain_grace_s, lambda: print_ready(start.service, identity)
    )
    log.info("stopped")


def print_ready(service: str, identity: WorkerIdentity) -> None:
    """The one line on stdout by which whoever started this process knows that it is ready."""
    line = {"service": service, "address": identity.address, "epoch": identity.epoch, "pid": os.getpid()}
    print(json.dumps(line), flush=True)


def run_service(name: str, main: Callable[[Start], Awaitable[None]], arguments: Sequence[str] | None = None) -> None:
    """The whole life of a service process; never returns."""
    sys.exit(_run(name, main, arguments))


def _run(name: str, main: Callable[[Start], Awaitable[None]], arguments: Sequence[str] | None) -> int:
    try:
        start = parse(name, arguments)
        logs.setup(name, start.epoch, start.config.telemetry.log_level)
        faults.Faults.parse(start.config.faults)
        telemetry.setup(name, start.epoch, start.config.telemetry, start.run_directory)
        asyncio.run(main(start))  # type: ignore[arg-type]
        return 0
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        return _explain(name, errors.unwrap(error))
    finally:
        telemetry.shutdown()


def _explain(name: str, error: BaseException) -> int:
    """One sentence for what an operator can act on, a traceback for what is our own mistake."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, errors.HeadraceError) and not isinstance(error, errors.InternalError):
        print(f"headrace {name}: {error.message}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, errors.ConfigError) else 1
    log.error("the service ended with an error", error=error)
    return 1


def parse(name: str, arguments: Sequence[str] | None = None) -> Start:
    """Command line -> Start. Raises ConfigError; `--help` and unknown flags leave by SystemExit, as argparse does."""
    parser = argparse.ArgumentParser(f"python -m services.{name}", description=f"One {name} process of a mesh.")
    parser.add_argument("--config", metavar="FILE", help="TOML file; default: $HEADRACE_CONFIG, else built-in values")
    parser.add_argument(
        "--set",
        metavar="PART.KEY=VALUE",
        action="append",
        default=[],
        help="one setting, stronger than file and environment",
    )
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 takes a free one")
    parser.add_argument("--rank", type=int, default=0, help="number of this process within its service")
    given = parser.parse_args(arguments)
    config = settings.load(given.config, given.set)
    return Start(name, config, new_epoch(), given.port, given.rank)
