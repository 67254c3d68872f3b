"""One decode rank: `python -m services.decode`; with `--aggregated` it prefills too, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys

from headrace import config as configuration
from headrace import rpc, transfer
from headrace.client import Peers
from headrace.engine.rank import open_worker, transfer_environment
from headrace.process import start as process
from headrace.process.start import Start
from headrace.protocol import WorkerIdentity
from services.decode import server
from services.decode.compose import open_decoder


async def main(start: Start) -> None:
    """Loads, warms up, serves, drains."""
    config = start.config
    backend, host = config.transfer.backend, config.mesh.host
    configuration.check_separate(config)
    configuration.apply_environment(transfer_environment(config.transfer))
    worker = await asyncio.to_thread(open_worker, config)
    worker.engine.start()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(worker.engine.stop)
        peers = Peers()
        stack.push_async_callback(peers.close)
        start = dataclasses.replace(start, port=start.port or rpc.unused_port(host))
        identity = WorkerIdentity(f"{host}:{start.port}", start.epoch)
        reached_at = identity.address if backend == "grpc" else host
        target = transfer.open_target(backend, worker.latent.rows, reached_at)
        stack.callback(target.close)
        registry = await stack.enter_async_context(start.open_registry())
        opened = open_decoder(start, worker, identity, peers, target, transfer=backend)
        core = await stack.enter_async_context(opened)
        write_rows = getattr(target, "write", None) if backend == "grpc" else None
        grpc_server, _ = await start.listen(server.register(core, write_rows), (server.SERVICE,))
        stack.push_async_callback(grpc_server.stop, None)
        await process.serve(start, grpc_server, registry, {"role": "decode", "model": worker.model_name}, core.drain)


if __name__ == "__main__":
    if "--aggregated" in sys.argv[1:]:
        from services.decode import aggregated

        process.run_service("decode", aggregated.main, [word for word in sys.argv[1:] if word != "--aggregated"])
    process.run_service("decode", main)
