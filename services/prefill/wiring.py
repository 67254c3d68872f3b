"""A prefill rank over the real engine; `__main__` and the aggregated process use it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator

from headrace.cache.blocks import BlockState
from headrace.cache.seats import blocks_for
from headrace.engine.prefill import PrefillBatcher
from headrace.engine.rank import Worker
from headrace.engine.request import PrefillJob, PrefillSequence
from headrace.observe import logs
from headrace.process.registry import Registry
from headrace.process.start import Start
from headrace.protocol.common import SamplingParams, WorkerIdentity, WorkerRole
from headrace.rpc.promises import MeshKeys
from headrace.transfer.base import TransferSource
from services.prefill.assembly import Opened, assemble
from services.prefill.writers import OpenLink

log = logs.get(__name__)

LONGEST_WARM_UP = 1024
"""Tokens of the longest prompt that a worker tries before it serves."""


@contextlib.asynccontextmanager
async def open_prefiller(
    start: Start,
    worker: Worker,
    identity: WorkerIdentity,
    registry: Registry,
    source: TransferSource,
    keys: MeshKeys,
    *,
    transfer: str,
    open_writer_link: OpenLink | None = None,
) -> AsyncIterator[Opened]:
    """The rank over `worker`, whose engine thread runs. `open_writer_link` reaches decode ranks; None: over gRPC."""
    await warm_up(worker)
    info = worker.info(WorkerRole.PREFILL, identity, transfer)
    batcher = PrefillBatcher(worker.runner, start.config.engine.max_batch_tokens)
    worker.engine.add_source(batcher)
    async with assemble(
        start, info, registry, source, keys, worker.blocks, batcher, worker.rows, open_writer_link=open_writer_link
    ) as opened:
        yield opened


async def warm_up(worker: Worker) -> None:
    """Short prompts and the checksum of their rows, in blocks of our own, so that the first requests do not pay for the first
    time: on a GPU kernels are compiled then, anew for each class of lengths."""
    began = time.perf_counter()
    longest = min(LONGEST_WARM_UP, worker.max_context_tokens, worker.blocks.num_blocks * worker.layout.block_size)
    lengths = [length for length in _lengths(worker) if length <= longest] or [1]
    blocks = worker.blocks.allocate(blocks_for(max(lengths), worker.layout.block_size), BlockState.RUNNING)
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
    sequence = PrefillSequence(0, [0] * length, list(blocks[: blocks_for(length, worker.layout.block_size)]))
    job = PrefillJob("warm-up", [sequence], SamplingParams(max_tokens=1), on_error=failures.append)
    batcher = PrefillBatcher(worker.runner, length)
    batcher.add(job)
    batcher.run_once()
    if failures:
        raise failures[0]
    worker.rows.checksum(0, blocks, 0, length)
