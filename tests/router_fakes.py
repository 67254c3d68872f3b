"""A scripted mesh for the router's tests: prefill and decode ranks that keep the protocol and compute nothing.

Token `position` of sample `s` is `script(s)[position]`, whichever rank is asked and whatever was delivered before: what
position-keyed sampling promises. Ranks keep a ledger, remember every call, and break when told to.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

from headrace.clock import SystemClock
from headrace.config import RouterConfig
from headrace.errors import HeadraceError, StaleAttempt, StaleEpoch, Unavailable
from headrace.protocol import (
    Committed,
    FinishReason,
    FirstToken,
    FirstTokens,
    GenerateCommand,
    GenerateEvent,
    KvLayout,
    PrefillCommand,
    PrefillEvent,
    PrefillFailed,
    Reservation,
    ReserveCommand,
    SampleEnd,
    SamplingParams,
    Stage,
    TargetDescriptor,
    TokenFrame,
    TokenRecord,
    WorkerIdentity,
    WorkerInfo,
)
from services.router.checkpoint import Checkpoint
from services.router.core import Router

EOS = 256
VOCABULARY = 300
CONTEXT = 512
BLOCK = 16
LAYOUT = KvLayout(2, 8, "fp32", BLOCK, "interleaved", "f00d")


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


def checkpoint(**changes) -> Checkpoint:
    """A tiny model's facts."""
    made = Checkpoint(
        "toy", ByteTokenizer(), PlainChat(), VOCABULARY, CONTEXT, (EOS,), {"temperature": 0.7, "top_p": 0.9}
    )
    return replace(made, **changes)


def alphabet(sample: int) -> list[int]:
    """Endless enough, different for every sample, never an end token."""
    return [97 + (position + sample) % 26 for position in range(4096)]


def saying(text: str, then: int | None = EOS) -> Callable[[int], list[int]]:
    """A script of bytes, ending in `then`."""
    return lambda sample: [*text.encode(), *([] if then is None else [then]), *([120] * 2048)]


def finish_of(token: int, sampling: SamplingParams, position: int) -> FinishReason:
    """The engines' rule, as far as scripts need it."""
    if token in sampling.eos_token_ids and not sampling.ignore_eos:
        return FinishReason.EOS
    if token in sampling.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if position + 1 >= sampling.max_tokens else FinishReason.NONE


@dataclass
class Held:
    """A reservation on a fake decode rank."""

    command: ReserveCommand
    reservation: Reservation
    outputs: dict[int, int] = field(default_factory=dict)
    pending: dict[int, list[int]] = field(default_factory=dict)
    task: asyncio.Task | None = None


class FakeDecode:
    """One decode rank. `gate` holds every step while it is cleared; `error` is raised by the next calls of Reserve."""

    def __init__(self, mesh: FakeMesh, address: str, epoch: str = "d-epoch-1"):
        self.mesh = mesh
        self.identity = WorkerIdentity(address, epoch)
        self.info = WorkerInfo(self.identity, "decode", "toy", LAYOUT, 64, CONTEXT, max_batch_size=16)
        self.alive = True
        self.held: dict[tuple[str, int], Held] = {}
        self.reserved: list[ReserveCommand] = []
        self.released: list[tuple[str, int, tuple[int, ...]]] = []
        self.steps = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.reserve_gate = asyncio.Event()
        self.reserve_gate.set()
        self.errors: list[HeadraceError] = []
        self.stop_after: int | None = None  # steps until `die` is called
        self.repeats_records = False
        self.timeouts: list[float] = []
        self.skips_position: int | None = None
        self._frames: dict[str, list[TokenFrame]] = {}
        self._news = asyncio.Event()
        self._broken: HeadraceError | None = None
        self._readers = 0
        self.refuses_resume = False

    # --- the port ---

    async def reserve(self, command: ReserveCommand, timeout_s: float) -> Reservation:
        self._check_alive()
        if command.decode_epoch != self.identity.epoch:
            raise StaleEpoch("restarted")
        if not self._readers:
            raise Unavailable("no stream", reason="NO_TOKEN_STREAM")
        is_canary = command.request_id.startswith("canary")
        if not is_canary:
            self.reserved.append(command)
            self.timeouts.append(timeout_s)
            await self.reserve_gate.wait()
            if self.errors:
                raise self.errors.pop(0)
        if any(id == command.request_id and attempt >= command.attempt for id, attempt, _ in self.released):
            raise StaleAttempt("ended")
        for key in [key for key in self.held if key[0] == command.request_id]:
            self._drop(key)
        target = TargetDescriptor("fake", "s", 0, 0, 0, 0, BLOCK, 2, 64)
        reservation = Reservation(
            f"{command.request_id}/{command.attempt}", self.identity, target, (), LAYOUT.fingerprint, 0, 10.0
        )
        self.held[command.request_id, command.attempt] = Held(command, reservation)
        return reservation

    async def release(self, request_id, attempt, decode_epoch, sample_indices, timeout_s) -> None:
        self._check_alive()
        self.released.append((request_id, attempt, tuple(sample_indices)))
        for key in [key for key in self.held if key[0] == request_id and key[1] <= attempt]:
            if sample_indices:
                for sample in sample_indices:
                    self.held[key].outputs.pop(sample, None)
            else:
                self._drop(key)

    async def stream_tokens(
        self, router: WorkerIdentity, decode_epoch: str, resume_after_frame: int = 0
    ) -> AsyncIterator[TokenFrame]:
        self._check_alive()
        if decode_epoch != self.identity.epoch:
            raise StaleEpoch("restarted")
        if self.refuses_resume and resume_after_frame:
            raise Unavailable("forgotten", reason="STREAM_LOST")
        if not resume_after_frame:
            self._frames[router.epoch] = []
        frames = self._frames[router.epoch]
        self._broken = None
        self._readers += 1
        self.push_frame(router.epoch)
        try:
            cursor = resume_after_frame
            while True:
                if self._broken is not None:
                    raise self._broken
                if cursor < len(frames):
                    yield frames[cursor]
                    cursor += 1
                else:
                    news = self._news
                    await news.wait()
        finally:
            self._readers -= 1

    # --- what tests do to it ---

    def push_frame(
        self, router_epoch: str, records: Sequence[TokenRecord] = (), ends: Sequence[SampleEnd] = ()
    ) -> None:
        frames = self._frames[router_epoch]
        frames.append(TokenFrame(len(frames) + 1, tuple(records), tuple(ends)))
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def break_stream(self, error: HeadraceError | None = None) -> None:
        self._broken = error or Unavailable("connection reset")
        self._tell()

    def die(self) -> None:
        """SIGKILL."""
        self.alive = False
        for key in list(self.held):
            self._drop(key)
        self.break_stream()

    def _drop(self, key: tuple[str, int]) -> None:
        held = self.held.pop(key, None)
        if held is not None and held.task is not None:
            held.task.cancel()

    def _check_alive(self) -> None:
        if not self.alive:
            raise Unavailable(f"{self.identity.address}: connection refused")

    # --- what prefill does to it ---

    def commit(self, reservation: Reservation, outputs: dict[int, int]) -> None:
        """`outputs`: tokens so far by sample that goes on."""
        self._check_alive()
        request_id, attempt = reservation.reservation_id.rsplit("/", 1)
        held = self.held.get((request_id, int(attempt)))
        if held is None:
            raise StaleAttempt("reservation ended")
        held.outputs = dict(outputs)
        held.task = asyncio.ensure_future(self._decode(held))

    async def _decode(self, held: Held) -> None:
        command = held.command
        while held.outputs:
            if not command.request_id.startswith("canary"):
                await self.gate.wait()
                self.steps += 1
                if self.stop_after is not None and self.steps > self.stop_after:
                    self.die()
                    return
            await asyncio.sleep(0)
            records, ends = [], []
            for sample in sorted(held.outputs):
                self._step(held, sample, records, ends)
            if records or ends:
                self.push_frame(command.router.epoch, records * (2 if self.repeats_records else 1), ends)
        self.held.pop((command.request_id, command.attempt), None)

    def _step(self, held: Held, sample: int, records: list, ends: list) -> None:
        command, position = held.command, held.outputs[sample]
        token = self.mesh.script(sample)[position]
        held.outputs[sample] = position + 1
        pending = held.pending.setdefault(sample, [])
        pending.append(token)
        reason = finish_of(token, command.sampling, position)
        if len(pending) >= command.stream_interval or reason:
            first = position + 1 - len(pending)
            wants = command.sampling.logprobs is not None
            logprobs = tuple(-float(first + i) for i in range(len(pending))) if wants else None
            if self.skips_position is None or not first <= self.skips_position < first + len(pending):
                records.append(TokenRecord(command.handle, sample, first, tuple(pending), logprobs))
            else:
                self.skips_position = None
            pending.clear()
        if reason:
            del held.outputs[sample]
            stages = () if held.outputs else (Stage("decode.queue", 0.0, 0.001), Stage("decode.generate", 0.001, 0.01))
            ends.append(SampleEnd(command.handle, sample, reason, "", stages))


class FakePrefill:
    """One prefill rank. `faults` are consumed one per attempt: `before`, `after_first`, or an error to raise at once."""

    def __init__(self, mesh: FakeMesh, address: str, epoch: str = "p-epoch-1"):
        self.mesh = mesh
        self.identity = WorkerIdentity(address, epoch)
        self.info = WorkerInfo(self.identity, "prefill", "toy", LAYOUT, 64, CONTEXT, max_batch_tokens=4096)
        self.alive = True
        self.commands: list[PrefillCommand] = []
        self.faults: list[str | HeadraceError] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.commit_gate = asyncio.Event()
        self.commit_gate.set()
        self.running = 0
        self.cancelled = 0
        self.commits_early = False
        self.canaries = 0
        self.timeouts: list[float] = []

    async def prefill(self, command: PrefillCommand, timeout_s: float) -> AsyncIterator[PrefillEvent]:
        if not self.alive:
            raise Unavailable(f"{self.identity.address}: connection refused")
        if command.prefill_epoch != self.identity.epoch:
            raise StaleEpoch("restarted")
        self.timeouts.append(timeout_s)
        self.running += 1
        try:
            async for event in self._events(command):
                yield event
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def _events(self, command: PrefillCommand) -> AsyncIterator[PrefillEvent]:
        fault: str | HeadraceError = ""
        if command.request_id.startswith("canary"):
            self.canaries += 1
        else:
            self.commands.append(command)
            await self.gate.wait()
            fault = self.faults.pop(0) if self.faults else ""
        if isinstance(fault, HeadraceError):
            raise fault
        if fault in ("INTERNAL", "DEADLINE_EXCEEDED", "CANCELLED"):
            yield PrefillFailed(fault, "the rank's own trouble", False)
            return
        if fault == "before":
            yield PrefillFailed("TRANSFER_FAILED", "no route", True)
            return
        first = self._first_tokens(command)
        going = {token.sample_index: token.position + 1 for token in first if not token.finish_reason}
        if self.commits_early and command.reservation is not None and going:
            self.mesh.decode_at(command.reservation.decode).commit(command.reservation, going)
            for _ in range(20):
                await asyncio.sleep(0)
        yield FirstTokens(first, cached_tokens=0, computed_tokens=len(command.prompt_token_ids))
        if fault == "after_first":
            raise Unavailable("connection reset")
        if fault == "mismatch":
            yield PrefillFailed("MANIFEST_MISMATCH", "layer 1: 3 rows of 4", True)
            return
        if not command.request_id.startswith("canary"):
            await self.commit_gate.wait()
        if command.reservation is not None and going and not self.commits_early:
            try:
                self.mesh.decode_at(command.reservation.decode).commit(command.reservation, going)
            except HeadraceError as error:
                yield PrefillFailed(error.reason, error.message, error.retryable)
                return
        stages = (Stage("prefill.forward", 0.0, 0.01, 4), Stage("decode.commit", 0.01, 0.002))
        yield Committed(128, stages)

    def _first_tokens(self, command: PrefillCommand) -> tuple[FirstToken, ...]:
        if command.sampling.max_tokens == 0:
            return ()
        tokens = []
        for sample in command.sample_indices:
            position = len(command.delivered.get(sample, ()))
            assert list(command.delivered.get(sample, ())) == self.mesh.script(sample)[:position]
            token = self.mesh.script(sample)[position]
            reason = finish_of(token, command.sampling, position)
            tokens.append(FirstToken(sample, position, token, -float(position), (), reason))
        return tuple(tokens)


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

    def prefill(self, address: str) -> FakePrefillPort:
        return FakePrefillPort(self, address)

    def decode(self, address: str) -> FakeDecodePort:
        return FakeDecodePort(self, address)

    async def probe(self, role: str, address: str, timeout_s: float) -> WorkerInfo:
        worker = self.at(role, address)
        if not worker.alive:
            raise Unavailable(f"{address}: connection refused")
        return worker.info

    async def forget(self, address: str) -> None:
        pass

    def at(self, role: str, address: str):
        return next(x for x in (self.prefills if role == "prefill" else self.decodes) if x.identity.address == address)

    def decode_at(self, identity: WorkerIdentity) -> FakeDecode:
        return next(x for x in self.decodes if x.identity == identity)

    def restart(self, role: str, index: int, epoch: str) -> FakePrefill | FakeDecode:
        """A new process at the same address. The registry does not know yet: call `relist`."""
        workers = self.prefills if role == "prefill" else self.decodes
        kind = FakePrefill if role == "prefill" else FakeDecode
        workers[index] = kind(self, workers[index].identity.address, epoch)  # type: ignore[call-overload]
        return workers[index]

    @property
    def held(self) -> int:
        """Reservations that some decode rank still holds, and prefills that still run."""
        return sum(len(x.held) for x in self.decodes) + sum(x.running for x in self.prefills)


class FakePrefillPort:
    """A channel to an address: whoever answers there now."""

    def __init__(self, mesh: FakeMesh, address: str):
        self._mesh, self._address = mesh, address

    async def prefill(self, command: PrefillCommand, timeout_s: float) -> AsyncIterator[PrefillEvent]:
        async with contextlib.aclosing(self._mesh.at("prefill", self._address).prefill(command, timeout_s)) as events:
            async for event in events:
                yield event


class FakeDecodePort:
    """A channel to an address: whoever answers there now."""

    def __init__(self, mesh: FakeMesh, address: str):
        self._mesh, self._address = mesh, address

    async def reserve(self, command: ReserveCommand, timeout_s: float) -> Reservation:
        return await self._mesh.at("decode", self._address).reserve(command, timeout_s)

    async def release(self, *arguments) -> None:
        await self._mesh.at("decode", self._address).release(*arguments)

    async def stream_tokens(self, *arguments) -> AsyncIterator[TokenFrame]:
        async with contextlib.aclosing(self._mesh.at("decode", self._address).stream_tokens(*arguments)) as frames:
            async for frame in frames:
                yield frame


# --- the router on it ------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def open_router(mesh: FakeMesh, *, ready: bool = True, clock=None, model=None, prefixes=None, **settings):
    """A router on a fake mesh; waits until a canary has gone through unless told not to."""
    async with Router.open(
        RouterConfig(**settings),
        model or checkpoint(),
        WorkerIdentity("router:1", "r-epoch-1"),
        membership=mesh,
        dialer=mesh,
        clock=clock or SystemClock(),
        prefixes=prefixes,
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


async def collect(router: Router, request: GenerateCommand, time_left_s: float = 10.0) -> Collected:
    """The whole answer to one request."""
    answer = Collected()
    async with asyncio.timeout(10):
        async for event in router.generate(request, time_left_s):
            answer.add(event)
    assert [event.final is not None for event in answer.events] == [False] * (len(answer.events) - 1) + [True]
    return answer


async def wait_until(condition: Callable[[], object], what: str = "a condition", seconds: float = 3.0) -> None:
    """Lets the loop run until `condition()` holds."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)
