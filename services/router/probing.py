"""Checks of the ranks: who has answered needs a canary, who was suspected must be seen to serve, who proved itself is ready."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from headrace.clock import Clock
from headrace.errors import HeadraceError, LayoutMismatch
from headrace.observe import logs
from headrace.protocol.common import WorkerIdentity, WorkerRole
from services.router.fleet import Fleet
from services.router.rank import BREAKER_FAULTS, FIRST_BACKOFF_S, MAX_BACKOFF_S, RankState, RankView
from services.router.survey import role_name

log = logs.get(__name__)

TICK_S = 0.1

RunCanary = Callable[[RankView, RankView], Awaitable[None]]
"""(prefill, decode): two tokens through this pair. Raises what went wrong."""


class Probing:
    """Keeps a fleet's ranks known, probed and proven. `run_canary` None: whoever answers is ready."""

    def __init__(self, fleet: Fleet, clock: Clock, run_canary: RunCanary | None):
        self._fleet, self._clock, self._run_canary = fleet, clock, run_canary
        self._mismatched: set[tuple[WorkerIdentity, WorkerIdentity]] = set()

    async def run(self) -> None:
        """Until cancelled. Canaries are tasks below this one."""
        fleet = self._fleet
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fleet.watch())
            tasks.create_task(self._tick())
            while True:
                fleet.news.clear()
                fleet.adopt_members()
                fleet.forget_idle()
                fleet.reopen_lost()
                self._check_all(tasks)
                fleet.changed()
                await fleet.news.wait()

    async def _tick(self) -> None:
        """Checks are paced by the clock; while everyone is ready there is nothing to pace."""
        while True:
            await self._clock.wait(TICK_S)
            if any(not rank.is_ready for rank in self._fleet.ranks()):
                self._fleet.news.set()

    def _check_all(self, tasks: asyncio.TaskGroup) -> None:
        now = self._clock.now()
        for rank in self._fleet.ranks():
            if rank.is_stalled and rank.state is RankState.READY and rank.links.is_open:
                rank.state = RankState.PROBED  # nothing new before a canary has gone through
            if rank.checking or rank.check_at > now or not rank.can_serve or rank.info is None:
                continue
            if rank.state in (RankState.NEW, RankState.SUSPECT):
                was_proven = rank.state is RankState.SUSPECT and rank.faults < BREAKER_FAULTS
                self._passed(rank, RankState.READY if was_proven or self._run_canary is None else RankState.PROBED)
            if rank.state is RankState.PROBED:
                self._start_canary(rank, tasks)

    def _start_canary(self, rank: RankView, tasks: asyncio.TaskGroup) -> None:
        """A canary through `rank` and the best partner; one that is not ready itself takes part in one canary only."""
        fleet, is_prefill = self._fleet, rank.role is WorkerRole.PREFILL
        partners = [x for x in (fleet.decodes() if is_prefill else fleet.prefills()) if self._may_pair(rank, x)]
        if not partners:
            rank.why = rank.why or "no partner with the same KV layout is there"
            return
        partner = min(partners, key=lambda x: (not x.is_ready, x.in_flight))
        for side in (rank, partner):
            side.checking = side.checking or not side.is_ready
        tasks.create_task(self._canary(*((rank, partner) if is_prefill else (partner, rank))))

    async def _canary(self, prefill: RankView, decode: RankView) -> None:
        assert self._run_canary is not None
        error: HeadraceError | None = None
        try:
            await self._run_canary(prefill, decode)
        except HeadraceError as failure:
            error = failure
        finally:
            for side in (prefill, decode):
                if side.state is not RankState.READY:
                    side.checking = False
        for side in (prefill, decode):
            if side.state is RankState.PROBED and error is None:
                self._passed(side, RankState.READY)
            elif side.state is RankState.PROBED and error is not None:
                self._failed(side, f"canary: {error.reason}: {error.message}")
        self._fleet.news.set()

    def _may_pair(self, rank: RankView, other: RankView) -> bool:
        if other.state not in (RankState.PROBED, RankState.READY) or (other.checking and not other.is_ready):
            return False
        if not rank.can_serve or not other.can_serve:
            return False
        if rank.fingerprint == other.fingerprint:
            return True
        pair = (min(rank.identity, other.identity, key=str), max(rank.identity, other.identity, key=str))
        if pair not in self._mismatched:
            self._mismatched.add(pair)
            error = _layout_mismatch(rank, other)
            rank.why = other.why = error.message
            log.error("layout mismatch", reason=error.reason, detail=error.message)
        return False

    def _passed(self, rank: RankView, state: RankState) -> None:
        rank.state, rank.why = state, ""
        rank.backoff_s, rank.check_at = FIRST_BACKOFF_S, 0.0
        if state is RankState.READY:
            rank.faults = 0 if self._run_canary is not None and rank.faults >= BREAKER_FAULTS else rank.faults
            identity = rank.identity
            log.info("worker ready", role=role_name(rank.role), address=identity.address, epoch=identity.epoch)

    def _failed(self, rank: RankView, why: str) -> None:
        rank.why = why
        rank.check_at = self._clock.now() + rank.backoff_s
        rank.backoff_s = min(2 * rank.backoff_s, MAX_BACKOFF_S)


def _layout_mismatch(rank: RankView, other: RankView) -> LayoutMismatch:
    layouts = [
        f"{role_name(x.role)} {x.identity.address} has {x.info.layout if x.info else None}" for x in (rank, other)
    ]
    return LayoutMismatch(" and ".join(layouts))
