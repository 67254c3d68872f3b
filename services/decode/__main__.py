"""One decode rank: `python -m services.decode`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

from headrace import config as configuration
from headrace import transfer
from headrace.engine.rank import open_worker, transfer_environment
from headrace.launch.sockets import unused_port
from headrace.process import start as process
from headrace.process.start import Start
from headrace.protocol.common import WorkerIdentity
from headrace.rpc.promises import MeshKeys
from services.decode import server
from services.decode.wiring import open_decoder


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
        start = dataclasses.replace(start, port=start.port or unused_port(host))
        identity = WorkerIdentity(f"{host}:{start.port}", start.epoch)
        target = transfer.open_target(backend, worker.latent.rows, identity.address if backend == "grpc" else host)
        stack.callback(target.close)
        registry = await stack.enter_async_context(start.open_registry())
        keys = MeshKeys.load(config.mesh.key_file)
        rank = open_decoder(start, worker, identity, target, keys, transfer=backend)
        opened = await stack.enter_async_context(rank)
        write_rows = getattr(target, "write", None) if backend == "grpc" else None
        grpc_server, _ = await start.listen(server.register(opened.core, opened.links, write_rows), (server.SERVICE,))
        stack.push_async_callback(grpc_server.stop, None)
        await process.serve(start, grpc_server, registry, {"role": "decode", "model": worker.model_name}, opened.drain)


if __name__ == "__main__":
    process.run_service("decode", main)
