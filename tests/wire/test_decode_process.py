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
from decode_peers import TIMEOUT_S, Router, opened, router_of, writer_of

from headrace.clock import Deadline, SystemClock
from headrace.config import EngineConfig
from headrace.engine.offline import Engine
from headrace.errors import HeadraceError
from headrace.launch.children import start_child, stop_child, wait_ready
from headrace.launch.redis_server import BundledRedis
from headrace.model.weights.random_checkpoint import write_random_checkpoint
from headrace.protocol import decode as p
from headrace.protocol.common import SamplingParams, WorkerIdentity
from headrace.protocol.prefill import Committed, FirstTokens, PrefillCommand
from headrace.rpc.clients import Peers
from headrace.rpc.links import PREFILL_LINK
from headrace.rpc.promises import MeshKeys, verify

ROOT = Path(__file__).resolve().parents[2]
ROUTER = WorkerIdentity("127.0.0.1:1", "router-played-by-hand")
SHAPE = {
    "num_hidden_layers": 3,
    "hidden_size": 128,
    "intermediate_size": 256,
    "vocab_size": 512,
    "num_attention_heads": 4,
}
MAX_TOKENS = 12


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
        (1, SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)),
        (16, SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)),
        (37, SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, temperature=1.0, seed=5, n=3)),
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
            command = [sys.executable, "-m", f"services.{name}"]
            command += [word for flag in flags for word in ("--set", flag)]
            log = stack.enter_context((directory / f"{name}.log").open("w"))
            children.append(start_child(command, stdout=subprocess.PIPE, stderr=log, directory=ROOT))
            stack.callback(stop_child, children[-1], 10.0)
        yield children, [wait_ready(child, 60.0) for child in children]


@dataclass
class Mesh:
    """One router's links to a decode rank and a prefill rank."""

    prefill: WorkerIdentity
    router: Router
    prompts: object
    ended: dict[tuple[int, int], int] = field(default_factory=dict)

    async def generate(self, request_id, handle, prompt, sampling):
        """Token ids of each sample."""
        samples = tuple(range(sampling.n))
        reserve = p.ReserveCommand(
            request_id=request_id, attempt=1, writer=self.prefill, prompt_tokens=len(prompt), sample_indices=samples,
            delivered_counts=(0,) * sampling.n, sampling=sampling, stream_interval=1, handle=handle,
        )  # fmt: skip
        reservation = await self.router.reserve(reserve, TIMEOUT_S)
        command = PrefillCommand(
            request_id=request_id, attempt=1, prompt_token_ids=prompt, sampling=sampling, sample_indices=samples,
            delivered={}, reservation=reservation, cache_salt="",
        )  # fmt: skip
        first = {token.sample_index: token.token_id for token in (await self.compute(command)).tokens}
        async with asyncio.timeout(TIMEOUT_S):
            while len(ends := {e.sample_index: e for e in self.router.ends() if e.handle == handle}) < sampling.n:
                self.router.news.clear()
                await self.router.news.wait()
        assert not any(end.error_reason for end in ends.values())
        answer = [(first[sample], *self.tokens(handle, sample)) for sample in samples]
        assert [ends[sample].output_tokens for sample in samples] == [len(tokens) for tokens in answer]
        return answer

    async def compute(self, command) -> FirstTokens:
        """Prefills; returns when it is committed."""
        events: asyncio.Queue = asyncio.Queue()
        self.prompts.send(command, deadline=Deadline.after(SystemClock(), TIMEOUT_S), on_answer=events.put_nowait)
        first = await asyncio.wait_for(events.get(), TIMEOUT_S)
        assert isinstance(first, FirstTokens), first
        last = await asyncio.wait_for(events.get(), TIMEOUT_S)
        assert isinstance(last, Committed), last
        return first

    def tokens(self, handle, sample):
        """What has come, in order and without a gap."""
        tokens: list[int] = []
        for record in self.router.records():
            if (record.handle, record.sample_index) == (handle, sample):
                assert record.first_position == 1 + len(tokens)
                tokens.extend(record.token_ids)
        return tokens


async def everything_matches(decode, prefill, expected):
    """All cases twice over and at once; then the ledgers are zero."""
    peers = Peers()
    async with (
        router_of(decode.address, ROUTER, decode.epoch) as router,
        opened(PREFILL_LINK, prefill.address, ROUTER, prefill.epoch, on_item=ignore) as (prompts, _),
    ):
        assert router.commands.info.vocabulary_size == SHAPE["vocab_size"]
        mesh = Mesh(prefill, router, prompts)
        numbered = list(enumerate(expected * 2, start=1))
        answers = await asyncio.gather(
            *(mesh.generate(f"r{n}", n, prompt, sampling) for n, (prompt, sampling, _) in numbered)
        )
        for (_, (_, _, tokens)), answer in zip(numbered, answers, strict=True):
            assert answer == tokens
        ledger = await peers.decode(decode.address).ledger()
        assert ledger.blocks.held == 0 and ledger.steps > 0 and ledger.fences == 0
        for _ in range(100):
            held = (await peers.prefill(prefill.address).ledger()).blocks.held
            if not held:
                break
            await asyncio.sleep(0.02)
        assert held == 0
    await peers.close()


def ignore(link, number, body):
    """What a prefill rank holds is not asked here."""


def identity(said) -> WorkerIdentity:
    """From a ready line."""
    return WorkerIdentity(said["address"], said["epoch"])


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
    """Nobody answers for the blocks of a writer that died after it began: they come back with a new transfer engine."""
    peers = Peers()
    client = peers.decode(decode.address)
    router_identity = WorkerIdentity("127.0.0.1:1", "router-of-the-second-test")

    def command(name, handle):
        return p.ReserveCommand(
            request_id=name, attempt=1, writer=dead, prompt_tokens=40, sample_indices=(0,), delivered_counts=(0,),
            sampling=SamplingParams(max_tokens=4), stream_interval=1, handle=handle,
        )  # fmt: skip

    def read(reservation) -> p.Promise:
        return verify(reservation, MeshKeys())

    async with router_of(decode.address, router_identity, decode.epoch) as router:
        never_begun = read(await router.reserve(command("never begun", 1)))
        await router.release("never begun")
        assert (await client.ledger()).blocks.held == 0
        async with writer_of(decode.address, dead, decode.epoch) as writer:  # who begins, and dies
            before = read(await router.reserve(command("begun", 2)))
            assert before.target.session == never_begun.target.session
            await writer.ask(p.BeginCommand(before.reservation_id))
        await router.release("begun")
        assert (await client.ledger()).blocks.quarantined == len(before.sequences[0].block_ids)
        async with asyncio.timeout(TIMEOUT_S):
            while (ledger := await client.ledger()).blocks.held:
                await asyncio.sleep(0.05)
        assert ledger.fences == 1
        after = read(await router.reserve(command("after", 3)))
        assert after.target.session != before.target.session
        with pytest.raises(HeadraceError):
            async with writer_of(decode.address, dead, decode.epoch) as writer:
                await writer.ask(p.BeginCommand(before.reservation_id))
    await peers.close()
