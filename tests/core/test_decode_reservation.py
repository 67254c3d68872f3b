"""The reservation table and the seats behind it, as a state machine against a plain model of the promises it makes."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from headrace.cache.blocks import BlockPool, BlockState
from headrace.cache.seats import blocks_needed
from headrace.errors import InvalidRequest, StaleAttempt, StaleEpoch
from headrace.protocol import common
from headrace.protocol import decode as p
from services.decode.reservation import OVER, PROMISED, ReservationTable, State
from services.decode.seats import Seats, plan_seats

EXPIRY_S, TOMBSTONE_S = 10.0, 30.0
BLOCK_SIZE, NUM_BLOCKS = 4, 40
ROUTER = common.WorkerIdentity("r:1", "router")


def command(request_id="r", attempt=1, *, prompt=6, max_tokens=4, delivered=(0,), writer_epoch="w"):
    """A Reserve for `len(delivered)` samples."""
    return p.ReserveCommand(
        request_id=request_id,
        attempt=attempt,
        writer=common.WorkerIdentity("p:1", writer_epoch),
        prompt_tokens=prompt,
        sample_indices=tuple(range(len(delivered))),
        delivered_counts=tuple(delivered),
        sampling=common.SamplingParams(n=len(delivered), max_tokens=max_tokens),
        stream_interval=1,
        handle=attempt,
    )


def commit_of(record, **changes):
    """A Commit for a record."""
    values = dict(
        reservation_id=record.reservation_id,
        request_id=record.command.request_id,
        attempt=record.command.attempt,
        manifest=(),
        samples=(),
        prompt_token_ids=(),
    )
    return p.CommitCommand(**(values | changes))


def name_of(request_id):
    """As the table names it."""
    return ROUTER.epoch, request_id


class Reservations(RuleBasedStateMachine):
    """Requests a..c with attempts 1..4, in every order that callers, writers, time and the engine can produce."""

    records = Bundle("records")

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.table = ReservationTable(EXPIRY_S, TOMBSTONE_S)
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        self.seats: dict[str, Seats] = {}
        self.all: dict[str, object] = {}
        self.ended: dict[str, int] = {}
        """Request -> attempts up to this have ended, as long as the machine has not let enough time pass to forget."""

    @rule(
        target=records,
        request=st.sampled_from("abc"),
        attempt=st.integers(1, 4),
        delivered=st.sampled_from([(0,), (0, 0, 0), (2, 1)]),
    )
    def reserve(self, request, attempt, delivered):
        before = {id(record) for record in self.all.values()}
        try:
            record = self.table.find(name_of(request), attempt)
        except StaleAttempt:
            assert attempt <= self.ended.get(request, 0)
            return multiple()
        if record is not None:
            assert id(record) in before and record.state not in OVER
            return record
        assert attempt > self.ended.get(request, 0)
        record, superseded = self.table.open(ROUTER, command(request, attempt, delivered=delivered), self.now)
        for older in superseded:
            assert older.attempt < attempt
            self.end(older)
        self.note_end(request, attempt - 1)
        self.all[record.reservation_id] = record
        return record

    @rule(record=records)
    def grant(self, record):
        plan = plan_seats(record.command, BLOCK_SIZE, 64)
        if record.state is State.WAITING and self.pool.can_allocate(plan.num_blocks):
            self.seats[record.reservation_id] = Seats(plan, self.pool.allocate(plan.num_blocks, BlockState.RESERVED))
            self.table.grant(record, self.now)

    @rule(record=records, right=st.booleans())
    def begin(self, record, right):
        epoch, was = record.command.writer.epoch if right else "someone else", record.state
        try:
            left = self.table.begin(record.reservation_id, epoch, self.now)
        except StaleEpoch:
            assert not right
        except StaleAttempt:
            assert was is not State.RESERVED
        else:
            assert right and was is State.RESERVED and record.state is State.WRITING
            assert left == EXPIRY_S and record.expires_at == self.now + EXPIRY_S

    @rule(record=records, right=st.booleans())
    def renew(self, record, right):
        epoch, was = record.command.writer.epoch if right else "someone else", record.state
        try:
            left = self.table.renew(record.reservation_id, epoch, self.now)
        except StaleEpoch:
            assert not right
        except StaleAttempt:
            assert record.state in (State.WAITING, *OVER)
        else:
            assert record.state is was  # renewing is not beginning
            assert right and left == EXPIRY_S and record.expires_at == self.now + EXPIRY_S

    @rule(record=records, good=st.booleans())
    def commit(self, record, good):
        try:
            assert self.table.find_commit(commit_of(record), record.command.writer.epoch) is record
        except InvalidRequest:
            assert record.state is State.RESERVED
            return
        except StaleAttempt:
            assert record.state in (State.WAITING, *OVER) and record.commit_duration_s is None
            return
        if record.commit_duration_s is not None:
            assert record.state in (State.RUNNING, State.FREED)
            return
        if record.state in PROMISED:
            self.table.extend(record, self.now)
            assert record.state is State.WRITING
            if good:
                self.table.accept(record)
                self.pool.move(self.seats[record.reservation_id].held(), BlockState.RUNNING)

    @rule(record=records)
    def start(self, record):
        if record.state is State.COMMITTED:
            self.table.run(record, 0.5)
        else:
            with pytest.raises(StaleAttempt):
                self.table.run(record, 0.5)

    @rule(record=records, data=st.data())
    def finish_a_sample(self, record, data):
        if record.state is State.RUNNING:
            seats = self.seats[record.reservation_id]
            self.pool.free(seats.leave(data.draw(st.sampled_from(seats.open_samples()))))
            if not seats.open_samples():
                self.table.free(record, self.now)
                self.note_end(record.command.request_id, record.attempt)

    @rule(request=st.sampled_from("abc"), attempt=st.integers(1, 4))
    def release(self, request, attempt):
        for record in self.table.live(name_of(request), attempt):
            assert record.attempt <= attempt
            self.end(record)
        self.table.bury(name_of(request), attempt, self.now)
        self.note_end(request, attempt)

    @rule(record=consumes(records))
    def drained(self, record):
        if record.state is State.QUARANTINED:
            self.free(record)

    @rule(seconds=st.floats(0.1, 12.0))
    def pass_time(self, seconds):
        self.now += seconds
        for record in self.table.expired(self.now):
            assert record.state in PROMISED and record.expires_at <= self.now
            self.table.bury(record.name, record.attempt, self.now)
            self.note_end(record.command.request_id, record.attempt)
            self.end(record)

    def note_end(self, request, attempt):
        self.ended[request] = max(self.ended.get(request, 0), attempt)

    def end(self, record):
        if record.state is State.WAITING:
            self.table.free(record, self.now)
        else:
            self.table.quarantine(record)
            self.pool.move(self.seats[record.reservation_id].held(), BlockState.QUARANTINED)

    def free(self, record):
        self.table.free(record, self.now)
        self.pool.free(self.seats[record.reservation_id].leave_all())

    @invariant()
    def counts_and_blocks_agree(self):
        by_state = {state: [r for r in self.all.values() if r.state is state] for state in State}
        for state, records in by_state.items():
            assert self.table.count(state) == len(records)
        held = {r.reservation_id: self.seats[r.reservation_id].held() for s in State for r in by_state[s]
                if s not in (State.WAITING, State.FREED)}  # fmt: skip
        blocks = [block for some in held.values() for block in some]
        assert len(blocks) == len(set(blocks)) == self.pool.ledger().held
        ledger = self.pool.ledger()
        assert ledger.reserved == sum(len(held[r.reservation_id]) for s in PROMISED for r in by_state[s])
        assert ledger.quarantined == sum(len(held[r.reservation_id]) for r in by_state[State.QUARANTINED])
        assert ledger.free + ledger.held == NUM_BLOCKS

    @invariant()
    def at_most_one_attempt_of_a_request_lives(self):
        for request in "abc":
            live = [r for r in self.all.values() if r.command.request_id == request and r.state not in OVER]
            assert len(live) <= 1
            assert all(r.command.attempt > self.ended.get(request, 0) for r in live)

    @invariant()
    def no_promise_is_past_its_time(self):
        assert all(r.expires_at > self.now for r in self.all.values() if r.state in PROMISED)

    def teardown(self):
        for record in [r for r in self.all.values() if r.state not in OVER]:
            self.end(record)
        for record in [r for r in self.all.values() if r.state is State.QUARANTINED]:
            self.free(record)
        assert self.pool.ledger().free == NUM_BLOCKS
        self.table.forget(self.now + TOMBSTONE_S)
        assert self.table.is_empty


Reservations.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_reservations_keep_their_promises_in_any_order = Reservations.TestCase


def test_what_is_remembered_is_forgotten_in_time():
    table = ReservationTable(EXPIRY_S, TOMBSTONE_S)
    record, _ = table.open(ROUTER, command(), 0.0)
    table.grant(record, 0.0)
    table.quarantine(record)
    table.free(record, 1.0)
    table.bury(name_of("r"), 1, 1.0)
    table.bury(name_of("other"), 7, 5.0)
    table.forget(30.9)
    assert not table.is_empty
    table.forget(31.0)
    with pytest.raises(StaleAttempt):
        table.find(name_of("other"), 7)
    assert table.find(name_of("r"), 1) is None
    table.forget(35.0)
    assert table.is_empty


def test_an_earlier_attempt_keeps_the_requests_place():
    table = ReservationTable(EXPIRY_S, TOMBSTONE_S)
    first, _ = table.open(ROUTER, command(attempt=1), 0.0)
    assert not first.keeps_place
    second, superseded = table.open(ROUTER, command(attempt=2), 0.0)
    assert second.keeps_place and superseded == [first]


@pytest.mark.parametrize("prompt", [1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("max_tokens", [1, 2, 4, 7])
@pytest.mark.parametrize("delivered", [(0,), (0, 0), (1,), (2, 1, 3)])
def test_seats_cover_every_row_once(prompt, max_tokens, delivered):
    max_tokens = max(max_tokens, max(delivered) + 1)
    plan = plan_seats(command(prompt=prompt, max_tokens=max_tokens, delivered=delivered), BLOCK_SIZE, 64)
    seats = Seats(plan, tuple(range(100, 100 + plan.num_blocks)))
    assert plan.num_shared == prompt // BLOCK_SIZE
    assert plan.num_blocks == blocks_needed(prompt, [prompt + max_tokens] * len(delivered), BLOCK_SIZE)
    for sample in range(len(delivered)):
        table = seats.table(sample)
        assert len(table) == -(-(prompt + max_tokens) // BLOCK_SIZE)
        assert table[: plan.num_shared] == seats.table(0)[: plan.num_shared]
    written = set()
    for sequence in seats.sequences():
        for row in range(sequence.first_row, sequence.first_row + sequence.num_rows):
            slot = (sequence.block_ids[row // BLOCK_SIZE], row % BLOCK_SIZE)
            assert slot not in written
            written.add(slot)
    for source, target, rows in seats.copies(tuple(range(len(delivered)))):
        for offset in range(rows):
            assert (source, offset) in written and (target, offset) not in written
            written.add((target, offset))
    for sample, count in enumerate(delivered):
        rows = range(prompt + count)
        assert all((seats.table(sample)[row // BLOCK_SIZE], row % BLOCK_SIZE) in written for row in rows)
    given_back = [block for sample in range(len(delivered)) for block in seats.leave(sample)]
    assert sorted(given_back) == list(range(100, 100 + plan.num_blocks)) and not seats.held()


def test_room_is_never_more_than_the_context():
    plan = plan_seats(command(prompt=10, max_tokens=1000), BLOCK_SIZE, 16)
    assert plan.num_blocks == 4


def test_a_tombstone_of_one_router_does_not_stop_anothers_request_of_that_name():
    table = ReservationTable(EXPIRY_S, TOMBSTONE_S)
    table.bury(name_of("r"), 3, 0.0)
    with pytest.raises(StaleAttempt):
        table.find(name_of("r"), 3)
    assert table.find(("another router", "r"), 3) is None
