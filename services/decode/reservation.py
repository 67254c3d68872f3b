"""The life of a promise of room, keyed (router, request id, attempt). No I/O, no blocks, no time of its own.

    WAITING -> RESERVED -> WRITING -> COMMITTED -> RUNNING -> FREED
                   any of the middle four -> QUARANTINED -> FREED

WAITING      asked for, no blocks yet; ends in FREED directly, because there is nothing to give back
RESERVED     blocks are promised and the writer has not begun: nothing can have been written
WRITING      the writer has used the promise up and may write
COMMITTED    the manifest was right; partial blocks are being copied
RUNNING      in the batch
QUARANTINED  over, but somebody (a writer, a copy, a step) may still touch the blocks
FREED        the blocks are back; the record stays a while to answer late and repeated calls

A request is named by its router's epoch and its id there: nobody else can end it. A *tombstone* says that attempts of a request up
to some number have ended here: a late Reserve of one is StaleAttempt. A late Begin or Commit needs no tombstone: a reservation that
is not known any more is a stale one.
"""

from __future__ import annotations

import enum
import itertools
import secrets
from collections import Counter, deque
from dataclasses import dataclass, field

from headrace.errors import InvalidRequest, StaleAttempt, StaleEpoch
from headrace.protocol.common import WorkerIdentity
from headrace.protocol.decode import CommitCommand, ReserveCommand

Name = tuple[str, str]
"""(epoch of the router, its id of the request)."""


class State(enum.Enum):
    """Where a reservation is in its life; see the module's picture."""

    WAITING = "waiting"
    RESERVED = "reserved"
    WRITING = "writing"
    COMMITTED = "committed"
    RUNNING = "running"
    QUARANTINED = "quarantined"
    FREED = "freed"

    __hash__ = object.__hash__  # members are singletons; Enum's own hashes the name, in Python, on each look-up


PROMISED = (State.RESERVED, State.WRITING)
"""States in which a reservation expires unless its writer renews it."""
OVER = (State.QUARANTINED, State.FREED)

_NEXT = {
    State.WAITING: {State.RESERVED, State.FREED},
    State.RESERVED: {State.WRITING, State.QUARANTINED},
    State.WRITING: {State.COMMITTED, State.QUARANTINED},
    State.COMMITTED: {State.RUNNING, State.QUARANTINED},
    State.RUNNING: {State.FREED, State.QUARANTINED},
    State.QUARANTINED: {State.FREED},
    State.FREED: set(),
}


@dataclass(eq=False)
class ReservationRecord:
    """One attempt's promise. Times are readings of the core's clock, in seconds."""

    router: WorkerIdentity
    command: ReserveCommand
    keeps_place: bool
    """An earlier attempt of the request was here: it waits at the head of the queue."""
    reservation_id: str = field(default_factory=lambda: secrets.token_hex(16))
    state: State = State.WAITING
    expires_at: float = 0.0
    forget_at: float = 0.0
    commit_duration_s: float | None = None
    """The first answer to Commit, for repeated ones. None before, and once the request was cancelled."""

    @property
    def name(self) -> Name:
        """Of the request."""
        return self.router.epoch, self.command.request_id

    @property
    def attempt(self) -> int:
        """Its number."""
        return self.command.attempt


class Tombstones:
    """Up to which attempt requests have ended, for a while."""

    def __init__(self, lasts_s: float):
        self._lasts_s = lasts_s
        self._ended: dict[Name, tuple[int, float]] = {}
        """Request -> (attempts up to this have ended, remembered until); oldest first."""

    def __contains__(self, name: Name) -> bool:
        return name in self._ended

    def __len__(self) -> int:
        return len(self._ended)

    def ended(self, name: Name) -> int:
        """The last attempt that has ended; 0 when none is remembered."""
        return self._ended.get(name, (0, 0.0))[0]

    def bury(self, name: Name, attempt: int, now: float) -> None:
        """Attempts up to `attempt` have ended, whether or not they were ever here."""
        attempt = max(attempt, self.ended(name))
        if attempt > 0:
            self._ended.pop(name, None)
            self._ended[name] = (attempt, now + self._lasts_s)

    def forget(self, now: float) -> None:
        """Drops what has been remembered for long enough."""
        lapsed = itertools.takewhile(lambda entry: entry[1][1] <= now, self._ended.items())
        for name in [name for name, _ in lapsed]:
            del self._ended[name]


class ReservationTable:
    """All records of one decode rank.

    expiry_s     a promise ends so long after it was given or renewed
    tombstone_s  how long ended attempts are remembered
    """

    def __init__(self, expiry_s: float, tombstone_s: float):
        self._expiry_s, self._tombstone_s = expiry_s, tombstone_s
        self._by_request: dict[Name, dict[int, ReservationRecord]] = {}
        self._by_id: dict[str, ReservationRecord] = {}
        self._unfinished: dict[str, ReservationRecord] = {}
        """By reservation id, all that are not FREED."""
        self._freed: deque[ReservationRecord] = deque()
        self._tombstones = Tombstones(tombstone_s)
        self._counts: Counter[State] = Counter()

    # --- reserve ---

    def find(self, name: Name, attempt: int) -> ReservationRecord | None:
        """The live record of an attempt; None when the attempt is new here. Raises StaleAttempt when it has ended."""
        first = self._by_request.get(name, {}).get(attempt)
        if first is not None and first.state not in OVER:
            return first
        if first is not None or attempt <= self._tombstones.ended(name):
            raise StaleAttempt(f"attempt {attempt} of request {name[1]} has ended here")
        return None

    def keeps_place(self, name: Name) -> bool:
        """Whether an earlier attempt of the request was here."""
        return name in self._by_request or name in self._tombstones

    def open(
        self, router: WorkerIdentity, command: ReserveCommand, now: float
    ) -> tuple[ReservationRecord, list[ReservationRecord]]:
        """A WAITING record for an attempt that `find` called new, and the older attempts that it supersedes.

        The caller ends the superseded ones.
        """
        name = (router.epoch, command.request_id)
        assert self.find(name, command.attempt) is None
        record = ReservationRecord(router, command, self.keeps_place(name))
        superseded = self.live(name, command.attempt)
        self._by_request.setdefault(name, {})[command.attempt] = record
        self._by_id[record.reservation_id] = self._unfinished[record.reservation_id] = record
        self._counts[record.state] += 1
        self.bury(name, command.attempt - 1, now)
        return record, superseded

    def grant(self, record: ReservationRecord, now: float) -> None:
        """Blocks were found. WAITING -> RESERVED."""
        self._move(record, State.RESERVED)
        record.expires_at = now + self._expiry_s

    # --- the writer ---

    def begin(self, reservation_id: str, writer_epoch: str, now: float) -> float:
        """Uses the promise up; seconds until it now expires. RESERVED -> WRITING. Raises StaleAttempt, StaleEpoch."""
        record = self._of_writer(reservation_id, writer_epoch)
        if record.state is not State.RESERVED:
            raise StaleAttempt(f"reservation {reservation_id} is good for one Begin", reason="PROMISE_USED")
        self._move(record, State.WRITING)
        return self.extend(record, now)

    def renew(self, reservation_id: str, writer_epoch: str, now: float) -> float:
        """Seconds until the reservation now expires. Raises StaleAttempt, StaleEpoch."""
        return self.extend(self._of_writer(reservation_id, writer_epoch), now)

    def extend(self, record: ReservationRecord, now: float) -> float:
        """Puts its expiry off; seconds until then."""
        record.expires_at = now + self._expiry_s
        return self._expiry_s

    def find_commit(self, command: CommitCommand, writer_epoch: str) -> ReservationRecord:
        """The record a Commit means. Raises StaleAttempt, StaleEpoch, InvalidRequest before a Begin.

        Its `commit_duration_s` is the answer when there has been one.
        """
        record = self._of_writer(command.reservation_id, writer_epoch)
        if (record.command.request_id, record.attempt) != (command.request_id, command.attempt):
            raise StaleAttempt(f"reservation {command.reservation_id} belongs to another attempt")
        if record.state is State.RESERVED:
            raise InvalidRequest(
                f"reservation {command.reservation_id} was not begun", field="reservation_id", reason="NOT_BEGUN"
            )
        return record

    def accept(self, record: ReservationRecord) -> None:
        """The manifest was right. WRITING -> COMMITTED. Raises StaleAttempt when it ended meanwhile."""
        self._advance(record, State.WRITING, State.COMMITTED)

    def run(self, record: ReservationRecord, commit_duration_s: float) -> None:
        """It is in the batch. COMMITTED -> RUNNING. Raises StaleAttempt when it ended meanwhile."""
        self._advance(record, State.COMMITTED, State.RUNNING)
        record.commit_duration_s = commit_duration_s

    # --- the end ---

    def bury(self, name: Name, attempt: int, now: float) -> None:
        """Attempts up to `attempt` have ended, whether or not they were ever here."""
        self._tombstones.bury(name, attempt, now)

    def live(self, name: Name, attempt: int) -> list[ReservationRecord]:
        """Attempts of a request up to `attempt` that are not over."""
        attempts = self._by_request.get(name, {})
        return [record for number, record in attempts.items() if number <= attempt and record.state not in OVER]

    def quarantine(self, record: ReservationRecord) -> None:
        """It is over; its blocks are not safe yet."""
        self._move(record, State.QUARANTINED)
        record.commit_duration_s = None

    def free(self, record: ReservationRecord, now: float) -> None:
        """Its blocks are back."""
        self._move(record, State.FREED)
        record.forget_at = now + self._tombstone_s
        del self._unfinished[record.reservation_id]
        self._freed.append(record)

    # --- time ---

    def expired(self, now: float) -> list[ReservationRecord]:
        """Promises whose time is over."""
        return [r for r in self._unfinished.values() if r.state in PROMISED and r.expires_at <= now]

    def forget(self, now: float) -> None:
        """Drops what has been remembered for long enough."""
        while self._freed and self._freed[0].forget_at <= now:
            record = self._freed.popleft()
            self._counts[State.FREED] -= 1
            del self._by_id[record.reservation_id]
            attempts = self._by_request[record.name]
            del attempts[record.attempt]
            if not attempts:
                del self._by_request[record.name]
        self._tombstones.forget(now)

    def count(self, *states: State) -> int:
        """Records in any of these states."""
        return sum(self._counts[state] for state in states)

    @property
    def is_empty(self) -> bool:
        """Nothing is held and nothing is remembered."""
        return not self._by_id and not self._tombstones

    # --- inside ---

    def _of_writer(self, reservation_id: str, writer_epoch: str) -> ReservationRecord:
        """The promise made to that writer; one that was over counts while its commit is still known."""
        record = self._by_id.get(reservation_id)
        if record is None or record.state is State.WAITING:
            raise StaleAttempt(f"no reservation {reservation_id} here, or no longer")
        if record.command.writer.epoch != writer_epoch:
            raise StaleEpoch(f"reservation {reservation_id} is for writer epoch {record.command.writer.epoch}")
        if record.state in OVER and record.commit_duration_s is None:
            raise StaleAttempt(f"reservation {reservation_id} has ended")
        return record

    def _advance(self, record: ReservationRecord, expected: State, state: State) -> None:
        if record.state is not expected:
            raise StaleAttempt(f"reservation {record.reservation_id} ended while its commit was being checked")
        self._move(record, state)

    def _move(self, record: ReservationRecord, state: State) -> None:
        assert state in _NEXT[record.state], f"{record.state} -> {state}"
        self._counts[record.state] -= 1
        self._counts[state] += 1
        record.state = state
