"""One prefill rank: `python -m services.prefill`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

from headrace import config as configuration
from headrace import rpc, transfer
from headrace.engine.rank import open_worker, transfer_environment
from headrace.process import start as process
from headrace.process.start import Start
from headrace.protocol.common import WorkerIdentity
from headrace.rpc.clients import RowSender
from headrace.rpc.promises import MeshKeys
from services.prefill import server
from services.prefill.wiring import open_prefiller


async def main(start: Start) -> None:
    """Loads, serves, drains."""
    config = start.config
    configuration.check_separate(config)
    configuration.apply_environment(transfer_environment(config.transfer))
    worker = await asyncio.to_thread(open_worker, config)
    worker.engine.start()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(worker.engine.stop)
        send_rows = stack.enter_context(RowSender(config.transfer.timeout_s))
        source = transfer.open_source(
            config.transfer.backend,
            worker.latent.rows,
            config.mesh.host,
            timeout_s=config.transfer.timeout_s,
            send=send_rows,
        )
        stack.callback(source.close)
        start = dataclasses.replace(start, port=start.port or rpc.unused_port(config.mesh.host))
        identity = WorkerIdentity(f"{config.mesh.host}:{start.port}", start.epoch)
        registry = await stack.enter_async_context(start.open_registry())
        keys = MeshKeys.load(config.mesh.key_file)
        rank = open_prefiller(start, worker, identity, registry, source, keys, transfer=config.transfer.backend)
        opened = await stack.enter_async_context(rank)
        grpc_server, _ = await start.listen(server.register(opened), (server.SERVICE,))
        stack.push_async_callback(grpc_server.stop, None)
        await process.serve(start, grpc_server, registry, {"role": "prefill", "model": worker.model_name}, opened.drain)


if __name__ == "__main__":
    process.run_service("prefill", main)
