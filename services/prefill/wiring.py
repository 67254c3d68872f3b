"""Puts a prefill core together from real parts; `__main__` and the aggregated process use it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from headrace.cache.blocks import BlockState
from headrace.client import KvStoreClient, Peers
from headrace.engine.prefill import PrefillBatcher
from headrace.engine.rank import Worker
from headrace.engine.request import PrefillJob, PrefillSequence
from headrace.observe import logs
from headrace.process.faults import Faults
from headrace.process.registry import Registry
from headrace.process.start import Start
from headrace.protocol import SamplingParams, WorkerIdentity
from headrace.transfer.base import TransferSource
from services.prefill.core import DecodePort, Prefiller
from services.prefill.publish import Publisher
from services.prefill.pusher import Pusher

log = logs.get(__name__)

LONGEST_WARM_UP = 1024
"""Tokens of the longest prompt that a worker tries before it serves."""


@contextlib.asynccontextmanager
async def open_prefiller(
    start: Start,
    worker: Worker,
    identity: WorkerIdentity,
    registry: Registry,
    peers: Peers,
    source: TransferSource,
    *,
    transfer: str,
    decode: Callable[[str], DecodePort] | None = None,
) -> AsyncIterator[Prefiller]:
    """The core over `worker`, whose engine thread runs. `decode(address)` reaches a decode rank; None: over gRPC."""
    config = start.config
    await warm_up(worker)
    info = worker.info("prefill", identity, transfer)
    batcher = PrefillBatcher(worker.runner, config.engine.max_batch_tokens)
    worker.engine.add_source(batcher)
    faults = start.faults()
    pusher = _pusher(worker, source, config.prefill.expiry_margin_s, faults)
    pusher.start()
    publisher = Publisher(identity, lambda: _catalogue(registry, peers), start.clock, config.kvstore.publish_ttl_s)
    worker.blocks.on_evict = publisher.withdraw
    opened = Prefiller.open(
        config.prefill,
        info,
        pool=worker.blocks,
        batcher=batcher,
        pusher=pusher,
        decode=decode or peers.decode,
        publisher=publisher,
        clock=start.clock,
        faults=faults,
    )
    try:
        async with opened as core, _running(publisher.run()):
            yield core
    finally:
        await asyncio.to_thread(pusher.stop, 2 * config.transfer.timeout_s)


def _pusher(worker: Worker, source: TransferSource, margin_s: float, faults: Faults) -> Pusher:
    layout = worker.layout
    return Pusher(source, worker.rows, layout.block_size, layout.layer_count, margin_s, faults)


async def warm_up(worker: Worker) -> None:
    """Short prompts and the checksum of their rows, in blocks of our own, so that the first requests do not pay for the first
    time: on a GPU kernels are compiled then, anew for each class of lengths."""
    began = time.perf_counter()
    longest = min(LONGEST_WARM_UP, worker.max_context_tokens, worker.blocks.num_blocks * worker.layout.block_size)
    lengths = [length for length in _lengths(worker) if length <= longest] or [1]
    blocks = worker.blocks.allocate(-(-max(lengths) // worker.layout.block_size), BlockState.RUNNING)
    try:
        for length in lengths:
            await worker.engine.call(_warm_prompt, worker, blocks, length)
    finally:
        worker.blocks.free(blocks)
    log.info("prefill is warm", seconds=round(time.perf_counter() - began, 3))


def _lengths(worker: Worker) -> list[int]:
    """A prompt of two blocks; on a GPU also powers of two, and odd lengths just below them: Triton tells those apart."""
    if worker.latent.rows.device.type == "cpu":
        return [worker.layout.block_size + 1]
    powers = [2**exponent for exponent in range(4, LONGEST_WARM_UP.bit_length())]
    return [1, *(length for power in powers for length in (power - 7, power))]


def _warm_prompt(worker: Worker, blocks: tuple[int, ...], length: int) -> None:
    failures: list[Exception] = []
    sequence = PrefillSequence(0, [0] * length, list(blocks[: -(-length // worker.layout.block_size)]))
    job = PrefillJob("warm-up", [sequence], SamplingParams(max_tokens=1), on_error=failures.append)
    batcher = PrefillBatcher(worker.runner, length)
    batcher.add(job)
    batcher.run_once()
    if failures:
        raise failures[0]
    worker.rows.checksum(0, blocks, 0, length)


def _catalogue(registry: Registry, peers: Peers) -> KvStoreClient | None:
    members = registry.members("kvstore")
    return peers.kvstore(members[0].identity.address) if members else None


@contextlib.asynccontextmanager
async def _running(work) -> AsyncIterator[None]:
    """A background coroutine that lives as long as the block."""
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(work)
        try:
            yield
        finally:
            task.cancel()
