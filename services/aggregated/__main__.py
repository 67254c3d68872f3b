"""One process that prefills and decodes: `python -m services.aggregated`, the oracle for the disaggregated mesh.

The same cores, the same links, the same engine thread and model; two pools, and the `local` transfer between them. Routers see a
prefill rank and a decode rank at one address. The one package that imports two services.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

from headrace import transfer
from headrace.engine.rank import open_worker
from headrace.launch.sockets import unused_port
from headrace.process import start as process
from headrace.process.start import Start
from headrace.protocol.common import WorkerIdentity
from headrace.rpc.promises import MeshKeys
from services.decode import server as decode_server
from services.decode.wiring import open_decoder
from services.prefill import server as prefill_server
from services.prefill.wiring import open_prefiller

BACKEND = "local"


async def main(start: Start) -> None:
    """Loads once, serves both services at one address, drains both."""
    config, host = start.config, start.config.mesh.host
    worker = await asyncio.to_thread(open_worker, config)
    prefill_worker = open_worker(config, engine=worker.engine, transformer=worker.transformer)
    worker.engine.start()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(worker.engine.stop)
        start = dataclasses.replace(start, port=start.port or unused_port(host))
        identity = WorkerIdentity(f"{host}:{start.port}", start.epoch)
        registry = await stack.enter_async_context(start.open_registry())
        target = transfer.open_target(BACKEND, worker.latent.rows, host)
        stack.callback(target.close)
        source = transfer.open_source(BACKEND, prefill_worker.latent.rows, host)
        stack.callback(source.close)
        keys = MeshKeys.load(config.mesh.key_file)
        decode = await stack.enter_async_context(open_decoder(start, worker, identity, target, keys, transfer=BACKEND))
        prefill = await stack.enter_async_context(
            open_prefiller(start, prefill_worker, identity, registry, source, keys, transfer=BACKEND)
        )

        def register(grpc_server) -> None:
            decode_server.register(decode.core, decode.links)(grpc_server)
            prefill_server.register(prefill)(grpc_server)

        async def drain(grace_s: float) -> None:
            await asyncio.gather(prefill.core.drain(grace_s), decode.drain(grace_s))

        services = (decode_server.SERVICE, prefill_server.SERVICE)
        grpc_server, _ = await start.listen(register, services)
        stack.push_async_callback(grpc_server.stop, None)
        await process.serve(
            start, grpc_server, registry, {"model": worker.model_name}, drain, roles=("prefill", "decode")
        )


if __name__ == "__main__":
    process.run_service("aggregated", main)
