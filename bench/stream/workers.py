"""Real prefill and decode cores, servers and registry around mock engines: `python -m bench.stream.workers prefill|decode`.

The only file of this bench that knows how cores are put together, beside services/*/wiring.py and services/*/__main__.py
which it follows line by line.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys

from bench.stream.engines import MockDecode, MockPrefill, NoRows
from bench.stream.mesh import engine_thread_file
from headrace import config as configuration
from headrace.cache.blocks import BlockPool
from headrace.client import KvStoreClient, Peers
from headrace.launch.sockets import unused_port
from headrace.process import start as process
from headrace.process.registry import Registry
from headrace.process.start import Start
from headrace.protocol import KvLayout, StopState, WorkerIdentity, WorkerInfo
from services.decode import server as decode_server
from services.decode.core import Decoder
from services.decode.interfaces import Collaborators
from services.prefill import server as prefill_server
from services.prefill.core import Prefiller
from services.prefill.publish import Publisher
from services.prefill.pusher import Pusher

MAX_CONTEXT_TOKENS = 4096
LAYOUT = KvLayout(
    layer_count=8, row_dim=160, dtype="fp32", block_size=16, rope_order="mock", model_fingerprint="mock engines"
)
"""Layers and rows of models/tiny."""


def _info(start: Start, identity: WorkerIdentity, role: str) -> WorkerInfo:
    engine = start.config.engine
    return WorkerInfo(
        identity=identity,
        role=role,
        model=configuration.model_directory(start.config).name,
        layout=LAYOUT,
        block_count=engine.num_blocks,
        max_context_tokens=MAX_CONTEXT_TOKENS,
        max_batch_tokens=engine.max_batch_tokens if role == "prefill" else 0,
        max_batch_size=engine.max_batch_size if role == "decode" else 0,
        transfer=start.config.transfer.backend,
    )


def _rows(start: Start) -> NoRows:
    return NoRows(LAYOUT.layer_count, start.config.engine.num_blocks, LAYOUT.block_size, 4 * LAYOUT.row_dim)


def _placed(start: Start) -> tuple[Start, WorkerIdentity]:
    host = start.config.mesh.host
    start = dataclasses.replace(start, port=start.port or unused_port(host))
    return start, WorkerIdentity(f"{host}:{start.port}", start.epoch)


async def _serve(stack: contextlib.AsyncExitStack, start: Start, registry: Registry, register, service, core, engine):
    engine_thread_file(start.run_directory, start.service).write_text(str(engine.thread_id))
    server, _ = await start.listen(register, (service,))
    stack.push_async_callback(server.stop, None)
    model = configuration.model_directory(start.config).name
    await process.serve(start, server, registry, {"role": start.service, "model": model}, core.drain)


async def prefill(start: Start) -> None:
    """As services.prefill.__main__."""
    start, identity = _placed(start)
    config, faults = start.config, start.faults()
    async with contextlib.AsyncExitStack() as stack:
        peers = Peers()
        stack.push_async_callback(peers.close)
        registry = await stack.enter_async_context(start.open_registry())
        rows = _rows(start)
        batcher = MockPrefill(LAYOUT.layer_count, MAX_CONTEXT_TOKENS)
        batcher.start()
        stack.callback(batcher.stop)
        margin_s = config.prefill.expiry_margin_s
        pusher = Pusher(rows, rows, LAYOUT.block_size, LAYOUT.layer_count, margin_s, faults)
        pusher.start()
        stack.callback(pusher.stop, 1.0)

        def catalogue() -> KvStoreClient | None:
            members = registry.members("kvstore")
            return peers.kvstore(members[0].identity.address) if members else None

        publisher = Publisher(identity, catalogue, start.clock, config.kvstore.publish_ttl_s)
        opened = Prefiller.open(
            config.prefill,
            _info(start, identity, "prefill"),
            pool=BlockPool(config.engine.num_blocks, LAYOUT.block_size, publisher.withdraw),
            batcher=batcher,
            pusher=pusher,
            decode=peers.decode,
            publisher=publisher,
            clock=start.clock,
            faults=faults,
        )
        core = await stack.enter_async_context(opened)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        stack.callback(tasks.create_task(publisher.run()).cancel)
        await _serve(stack, start, registry, prefill_server.register(core), prefill_server.SERVICE, core, batcher)


async def decode(start: Start) -> None:
    """As services.decode.__main__."""
    start, identity = _placed(start)
    config = start.config
    async with contextlib.AsyncExitStack() as stack:
        peers = Peers()
        stack.push_async_callback(peers.close)
        registry = await stack.enter_async_context(start.open_registry())
        rows = _rows(start)
        engine = MockDecode(MAX_CONTEXT_TOKENS)
        stack.callback(engine.stop)

        async def stop_writer(writer: WorkerIdentity, reservation_id: str, wait_s: float) -> StopState:
            return await peers.prefill(writer.address).stop(reservation_id, writer.epoch, wait_s, wait_s + 1.0)

        collaborators = Collaborators(
            clock=start.clock,
            pool=BlockPool(config.engine.num_blocks, LAYOUT.block_size),
            engine=engine,
            target=rows,
            checksums=rows.layer_checksums,
            copy_rows=rows.copy_rows,
            stop_writer=stop_writer,
            faults=start.faults(),
        )
        opened = Decoder.open(
            config.decode,
            _info(start, identity, "decode"),
            collaborators,
            stop_wait_s=config.transfer.timeout_s + 1.0,
            output_chunk=config.engine.output_chunk,
        )
        core = await stack.enter_async_context(opened)
        await _serve(stack, start, registry, decode_server.register(core), decode_server.SERVICE, core, engine)


if __name__ == "__main__":
    process.run_service(sys.argv[1], {"prefill": prefill, "decode": decode}[sys.argv[1]], sys.argv[2:])
