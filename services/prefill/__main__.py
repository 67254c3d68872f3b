"""One prefill rank: `python -m services.prefill`."""

from __future__ import annotations

from headrace import config as configuration
from headrace import transfer
from headrace.process.start import Start, run_service
from headrace.process.worker import open_worker_process
from headrace.rpc.clients import RowSender
from services.prefill import server
from services.prefill.wiring import open_prefiller


async def main(start: Start) -> None:
    """Loads, serves, drains."""
    configuration.check_separate(start.config)
    settings = start.config.transfer
    async with open_worker_process(start) as process:
        send_rows = process.stack.enter_context(RowSender(settings.timeout_s))
        source = transfer.open_source(
            settings.backend,
            process.worker.latent.rows,
            start.config.mesh.host,
            timeout_s=settings.timeout_s,
            send=send_rows,
        )
        process.stack.callback(source.close)
        opened = await process.stack.enter_async_context(
            open_prefiller(
                process.start,
                process.worker,
                process.identity,
                process.registry,
                source,
                process.keys,
                transfer=settings.backend,
            )
        )
        await process.serve(server.register(opened), (server.SERVICE,), opened.drain, roles=("prefill",))


if __name__ == "__main__":
    run_service("prefill", main)
