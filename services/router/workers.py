"""The router's view of its workers: who is there, who is ready, who was sent what.

A worker is one epoch at one address. It is probed (GetInfo and health), paired with workers of the other role whose KV layout
is the same, and ready once a canary token has gone through it. A transport error or a worker's fault makes it suspect: it
gets nothing new until it has answered a probe, and after BREAKER_FAULTS in a row until a canary has gone through again.
Callers' mistakes and overload count for nothing here.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from headrace.clock import Clock
from headrace.errors import HeadraceError, LayoutMismatch, StaleEpoch, Unavailable
from headrace.observe import logs, telemetry
from headrace.protocol import (
    PrefixHolder,
    WorkerIdentity,
    WorkerInfo,
    WorkerView,
)
from services.router import policy
from services.router.interfaces import DecodePort, Dialer, Membership, PrefillPort
from services.router.limits import Capacity
from services.router.tokens import TokenStream

log = logs.get(__name__)

BREAKER_FAULTS = 3
PROBE_TIMEOUT_S = 1.0
CANARY_TIMEOUT_S = 10.0
TICK_S = 0.1
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 1.0
STREAM_RESUME_S = 2.0


class State(enum.Enum):
    """Where a worker is; only READY ones get requests."""

    NEW = "not probed yet"
    PROBED = "no canary has gone through yet"
    READY = ""
    SUSPECT = "an error was seen; not probed since"
    LEAVING = "it announces itself no longer"
    LOST = "its process has ended"


Port = TypeVar("Port")


@dataclass(eq=False)
class Worker(Generic[Port]):
    """One epoch of one rank. `queued_tokens`, `booked_blocks` and `in_flight` count this router's requests only."""

    role: str
    identity: WorkerIdentity
    client: Port
    info: WorkerInfo | None = None
    state: State = State.NEW
    why: str = ""
    in_flight: int = 0
    queued_tokens: int = 0
    booked_blocks: int = 0
    faults: int = 0
    checking: bool = False
    check_at: float = 0.0
    backoff_s: float = FIRST_BACKOFF_S

    @property
    def is_ready(self) -> bool:
        """Whether it gets requests."""
        return self.state is State.READY

    @property
    def fingerprint(self) -> str:
        """Of its KV layout; empty before the first probe."""
        return self.info.layout.fingerprint if self.info is not None else ""

    def view(self) -> WorkerView | None:
        """For operators; None before the first probe."""
        if self.info is None:
            return None
        why = "" if self.is_ready else self.why or self.state.value
        return WorkerView(self.info, self.is_ready, self.in_flight, self.queued_tokens, why)


PrefillWorker = Worker[PrefillPort]


@dataclass(eq=False)
class DecodeWorker(Worker[DecodePort]):
    """A decode rank and the token stream that this router keeps open to it."""

    stream: TokenStream = field(default=None)  # type: ignore[assignment]
    stream_task: asyncio.Task[None] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it gets requests: not while its stream is being resumed."""
        return self.state is State.READY and self.stream.is_open


@dataclass(eq=False)
class Place:
    """Where an attempt runs, with what is booked there. `release` gives everything back, and may be called twice."""

    prefill: PrefillWorker
    decode: DecodeWorker | None
    num_tokens: int
    num_blocks: int
    on_room: Callable[[], None]
    _is_queued: bool = True
    _is_booked: bool = True

    def book(self) -> Place:
        """Counts it."""
        self.prefill.in_flight += 1
        self.prefill.queued_tokens += self.num_tokens
        if self.decode is not None:
            self.decode.in_flight += 1
            self.decode.booked_blocks += self.num_blocks
        return self

    def prefilled(self) -> None:
        """The prompt no longer waits on the prefill rank."""
        if self._is_queued:
            self._is_queued = False
            self.prefill.queued_tokens -= self.num_tokens
            self.on_room()

    def release(self) -> None:
        """The attempt is over."""
        self.prefilled()
        if self._is_booked:
            self._is_booked = False
            self.prefill.in_flight -= 1
            if self.decode is not None:
                self.decode.in_flight -= 1
                self.decode.booked_blocks -= self.num_blocks
            self.on_room()


@dataclass(frozen=True)
class Need:
    """What an attempt needs: prompt tokens to compute, prompt plus output, decode blocks by block size, samples."""

    num_tokens: int
    total_tokens: int
    blocks: Callable[[int], int]
    decode: bool


class Workers:
    """All known workers. `run` is the task that keeps them known, probed and proven."""

    def __init__(
        self,
        membership: Membership,
        dialer: Dialer,
        router: WorkerIdentity,
        clock: Clock,
        canary: Callable[[PrefillWorker, DecodeWorker], Awaitable[None]] | None,
        on_room: Callable[[], None],
    ):
        self._membership, self._dialer, self._router, self._clock = membership, dialer, router, clock
        self._canary, self._on_room = canary, on_room
        # By role as well: an aggregated rank is both under one identity.
        self._workers: dict[tuple[str, WorkerIdentity], Worker[Any]] = {}
        self._dead: dict[tuple[str, WorkerIdentity], None] = {}
        self._mismatched: set[tuple[WorkerIdentity, WorkerIdentity]] = set()
        self._wake = asyncio.Event()
        self.has_pair = asyncio.Event()
        """Set while some ready prefill rank and some ready decode rank share a layout."""
        self.had_pair = False
        """Whether there has ever been one."""
        self.no_pair = asyncio.Event()
        self.no_pair.set()

    # --- choosing --------------------------------------------------------------------------------------------------------

    def prefills(self) -> list[PrefillWorker]:
        """All known prefill ranks."""
        return [worker for worker in self._workers.values() if worker.role == "prefill"]

    def decodes(self) -> list[DecodeWorker]:
        """All known decode ranks."""
        return [worker for worker in self._workers.values() if isinstance(worker, DecodeWorker)]

    def choose(
        self,
        need: Need,
        *,
        reserve_ahead_tokens: int | None = None,
        holders: Sequence[PrefixHolder] = (),
        avoid: frozenset[WorkerIdentity] = frozenset(),
        keep: DecodeWorker | None = None,
    ) -> Place | None:
        """The best place now, booked, or None. Workers in `avoid` come last; `keep` is the decode rank to stay on."""
        decodes = [x for x in self.decodes() if x.is_ready and _holds(x, need)]
        kept = [x for x in decodes if x is keep and x.identity not in avoid]
        prefills = self._partners(kept or decodes, need)
        chosen = policy.choose_prefill(
            [self._prefill_candidate(x, holders, avoid) for x in prefills], need.num_tokens, reserve_ahead_tokens
        )
        if chosen is None:
            return None
        prefill = self._workers["prefill", chosen]
        decode = None
        if need.decode:
            decode = self._choose_decode(
                [x for x in kept or decodes if x.fingerprint == prefill.fingerprint], need, avoid
            )
            if decode is None:
                return None
        blocks = need.blocks(decode.info.layout.block_size) if decode is not None and decode.info is not None else 0
        return Place(prefill, decode, need.num_tokens, blocks, self._on_room).book()

    def _partners(self, decodes: Sequence[DecodeWorker], need: Need) -> list[PrefillWorker]:
        """Ready prefill ranks; when decode follows, those that share a layout with one of `decodes`."""
        fingerprints = {x.fingerprint for x in decodes}
        return [
            x
            for x in self.prefills()
            if x.is_ready and _holds(x, need) and (not need.decode or x.fingerprint in fingerprints)
        ]

    def _choose_decode(
        self, decodes: Sequence[DecodeWorker], need: Need, avoid: frozenset[WorkerIdentity]
    ) -> DecodeWorker | None:
        if not decodes:
            return None
        candidates = [
            policy.DecodeCandidate(
                x.identity,
                x.info.block_count if x.info else 0,
                x.booked_blocks,
                x.in_flight,
                x.identity in avoid,
            )
            for x in decodes
        ]
        blocks = need.blocks(decodes[0].info.layout.block_size if decodes[0].info else 1)
        chosen = policy.choose_decode(candidates, blocks)
        return next((x for x in decodes if x.identity == chosen), None)

    def _prefill_candidate(
        self, worker: PrefillWorker, holders: Sequence[PrefixHolder], avoid: frozenset[WorkerIdentity]
    ) -> policy.PrefillCandidate:
        size = worker.info.layout.block_size if worker.info else 1
        cached = policy.cached_tokens(holders, size).get(worker.identity, 0)
        return policy.PrefillCandidate(
            worker.identity, worker.queued_tokens, worker.in_flight, cached, worker.identity in avoid
        )

    def capacity(self) -> Capacity:
        """What the workers that are ready could hold. Raises Unavailable when there is no pair."""
        prefills = [x.info for x in self.prefills() if x.is_ready and x.info]
        decodes = [x.info for x in self.decodes() if x.is_ready and x.info]
        if not prefills or not decodes:
            raise self.unavailable()
        return Capacity(
            max_context_tokens=min(
                max(x.max_context_tokens for x in prefills), max(x.max_context_tokens for x in decodes)
            ),
            prefill_blocks=max(x.block_count for x in prefills),
            decode_blocks=max(x.block_count for x in decodes),
            block_size=decodes[0].layout.block_size,
            max_batch_size=max(x.max_batch_size for x in decodes) or 2**31,
        )

    def block_size(self) -> int:
        """Of any probed worker; 0 when there is none."""
        return next((x.info.layout.block_size for x in self._workers.values() if x.info), 0)

    def unavailable(self) -> Unavailable:
        """Why no request can be served now."""
        reasons = [
            f"{x.role} {x.identity.address}: {x.why or x.state.value or 'its token stream is not open'}"
            for x in self._workers.values()
            if not x.is_ready
        ]
        known = {x.role for x in self._workers.values()}
        reasons += [f"no {role} rank is known" for role in ("prefill", "decode") if role not in known]
        text = "; ".join(reasons) or "those that are ready do not share a KV layout"
        return Unavailable(f"no prefill and decode pair is ready: {text}", reason="NO_WORKERS", retry_after_s=1.0)

    def views(self) -> tuple[WorkerView, ...]:
        """Every probed worker, by address."""
        found = [view for worker in self._workers.values() if (view := worker.view()) is not None]
        return tuple(sorted(found, key=lambda view: (view.info.identity.address, view.info.role)))

    def has_other(self, worker: Worker[Any]) -> bool:
        """Whether another ready worker could take its part."""
        return any(
            x is not worker and x.role == worker.role and x.is_ready and x.fingerprint == worker.fingerprint
            for x in self._workers.values()
        )

    # --- what attempts report ----------------------------------------------------------------------------------------------

    def succeeded(self, *workers: Worker[Any] | None) -> None:
        """An attempt went through: faults are forgiven."""
        for worker in workers:
            if worker is not None:
                worker.faults = 0

    def suspect(self, worker: Worker[Any], error: HeadraceError) -> None:
        """A transport error or a fault of the worker's: nothing new goes there before it has been probed."""
        if worker.state in (State.LOST, State.LEAVING):
            return
        telemetry.counter("headrace.router.worker_faults").add(1, role=worker.role, reason=error.reason)
        worker.why = f"{error.reason}: {error.message}"
        if worker.state is State.READY:  # what else was lost with the same fault counts once
            worker.faults += 1
            worker.state = State.SUSPECT
            worker.check_at = self._clock.now()
            self._changed()
        self._wake.set()

    # --- keeping the view ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled. Every worker's stream and check is a task below this one."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch())
            tasks.create_task(self._tick())
            while True:
                self._wake.clear()
                self._adopt_members(tasks)
                await self._forget_idle()
                self._start_checks(tasks)
                self._changed()
                await self._wake.wait()

    async def _watch(self) -> None:
        version = self._membership.version
        while True:
            await self._membership.wait_change(1.0, version)
            version = self._membership.version
            self._wake.set()

    async def _tick(self) -> None:
        """Checks are paced by the clock; while everyone is ready there is nothing to pace."""
        while True:
            await self._clock.wait(TICK_S)
            if any(not worker.is_ready for worker in self._workers.values()):
                self._wake.set()

    def _adopt_members(self, tasks: asyncio.TaskGroup) -> None:
        listed: set[tuple[str, str]] = set()
        for role in ("prefill", "decode"):
            for member in self._membership.members(role):
                listed.add((role, member.identity.address))
                key = (role, member.identity)
                if key not in self._workers and key not in self._dead:
                    self._add(role, member.identity, tasks)
        for worker in list(self._workers.values()):
            is_listed = (worker.role, worker.identity.address) in listed
            if not is_listed and worker.state not in (State.LEAVING, State.LOST):
                worker.state, worker.why = State.LEAVING, ""
            elif is_listed and worker.state is State.LEAVING:
                worker.state = State.NEW if worker.info is None else State.SUSPECT

    def _add(self, role: str, identity: WorkerIdentity, tasks: asyncio.TaskGroup) -> None:
        for old in list(self._workers.values()):
            if old.role == role and old.identity.address == identity.address:
                self._lose(old)
        if role == "prefill":
            self._workers[role, identity] = Worker(role, identity, self._dialer.prefill(identity.address))
            return
        worker = DecodeWorker(role, identity, self._dialer.decode(identity.address))
        worker.stream = TokenStream(
            worker.client,
            self._router,
            identity,
            self._clock,
            STREAM_RESUME_S,
            lambda error: self.suspect(worker, error),
            self._wake.set,
        )
        worker.stream_task = tasks.create_task(worker.stream.run())
        self._workers[role, identity] = worker

    def _lose(self, worker: Worker[Any]) -> None:
        """Its process has ended: its requests go elsewhere at once."""
        worker.state = State.LOST
        self._dead[worker.role, worker.identity] = None
        while len(self._dead) > 1024:
            del self._dead[next(iter(self._dead))]
        self._drop(worker, StaleEpoch(f"the {worker.role} rank at {worker.identity.address} has restarted"))
        log.info("worker lost", role=worker.role, address=worker.identity.address, epoch=worker.identity.epoch)

    def _drop(self, worker: Worker[Any], error: HeadraceError) -> None:
        self._workers.pop((worker.role, worker.identity), None)
        if isinstance(worker, DecodeWorker):
            worker.stream.close(error)
            if worker.stream_task is not None:
                worker.stream_task.cancel()

    async def _forget_idle(self) -> None:
        for worker in list(self._workers.values()):
            if worker.state is State.LEAVING and not worker.in_flight and not worker.checking:
                self._drop(worker, Unavailable("the rank has left"))
                if all(x.identity.address != worker.identity.address for x in self._workers.values()):
                    await self._dialer.forget(worker.identity.address)

    # --- probes and canaries -------------------------------------------------------------------------------------------------

    def _start_checks(self, tasks: asyncio.TaskGroup) -> None:
        now = self._clock.now()
        for worker in list(self._workers.values()):
            if worker.checking or worker.check_at > now:
                continue
            if worker.state in (State.NEW, State.SUSPECT):
                worker.checking = True
                tasks.create_task(self._probe(worker, tasks))
            elif worker.state is State.PROBED:
                self._start_canary(worker, tasks)

    async def _probe(self, worker: Worker[Any], tasks: asyncio.TaskGroup) -> None:
        try:
            info = await self._dialer.probe(worker.role, worker.identity.address, PROBE_TIMEOUT_S)
        except HeadraceError as error:
            self._check_failed(worker, f"probe: {error.message or error.reason}")
            return
        finally:
            worker.checking = False
            self._wake.set()
        if worker.state not in (State.NEW, State.SUSPECT):
            return
        if info.identity.epoch != worker.identity.epoch:
            if (worker.role, worker.identity) in self._workers:
                self._add(worker.role, WorkerIdentity(worker.identity.address, info.identity.epoch), tasks)
            return
        was_proven = worker.state is State.SUSPECT and worker.faults < BREAKER_FAULTS
        worker.info = info
        self._check_passed(worker, State.READY if was_proven or self._canary is None else State.PROBED)

    def _start_canary(self, worker: Worker[Any], tasks: asyncio.TaskGroup) -> None:
        """A canary through `worker` and the best partner; one that is not ready itself takes part in one canary only."""
        others: Iterable[Worker[Any]] = self.decodes() if worker.role == "prefill" else self.prefills()
        partners = [x for x in others if self._may_pair(worker, x)]
        if not partners:
            worker.why = worker.why or "no partner with the same KV layout is there"
            return
        partner = min(partners, key=lambda x: (not x.is_ready, x.in_flight))
        for side in (worker, partner):
            side.checking = side.checking or not side.is_ready
        prefill, decode = (worker, partner) if worker.role == "prefill" else (partner, worker)
        assert isinstance(decode, DecodeWorker)
        tasks.create_task(self._run_canary(prefill, decode))

    async def _run_canary(self, prefill: PrefillWorker, decode: DecodeWorker) -> None:
        assert self._canary is not None
        error: HeadraceError | None = None
        try:
            await self._canary(prefill, decode)
        except HeadraceError as failure:
            error = failure
        finally:
            for side in (prefill, decode):
                if side.state is State.PROBED:
                    side.checking = False
        for side in (prefill, decode):
            if side.state is not State.PROBED:
                continue
            if error is None:
                self._check_passed(side, State.READY)
            else:
                self._check_failed(side, f"canary: {error.reason}: {error.message}")
        self._wake.set()

    def _may_pair(self, worker: Worker[Any], other: Worker[Any]) -> bool:
        if other.state not in (State.PROBED, State.READY) or (other.checking and not other.is_ready):
            return False
        if any(isinstance(x, DecodeWorker) and not x.stream.is_open for x in (worker, other)):
            return False
        if worker.fingerprint == other.fingerprint:
            return True
        pair = (min(worker.identity, other.identity, key=str), max(worker.identity, other.identity, key=str))
        if pair not in self._mismatched:
            self._mismatched.add(pair)
            error = _layout_mismatch(worker, other)
            worker.why = other.why = error.message
            log.error("layout mismatch", reason=error.reason, detail=error.message)
        return False

    def _check_passed(self, worker: Worker[Any], state: State) -> None:
        worker.state, worker.why = state, ""
        worker.backoff_s, worker.check_at = FIRST_BACKOFF_S, 0.0
        if state is State.READY:
            worker.faults = 0 if self._canary is not None and worker.faults >= BREAKER_FAULTS else worker.faults
            log.info("worker ready", role=worker.role, address=worker.identity.address, epoch=worker.identity.epoch)

    def _check_failed(self, worker: Worker[Any], why: str) -> None:
        worker.why = why
        worker.check_at = self._clock.now() + worker.backoff_s
        worker.backoff_s = min(2 * worker.backoff_s, MAX_BACKOFF_S)

    def _changed(self) -> None:
        """Tells those who wait for a pair, or for its absence, and those who wait for room."""
        decodes = {x.fingerprint for x in self.decodes() if x.is_ready}
        has_pair = any(x.is_ready and x.fingerprint in decodes for x in self.prefills())
        (self.has_pair if has_pair else self.no_pair).set()
        (self.no_pair if has_pair else self.has_pair).clear()
        if has_pair:
            self.had_pair = True
            self._on_room()


def _holds(worker: Worker[Any], need: Need) -> bool:
    return worker.info is not None and worker.info.max_context_tokens >= need.total_tokens


def _layout_mismatch(worker: Worker[Any], other: Worker[Any]) -> LayoutMismatch:
    layouts = [f"{x.role} {x.identity.address} has {x.info.layout if x.info else None}" for x in (worker, other)]
    return LayoutMismatch(" and ".join(layouts))
