"""What stands around a prefill core in its tests: a scripted batcher, a recording source, a decode rank that answers as told."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import replace

from headrace.cache.blocks import BlockPool
from headrace.clock import FakeClock
from headrace.config import PrefillConfig
from headrace.errors import HeadraceError
from headrace.process.faults import Faults
from headrace.protocol.common import (
    FinishReason,
    KvLayout,
    KvRegion,
    NumberFormat,
    RopeOrder,
    SamplingParams,
    TransferBackend,
    WorkerIdentity,
    WorkerInfo,
    WorkerRole,
)
from headrace.protocol.decode import (
    BeginCommand,
    CommitAccepted,
    CommitCommand,
    Promise,
    RenewCommand,
    Renewed,
    Reservation,
    StopState,
    TargetDescriptor,
    TargetSequence,
)
from headrace.protocol.prefill import Committed, FirstToken, PrefillCommand
from headrace.rpc.promises import MeshKeys, sign
from services.prefill.core import Prefiller
from services.prefill.pusher import Pusher

LAYERS, BLOCK, BLOCKS = 2, 4, 32
LAYOUT = KvLayout((KvRegion("latent", LAYERS, 8, NumberFormat.FP32),), BLOCK, RopeOrder.INTERLEAVED, "model")
ME, DECODE = WorkerIdentity("p:1", "epoch-p"), WorkerIdentity("d:1", "epoch-d")
INFO = WorkerInfo(
    identity=ME,
    role=WorkerRole.PREFILL,
    model="tiny",
    layout=LAYOUT,
    block_count=BLOCKS,
    max_context_tokens=100,
    max_batch_tokens=64,
    transfer=TransferBackend.LOCAL,
    vocabulary_size=200,
)
TARGET = TargetDescriptor(
    backend=TransferBackend.LOCAL,
    session="s",
    base_address=0,
    layer_stride_bytes=64 * 128,
    block_stride_bytes=128,
    row_bytes=32,
    block_size=BLOCK,
    num_layers=LAYERS,
    num_blocks=64,
)
KEYS = MeshKeys((b"the key of this mesh" * 2,))


def nothing() -> None:
    """The rows of a layer that stand."""


class Batcher:
    """Runs a job when told to."""

    def __init__(self):
        self.jobs, self.queued_tokens, self.batches, self.cancelled = [], 0, 0, []
        self.completed_layers, self.pending_batches = 0, 0

    def add(self, job):
        self.jobs.append(job)

    def cancel(self, key):
        self.cancelled.append(key)
        return any(job.key == key for job in self.jobs)

    def run(self, finish=FinishReason.NONE, layers=LAYERS):
        job = self.jobs.pop(0)
        self.batches += 1
        job.on_start()
        for layer in range(layers):
            job.on_layer(layer, nothing)
            self.completed_layers += 1
        job.on_tokens(
            [
                FirstToken(sample, count, 70 + sample, finish_reason=finish)
                for sample, count in zip(job.sample_indices, job.delivered_counts, strict=True)
            ]
        )
        return job


class Source:
    """Records pushes; `gate` holds them back; `error` is raised instead."""

    def __init__(self):
        self.pushes, self.gate, self.error = [], threading.Event(), None
        self.entered = threading.Event()
        self.gate.set()

    def push(self, target, layer, runs):
        self.entered.set()
        assert self.gate.wait(5)
        if self.error:
            raise self.error
        self.pushes.append((layer, tuple(runs)))
        return sum(run.num_rows for run in runs) * target.row_bytes


class Rows:
    """Checksums that say what was asked."""

    def __init__(self):
        self.flips = []

    def begin_checksum(self, layer, blocks, first_row, num_rows):
        return lambda: layer * 1000 + first_row * 100 + num_rows

    def flip_byte(self, layer, block, offset):
        self.flips.append((layer, block, offset))


class Decode:
    """The writer links, and one decode rank behind them: remembers what it was asked, answers at once.

    `errors` are raised by the next answers to a command of that kind; what is in `silent` is not answered.
    """

    def __init__(self):
        self.begins, self.renewals, self.commits = [], 0, []
        self.errors: dict[type, list[HeadraceError]] = {}
        self.silent: set[type] = set()
        self.unanswered: list[tuple[object, asyncio.Future]] = []
        self.legs: set = set()
        self.expires_in_s = 10.0

    def enter(self, leg, decode):
        assert decode == DECODE
        self.legs.add(leg)
        return self

    def leave(self, leg):
        self.legs.discard(leg)

    def ask(self, body, within_s):
        answer = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._remember(body)
        errors = self.errors.get(type(body))
        if type(body) in self.silent:
            self.unanswered.append((body, answer))
        elif errors:
            answer.set_exception(errors.pop(0))
        else:
            answer.set_result(CommitAccepted(0.001) if isinstance(body, CommitCommand) else Renewed(self.expires_in_s))
        return answer

    def _remember(self, body):
        if isinstance(body, BeginCommand):
            self.begins.append(body.reservation_id)
        elif isinstance(body, RenewCommand):
            self.renewals += 1
        else:
            self.commits.append(body)


class Router:
    """Owns attempts, as a router's link does."""


class Bench:
    """A core and its fakes."""

    def __init__(self, keys: MeshKeys = KEYS, **config):
        self.batcher, self.source, self.decode, self.rows = Batcher(), Source(), Decode(), Rows()
        self.pool, self.clock, self.keys = BlockPool(BLOCKS, BLOCK), FakeClock(), keys
        self.config, self.faults, self.router = PrefillConfig(**config), Faults(), Router()

    @contextlib.asynccontextmanager
    async def open(self):
        self.pusher = Pusher(self.source, self.rows, BLOCK, LAYERS, self.config.expiry_margin_s, self.faults)
        self.pusher.start()
        collaborators = dict(
            pool=self.pool,
            batcher=self.batcher,
            pusher=self.pusher,
            writers=self.decode,
            keys=self.keys,
            clock=self.clock,
            faults=self.faults,
        )
        async with Prefiller.open(self.config, INFO, **collaborators) as core:
            yield core
        self.pusher.stop(5)

    async def job(self):
        """The next job that comes to the batcher."""
        async with asyncio.timeout(5):
            while not self.batcher.jobs:
                await asyncio.sleep(0.005)
        return self.batcher.jobs.pop(0)

    async def run_job(self, **how):
        """Runs the next job that comes to the batcher."""
        job = await self.job()
        self.batcher.jobs.insert(0, job)
        return self.batcher.run(**how)

    async def settled(self, core):
        """Waits until no attempt is left; every block has come back then."""
        for _ in range(400):
            if not core.ledger().running_requests and not core.ledger().queued_requests:
                break
            await asyncio.sleep(0.005)
        ledger = core.ledger()
        assert ledger.blocks.held == 0, ledger
        assert ledger.queued_tokens == 0 and ledger.running_requests == 0
        assert not self.decode.legs, "no leg keeps a link to decode busy"
        return ledger


class Asked:
    """One Prefill and what was answered. Raises at once what the core refuses at its door."""

    def __init__(self, bench: Bench, core: Prefiller, command: PrefillCommand):
        self.events: list = []
        self._ended = asyncio.Event()
        core.prefill(command, bench.router, self._answer)

    def _answer(self, event) -> None:
        assert not self._ended.is_set(), "nothing follows the last answer"
        self.events.append(event)
        if isinstance(event, Committed | HeadraceError):
            self._ended.set()

    @property
    def is_over(self) -> bool:
        """The last answer has come."""
        return self._ended.is_set()

    async def all(self) -> list:
        """Every answer."""
        async with asyncio.timeout(5):
            await self._ended.wait()
        return self.events


async def attempt(bench: Bench, core: Prefiller, order: PrefillCommand, **how):
    """Answers to one order whose job runs, and the job."""
    asked = Asked(bench, core, order)
    job = await bench.run_job(**how)
    return await asked.all(), job


def promise(order: PrefillCommand, **changes) -> Promise:
    """What a decode rank would promise for this order."""
    longest = len(order.prompt_token_ids) + len(order.delivered.get(order.sample_indices[0], ()))
    sequences = (TargetSequence(order.sample_indices[0], 0, longest, tuple(range(30, 30 - (-longest // BLOCK)))),)
    values = dict(
        reservation_id=f"r{order.attempt}",
        request_id=order.request_id,
        attempt=order.attempt,
        decode=DECODE,
        writer=ME,
        target=TARGET,
        sequences=sequences,
        layout_fingerprint=LAYOUT.fingerprint,
    )
    return Promise(**(values | changes))


def signed(promised: Promise, keys: MeshKeys = KEYS, expires_in_s: float = 10.0) -> Reservation:
    """The promise as it travels."""
    return sign(promised, expires_in_s, keys=keys)


def command(
    length: int = 10, reservation: Reservation | bool = True, attempt: int = 1, samples=(0,), delivered=None, **changes
) -> PrefillCommand:
    """An order, with a promise of decode unless `reservation` says otherwise."""
    values = dict(
        request_id="q",
        attempt=attempt,
        prompt_token_ids=tuple(range(length)),
        sampling=SamplingParams(),
        sample_indices=samples,
        delivered=delivered or {},
        reservation=None,
        cache_salt="",
        time_left_s=60.0,
    )
    order = PrefillCommand(**(values | changes))
    if reservation is True:
        reservation = signed(promise(order)) if samples else None
    return replace(order, reservation=reservation or None)


async def stop(core: Prefiller, reservation_id: str, wait_s: float, decode: WorkerIdentity = DECODE) -> StopState:
    """What a decode rank hears that takes a reservation back."""
    state = asyncio.get_running_loop().create_future()
    core.stop(reservation_id, decode, wait_s, state.set_result)
    return await asyncio.wait_for(state, 5)
