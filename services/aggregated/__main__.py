"""One process that prefills and decodes: `python -m services.aggregated`, the oracle for the disaggregated mesh.

The same cores, the same protocol, the same engine thread and model; two pools, and the `local` transfer between them.
Routers see a prefill rank and a decode rank at one address. The only package that imports both services.
"""

from __future__ import annotations

import asyncio

from headrace import transfer
from headrace.engine.rank import open_worker
from headrace.errors import DeadlineExceeded, Unavailable
from headrace.process.start import Start, run_service
from headrace.process.worker import WorkerProcess, open_worker_process
from headrace.protocol import CommitCommand, StopState, WorkerIdentity
from services.decode import server as decode_server
from services.decode.core import Decoder
from services.decode.wiring import open_decoder
from services.prefill import server as prefill_server
from services.prefill.core import Prefiller
from services.prefill.wiring import open_prefiller

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
    host = start.config.mesh.host
    async with open_worker_process(start) as process:
        worker, stack = process.worker, process.stack
        prefill_worker = open_worker(process.start.config, engine=worker.engine, transformer=worker.transformer)
        target = transfer.open_target(BACKEND, worker.latent.rows, host)
        stack.callback(target.close)
        source = transfer.open_source(BACKEND, prefill_worker.latent.rows, host)
        stack.callback(source.close)
        writer = LocalWriter()
        decoder = await stack.enter_async_context(
            open_decoder(
                process.start,
                worker,
                process.identity,
                process.peers,
                target,
                transfer=BACKEND,
                stop_writer=writer.stop,
            )
        )
        port = LocalDecode(decoder)
        writer.core = await stack.enter_async_context(
            open_prefiller(
                process.start,
                prefill_worker,
                process.identity,
                process.registry,
                process.peers,
                source,
                transfer=BACKEND,
                decode=lambda address: port,
            )
        )
        await _serve(process, decoder, writer.core)


async def _serve(process: WorkerProcess, decoder: Decoder, prefiller: Prefiller) -> None:
    def register(grpc_server) -> None:
        decode_server.register(decoder)(grpc_server)
        prefill_server.register(prefiller)(grpc_server)

    async def drain(grace_s: float) -> None:
        await asyncio.gather(prefiller.drain(grace_s), decoder.drain(grace_s))

    names = (decode_server.SERVICE, prefill_server.SERVICE)
    await process.serve(register, names, drain, roles=("prefill", "decode"))


if __name__ == "__main__":
    run_service("aggregated", main)
