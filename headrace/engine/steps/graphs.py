"""Decode steps over fixed buffers, captured into one CUDA graph for each batch size.

A step of n samples runs in the smallest size that holds it; the places after n are padding: slot -1, a context of one
row. What a plan says of a step is one upload into the size's buffers; block tables stand on the device already. Inside
the graph are the choice of the tokens to feed (from the step before, where the host does not know them), the model and
the sampler. Edits of logits and log-probabilities follow the graph where somebody asked for them.

Everything runs on the current stream of the thread that calls; nothing here waits for the device but `warm`, a capture,
and a model that plans on the host (its plan's upload must have ended before the next plan overwrites it).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from headrace.cache.latent import LatentPool
from headrace.engine.device_sampler import Columns, DeviceSampler, columns
from headrace.engine.sampler import Drawn, Uncounted
from headrace.engine.sampling_table import SamplingTable
from headrace.engine.step import StepPlan
from headrace.errors import InternalError
from headrace.model.base import DecodeInputs, GraphModel
from headrace.observe import logs

log = logs.get(__name__)

LADDER = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
WARM_RUNS = 2  # before a capture: kernels compile, libraries take their work space

_LONGS = ("token_ids", "sources", "positions", "slots", "rows", "keys")
_INTS = ("context_lens", "top_k")
_FLOATS = ("temperature", "top_p", "min_p")
_PADDING = {"sources": -1, "slots": -1, "context_lens": 1, "top_p": 1.0}


def sizes_up_to(max_batch_size: int, wanted: Sequence[int] = ()) -> tuple[int, ...]:
    """The batch sizes that get buffers and graphs: the ladder's, or those wanted, and `max_batch_size` itself."""
    return tuple(sorted({size for size in wanted or LADDER if size < max_batch_size} | {max_batch_size}))


class StepBuffers:
    """The inputs of steps of one size, on the device at fixed addresses, filled by one upload."""

    def __init__(self, size: int, max_blocks: int, device: torch.device):
        self.size = size
        self._pinned = device.type == "cuda"
        self._bytes = torch.zeros(size * (8 * len(_LONGS) + 4 * len(_INTS + _FLOATS)), dtype=torch.uint8, device=device)
        self.there = _views(self._bytes, size)
        self.block_tables = torch.zeros(size, max_blocks, dtype=torch.int32, device=device)
        self.fed = torch.zeros(size, dtype=torch.int64, device=device)  # the tokens that the model got

    def fill(self, values: dict[str, np.ndarray]) -> np.ndarray:
        """Uploads a step's columns, padded. -> the padded context lengths [size] int32 on the host."""
        host = torch.empty(len(self._bytes), dtype=torch.uint8, pin_memory=self._pinned)
        here = {name: view.numpy() for name, view in _views(host, self.size).items()}
        for name, column in here.items():
            given = values.get(name)
            count = 0 if given is None else len(given)
            if given is not None:
                column[:count] = given
            column[count:] = _PADDING.get(name, 0)
        self._bytes.copy_(host, non_blocking=True)
        return here["context_lens"]

    @property
    def columns(self) -> Columns:
        """For the sampler."""
        return Columns(*(self.there[name] for name in Columns._fields))


def _views(packed: torch.Tensor, size: int) -> dict[str, torch.Tensor]:
    """Columns of [size] each in one stretch of bytes."""
    views, start = {}, 0
    for names, dtype in ((_LONGS, torch.int64), (_INTS, torch.int32), (_FLOATS, torch.float32)):
        for name in names:
            end = start + size * dtype.itemsize
            views[name] = packed[start:end].view(dtype)
            start = end
    return views


class DecodeGraphs:
    """Runs decode steps for a Runner (`runner.Steps`); a penalised sample's newest token is counted on the device.

    sizes        ascending batch sizes; the last is the largest step
    max_blocks   width of the block tables, one for all steps
    capture      False: the same buffers, but the model runs kernel by kernel
    """

    counts_on_host = False

    def __init__(
        self,
        transformer: GraphModel,
        pool: LatentPool,
        sampler: DeviceSampler,
        *,
        sizes: Sequence[int],
        max_blocks: int,
        capture: bool,
    ):
        self._transformer, self._pool, self._sampler = transformer, pool, sampler
        self._sizes, self._max_blocks = tuple(sizes), max_blocks
        self._capture = capture and transformer.device.type == "cuda"
        self._device = transformer.device
        self._buffers: dict[int, StepBuffers] = {}
        self._runs: dict[int, Callable[[], torch.Tensor]] = {}
        self._drawn: torch.Tensor | None = None  # [largest size] int64, the tokens of the step launched last, by place
        self._memory = None  # shared by all graphs: only one of them runs at a time
        self._latest: Drawn | None = None
        self._host_plan_sent: torch.cuda.Event | None = None

    @property
    def captured(self) -> tuple[int, ...]:
        """Sizes that have a graph by now."""
        return tuple(sorted(self._runs)) if self._capture else ()

    def warm(self) -> None:
        """Captures every size, the largest first, so that the smaller ones live in its memory."""
        began = time.perf_counter()
        with torch.inference_mode():
            for size in reversed(self._sizes):
                self._run_of(size)
        if self._capture:
            log.info("decode graphs", sizes=self._sizes, seconds=round(time.perf_counter() - began, 3))

    def launch(self, plan: StepPlan, table: SamplingTable, before: Drawn | None) -> Drawn:
        """As Runner.launch."""
        if before is not None and before is not self._latest:
            raise InternalError("a step feeds on tokens that another step has replaced")
        count = len(plan.rows)
        run, buffers = self._run_of(self._size_for(count)), self._buffers[self._size_for(count)]
        self._fill(buffers, plan, table)
        logits = run()[:count]
        token_ids = self._tokens(count)
        uncounted = Uncounted(buffers.fed[:count], plan.sources >= 0)
        edited = self._sampler.edited(logits, table, plan.rows, plan.positions, uncounted)
        if edited is not None:
            token_ids.copy_(self._sampler.choose(edited, Columns(*(one[:count] for one in buffers.columns))))
        self._latest = self._sampler.reported(logits, token_ids, table, plan.rows)
        return self._latest

    def _size_for(self, count: int) -> int:
        for size in self._sizes:
            if count <= size:
                return size
        raise InternalError(f"a step of {count} samples; engine.max_batch_size is {self._sizes[-1]}")

    def _tokens(self, count: int) -> torch.Tensor:
        if self._drawn is None:
            self._drawn = torch.zeros(self._sizes[-1], dtype=torch.int64, device=self._device)
        return self._drawn[:count]

    def _fill(self, buffers: StepBuffers, plan: StepPlan, table: SamplingTable) -> None:
        values = {
            "token_ids": plan.token_ids,
            "sources": plan.sources,
            "positions": plan.context_lens - 1,
            "slots": plan.slots,
            "rows": plan.rows,
            "context_lens": plan.context_lens,
            **columns(table, plan.rows, plan.positions)._asdict(),
        }
        context_lens = buffers.fill(values)
        tables = plan.tables.on_device(self._device, self._max_blocks)
        torch.index_select(tables, 0, buffers.there["rows"], out=buffers.block_tables)
        self._plan_on_host(buffers, context_lens)

    def _plan_on_host(self, buffers: StepBuffers, context_lens: np.ndarray) -> None:
        if self._transformer.graph_safe:
            return
        if self._host_plan_sent is not None:
            self._host_plan_sent.synchronize()
        self._transformer.plan_decode(self._inputs(buffers), self._pool, context_lens)
        if self._device.type == "cuda":
            self._host_plan_sent = torch.cuda.Event()
            self._host_plan_sent.record()

    def _inputs(self, buffers: StepBuffers) -> DecodeInputs:
        there = buffers.there
        return DecodeInputs(
            token_ids=buffers.fed,
            positions=there["positions"],
            slots=there["slots"],
            block_tables=buffers.block_tables,
            context_lens=there["context_lens"],
        )

    def _body(self, buffers: StepBuffers) -> torch.Tensor:
        """One step from filled buffers: [size, vocab] logits, and the tokens in `_drawn`."""
        drawn, sources = self._tokens(self._sizes[-1]), buffers.there["sources"]
        known = buffers.there["token_ids"]
        torch.where(sources >= 0, drawn.index_select(0, sources.clamp(min=0)), known, out=buffers.fed)
        logits = self._transformer.decode(self._inputs(buffers), self._pool)
        drawn[: buffers.size].copy_(self._sampler.choose(logits, buffers.columns))
        return logits

    # --- capture ---

    def _run_of(self, size: int) -> Callable[[], torch.Tensor]:
        run = self._runs.get(size)
        if run is None:
            buffers = self._buffers[size] = StepBuffers(size, self._max_blocks, self._device)
            run = self._runs[size] = self._captured(buffers) if self._capture else lambda: self._body(buffers)
        return run

    def _captured(self, buffers: StepBuffers) -> Callable[[], torch.Tensor]:
        with self._kept_tokens():
            self._plan_on_host(buffers, buffers.fill({}))
            aside = torch.cuda.Stream(self._device)
            aside.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(aside):
                for _ in range(WARM_RUNS):
                    self._body(buffers)
            torch.cuda.current_stream(self._device).wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            if self._memory is None:
                self._memory = torch.cuda.graph_pool_handle()
            # thread_local: other threads push rows and take checksums meanwhile.
            with torch.cuda.graph(graph, pool=self._memory, stream=aside, capture_error_mode="thread_local"):
                logits = self._body(buffers)

        def run() -> torch.Tensor:
            graph.replay()
            return logits

        return run

    @contextlib.contextmanager
    def _kept_tokens(self):
        """A capture in the midst of serving runs padding steps: the tokens of the step in flight survive it."""
        drawn = self._tokens(self._sizes[-1])
        kept = drawn.clone()
        yield
        drawn.copy_(kept)
