"""One decode rank: `python -m services.decode`."""

from __future__ import annotations

from headrace import config as configuration
from headrace import transfer
from headrace.process.start import Start, run_service
from headrace.process.worker import open_worker_process
from services.decode import server
from services.decode.wiring import open_decoder


async def main(start: Start) -> None:
    """Loads, warms up, serves, drains."""
    configuration.check_separate(start.config)
    backend = start.config.transfer.backend
    async with open_worker_process(start) as process:
        reached_at = process.identity.address if backend == "grpc" else start.config.mesh.host
        target = transfer.open_target(backend, process.worker.latent.rows, reached_at)
        process.stack.callback(target.close)
        opened = await process.stack.enter_async_context(
            open_decoder(process.start, process.worker, process.identity, target, process.keys, transfer=backend)
        )
        write_rows = getattr(target, "write", None) if backend == "grpc" else None
        register = server.register(opened.core, opened.links, write_rows)
        await process.serve(register, (server.SERVICE,), opened.drain, roles=("decode",))


if __name__ == "__main__":
    run_service("decode", main)
