"""The life of a promise of room, keyed (request id, attempt). No I/O, no blocks, no time of its own.

    WAITING -> RESERVED -> WRITING -> COMMITTED -> RUNNING -> FREED
                   any of the middle four -> QUARANTINED -> FREED

WAITING      asked for, no blocks yet; ends in FREED directly, because there is nothing to give back
RESERVED     blocks are promised and the writer has not been heard of
WRITING      the writer has renewed or tried to commit
COMMITTED    the manifest was right; partial blocks are being copied
RUNNING      in the batch
QUARANTINED  over, but somebody (a writer, a copy, a step) may still touch the blocks
FREED        the blocks are back; the record stays a while to answer late and repeated calls

A *tombstone* says that attempts of a request up to some number have ended here: a late Reserve of one is StaleAttempt. A
late Commit needs no tombstone: a reservation that is not known any more is a stale one.
"""

from __future__ import annotations

import enum
import itertools
import secrets
from collections import Counter, deque
from dataclasses import dataclass, field

from headrace.errors import StaleAttempt, StaleEpoch
from headrace.protocol import CommitCommand, ReserveCommand


class State(enum.Enum):
    """Where a reservation is in its life; see the module's picture."""

    WAITING = "waiting"
    RESERVED = "reserved"
    WRITING = "writing"
    COMMITTED = "committed"
    RUNNING = "running"
    QUARANTINED = "quarantined"
    FREED = "freed"


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
    def key(self) -> tuple[str, int]:
        return self.command.request_id, self.command.attempt


class ReservationTable:
    """All records of one decode rank.

    expiry_s     a promise ends so long after it was given or renewed
    tombstone_s  how long ended attempts are remembered
    """

    def __init__(self, expiry_s: float, tombstone_s: float):
        self._expiry_s, self._tombstone_s = expiry_s, tombstone_s
        self._by_request: dict[str, dict[int, ReservationRecord]] = {}
        self._by_id: dict[str, ReservationRecord] = {}
        self._unfinished: dict[str, ReservationRecord] = {}
        """By reservation id, all that are not FREED."""
        self._freed: deque[ReservationRecord] = deque()
        self._tombstones: dict[str, tuple[int, float]] = {}
        """Request id -> (attempts up to this have ended, remembered until); oldest first."""
        self._counts: Counter[State] = Counter()

    # --- reserve ---

    def find(self, request_id: str, attempt: int) -> ReservationRecord | None:
        """The live record of an attempt; None when the attempt is new here. Raises StaleAttempt when it has ended."""
        first = self._by_request.get(request_id, {}).get(attempt)
        if first is not None and first.state not in OVER:
            return first
        if first is not None or attempt <= self._ended(request_id):
            raise StaleAttempt(f"attempt {attempt} of request {request_id} has ended here")
        return None

    def keeps_place(self, request_id: str) -> bool:
        """Whether an earlier attempt of the request was here."""
        return request_id in self._by_request or request_id in self._tombstones

    def open(self, command: ReserveCommand, now: float) -> tuple[ReservationRecord, list[ReservationRecord]]:
        """A WAITING record for an attempt that `find` called new, and the older attempts that it supersedes.

        The caller ends the superseded ones.
        """
        assert self.find(command.request_id, command.attempt) is None
        record = ReservationRecord(command, self.keeps_place(command.request_id))
        superseded = self.live(command.request_id, command.attempt)
        self._by_request.setdefault(command.request_id, {})[command.attempt] = record
        self._by_id[record.reservation_id] = self._unfinished[record.reservation_id] = record
        self._counts[record.state] += 1
        self.bury(command.request_id, command.attempt - 1, now)
        return record, superseded

    def grant(self, record: ReservationRecord, now: float) -> None:
        """Blocks were found. WAITING -> RESERVED."""
        self._move(record, State.RESERVED)
        record.expires_at = now + self._expiry_s

    # --- the writer ---

    def renew(self, reservation_id: str, writer_epoch: str, now: float) -> float:
        """Seconds until the reservation now expires. Raises StaleAttempt, StaleEpoch."""
        record = self._of_writer(reservation_id, writer_epoch)
        if record.state in OVER and record.commit_duration_s is None:
            raise StaleAttempt(f"reservation {reservation_id} has ended")
        self._heard_of_writer(record, now)
        return self._expiry_s

    def find_commit(self, command: CommitCommand) -> ReservationRecord:
        """The record a Commit means. Raises StaleAttempt, StaleEpoch.

        Its `commit_duration_s` is the answer when there has been one.
        """
        record = self._of_writer(command.reservation_id, command.writer_epoch)
        if record.key != (command.request_id, command.attempt):
            raise StaleAttempt(f"reservation {command.reservation_id} belongs to another attempt")
        if record.state in OVER and record.commit_duration_s is None:
            raise StaleAttempt(f"reservation {command.reservation_id} has ended")
        return record

    def begin_commit(self, record: ReservationRecord, now: float) -> None:
        """A manifest is being checked; the promise is renewed meanwhile. -> WRITING."""
        self._heard_of_writer(record, now)

    def accept(self, record: ReservationRecord) -> None:
        """The manifest was right. WRITING -> COMMITTED. Raises StaleAttempt when it ended meanwhile."""
        self._expect(record, State.WRITING)
        self._move(record, State.COMMITTED)

    def run(self, record: ReservationRecord, commit_duration_s: float) -> None:
        """It is in the batch. COMMITTED -> RUNNING. Raises StaleAttempt when it ended meanwhile."""
        self._expect(record, State.COMMITTED)
        self._move(record, State.RUNNING)
        record.commit_duration_s = commit_duration_s

    # --- the end ---

    def bury(self, request_id: str, attempt: int, now: float) -> None:
        """Attempts up to `attempt` have ended, whether or not they were ever here."""
        attempt = max(attempt, self._ended(request_id))
        if attempt > 0:
            self._tombstones.pop(request_id, None)
            self._tombstones[request_id] = (attempt, now + self._tombstone_s)

    def live(self, request_id: str, attempt: int) -> list[ReservationRecord]:
        """Attempts of a request up to `attempt` that are not over."""
        attempts = self._by_request.get(request_id, {})
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
            attempts = self._by_request[record.command.request_id]
            del attempts[record.command.attempt]
            if not attempts:
                del self._by_request[record.command.request_id]
        lapsed = itertools.takewhile(lambda entry: entry[1][1] <= now, self._tombstones.items())
        for request_id in [name for name, _ in lapsed]:
            del self._tombstones[request_id]

    def count(self, *states: State) -> int:
        """Records in any of these states."""
        return sum(self._counts[state] for state in states)

    @property
    def is_empty(self) -> bool:
        """Nothing is held and nothing is remembered."""
        return not self._by_id and not self._tombstones

    # --- inside ---

    def _ended(self, request_id: str) -> int:
        return self._tombstones.get(request_id, (0, 0.0))[0]

    def _of_writer(self, reservation_id: str, writer_epoch: str) -> ReservationRecord:
        record = self._by_id.get(reservation_id)
        if record is None or record.state is State.WAITING:
            raise StaleAttempt(f"no reservation {reservation_id} here, or no longer")
        if record.command.writer.epoch != writer_epoch:
            raise StaleEpoch(f"reservation {reservation_id} is for writer epoch {record.command.writer.epoch}")
        return record

    def _heard_of_writer(self, record: ReservationRecord, now: float) -> None:
        if record.state is State.RESERVED:
            self._move(record, State.WRITING)
        record.expires_at = now + self._expiry_s

    def _expect(self, record: ReservationRecord, state: State) -> None:
        if record.state is not state:
            raise StaleAttempt(f"reservation {record.reservation_id} ended while its commit was being checked")

    def _move(self, record: ReservationRecord, state: State) -> None:
        assert state in _NEXT[record.state], f"{record.state} -> {state}"
        self._counts[record.state] -= 1
        self._counts[state] += 1
        record.state = state
