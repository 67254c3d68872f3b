"""Scripted ranks and the links to them: they keep the protocol and compute nothing.

Ranks keep a ledger, remember every command, and break when told to. Links deliver in order, each item in a turn of the loop of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from headrace.clock import Deadline
from headrace.errors import (
    Cancelled,
    DeadlineExceeded,
    HeadraceError,
    InternalError,
    ManifestMismatch,
    StaleAttempt,
    StaleEpoch,
    TransferError,
    Unavailable,
)
from headrace.protocol.common import (
    FinishReason,
    KvLayout,
    KvRegion,
    NumberFormat,
    RopeOrder,
    SamplingParams,
    Stage,
    WorkerIdentity,
    WorkerInfo,
    WorkerProgress,
    WorkerRole,
)
from headrace.protocol.decode import (
    ReleaseCommand,
    Reservation,
    ReserveCommand,
    SampleEnd,
    TokenFrame,
    TokenRecord,
)
from headrace.protocol.link import Done
from headrace.protocol.prefill import (
    CancelPrefillCommand,
    Committed,
    FirstToken,
    FirstTokens,
    HeldPrefixes,
    PrefillCommand,
)

EOS = 256
VOCABULARY = 300
CONTEXT = 512
BLOCK = 16
LAYOUT = KvLayout((KvRegion("latent", 2, 8, NumberFormat.FP32),), BLOCK, RopeOrder.INTERLEAVED, "f00d")


def finish_of(token: int, sampling: SamplingParams, position: int) -> FinishReason:
    """The engines' rule, as far as scripts need it."""
    if token in sampling.eos_token_ids and not sampling.ignore_eos:
        return FinishReason.EOS
    if token in sampling.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if position + 1 >= sampling.max_tokens else FinishReason.NONE


class Mesh(Protocol):
    """router_fakes.FakeMesh."""

    script: Callable[[int], list[int]]

    def find(self, role: str, address: str) -> Any: ...


# --- links -------------------------------------------------------------------------------------------------------------


class FakeLink:
    """A link's end at the router, and its keeper. What it sends reaches `rank.on_command`; `push` and `reply` come back."""

    def __init__(self, mesh: Mesh, kind: str, identity: WorkerIdentity, handler):
        self.mesh, self.kind, self.identity, self.handler = mesh, kind, identity, handler
        self.link = self
        self.router = "router"
        self.info: WorkerInfo | None = None
        self.progress: WorkerProgress | None = None
        self.is_open = self.is_lost = False
        self.acknowledged_through = 0
        self.rank: FakePrefill | FakeDecode | None = None
        self.sent: list[object] = []
        self._asked: dict[int, Callable[[object], None]] = {}
        self._out: list[Callable[[], None]] = []  # to the rank, while broken
        self._in: list[Callable[[], None]] = []  # from the rank, while broken
        self._over = asyncio.Event()
        self._frames = 0

    async def run(self) -> None:
        rank = self.mesh.find("prefill" if self.kind == "prefill" else "decode", self.identity.address)
        if rank is None or not rank.alive:
            self.lose(Unavailable(f"{self.identity.address}: connection refused"))
        elif self.identity.epoch not in ("", rank.identity.epoch):
            self.lose(StaleEpoch("another process is there"))
        else:
            self.rank = rank
            self.info, self.progress = rank.info, rank.progress
            rank.links.append(self)
            self.is_open = True
            self.handler.on_open(self)
            rank.on_link(self)
        await self._over.wait()

    def send(self, body, *, deadline: Deadline | None = None, on_answer=None) -> int:
        if self.is_lost:
            raise Unavailable("the link is lost", reason="LINK_LOST")
        self.sent.append(body)
        number = len(self.sent)
        if on_answer is not None:
            self._asked[number] = on_answer
        self._soon(self._out, lambda: self._deliver(number, body, deadline))
        return number

    def _deliver(self, number: int, body: object, deadline: Deadline | None) -> None:
        self.acknowledged_through = number
        assert self.rank is not None
        if self.rank.alive:
            self.rank.on_command(self, number, body, deadline.left_s() if deadline is not None else None)

    def _soon(self, waiting: list, call: Callable[[], None]) -> None:
        if self.is_open and not waiting:
            asyncio.get_running_loop().call_soon(lambda: self._now(waiting, call))
        else:
            waiting.append(call)

    def _now(self, waiting: list, call: Callable[[], None]) -> None:
        if self.is_lost:
            return
        if self.is_open and not waiting:
            call()
        else:
            waiting.append(call)

    # --- the rank's end ---

    def reply(self, number: int, body: object) -> None:
        self._soon(self._in, lambda: self._answer(number, body))

    def _answer(self, number: int, body: object) -> None:
        on_answer = self._asked.get(number) if isinstance(body, FirstTokens) else self._asked.pop(number, None)
        if on_answer is not None:
            on_answer(body)

    def push(self, body: object) -> None:
        self._frames += 1
        number = self._frames
        self._soon(self._in, lambda: self.handler.on_item(self, number, body))

    def beat(self, progress: WorkerProgress) -> None:
        self.progress = progress
        if self.is_open:
            self.handler.on_progress(self)

    # --- what happens to it ---

    def break_(self) -> None:
        self.is_open = False
        self.handler.on_broken(self)

    def resume(self) -> None:
        self.is_open = True
        self.handler.on_open(self)
        for waiting in (self._out, self._in):
            calls = list(waiting)
            waiting.clear()
            for call in calls:
                self._soon(waiting, call)

    def lose(self, error: HeadraceError) -> None:
        if self.is_lost:
            return
        self.is_lost, self.is_open = True, False
        asked, self._asked = self._asked, {}
        for on_answer in list(asked.values()):
            on_answer(Unavailable("the link is lost", reason="LINK_LOST"))
        self.handler.on_lost(self, error)
        if self.rank is not None:
            self.rank.links.remove(self)
            self.rank.on_link_lost(self)
        self._over.set()


@dataclass
class Held:
    """A reservation on a fake decode rank."""

    command: ReserveCommand
    link: FakeLink
    outputs: dict[int, int] = field(default_factory=dict)
    pending: dict[int, list[int]] = field(default_factory=dict)
    task: asyncio.Task | None = None


class FakeRank:
    """What both kinds share: an identity, links, beats, an end."""

    def __init__(self, mesh: Mesh, role: WorkerRole, address: str, epoch: str, **limits: int):
        self.mesh = mesh
        self.identity = WorkerIdentity(address, epoch)
        self.info = WorkerInfo(self.identity, role, "toy", LAYOUT, 64, CONTEXT, **limits)
        self.progress: WorkerProgress | None = WorkerProgress(serving=True, available_blocks=64)
        self.alive = True
        self.links: list[FakeLink] = []

    def on_link(self, link: FakeLink) -> None: ...

    def beat(self, **changes) -> None:
        """The same on every link."""
        self.progress = replace(self.progress or WorkerProgress(serving=True), **changes)
        for link in list(self.links):
            link.beat(self.progress)

    def break_links(self) -> None:
        for link in list(self.links):
            link.break_()

    def resume_links(self) -> None:
        for link in list(self.links):
            link.resume()

    def lose_links(self) -> None:
        """The routers have given up waiting for them to come back."""
        for link in list(self.links):
            link.lose(Unavailable("no word for 9 s", reason="LINK_LOST"))

    def die(self) -> None:
        """SIGKILL, and so long after it that links are lost."""
        self.alive = False
        self.lose_links()


class FakeDecode(FakeRank):
    """One decode rank. `gate` holds every step while it is cleared; `errors` answer the next Reserves."""

    def __init__(self, mesh: Mesh, address: str, epoch: str = "d-epoch-1"):
        super().__init__(mesh, WorkerRole.DECODE, address, epoch, max_batch_size=16)
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
        self._tasks: set[asyncio.Task] = set()

    # --- commands ---

    def on_command(self, link: FakeLink, number: int, body: object, left_s: float | None) -> None:
        if isinstance(body, ReserveCommand):
            assert left_s is not None
            self._keep(self._reserve(link, number, body, left_s))
        else:
            assert isinstance(body, ReleaseCommand)
            self._release(body)
            link.reply(number, Done())

    def _keep(self, work) -> asyncio.Task:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _reserve(self, link: FakeLink, number: int, command: ReserveCommand, left_s: float) -> None:
        try:
            link.reply(number, await self._room(link, command, left_s))
        except HeadraceError as error:
            link.reply(number, error)

    async def _room(self, link: FakeLink, command: ReserveCommand, left_s: float) -> Reservation:
        if not any(x.kind == "tokens" and x.router == link.router and x.is_open for x in self.links):
            raise Unavailable("no token link", reason="NO_TOKEN_LINK")
        if not command.request_id.startswith("canary"):
            self.reserved.append(command)
            self.timeouts.append(left_s)
            await self.reserve_gate.wait()
            if self.errors:
                raise self.errors.pop(0)
        if any(id == command.request_id and attempt >= command.attempt for id, attempt, _ in self.released):
            raise StaleAttempt("ended")
        for key in [key for key in self.held if key[0] == command.request_id]:
            self._drop(key)
        self.held[command.request_id, command.attempt] = Held(command, link)
        promise = f"{self.identity.address} {self.identity.epoch} {command.attempt} {command.request_id}"
        return Reservation(promise.encode(), b"", 10.0)

    def _release(self, command: ReleaseCommand) -> None:
        request_id, attempt, samples = command.request_id, command.attempt, tuple(command.sample_indices)
        self.released.append((request_id, attempt, samples))
        for key in [key for key in self.held if key[0] == request_id and key[1] <= attempt]:
            if samples:
                for sample in samples:
                    self.held[key].outputs.pop(sample, None)
            else:
                self._drop(key)

    def on_link_lost(self, link: FakeLink) -> None:
        """What came from its router ends."""
        for key, held in list(self.held.items()):
            if held.link.router == link.router:
                self._drop(key)

    def _drop(self, key: tuple[str, int]) -> None:
        held = self.held.pop(key, None)
        if held is not None and held.task is not None:
            held.task.cancel()

    # --- tokens ---

    def push_frame(self, router: str, records: Sequence[TokenRecord] = (), ends: Sequence[SampleEnd] = ()) -> None:
        for link in self.links:
            if link.kind == "tokens" and link.router == router:
                link.push(TokenFrame(tuple(records), tuple(ends)))

    def commit(self, request_id: str, attempt: int, outputs: dict[int, int]) -> None:
        """`outputs`: tokens so far by sample that goes on."""
        held = self.held.get((request_id, attempt))
        if held is None:
            raise StaleAttempt("reservation ended")
        held.outputs = dict(outputs)
        held.task = self._keep(self._decode(held))

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
                self.push_frame(held.link.router, records * (2 if self.repeats_records else 1), ends)
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
            ends.append(SampleEnd(command.handle, sample, reason, "", stages, position + 1))


FAILURES = {
    "before": TransferError("no route"),
    "mismatch": ManifestMismatch("layer 1: 3 rows of 4"),
    "after_first": Unavailable("connection reset"),
    "INTERNAL": InternalError("the rank's own trouble"),
    "DEADLINE_EXCEEDED": DeadlineExceeded("the rank's own trouble"),
    "CANCELLED": Cancelled("the rank's own trouble"),
}


class FakePrefill(FakeRank):
    """One prefill rank. `faults` are consumed one per attempt: a key of FAILURES, or an error to answer with at once."""

    def __init__(self, mesh: Mesh, address: str, epoch: str = "p-epoch-1"):
        super().__init__(mesh, WorkerRole.PREFILL, address, epoch, max_batch_tokens=4096)
        self.commands: list[PrefillCommand] = []
        self.faults: list[str | Exception] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.commit_gate = asyncio.Event()
        self.commit_gate.set()
        self.cancelled = 0
        self.commits_early = False
        self.canaries = 0
        self.timeouts: list[float] = []
        self.held_keys: list[bytes] = []
        self._jobs: dict[tuple[str, int], tuple[FakeLink, int, asyncio.Task]] = {}

    @property
    def running(self) -> int:
        """Attempts that have not ended."""
        return len(self._jobs)

    def on_link(self, link: FakeLink) -> None:
        link.push(HeldPrefixes(True, tuple(self.held_keys), ()))

    def hold(self, keys: Sequence[bytes], gone: Sequence[bytes] = ()) -> None:
        """Its pool changes."""
        self.held_keys = [key for key in self.held_keys if key not in gone] + list(keys)
        for link in self.links:
            link.push(HeldPrefixes(False, tuple(keys), tuple(gone)))

    def on_command(self, link: FakeLink, number: int, body: object, left_s: float | None) -> None:
        if isinstance(body, PrefillCommand):
            assert left_s is not None
            self.timeouts.append(left_s)
            key = (body.request_id, body.attempt)
            self._jobs[key] = (link, number, asyncio.ensure_future(self._run(link, number, body)))
            return
        assert isinstance(body, CancelPrefillCommand)
        if job := self._jobs.pop((body.request_id, body.attempt), None):
            job[2].cancel()
            self.cancelled += 1
            link.reply(job[1], Cancelled("the router needs no more of it"))

    def on_link_lost(self, link: FakeLink) -> None:
        """What came over a lost link ends."""
        for key, (owner, _, task) in list(self._jobs.items()):
            if owner is link:
                task.cancel()
                del self._jobs[key]

    async def _run(self, link: FakeLink, number: int, command: PrefillCommand) -> None:
        try:
            async for event in self._events(command):
                link.reply(number, event)
        except HeadraceError as error:
            link.reply(number, error)
        self._jobs.pop((command.request_id, command.attempt), None)

    async def _events(self, command: PrefillCommand) -> AsyncIterator[FirstTokens | Committed]:
        fault: str | Exception = ""
        if command.request_id.startswith("canary"):
            self.canaries += 1
        else:
            self.commands.append(command)
            await self.gate.wait()
            fault = self.faults.pop(0) if self.faults else ""
        if isinstance(fault, Exception):
            raise fault
        if fault not in ("", "after_first", "mismatch"):
            raise FAILURES[fault]
        first = self._first_tokens(command)
        going = {token.sample_index: token.position + 1 for token in first if not token.finish_reason}
        if self.commits_early and command.reservation is not None and going:
            self._commit(command, going)
            for _ in range(20):
                await asyncio.sleep(0)
        yield FirstTokens(first, cached_tokens=0, computed_tokens=len(command.prompt_token_ids))
        if fault:
            raise FAILURES[fault]
        if not command.request_id.startswith("canary"):
            await self.commit_gate.wait()
        if command.reservation is not None and going and not self.commits_early:
            self._commit(command, going)
        stages = (Stage("prefill.forward", 0.0, 0.01, 4), Stage("decode.commit", 0.01, 0.002))
        yield Committed(128, stages)

    def _commit(self, command: PrefillCommand, going: dict[int, int]) -> None:
        assert command.reservation is not None
        address, epoch, attempt, request_id = command.reservation.promise.decode().split(" ", 3)
        decode = self.mesh.find("decode", address)
        if decode is None or not decode.alive:
            raise Unavailable(f"{address}: connection refused", reason="DECODE_UNANSWERED")
        if decode.identity.epoch != epoch:
            raise StaleEpoch("the decode rank has restarted")
        decode.commit(request_id, int(attempt), going)

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
