"""One process that prefills and decodes: `python -m services.decode --aggregated`, the oracle for the disaggregated mesh.

The same cores, the same protocol, the same engine thread and model; two pools, and the `local` transfer between them.
Routers see a prefill rank and a decode rank at one address. The only file that imports both services.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

from headrace import rpc, transfer
from headrace.client import Peers
from headrace.engine.rank import open_worker
from headrace.errors import DeadlineExceeded, Unavailable
from headrace.process import start as process
from headrace.process.start import Start
from headrace.protocol import CommitCommand, StopState, WorkerIdentity
from services.decode import server as decode_server
from services.decode.compose import open_decoder
from services.decode.core import Decoder
from services.prefill import server as prefill_server
from services.prefill.compose import open_prefiller
from services.prefill.core import Prefiller

BACKEND = "local"


class LocalDecode:
    """The decode rank as this process's prefill core calls it."""

    def __init__(self, core: Decoder):
        self._core = core

    async def renew(self, reservation_id: str, writer_epoch: str, timeout_s: float) -> float:
        """As DecodeClient."""
        return self._core.renew(reservation_id, writer_epoch)

    async def commit(self, command: CommitCommand, timeout_s: float) -> float:
        """As DecodeClient."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._core.commit(command)
        except TimeoutError as error:
            raise DeadlineExceeded("the commit was not answered in time") from error


class LocalWriter:
    """The prefill rank as this process's decode core calls it. `core` is set once there is one."""

    core: Prefiller | None = None

    async def stop(self, writer: WorkerIdentity, reservation_id: str, wait_s: float) -> StopState:
        """As StopWriter. A writer that is not this process cannot have written: its session is not known elsewhere."""
        if self.core is None:
            raise Unavailable("the prefill core is not open")
        return await self.core.stop(reservation_id, writer.epoch, wait_s)


async def main(start: Start) -> None:
    """Loads once, serves both services at one address, drains both."""
    config, host = start.config, start.config.mesh.host
    worker = await asyncio.to_thread(open_worker, config)
    prefill_worker = open_worker(config, engine=worker.engine, transformer=worker.transformer)
    worker.engine.start()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(worker.engine.stop)
        peers = Peers()
        stack.push_async_callback(peers.close)
        start = dataclasses.replace(start, port=start.port or rpc.unused_port(host))
        identity = WorkerIdentity(f"{host}:{start.port}", start.epoch)
        registry = await stack.enter_async_context(start.open_registry())
        target = transfer.open_target(BACKEND, worker.latent.rows, host)
        stack.callback(target.close)
        source = transfer.open_source(BACKEND, prefill_worker.latent.rows, host)
        stack.callback(source.close)
        writer = LocalWriter()
        decoder = await stack.enter_async_context(
            open_decoder(start, worker, identity, peers, target, transfer=BACKEND, stop_writer=writer.stop)
        )
        port = LocalDecode(decoder)
        writer.core = await stack.enter_async_context(
            open_prefiller(
                start,
                prefill_worker,
                identity,
                registry,
                peers,
                source,
                transfer=BACKEND,
                decode=lambda address: port,
            )
        )
        await _serve(start, stack, registry, decoder, writer.core, worker.model_name)


async def _serve(start, stack, registry, decoder: Decoder, prefiller: Prefiller, model_name: str) -> None:
    def register(grpc_server) -> None:
        decode_server.register(decoder)(grpc_server)
        prefill_server.register(prefiller)(grpc_server)

    async def drain(grace_s: float) -> None:
        await asyncio.gather(prefiller.drain(grace_s), decoder.drain(grace_s))

    grpc_server, _ = await start.listen(register, (decode_server.SERVICE, prefill_server.SERVICE))
    stack.push_async_callback(grpc_server.stop, None)
    await process.serve(start, grpc_server, registry, {"model": model_name}, drain, roles=("prefill", "decode"))
