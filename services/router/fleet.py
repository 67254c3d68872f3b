"""Who is there: every rank the registry lists, its links, and whether it is ready.

The registry says where ranks are; their hellos say who they are. An address that refuses the epoch it was listed with is asked who
serves there now, so that a restarted rank is found also while the registry is behind. Checks are `probing`'s business.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from headrace.clock import Clock
from headrace.errors import HeadraceError, StaleEpoch, Unavailable
from headrace.observe import logs, telemetry
from headrace.protocol.common import WorkerIdentity, WorkerInfo, WorkerRole
from services.router import survey
from services.router.interfaces import Dialer, Membership
from services.router.limits import Capacity
from services.router.rank import MAX_BACKOFF_S, RankState, RankView
from services.router.survey import ROLES, role_name

log = logs.get(__name__)

MAX_DEAD = 1024
FLUSH_LOOK_S = 0.005
_faults = telemetry.counter("headrace.router.worker_faults")


class Fleet:
    """All known ranks. `on_room` is called when a rank has become ready, or others load it less."""

    def __init__(
        self,
        membership: Membership,
        dialer: Dialer,
        clock: Clock,
        tasks: asyncio.TaskGroup,
        on_room: Callable[[], None],
    ):
        self._membership, self._dialer, self._clock, self._tasks, self._on_room = (
            membership,
            dialer,
            clock,
            tasks,
            on_room,
        )
        # By role as well: an aggregated rank is both under one identity.
        self._ranks: dict[tuple[WorkerRole, WorkerIdentity], RankView] = {}
        self._dead: dict[tuple[WorkerRole, WorkerIdentity], None] = {}
        self.news = asyncio.Event()
        """Set when something has changed that checks may act on."""
        self.has_pair = asyncio.Event()
        """Set while some ready prefill rank and some ready decode rank share a layout."""
        self.no_pair = asyncio.Event()
        self.no_pair.set()
        self.had_pair = False
        self._capacity: Capacity | None = None
        """Whether there has ever been one."""

    # --- what others ask -----------------------------------------------------------------------------------------------------

    def ranks(self) -> list[RankView]:
        """All known ranks."""
        return list(self._ranks.values())

    def prefills(self) -> list[RankView]:
        """All known prefill ranks."""
        return [rank for rank in self._ranks.values() if rank.role is WorkerRole.PREFILL]

    def decodes(self) -> list[RankView]:
        """All known decode ranks."""
        return [rank for rank in self._ranks.values() if rank.role is WorkerRole.DECODE]

    def has_other(self, rank: RankView) -> bool:
        """Whether another ready rank could take its part."""
        return any(
            x is not rank and x.role is rank.role and x.is_ready and x.fingerprint == rank.fingerprint
            for x in self._ranks.values()
        )

    def capacity(self) -> Capacity:
        """What the ranks that are ready could hold. Raises Unavailable when there is no pair."""
        if self._capacity is None:
            self._capacity = survey.capacity(self.ranks())
        if self._capacity is None:
            raise self.unavailable()
        return self._capacity

    def unavailable(self) -> Unavailable:
        """Why no request can be served now."""
        return survey.unavailable(self.ranks())

    # --- what attempts report ----------------------------------------------------------------------------------------------

    def succeeded(self, *ranks: RankView | None) -> None:
        """An attempt went through: faults are forgiven."""
        for rank in ranks:
            if rank is not None:
                rank.faults = 0

    def suspect(self, rank: RankView, error: HeadraceError) -> None:
        """A transport error or a fault of the rank's: nothing new goes there before it is known to serve."""
        if rank.state in (RankState.LOST, RankState.LEAVING):
            return
        _faults.add(1, role=role_name(rank.role), reason=error.reason)
        rank.why = f"{error.reason}: {error.message}"
        if rank.state is RankState.READY:  # what else was lost with the same fault counts once
            rank.faults += 1
            rank.state = RankState.SUSPECT
            rank.check_at = self._clock.now()
            self.changed()
        self.news.set()

    # --- keeping the view ----------------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Tells of changes in the registry, until cancelled."""
        version = self._membership.version
        while True:
            await self._membership.wait_change(1.0, version)
            version = self._membership.version
            self.news.set()

    def adopt_members(self) -> None:
        """Adds who is listed now; who is listed no longer finishes what runs and is forgotten."""
        listed: set[tuple[WorkerRole, str]] = set()
        for role in ROLES:
            for member in self._membership.members(role_name(role)):
                listed.add((role, member.identity.address))
                key = (role, member.identity)
                if key not in self._ranks and key not in self._dead:
                    self._replace(role, member.identity)
        for rank in self.ranks():
            is_listed = (rank.role, rank.identity.address) in listed
            if not is_listed and rank.state not in (RankState.LEAVING, RankState.LOST):
                rank.state, rank.why = RankState.LEAVING, ""
            elif is_listed and rank.state is RankState.LEAVING:
                rank.state = RankState.NEW if rank.info is None else RankState.SUSPECT

    def forget_idle(self) -> None:
        """Drops ranks that have left and work on nothing of ours."""
        for rank in self.ranks():
            if rank.state is RankState.LEAVING and not rank.in_flight and not rank.checking:
                self._drop(rank, Unavailable("the rank has left", reason="LINK_LOST"))

    def reopen_lost(self) -> None:
        """New links to ranks whose links were lost, when it is time."""
        for rank in self.ranks():
            if rank.links.is_lost and rank.check_at <= self._clock.now() and rank.state is not RankState.LEAVING:
                rank.open(self._dialer, self._tasks)

    def changed(self) -> None:
        """Tells those who wait for a pair, or for its absence, and those who wait for room."""
        self._capacity = None
        decodes = {x.fingerprint for x in self.decodes() if x.is_ready}
        has_pair = any(x.is_ready and x.fingerprint in decodes for x in self.prefills())
        (self.has_pair if has_pair else self.no_pair).set()
        (self.no_pair if has_pair else self.has_pair).clear()
        if has_pair:
            self.had_pair = True
            self._on_room()

    async def close(self, within_s: float) -> None:
        """Ends every link, once what was released has arrived; waits for that at most `within_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not all(rank.links.is_flushed for rank in self._ranks.values()):
                    await asyncio.sleep(FLUSH_LOOK_S)
        for rank in self.ranks():
            self._drop(rank, Unavailable("the router stops", reason="LINK_LOST"))

    def _replace(self, role: WorkerRole, identity: WorkerIdentity) -> None:
        """A new process at an address: whoever was there before has ended."""
        for old in self.ranks():
            if old.role is role and old.identity.address == identity.address:
                self._bury(old)
        rank = RankView(role, identity, self._clock, self)
        self._ranks[role, identity] = rank
        rank.open(self._dialer, self._tasks)

    def _bury(self, rank: RankView) -> None:
        """Its process has ended: its requests go elsewhere at once."""
        rank.state = RankState.LOST
        if rank.identity.epoch:
            self._dead[rank.role, rank.identity] = None
            log.info("worker lost", role=role_name(rank.role), address=rank.identity.address, epoch=rank.identity.epoch)
        while len(self._dead) > MAX_DEAD:
            del self._dead[next(iter(self._dead))]
        self._drop(rank, StaleEpoch(f"the {role_name(rank.role)} rank at {rank.identity.address} has restarted"))

    def _drop(self, rank: RankView, error: HeadraceError) -> None:
        self._ranks.pop((rank.role, rank.identity), None)
        rank.state = RankState.LOST
        rank.links.close(error)

    # --- RankObserver ----------------------------------------------------------------------------------------------------------

    def on_rank_open(self, rank: RankView, info: WorkerInfo) -> None:
        """It is connected, and has said who it is."""
        if self._ranks.get((rank.role, rank.identity)) is not rank:
            return
        if info.identity.epoch != rank.identity.epoch and not self._rename(rank, info.identity):
            return
        rank.learn(info)
        self.news.set()
        self.changed()

    def _rename(self, rank: RankView, identity: WorkerIdentity) -> bool:
        """We asked who is there, and know now. False when that process is known already."""
        key = (rank.role, WorkerIdentity(rank.identity.address, identity.epoch))
        if key in self._ranks or key in self._dead:
            self._drop(rank, Unavailable("that process is known already", reason="LINK_LOST"))
            return False
        del self._ranks[rank.role, rank.identity]
        rank.identity = key[1]
        self._ranks[key] = rank
        return True

    def on_rank_broken(self, rank: RankView) -> None:
        """Nothing new goes there. Prompts that it computes may move; what decodes there waits."""
        self.changed()
        self.news.set()
        for leg in list(rank.legs):
            leg.on_prefill_broken()

    def on_rank_progress(self, rank: RankView) -> None:
        """A beat may change whether it is ready, and how much room it has."""
        self.changed()
        if not rank.is_ready:
            self.news.set()

    def on_rank_lost(self, rank: RankView, error: HeadraceError) -> None:
        """Its links are gone. Another epoch at its address means that it has ended; else it is dialled again."""
        if self._ranks.get((rank.role, rank.identity)) is not rank or rank.state is RankState.LOST:
            return
        was_open, rank.was_open = rank.was_open, False
        if was_open:
            where = {"role": role_name(rank.role), "address": rank.identity.address}
            log.warning("links lost", **where, reason=error.reason, detail=error.message)
        if error.reason == StaleEpoch.reason and rank.identity.epoch:
            role, address = rank.role, rank.identity.address
            self._bury(rank)
            if all(x.role is not role or x.identity.address != address for x in self._ranks.values()):
                self._replace(role, WorkerIdentity(address, ""))
        else:
            rank.why = f"{error.reason}: {error.message}"
            if was_open:
                self.suspect(rank, error)
            rank.check_at = self._clock.now() + rank.backoff_s
            rank.backoff_s = min(2 * rank.backoff_s, MAX_BACKOFF_S)
        self.changed()
        self.news.set()
