"""One router process: `python -m services.router`. It loads no torch, no mooncake and no Rust extension.

The line on stdout says that it listens; health says SERVING only while a canary token has gone through some pair of workers. Several
router processes may serve one port: each has an epoch of its own, and links of its own to every rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

from headrace import config as configuration
from headrace.launch.sockets import unused_port
from headrace.process.start import Start, print_ready, run_service
from headrace.protocol.common import WorkerIdentity
from headrace.rpc.links import LinkSettings
from headrace.rpc.server import Server, serve_until_signal
from services.router.checkpoint import CheckpointInfo
from services.router.core import Router
from services.router.dialer import LinkDialer
from services.router.server import SERVICES, register


async def main(start: Start) -> None:
    """Loads the tokenizer, watches the workers, serves until a signal."""
    config = start.config
    checkpoint = CheckpointInfo.load(configuration.model_directory(config), config.model.max_context_tokens)
    start = dataclasses.replace(start, port=start.port or config.router.port or unused_port(config.mesh.host))
    identity = WorkerIdentity(f"{config.mesh.host}:{start.port}", start.epoch)
    settings = LinkSettings.from_beat(config.links.beat_s, config.links.max_queued_bytes)
    async with contextlib.AsyncExitStack() as stack:
        registry = await stack.enter_async_context(start.open_registry())
        router = await stack.enter_async_context(
            Router.open(
                config.router,
                checkpoint,
                membership=registry,
                dialer=LinkDialer(identity, start.clock, settings),
                clock=start.clock,
                claims=registry,
            )
        )
        doors = register(router, config.router.default_deadline_s)
        server, _ = await start.listen(doors, SERVICES, share_port=config.router.processes > 1)
        stack.push_async_callback(server.stop, None)
        details = {"rank": start.rank, "model": checkpoint.name}
        await registry.announce("router", identity, details, shares_address=True)
        async with asyncio.TaskGroup() as tasks:
            telling = tasks.create_task(tell_health(router, server))

            async def drain(grace_s: float) -> None:
                telling.cancel()
                await registry.withdraw()
                await router.drain(grace_s)

            await serve_until_signal(
                server, drain, config.mesh.drain_grace_s, lambda: print_ready(start.service, identity)
            )


async def tell_health(router: Router, server: Server) -> None:
    """Keeps health in step with whether a pair of workers is ready."""
    while True:
        await router.wait_ready(True)
        await server.set_serving(router.is_ready)
        await router.wait_ready(False)
        await server.set_serving(False)


if __name__ == "__main__":
    run_service("router", main)
