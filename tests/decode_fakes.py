"""A decode rank without torch: integer rows, an engine that steps when told, a writer that answers as told."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from dataclasses import dataclass, field

import numpy as np

from headrace import protocol as p
from headrace.cache.blocks import BlockPool
from headrace.clock import FakeClock
from headrace.config import DecodeConfig
from headrace.engine.request import SampledToken
from headrace.errors import TransferError, Unavailable
from headrace.process.faults import Faults
from services.decode.core import Decoder
from services.decode.interfaces import Collaborators

NUM_LAYERS, BLOCK_SIZE = 3, 4
WRITER = p.WorkerIdentity("127.0.0.1:7001", "writer-epoch-one")
ROUTER = p.WorkerIdentity("127.0.0.1:7000", "router-epoch-one")
DECODE = p.WorkerIdentity("127.0.0.1:7002", "decode-epoch-one")


class FakeEngine:
    """Steps when `step()` is called; token ids are 100 + output position."""

    def __init__(self):
        self.batch: dict[tuple[int, int], list] = {}
        self.steps = 0
        self.removing = asyncio.Event()
        self.removing.set()

    def connect(self, on_step, on_failure):
        self.on_step, self.on_failure = on_step, on_failure

    def add(self, sequences):
        for sequence in sequences:
            self.batch[sequence.handle, sequence.sample_index] = [sequence, len(sequence.output_token_ids)]

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
            reason = p.FinishReason.LENGTH if last else p.FinishReason.NONE
            logprob = None if sequence.sampling.logprobs is None else -0.5
            top = ((1, -0.5), (2, -1.5)) if sequence.sampling.logprobs else ()
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
            "local", f"session-{self.fences}", 0, 8 * BLOCK_SIZE * self.num_blocks, 8 * BLOCK_SIZE, 8, BLOCK_SIZE,
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

    def push(self, reservation: p.Reservation) -> tuple[p.SequenceManifest, ...]:
        """Writes what a reservation owes, as a prefill rank would, and says what was written."""
        manifest = []
        for sequence in reservation.sequences:
            where = (sequence.block_ids, sequence.first_row, sequence.num_rows)
            for layer in range(NUM_LAYERS):
                values = 1000 * (layer + 1) + np.arange(sequence.num_rows) + sequence.first_row
                self.values[layer, self.slots(*where)] = values
            layers = tuple(
                p.LayerManifest(sequence.num_rows, self.checksum(layer, *where)) for layer in range(NUM_LAYERS)
            )
            manifest.append(p.SequenceManifest(sequence.sample_index, sequence.first_row, layers))
        return tuple(manifest)


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
    frames: list[p.TokenFrame] = field(default_factory=list)
    handles: itertools.count = field(default_factory=lambda: itertools.count(1))

    def command(self, request_id="r", attempt=1, *, prompt=6, max_tokens=4, n=1, delivered=None, **changes):
        sampling = p.SamplingParams(n=n, max_tokens=max_tokens, logprobs=changes.pop("logprobs", None))
        values = dict(
            request_id=request_id, attempt=attempt, writer=WRITER, prompt_tokens=prompt,
            sample_indices=tuple(range(n)), delivered_counts=delivered or (0,) * n, sampling=sampling,
            stream_interval=1, router=ROUTER, handle=next(self.handles), decode_epoch=DECODE.epoch,
        )  # fmt: skip
        return p.ReserveCommand(**(values | changes))

    def commit_command(self, reserve, reservation, manifest, **changes):
        samples = tuple(
            p.SampleState(index, tuple(range(50, 51 + count)))
            for index, count in zip(reserve.sample_indices, reserve.delivered_counts, strict=True)
        )
        values = dict(
            reservation_id=reservation.reservation_id, request_id=reserve.request_id, attempt=reserve.attempt,
            writer_epoch=WRITER.epoch, manifest=manifest, samples=samples,
            prompt_token_ids=tuple(range(reserve.prompt_tokens)),
        )  # fmt: skip
        return p.CommitCommand(**(values | changes))

    async def reserve(self, command, time_left_s=5.0):
        return await self.core.reserve(command, time_left_s)

    async def start(self, request_id="r", **options):
        """Reserve, push, commit: a running request."""
        command = self.command(request_id, **options)
        reservation = await self.reserve(command)
        await self.core.commit(self.commit_command(command, reservation, self.rows.push(reservation)))
        return command, reservation

    def release(self, request_id="r", attempt=1, samples=()):
        self.core.release(request_id, attempt, DECODE.epoch, samples)

    async def step(self, times=1):
        for _ in range(times):
            self.engine.step()
            await settle()

    @property
    def held(self):
        return self.core.ledger().blocks.held

    def records(self):
        return [record for frame in self.frames for record in frame.records]

    def ends(self):
        return [end for frame in self.frames for end in frame.ends]

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
async def reading(rank, router=ROUTER, resume_after=0, into=None):
    """A connected router whose frames are collected."""
    frames = rank.frames if into is None else into

    async def read():
        async for frame in rank.core.stream_tokens(router, DECODE.epoch, resume_after):
            frames.append(frame)

    async with asyncio.TaskGroup() as tasks:
        reader = tasks.create_task(read())
        await settle()
        try:
            yield reader
        finally:
            reader.cancel()


@contextlib.asynccontextmanager
async def decode_rank(num_blocks=16, *, faults=(), connected=True, max_context=64, clock=None, **config):
    """An open Decoder over fakes, with one router connected."""
    clock, engine, target, writer = clock or FakeClock(), FakeEngine(), FakeTarget(num_blocks), FakeWriter()
    rows, pool = Rows(num_blocks), BlockPool(num_blocks, BLOCK_SIZE)
    layout = p.KvLayout(NUM_LAYERS, 1, "int64", BLOCK_SIZE, "interleaved", "f")
    info = p.WorkerInfo(DECODE, "decode", "fake", layout, num_blocks, max_context, 0, 8, True, "local")
    collaborators = Collaborators(
        clock, pool, engine, target, rows.checksums, rows.copy_rows, writer.stop, Faults.parse(faults)
    )
    async with Decoder.open(DecodeConfig(**config), info, collaborators) as core:
        rank = Rank(core, clock, engine, target, writer, rows, pool)
        if not connected:
            yield rank
            return
        async with reading(rank):
            yield rank
