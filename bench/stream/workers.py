"""Real prefill and decode cores, servers and registry around mock engines: `python -m bench.stream.workers prefill|decode`.

The only file of this bench that knows how cores are put together, beside headrace/process/worker.py and services/*/__main__.py
which it follows line by line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass

from bench.stream.engines import MockDecode, MockPrefill, NoRows
from bench.stream.mesh import engine_thread_file
from headrace import config as configuration
from headrace.cache.blocks import BlockPool
from headrace.launch.sockets import unused_port
from headrace.process import start as process
from headrace.process.registry import Registry
from headrace.process.start import Start
from headrace.protocol.common import (
    KvLayout,
    KvRegion,
    NumberFormat,
    RopeOrder,
    TransferBackend,
    WorkerIdentity,
    WorkerInfo,
    WorkerRole,
)
from headrace.rpc.promises import MeshKeys
from services.decode import assembly as decode_assembly
from services.decode import server as decode_server
from services.prefill import assembly as prefill_assembly
from services.prefill import server as prefill_server

MAX_CONTEXT_TOKENS = 4096
VOCABULARY_SIZE = 8192
LAYOUT = KvLayout(
    regions=(KvRegion("latent", layer_count=8, row_width=160, format=NumberFormat.FP32),),
    block_size=16,
    rope_order=RopeOrder.INTERLEAVED,
    model_fingerprint="mock engines",
)
"""Layers and rows of models/tiny."""
ROW_BYTES = 4 * 160


@dataclass(frozen=True)
class MockWorker:
    """As headrace.process.worker.WorkerProcess, without a model."""

    start: Start
    info: WorkerInfo
    registry: Registry
    keys: MeshKeys
    rows: NoRows
    pool: BlockPool
    stack: contextlib.AsyncExitStack

    async def serve(self, register, service_name: str, drain, engine: MockPrefill | MockDecode) -> None:
        """Announced until a signal."""
        engine_thread_file(self.start.run_directory, self.start.service).write_text(str(engine.thread_id))
        server, _ = await self.start.listen(register, (service_name,))
        self.stack.push_async_callback(server.stop, None)
        details = {"model": self.info.model, "role": self.start.service}
        await process.serve(self.start, server, self.registry, details, drain, roles=(self.start.service,))


@contextlib.asynccontextmanager
async def _open(start: Start, role: WorkerRole) -> AsyncIterator[MockWorker]:
    config = start.config
    start = dataclasses.replace(start, port=start.port or unused_port(config.mesh.host))
    engine, blocks = config.engine, config.engine.num_blocks
    info = WorkerInfo(
        identity=WorkerIdentity(f"{config.mesh.host}:{start.port}", start.epoch),
        role=role,
        model=configuration.model_directory(config).name,
        layout=LAYOUT,
        block_count=blocks,
        max_context_tokens=MAX_CONTEXT_TOKENS,
        max_batch_tokens=engine.max_batch_tokens if role is WorkerRole.PREFILL else 0,
        max_batch_size=engine.max_batch_size if role is WorkerRole.DECODE else 0,
        transfer=TransferBackend.LOCAL,
        vocabulary_size=VOCABULARY_SIZE,
    )
    rows = NoRows(LAYOUT.layer_count, blocks, LAYOUT.block_size, ROW_BYTES)
    keys, pool = MeshKeys.load(config.mesh.key_file), BlockPool(blocks, LAYOUT.block_size)
    async with contextlib.AsyncExitStack() as stack:
        registry = await stack.enter_async_context(start.open_registry())
        yield MockWorker(start, info, registry, keys, rows, pool, stack)


async def prefill(start: Start) -> None:
    """As services.prefill.__main__."""
    async with _open(start, WorkerRole.PREFILL) as worker:
        engine = MockPrefill(LAYOUT.layer_count, MAX_CONTEXT_TOKENS)
        engine.start()
        worker.stack.callback(engine.stop)
        assembled = prefill_assembly.assemble(
            worker.start, worker.info, worker.registry, worker.rows, worker.keys, worker.pool, engine, worker.rows
        )
        opened = await worker.stack.enter_async_context(assembled)
        await worker.serve(prefill_server.register(opened), prefill_server.SERVICE, opened.drain, engine)


async def decode(start: Start) -> None:
    """As services.decode.__main__."""
    async with _open(start, WorkerRole.DECODE) as worker:
        engine, rows = MockDecode(MAX_CONTEXT_TOKENS), worker.rows
        worker.stack.callback(engine.stop)
        assembled = decode_assembly.assemble(
            worker.start, worker.info, worker.keys, worker.pool, engine, rows, rows.layer_checksums, rows.copy_rows
        )
        opened = await worker.stack.enter_async_context(assembled)
        register = decode_server.register(opened.core, opened.links)
        await worker.serve(register, decode_server.SERVICE, opened.drain, engine)


if __name__ == "__main__":
    process.run_service(sys.argv[1], {"prefill": prefill, "decode": decode}[sys.argv[1]], sys.argv[2:])
