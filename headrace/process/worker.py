"""How a process with a model begins and ends: a prefill rank, a decode rank, or both in one.

Loaded by those processes only: it brings torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace import config as configuration
from headrace.engine.rank import Worker, open_worker, transfer_environment
from headrace.launch.sockets import unused_port
from headrace.process.registry import Registry
from headrace.process.start import Start, serve
from headrace.protocol.common import WorkerIdentity
from headrace.rpc.promises import MeshKeys


@dataclass(frozen=True)
class WorkerProcess:
    """What the process has before it opens a core; `keys` sign and verify promises. `stack` closes what is entered into it before the engine stops."""

    start: Start
    worker: Worker
    identity: WorkerIdentity
    registry: Registry
    keys: MeshKeys
    stack: contextlib.AsyncExitStack

    async def serve(
        self,
        register: Callable[[Any], None],
        service_names: Sequence[str],
        drain: Callable[[float], Awaitable[None]],
        *,
        roles: Sequence[str],
    ) -> None:
        """Announced under `roles` until a signal; then `drain(grace_s)`. Returns when nothing runs any more."""
        server, _ = await self.start.listen(register, service_names)
        self.stack.push_async_callback(server.stop, None)
        details = {"model": self.worker.model_name} | ({"role": roles[0]} if len(roles) == 1 else {})
        await serve(self.start, server, self.registry, details, drain, roles=roles)


@contextlib.asynccontextmanager
async def open_worker_process(start: Start) -> AsyncIterator[WorkerProcess]:
    """Loads the model and starts the engine, beside clients, identity and registry; leaving stops them in the other order. Raises
    ConfigError and CheckpointError."""
    role = "decode" if start.service == "aggregated" else start.service
    config = dataclasses.replace(start.config, engine=configuration.engine_of(start.config, role, start.rank))
    configuration.apply_environment(transfer_environment(config.transfer))
    keys = MeshKeys.load(config.mesh.key_file)
    worker = await asyncio.to_thread(open_worker, config)
    worker.engine.start()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(worker.engine.stop)
        start = dataclasses.replace(start, config=config, port=start.port or unused_port(config.mesh.host))
        identity = WorkerIdentity(f"{config.mesh.host}:{start.port}", start.epoch)
        registry = await stack.enter_async_context(start.open_registry())
        yield WorkerProcess(start, worker, identity, registry, keys, stack)
