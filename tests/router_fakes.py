"""A scripted mesh for the router's tests, and a router on it. The ranks stand in `router_ranks.py`.

Token `position` of sample `s` is `script(s)[position]`, whichever rank is asked and whatever was delivered before: what
position-keyed sampling promises.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from router_ranks import BLOCK, CONTEXT, EOS, LAYOUT, VOCABULARY, FakeDecode, FakeLink, FakePrefill

from headrace.clock import SystemClock
from headrace.config import RouterConfig
from headrace.errors import StaleEpoch
from headrace.protocol.common import FinishReason, WorkerIdentity
from headrace.protocol.inference import GenerateCommand, GenerateEvent
from services.router.checkpoint import CheckpointInfo
from services.router.core import Router

__all__ = ["BLOCK", "CONTEXT", "EOS", "LAYOUT", "VOCABULARY", "FakeDecode", "FakeLink", "FakePrefill"]


class ByteTokenizer:
    """Ids 0..255 are bytes, 256 is the end token, 257 and up are words of several bytes."""

    longest_token_bytes = 8
    eos_ids = (EOS,)
    words = {257: b"water", 258: "\U0001f468\u200d".encode(), 259: "\U0001f469".encode(), 260: "é".encode()}

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else self.words.get(token_id, b"")


class PlainChat:
    """Turns joined by newlines."""

    available = True

    def render(self, messages: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return "\n".join(message["content"] for message in messages)


def checkpoint(**changes) -> CheckpointInfo:
    """A tiny model's facts."""
    made = CheckpointInfo(
        "toy", ByteTokenizer(), PlainChat(), VOCABULARY, CONTEXT, (EOS,), {"temperature": 0.7, "top_p": 0.9}
    )
    return replace(made, **changes)


def alphabet(sample: int) -> list[int]:
    """Endless enough, different for every sample, never an end token."""
    return [97 + (position + sample) % 26 for position in range(4096)]


def saying(text: str, then: int | None = EOS) -> Callable[[int], list[int]]:
    """A script of bytes, ending in `then`."""
    return lambda sample: [*text.encode(), *([] if then is None else [then]), *([120] * 2048)]


@dataclass(frozen=True)
class FakeMember:
    """A member of the fake registry."""

    identity: WorkerIdentity


class FakeMesh:
    """Workers, the registry that lists them, and the dialer that reaches them. Names are claimed here, too."""

    def __init__(self, prefills: int = 1, decodes: int = 1, script: Callable[[int], list[int]] = alphabet):
        self.script = script
        self.prefills = [FakePrefill(self, f"p{index}:1") for index in range(prefills)]
        self.decodes = [FakeDecode(self, f"d{index}:1") for index in range(decodes)]
        self.version = 0
        self.claimed: set[str] = set()
        self.reachable = True
        self.listed: dict[str, list[WorkerIdentity]] = {
            "prefill": [x.identity for x in self.prefills],
            "decode": [x.identity for x in self.decodes],
        }
        self._change = asyncio.Event()

    # --- registry ---

    def members(self, role: str) -> tuple[FakeMember, ...]:
        return tuple(FakeMember(identity) for identity in self.listed.get(role, ()))

    async def wait_change(self, timeout_s: float, since: int | None = None) -> bool:
        if since is not None and since != self.version:
            return True
        self._change.clear()
        await self._change.wait()
        return True

    def relist(self) -> None:
        """The registry notices who is there."""
        self.listed["prefill"] = [x.identity for x in self.prefills if x.alive]
        self.listed["decode"] = [x.identity for x in self.decodes if x.alive]
        self.changed()

    def changed(self) -> None:
        """Tells whoever watches."""
        self.version += 1
        self._change.set()

    async def claim(self, name: str, ttl_s: float) -> bool:
        if name in self.claimed:
            return False
        self.claimed.add(name)
        return True

    async def unclaim(self, name: str) -> None:
        self.claimed.discard(name)

    # --- dialer ---

    def open_prefill_link(self, rank: WorkerIdentity, handler) -> FakeLink:
        return FakeLink(self, "prefill", rank, handler)

    def open_decode_link(self, rank: WorkerIdentity, handler) -> FakeLink:
        return FakeLink(self, "decode", rank, handler)

    def open_token_link(self, rank: WorkerIdentity, handler) -> FakeLink:
        return FakeLink(self, "tokens", rank, handler)

    # --- what tests do ---

    def find(self, role: str, address: str):
        """Who is at an address now."""
        ranks = self.prefills if role == "prefill" else self.decodes
        return next((x for x in ranks if x.identity.address == address), None)

    def restart(self, role: str, index: int, epoch: str):
        """The process at an address ends, links to it are refused, and a new one serves there."""
        ranks = self.prefills if role == "prefill" else self.decodes
        old = ranks[index]
        kind = FakePrefill if role == "prefill" else FakeDecode
        ranks[index] = new = kind(self, old.identity.address, epoch)  # type: ignore[call-overload]
        old.alive = False
        for link in list(old.links):
            link.lose(StaleEpoch("another process is there"))
        return new

    @property
    def held(self) -> int:
        """Reservations and prefills that have not ended, over all ranks."""
        return sum(len(x.held) for x in self.decodes) + sum(x.running for x in self.prefills)


# --- the router on it ------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def open_router(mesh: FakeMesh, *, ready: bool = True, clock=None, model=None, **settings):
    """A router on a fake mesh; waits until a canary has gone through unless told not to."""
    async with Router.open(
        RouterConfig(**settings),
        model or checkpoint(),
        membership=mesh,
        dialer=mesh,
        clock=clock or SystemClock(),
        claims=mesh,
    ) as router:
        if ready:
            async with asyncio.timeout(5):
                await router.wait_ready(True)
        yield router


def command(prompt: str | tuple[int, ...] = "hello", *, request_id: str = "", **options) -> GenerateCommand:
    """A request; options that are not sampling fields are the command's own."""
    own = {
        name: options.pop(name)
        for name in ("stream_interval", "final_only", "cache_salt", "priority")
        if name in options
    }
    form = {"text": prompt} if isinstance(prompt, str) else {"token_ids": prompt}
    return GenerateCommand(**form, request_id=request_id, sampling=options, **own)  # type: ignore[arg-type]


@dataclass
class Collected:
    """A whole answer by sample."""

    events: list[GenerateEvent] = field(default_factory=list)
    text: dict[int, str] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    matched: dict[int, str] = field(default_factory=dict)

    @property
    def final(self):
        """The summary of the last message."""
        return self.events[-1].final

    def add(self, event: GenerateEvent) -> None:
        """One message; positions must follow one another."""
        self.events.append(event)
        for delta in event.deltas:
            ids = self.ids.setdefault(delta.sample_index, [])
            assert delta.first_position == len(ids), "positions must have no gap and no overlap"
            ids.extend(delta.token_ids)
            self.text[delta.sample_index] = self.text.get(delta.sample_index, "") + delta.text
            self.logprobs.setdefault(delta.sample_index, []).extend(x.logprob for x in delta.logprobs)
            if delta.finish_reason:
                assert delta.sample_index not in self.reasons, "a sample ends once"
                self.reasons[delta.sample_index] = delta.finish_reason
                self.matched[delta.sample_index] = delta.matched_stop


async def collect(
    router: Router, request: GenerateCommand, time_left_s: float = 10.0, trace_parent: str = ""
) -> Collected:
    """The whole answer to one request."""
    answer = Collected()
    async with asyncio.timeout(10):
        async for event in router.generate(request, time_left_s, trace_parent=trace_parent):
            answer.add(event)
    assert [event.final is not None for event in answer.events] == [False] * (len(answer.events) - 1) + [True]
    return answer


async def wait_until(condition: Callable[[], object], what: str = "a condition", seconds: float = 3.0) -> None:
    """Lets the loop run until `condition()` holds."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    """Runs a scenario within a bound."""

    async def bounded():
        async with asyncio.timeout(20):
            await scenario()

    asyncio.run(bounded())


async def assert_all_is_free(mesh: FakeMesh, router: Router) -> None:
    """Both legs are gone and the router holds nothing."""
    await wait_until(lambda: mesh.held == 0, "legs to end")
    await wait_until(lambda: router.ledger().open_handles == 0 and router.ledger().running_requests == 0)
    assert router.ledger().queued_tokens == 0
    assert all(view.in_flight == 0 and view.queued_tokens == 0 for view in router.workers())
