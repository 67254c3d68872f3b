"""One process that prefills and decodes: `python -m services.aggregated`, the oracle for the disaggregated mesh.

The same cores, the same links, the same engine thread and model; two pools, and the `local` transfer between them. Routers see a
prefill rank and a decode rank at one address. The only package that imports both services.
"""

from __future__ import annotations

import asyncio

from headrace import transfer
from headrace.engine.rank import open_worker
from headrace.process.start import Start, run_service
from headrace.process.worker import open_worker_process
from services.decode import server as decode_server
from services.decode.wiring import open_decoder
from services.prefill import server as prefill_server
from services.prefill.wiring import open_prefiller

BACKEND = "local"


async def main(start: Start) -> None:
    """Loads once, serves both services at one address, drains both."""
    host = start.config.mesh.host
    async with open_worker_process(start) as process:
        worker, stack = process.worker, process.stack
        prefill_worker = open_worker(process.start.config, engine=worker.engine, transformer=worker.transformer)
        target = transfer.open_target(BACKEND, worker.latent.rows, host)
        stack.callback(target.close)
        source = transfer.open_source(BACKEND, prefill_worker.latent.rows, host)
        stack.callback(source.close)
        decode = await stack.enter_async_context(
            open_decoder(process.start, worker, process.identity, target, process.keys, transfer=BACKEND)
        )
        prefill = await stack.enter_async_context(
            open_prefiller(
                process.start,
                prefill_worker,
                process.identity,
                process.registry,
                source,
                process.keys,
                transfer=BACKEND,
            )
        )

        def register(grpc_server) -> None:
            decode_server.register(decode.core, decode.links)(grpc_server)
            prefill_server.register(prefill)(grpc_server)

        async def drain(grace_s: float) -> None:
            await asyncio.gather(prefill.drain(grace_s), decode.drain(grace_s))

        names = (decode_server.SERVICE, prefill_server.SERVICE)
        await process.serve(register, names, drain, roles=("prefill", "decode"))


if __name__ == "__main__":
    run_service("aggregated", main)
