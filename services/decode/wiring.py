"""A decode rank over the real engine; `__main__` and the aggregated process use it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence

from headrace.cache.blocks import BlockState
from headrace.engine.decode import DecodeBatcher
from headrace.engine.rank import Worker
from headrace.engine.request import DecodeSequence, SampledToken
from headrace.engine.sampler import Drawn
from headrace.engine.step import StepPlan, StepTokens
from headrace.engine.thread import EngineThread
from headrace.errors import InternalError
from headrace.observe import logs, telemetry
from headrace.process.faults import Faults
from headrace.process.start import Start
from headrace.protocol.common import SamplingParams, WorkerIdentity, WorkerRole
from headrace.rpc.promises import MeshKeys
from headrace.transfer.base import TransferTarget
from services.decode.assembly import Opened, assemble

log = logs.get(__name__)


class BatchEngine:
    """The core's DecodeEngine: a DecodeBatcher in the engine thread."""

    def __init__(self, worker: Worker, faults: Faults):
        self._thread: EngineThread = worker.engine
        self._batcher = _Batcher(worker.runner, worker.config.engine.max_batch_size, self._on_step, self._on_failure)
        self._batcher.faults = faults
        self._listeners: tuple[Callable, Callable] | None = None

    def connect(
        self,
        on_step: Callable[[Sequence[SampledToken]], None],
        on_failure: Callable[[Sequence[DecodeSequence], Exception], None],
    ) -> None:
        """As DecodeEngine; the batcher takes its turns in the thread from now on."""
        self._listeners = (on_step, on_failure)
        self._thread.add_source(self._batcher)

    def add(self, sequences: Sequence[DecodeSequence]) -> None:
        """As DecodeEngine."""
        self._batcher.add(sequences)

    async def remove(self, handle: int, sample_index: int | None = None) -> None:
        """As DecodeEngine: waits for the step in flight."""
        await self._thread.call(self._batcher.remove, handle, sample_index)

    @property
    def steps(self) -> int:
        """As DecodeEngine."""
        return self._batcher.steps

    @property
    def pending(self) -> int:
        """As DecodeEngine: while anyone steps, one step is on its way."""
        return min(1, self._batcher.running)

    def _on_step(self, tokens: StepTokens) -> None:
        assert self._listeners is not None
        self._listeners[0](tokens)

    def _on_failure(self, sequences: list[DecodeSequence], error: Exception) -> None:
        assert self._listeners is not None
        self._listeners[1](sequences, error)


class _Batcher(DecodeBatcher):
    """A batcher whose steps are measured and can be made to fail, hang or take longer (`decode.step` rules)."""

    faults = Faults()

    def launch(self, plan: StepPlan, before: Drawn | None) -> Drawn:
        fault = self.faults.fire("decode.step")
        if fault is not None and fault.kind == "fail":
            raise InternalError("fault injected at decode.step")
        if fault is not None:
            time.sleep(fault.seconds)
        return super().launch(plan, before)

    def completed(self, plan: StepPlan, duration_s: float) -> None:
        telemetry.histogram(*telemetry.STEP_DURATION).record(duration_s)
        telemetry.gauge("headrace.decode.batch_size").set(len(plan.rows))


@contextlib.asynccontextmanager
async def open_decoder(
    start: Start, worker: Worker, identity: WorkerIdentity, target: TransferTarget, keys: MeshKeys, *, transfer: str
) -> AsyncIterator[Opened]:
    """The rank over `worker`, whose engine thread runs."""
    await warm_up(worker)
    engine, rows = BatchEngine(worker, start.faults()), worker.rows
    info = worker.info(WorkerRole.DECODE, identity, transfer)
    async with assemble(
        start, info, keys, worker.blocks, engine, target, rows.layer_checksums, rows.copy_rows
    ) as opened:
        yield opened


async def warm_up(worker: Worker) -> None:
    """One step and one checksum over a block of our own, so that the first request does not pay for the first time."""
    began = time.perf_counter()
    blocks = worker.blocks.allocate(1, BlockState.RUNNING)
    try:
        await worker.engine.call(_warm_step, worker, blocks)
    finally:
        worker.blocks.free(blocks)
    log.info("engine is warm", seconds=round(time.perf_counter() - began, 3))


def _warm_step(worker: Worker, blocks: tuple[int, ...]) -> None:
    worker.runner.warm()
    batcher = DecodeBatcher(worker.runner, 1, lambda tokens: None)
    batcher.add([DecodeSequence(0, 0, SamplingParams(max_tokens=2), (0,), [0], list(blocks))])
    while batcher.has_work():
        batcher.run_once()
    worker.rows.layer_checksums(blocks, 0, 1)
