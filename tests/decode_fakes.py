"""A decode rank without torch: integer rows, an engine that steps when told, a writer that answers as told."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import time
from dataclasses import dataclass, field

import numpy as np

from headrace.cache.blocks import BlockPool
from headrace.clock import FakeClock
from headrace.config import DecodeConfig
from headrace.engine.request import SampledToken
from headrace.errors import HeadraceError, TransferError, Unavailable
from headrace.process.faults import Faults
from headrace.protocol import common
from headrace.protocol import decode as p
from services.decode.core import Decoder
from services.decode.interfaces import Collaborators
from services.decode.tokens import record_bytes

NUM_LAYERS, BLOCK_SIZE, VOCABULARY_SIZE = 3, 4, 1000
WRITER = common.WorkerIdentity("127.0.0.1:7001", "writer-epoch-one")
ROUTER = common.WorkerIdentity("127.0.0.1:7000", "router-epoch-one")
DECODE = common.WorkerIdentity("127.0.0.1:7002", "decode-epoch-one")


def run(function):
    """An async test, run to its end."""

    @functools.wraps(function)
    def test():
        asyncio.run(asyncio.wait_for(function(), 60))

    return test


class FakeEngine:
    """Steps when `step()` is called; token ids are 100 + output position."""

    def __init__(self):
        self.batch: dict[tuple[int, int], list] = {}
        self.top = ((1, -0.5), (2, -1.5))
        self.steps = 0
        self.removing = asyncio.Event()
        self.removing.set()

    def connect(self, on_step, on_failure):
        self.on_step, self.on_failure = on_step, on_failure

    def add(self, sequences):
        for sequence in sequences:
            self.batch[sequence.handle, sequence.sample_index] = [sequence, len(sequence.output_token_ids)]

    @property
    def pending(self):
        return min(1, len(self.batch))

    async def remove(self, handle, sample_index=None):
        await self.removing.wait()
        for key in [k for k in self.batch if k[0] == handle and sample_index in (None, k[1])]:
            del self.batch[key]

    def step(self):
        self.steps += 1
        tokens = []
        for key, entry in list(self.batch.items()):
            sequence, position = entry
            last = position + 1 >= sequence.sampling.max_tokens
            reason = common.FinishReason.LENGTH if last else common.FinishReason.NONE
            logprob = None if sequence.sampling.logprobs is None else -0.5
            top = self.top if sequence.sampling.logprobs else ()
            tokens.append(SampledToken(*key, position, 100 + position, logprob, top, reason))
            entry[1] += 1
            if last:
                del self.batch[key]
        self.on_step(tokens)


class FakeTarget:
    """A transfer target whose session counts its fences."""

    def __init__(self, num_blocks):
        self.num_blocks, self.fences, self.broken = num_blocks, 0, False

    def descriptor(self):
        return p.TargetDescriptor(
            common.TransferBackend.LOCAL, f"session-{self.fences}", 0, 8 * BLOCK_SIZE * self.num_blocks, 8 * BLOCK_SIZE, 8, BLOCK_SIZE,
            NUM_LAYERS, self.num_blocks,
        )  # fmt: skip

    def fence(self):
        if self.broken:
            raise TransferError("no port")
        self.fences += 1
        return self.descriptor()


class FakeWriter:
    """What a prefill rank answers to Stop: an answer, or None for silence. `asked` holds reservation ids."""

    def __init__(self):
        self.answer: p.StopState | None = p.StopState.DRAINED
        self.asked: list[str] = []
        self.hangs = False

    async def stop(self, writer, reservation_id, wait_s):
        self.asked.append(reservation_id)
        if self.hangs:
            await asyncio.Event().wait()
        if self.answer is None:
            raise Unavailable("nobody there")
        return self.answer


class Rows:
    """rows [num_layers, num_blocks * block_size] int64, with a checksum and a block copy."""

    def __init__(self, num_blocks):
        self.values = np.zeros((NUM_LAYERS, num_blocks * BLOCK_SIZE), dtype=np.int64)
        self.slow = None

    def checksum(self, layer, blocks, first_row, num_rows):
        if self.slow is not None:
            self.slow.wait(5)
        positions = np.arange(first_row, first_row + num_rows)
        return int((self.values[layer, self.slots(blocks, first_row, num_rows)] * (2 * positions + 1)).sum())

    def checksums(self, blocks, first_row, num_rows):
        return [self.checksum(layer, blocks, first_row, num_rows) for layer in range(NUM_LAYERS)]

    @staticmethod
    def slots(blocks, first_row, num_rows):
        positions = np.arange(first_row, first_row + num_rows)
        return np.asarray(blocks)[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE

    def copy_rows(self, source, target, num_rows):
        for layer in self.values:
            layer[target * BLOCK_SIZE : target * BLOCK_SIZE + num_rows] = layer[
                source * BLOCK_SIZE : source * BLOCK_SIZE + num_rows
            ]

    def push(self, promise: p.Promise) -> tuple[p.SequenceManifest, ...]:
        """Writes what a promise owes, as a prefill rank would, and says what was written."""
        manifest = []
        for sequence in promise.sequences:
            where = (sequence.block_ids, sequence.first_row, sequence.num_rows)
            for layer in range(NUM_LAYERS):
                values = 1000 * (layer + 1) + np.arange(sequence.num_rows) + sequence.first_row
                self.values[layer, self.slots(*where)] = values
            layers = tuple(
                p.LayerManifest(sequence.num_rows, self.checksum(layer, *where)) for layer in range(NUM_LAYERS)
            )
            manifest.append(p.SequenceManifest(sequence.sample_index, sequence.first_row, layers))
        return tuple(manifest)


class FakeTokenLink:
    """A router's token link. Frames are kept in `frames`; while `reads` is false none of them is acknowledged."""

    def __init__(self, peer=ROUTER):
        self.peer, self.frames = peer, []
        self.is_open, self.is_lost, self.reads = True, False, True
        self.unacknowledged_bytes = self.acknowledged_through = 0
        self.fails: list[Exception] = []
        """What the next sends raise."""

    def send(self, frame):
        if self.is_lost:
            raise Unavailable("lost", reason="LINK_LOST")
        if self.fails:
            raise self.fails.pop(0)
        self.frames.append(frame)
        if self.reads:
            self.acknowledged_through = len(self.frames)
        else:
            self.unacknowledged_bytes += sum(record_bytes(record) for record in frame.records)
        return len(self.frames)

    def lose(self, error):
        self.is_open, self.is_lost = False, True


def answered() -> tuple[asyncio.Future, object]:
    """A future, and the `answer` that fulfils it."""
    future = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody need look

    def answer(said):
        if isinstance(said, HeadraceError):
            future.set_exception(said)
        else:
            future.set_result(said)

    return future, answer


@dataclass
class Signer:
    """Signs nothing; `promises` by reservation id."""

    promises: dict[str, p.Promise] = field(default_factory=dict)

    def sign(self, promise, expires_in_s):
        self.promises[promise.reservation_id] = promise
        return p.Reservation(promise.reservation_id.encode(), b"", expires_in_s)

    def read(self, reservation: p.Reservation) -> p.Promise:
        return self.promises[reservation.promise.decode()]


@dataclass
class Rank:
    """A Decoder and everything around it."""

    core: Decoder
    clock: object
    engine: FakeEngine
    target: FakeTarget
    writer: FakeWriter
    rows: Rows
    pool: BlockPool
    signer: Signer
    link: FakeTokenLink
    collaborators: Collaborators
    begun: set[str] = field(default_factory=set)
    handles: itertools.count = field(default_factory=lambda: itertools.count(1))

    def command(self, request_id="r", attempt=1, *, prompt=6, max_tokens=4, n=1, delivered=None, **changes):
        sampling = common.SamplingParams(n=n, max_tokens=max_tokens, logprobs=changes.pop("logprobs", None))
        values = dict(
            request_id=request_id, attempt=attempt, writer=WRITER, prompt_tokens=prompt,
            sample_indices=tuple(range(n)), delivered_counts=delivered or (0,) * n, sampling=sampling,
            stream_interval=1, handle=next(self.handles), time_left_s=5.0,
        )  # fmt: skip
        return p.ReserveCommand(**(values | changes))

    def commit_command(self, reserve, promise, manifest, **changes):
        samples = tuple(
            p.SampleState(index, tuple(range(50, 51 + count)))
            for index, count in zip(reserve.sample_indices, reserve.delivered_counts, strict=True)
        )
        values = dict(
            reservation_id=promise.reservation_id, request_id=reserve.request_id, attempt=reserve.attempt,
            manifest=manifest, samples=samples,
            prompt_token_ids=tuple(range(reserve.prompt_tokens)),
        )  # fmt: skip
        return p.CommitCommand(**(values | changes))

    def reserving(self, command, router=ROUTER, **changes) -> asyncio.Future:
        """The answer to a Reserve."""
        future, answer = answered()
        try:
            self.core.reserve(router, dataclasses.replace(command, **changes), answer)
        except HeadraceError as error:
            answer(error)
        return future

    async def reserve(self, command, router=ROUTER, **changes) -> p.Promise:
        """What was promised."""
        return self.signer.read(await self.reserving(command, router, **changes))

    async def writing(self, command, router=ROUTER) -> p.Promise:
        """A promise whose writer has begun."""
        promise = await self.reserve(command, router)
        self.begin(promise)
        return promise

    def push(self, promise) -> tuple[p.SequenceManifest, ...]:
        """What a writer does: it begins, once, and writes."""
        self.begin(promise)
        return self.rows.push(promise)

    def begin(self, promise) -> None:
        """Once."""
        if promise.reservation_id not in self.begun:
            self.begun.add(promise.reservation_id)
            assert self.core.begin(promise.reservation_id, promise.writer.epoch) == 10.0

    def committing(self, command, writer_epoch=WRITER.epoch) -> asyncio.Future:
        """The answer to a Commit."""
        future, answer = answered()
        try:
            self.core.commit(command, writer_epoch, answer)
        except HeadraceError as error:
            answer(error)
        return future

    async def commit(self, command, writer_epoch=WRITER.epoch) -> float:
        """How long the accepted commit took."""
        return (await self.committing(command, writer_epoch)).commit_duration_s

    async def start(self, request_id="r", router=ROUTER, **options):
        """Reserve, begin, push, commit: a running request."""
        command = self.command(request_id, **options)
        promise = await self.reserve(command, router)
        await self.commit(self.commit_command(command, promise, self.push(promise)))
        return command, promise

    def release(self, request_id="r", attempt=1, samples=(), router=ROUTER):
        self.core.release(router, p.ReleaseCommand(request_id, attempt, samples))

    def connect(self, router=ROUTER) -> FakeTokenLink:
        """Another token link."""
        link = FakeTokenLink(router)
        self.core.token_link_opened(link)
        return link

    def lose(self, link, error=None):
        """A token link that does not come back."""
        error = error or Unavailable("lost", reason="LINK_LOST")
        link.lose(error)
        self.core.token_link_lost(link, error)

    async def step(self, times=1):
        for _ in range(times):
            self.engine.step()
            await settle()

    @property
    def held(self):
        return self.core.ledger().blocks.held

    def records(self):
        return [record for frame in self.link.frames for record in frame.records]

    def ends(self):
        return [end for frame in self.link.frames for end in frame.ends]

    async def all_free(self):
        """The leak ledger is zero, without traffic and without the clock."""
        await until(lambda: self.held == 0)
        ledger = self.core.ledger()
        assert ledger.blocks.free == self.pool.num_blocks
        assert ledger.reserved_requests == ledger.running_requests == ledger.quarantined_requests == 0
        assert ledger.waiting_requests == 0


async def settle(rounds=30):
    """Lets everyone who can run do so."""
    for _ in range(rounds):
        await asyncio.sleep(0)


async def until(predicate, limit_s=5.0):
    """Waits for worker threads; the rank's own clock stands still."""
    end = time.monotonic() + limit_s
    while not predicate():
        assert time.monotonic() < end, "did not happen"
        await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def decode_rank(
    num_blocks=16, *, faults=(), connected=True, max_context=64, clock=None, sign=None, stop_writer=None, **config
):
    """An open Decoder over fakes, with one router connected. `sign` and `stop_writer` replace the fakes."""
    clock, engine, target, writer = clock or FakeClock(), FakeEngine(), FakeTarget(num_blocks), FakeWriter()
    rows, pool, signer = Rows(num_blocks), BlockPool(num_blocks, BLOCK_SIZE), Signer()
    collaborators = Collaborators(
        clock=clock,
        pool=pool,
        engine=engine,
        target=target,
        checksums=rows.checksums,
        copy_rows=rows.copy_rows,
        sign=sign or signer.sign,
        stop_writer=stop_writer or writer.stop,
        faults=Faults.parse(faults),
    )
    info = worker_info(num_blocks, max_context)
    async with Decoder.open(DecodeConfig(**config), info, collaborators) as core:
        rank = Rank(core, clock, engine, target, writer, rows, pool, signer, FakeTokenLink(), collaborators)
        if connected:
            core.token_link_opened(rank.link)
        yield rank


def worker_info(num_blocks=16, max_context=64) -> common.WorkerInfo:
    """What the rank says about itself."""
    region = common.KvRegion("latent", NUM_LAYERS, 1, common.NumberFormat.FP32)
    layout = common.KvLayout((region,), BLOCK_SIZE, common.RopeOrder.INTERLEAVED, "f")
    return common.WorkerInfo(
        DECODE, common.WorkerRole.DECODE, "fake", layout, num_blocks, max_context, max_batch_size=8,
        transfer=common.TransferBackend.LOCAL, vocabulary_size=VOCABULARY_SIZE,
    )  # fmt: skip
