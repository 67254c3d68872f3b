"""Real worker processes over a random checkpoint: a router played by hand gets the tokens that the engine alone gives."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from headrace import protocol as p
from headrace.client import Peers
from headrace.config import EngineConfig
from headrace.engine.offline import Engine
from headrace.launch.children import start_child, stop_child, wait_ready
from headrace.launch.redis_server import BundledRedis
from headrace.model.weights.random_checkpoint import write_random_checkpoint

ROOT = Path(__file__).resolve().parents[2]
ROUTER = p.WorkerIdentity("127.0.0.1:1", "router-played-by-hand")
SHAPE = {
    "num_hidden_layers": 3,
    "hidden_size": 128,
    "intermediate_size": 256,
    "vocab_size": 512,
    "num_attention_heads": 4,
}
MAX_TOKENS = 12
TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """Three layers of random weights."""
    return write_random_checkpoint(tmp_path_factory.mktemp("checkpoint"), SHAPE)


@pytest.fixture(scope="module")
def expected(checkpoint):
    """Prompt, sampling and the tokens of each sample as the engine alone draws them."""
    engine = Engine.load(checkpoint, EngineConfig(num_blocks=64, exact=True, num_threads=1))
    cases = []
    for length, sampling in (
        (1, p.SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)),
        (16, p.SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)),
        (37, p.SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, temperature=1.0, seed=5, n=3)),
    ):
        prompt = tuple(3 + (7 * i) % 500 for i in range(length))
        (outputs,) = engine.generate([prompt], sampling)
        cases.append((prompt, sampling, [tuple(output.token_ids) for output in outputs]))
    return cases


@contextlib.contextmanager
def processes(checkpoint: Path, directory: Path, names, *more_flags):
    """Worker processes over a Redis of their own; yields what each said when it was ready."""
    with BundledRedis() as redis, contextlib.ExitStack() as stack:
        children = []
        for name in names:
            flags = [
                f"model.directory={checkpoint}", f"registry.url={redis.url}", f"mesh.run_directory={directory}",
                "engine.num_blocks=64", "engine.num_threads=1", "mesh.drain_grace_s=5", *more_flags,
            ]  # fmt: skip
            command = [sys.executable, "-m", f"services.{name.split()[0]}", *name.split()[1:]]
            command += [word for flag in flags for word in ("--set", flag)]
            log = stack.enter_context((directory / f"{name.split()[0]}.log").open("w"))
            children.append(start_child(command, stdout=subprocess.PIPE, stderr=log, directory=ROOT))
            stack.callback(stop_child, children[-1], 10.0)
        yield children, [wait_ready(child, 60.0) for child in children]


@dataclass
class Router:
    """One router's stream to a decode rank, and what has come."""

    decode: p.WorkerIdentity
    prefill: p.WorkerIdentity
    peers: Peers
    tokens: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    ended: set[tuple[int, int]] = field(default_factory=set)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self):
        client = self.peers.decode(self.decode.address)
        async for frame in client.stream_tokens(ROUTER, self.decode.epoch):
            for record in frame.records:
                so_far = self.tokens.setdefault((record.handle, record.sample_index), [])
                assert record.first_position == 1 + len(so_far)
                so_far.extend(record.token_ids)
            self.ended |= {(end.handle, end.sample_index) for end in frame.ends if not end.error_reason}
            self.news.set()

    async def generate(self, request_id, handle, prompt, sampling):
        """Token ids of each sample."""
        samples = tuple(range(sampling.n))
        reserve = p.ReserveCommand(
            request_id, 1, self.prefill, len(prompt), samples, (0,) * sampling.n, sampling, 1, ROUTER, handle,
            self.decode.epoch,
        )  # fmt: skip
        reservation = await self.peers.decode(self.decode.address).reserve(reserve, TIMEOUT_S)
        command = p.PrefillCommand(request_id, 1, prompt, sampling, samples, {}, reservation, "", self.prefill.epoch)
        first: dict[int, int] = {}
        async for event in self.peers.prefill(self.prefill.address).prefill(command, TIMEOUT_S):
            assert not isinstance(event, p.PrefillFailed), event
            if isinstance(event, p.FirstTokens):
                first = {token.sample_index: token.token_id for token in event.tokens}
        while not {(handle, sample) for sample in samples} <= self.ended:
            self.news.clear()
            await asyncio.wait_for(self.news.wait(), TIMEOUT_S)
        return [(first[sample], *self.tokens[handle, sample]) for sample in samples]


async def everything_matches(decode, prefill, expected):
    """All cases twice over and at once; then the ledgers are zero."""
    router = Router(decode, prefill, Peers())
    reader = asyncio.ensure_future(router.read())
    try:
        await asyncio.wait_for(router.news.wait(), TIMEOUT_S)
        numbered = list(enumerate(expected * 2, start=1))
        answers = await asyncio.gather(
            *(router.generate(f"r{n}", n, prompt, sampling) for n, (prompt, sampling, _) in numbered)
        )
        for (_, (_, _, tokens)), answer in zip(numbered, answers, strict=True):
            assert answer == tokens
        ledger = await router.peers.decode(decode.address).ledger()
        assert ledger.blocks.held == 0 and ledger.steps > 0 and ledger.fences == 0
        for _ in range(100):
            held = (await router.peers.prefill(prefill.address).ledger()).blocks.held
            if not held:
                break
            await asyncio.sleep(0.02)
        assert held == 0
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        await router.peers.close()


def identity(said) -> p.WorkerIdentity:
    """From a ready line."""
    return p.WorkerIdentity(said["address"], said["epoch"])


def test_the_aggregated_process_gives_the_engines_tokens_and_drains(checkpoint, expected, tmp_path):
    with processes(checkpoint, tmp_path, ["aggregated"]) as (children, (said,)):
        asyncio.run(everything_matches(identity(said), identity(said), expected))
        children[0].send_signal(signal.SIGTERM)
        assert children[0].wait(15) == 0


def test_two_processes_and_a_real_transfer_give_the_engines_tokens(checkpoint, expected, tmp_path):
    names = ["decode", "prefill"]
    with processes(checkpoint, tmp_path, names, "decode.quarantine_max_s=1") as (children, (decode, prefill)):
        asyncio.run(everything_matches(identity(decode), identity(prefill), expected))
        children[1].kill()
        asyncio.run(a_dead_writer_ends_in_a_fence(identity(decode), identity(prefill)))


async def a_dead_writer_ends_in_a_fence(decode, dead):
    """Nobody answers for the blocks of a writer that was killed: they come back with a new transfer engine."""
    peers, opened = Peers(), asyncio.Event()
    client = peers.decode(decode.address)
    router = p.WorkerIdentity("127.0.0.1:1", "router-of-the-second-test")

    async def read():
        async for _ in client.stream_tokens(router, decode.epoch):
            opened.set()

    def command(name, handle):
        sampling = p.SamplingParams(max_tokens=4)
        return p.ReserveCommand(name, 1, dead, 40, (0,), (0,), sampling, 1, router, handle, decode.epoch)

    reader = asyncio.ensure_future(read())
    try:
        await asyncio.wait_for(opened.wait(), TIMEOUT_S)
        before = await client.reserve(command("before", 1), TIMEOUT_S)
        await client.release("before", 1, decode.epoch, (), TIMEOUT_S)
        assert (await client.ledger()).blocks.quarantined == len(before.sequences[0].block_ids)
        async with asyncio.timeout(TIMEOUT_S):
            while (ledger := await client.ledger()).blocks.held:
                await asyncio.sleep(0.05)
        assert ledger.fences == 1
        after = await client.reserve(command("after", 2), TIMEOUT_S)
        assert after.target.session != before.target.session
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        await peers.close()
