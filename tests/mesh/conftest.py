"""Meshes of real processes on loopback, shared by all tests of this folder, and what every scenario asserts afterwards.

`mesh` is router, prefill, decode and kvstore; `aggregated` is the oracle: one worker process with the local transfer. Both run
in exact mode, so that equal requests give equal tokens. Tests that break things start a mesh of their own with
`start_mesh`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from headrace import config as configuration
from headrace.client import Answer, AsyncClient
from headrace.launch.local import Mesh
from headrace.rpc.channel import open_channel
from headrace.rpc.clients import DecodeClient, PrefillClient, RouterClient

NUM_BLOCKS = 2048


@dataclass
class Idle:
    """What a mesh looks like when nothing runs."""

    router: object
    prefill: object
    decode: object

    @property
    def is_idle(self) -> bool:
        """Whether nobody holds anything."""
        router, prefill, decode = self.router, self.prefill, self.decode
        return (
            router.queued_requests == router.running_requests == router.open_handles == 0
            and prefill.blocks.held == prefill.queued_tokens == prefill.running_requests == 0
            and decode.blocks.held == decode.waiting_requests == decode.reserved_requests == 0
            and decode.running_requests == decode.quarantined_requests == 0
        )


class TestMesh(Mesh):
    """A mesh that can be asked and checked."""

    __test__ = False

    def worker_address(self, role: str) -> str:
        """Where the first rank of that role listens; in an aggregated mesh the worker that is both."""
        return self.address("aggregated-0" if self.plan.aggregated else f"{role}-0")

    async def ledgers(self) -> Idle:
        """All ledgers now."""
        async with contextlib.AsyncExitStack() as stack:
            channels = [
                await stack.enter_async_context(open_channel(address))
                for address in (self.router_address, self.worker_address("prefill"), self.worker_address("decode"))
            ]
            return Idle(
                await RouterClient(channels[0]).ledger(),
                await PrefillClient(channels[1]).ledger(),
                await DecodeClient(channels[2]).ledger(),
            )

    async def wait_idle(self, timeout_s: float = 2.0) -> Idle:
        """Asserts that every ledger returns to zero within `timeout_s`, without further traffic."""
        end = time.monotonic() + timeout_s
        while True:
            now = await self.ledgers()
            if now.is_idle:
                return now
            assert time.monotonic() < end, f"still held after {timeout_s} s: {now}"
            await asyncio.sleep(0.05)

    def client(self, timeout_s: float = 60.0) -> AsyncClient:
        """An asyncio client of the router."""
        return AsyncClient(self.router_address, timeout_s=timeout_s)

    def ask(self, prompt, **options) -> Answer:
        """One whole answer; every ledger is back to zero after it."""

        async def ask() -> Answer:
            async with self.client() as client:
                answer = await client.generate(prompt, **options)
            await self.wait_idle()
            return answer

        return asyncio.run(ask())

    def tail(self, name: str, lines: int = 40) -> str:
        """The end of a process's log."""
        return "\n".join(self.running[name].log.read_text().splitlines()[-lines:])


@pytest.fixture(scope="session")
def start_mesh(tmp_path_factory, tiny_directory) -> Callable[..., contextlib.AbstractContextManager[TestMesh]]:
    """`with start_mesh("part.key=value", aggregated=False) as mesh:` a mesh with those settings."""

    @contextlib.contextmanager
    def start(*flags: str, aggregated: bool = False) -> Iterator[TestMesh]:
        own = [
            f"model.directory={tiny_directory}",
            f"mesh.run_directory={tmp_path_factory.mktemp('mesh')}",
            f"engine.num_blocks={NUM_BLOCKS}",
            "engine.exact=true",
            "mesh.drain_grace_s=5",
            *flags,
        ]
        with TestMesh(configuration.load(flags=own), aggregated=aggregated, flags=own) as mesh:
            yield mesh

    return start


@pytest.fixture(scope="session")
def mesh(start_mesh) -> Iterator[TestMesh]:
    """The disaggregated mesh of this session."""
    with start_mesh() as running:
        yield running


@pytest.fixture(scope="session")
def aggregated(start_mesh) -> Iterator[TestMesh]:
    """The oracle of this session."""
    with start_mesh(aggregated=True) as running:
        yield running


def assert_same(ours: Answer, oracle: Answer) -> None:
    """Two answers to the same request differ in nothing a user sees."""
    assert len(ours.samples) == len(oracle.samples)
    for mine, theirs in zip(ours.samples, oracle.samples, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert mine.text == theirs.text
        assert mine.finish_reason == theirs.finish_reason
        assert mine.matched_stop == theirs.matched_stop
        assert mine.logprobs == theirs.logprobs
    mine, theirs = ours.final.usage, oracle.final.usage
    assert (mine.prompt_tokens, mine.generated_tokens) == (theirs.prompt_tokens, theirs.generated_tokens)


@pytest.fixture(scope="session")
def same(mesh, aggregated) -> Callable[..., Answer]:
    """`same(prompt, **options)`: asks both meshes, asserts that nothing differs, returns the answer."""

    def ask(prompt, **options) -> Answer:
        ours, oracle = mesh.ask(prompt, **options), aggregated.ask(prompt, **options)
        assert_same(ours, oracle)
        return ours

    return ask
