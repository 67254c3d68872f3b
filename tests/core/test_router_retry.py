"""Who is blamed for a lost attempt, whether there is another one, whom it avoids, how long it waits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from headrace.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    LayoutMismatch,
    ManifestMismatch,
    Overloaded,
    StaleAttempt,
    StaleEpoch,
    TransferError,
    Unavailable,
)
from services.router.rank import RankState
from services.router.retry import MAX_DEATHS, MAX_WAIT_S, LostAttempt, Retries, lost_on_prefill, suspects


def place(prefill: RankState = RankState.READY, moved=(3, 7)):
    def rank(name: str, state: RankState):
        return SimpleNamespace(identity=name, state=state, moved_count=moved)

    return SimpleNamespace(prefill=rank("p", prefill), decode=rank("d", RankState.READY))


@pytest.mark.parametrize("error, both", [
    (TransferError("no route"), True),
    (StaleEpoch("decode has restarted"), True),
    (Unavailable("decode is silent", reason="DECODE_UNANSWERED"), True),
    (Unavailable("gone", reason="LINK_LOST"), False),
    (Unavailable("I drain", reason="DRAINING"), False),
    (ManifestMismatch("3 of 4"), False),
    (InternalError("mine"), False),
])  # fmt: skip
def test_what_prefill_reports_may_speak_of_the_decode_rank_it_talked_to(error, both):
    lost = lost_on_prefill(error)
    assert (lost.prefill, lost.decode) == (True, both)


@pytest.mark.parametrize("error", [InvalidRequest("no"), Overloaded("full"), StaleAttempt("late")])
def test_what_callers_ask_for_and_overload_condemn_nobody(error):
    assert suspects(LostAttempt(error, prefill=True, decode=True), place(), ((3, 7), (3, 7))) == []


def test_a_deadline_that_passed_counts_only_against_a_rank_that_completed_nothing():
    lost, here = LostAttempt(DeadlineExceeded("late"), prefill=True, decode=True), place(moved=(3, 7))
    assert suspects(lost, here, ((3, 7), (3, 6))) == [here.prefill]
    assert suspects(lost, here, ((2, 7), (3, 6))) == []
    fault = LostAttempt(InternalError("mine"), prefill=True)
    assert suspects(fault, here, ((2, 7), (3, 6))) == [here.prefill]


def test_every_rank_that_may_be_to_blame_is_avoided_and_decode_is_kept_when_prefill_alone_is():
    retries = Retries(9)
    retries.note(LostAttempt(InternalError("mine"), prefill=True), place(), 0, 0)
    assert retries.avoid == {"p"} and retries.keep.identity == "d"
    retries.note(LostAttempt(Unavailable("gap", reason="TOKEN_GAP"), decode=True), place(), 0, 0)
    assert retries.avoid == {"p", "d"} and retries.keep is None


def tried(retries: Retries, error, times: int, num_new: int = 0, num_delivered: int = 0, **how):
    """The verdict after the last of so many equal losses."""
    lost = LostAttempt(error, prefill=True)
    for _ in range(times):
        retries.attempts += 1
        retries.note(lost, how.get("place", place()), num_new, num_delivered)
    return retries.why_no_more(lost, num_delivered, how.get("has_other", True))


def test_the_budget_counts_attempts_that_brought_nothing():
    error = TransferError("no route")
    assert tried(Retries(3), error, 2) is None
    assert tried(Retries(3), error, 3) is error
    assert tried(Retries(3), error, 50, num_new=1, num_delivered=50) is None


@pytest.mark.parametrize("error", [Overloaded("full"), Unavailable("away"), StaleEpoch("restarted")])
def test_what_the_surroundings_did_never_ends_a_stream_that_has_delivered_tokens(error):
    assert tried(Retries(3), error, 50, num_delivered=1, has_other=False) is None
    assert tried(Retries(3), error, 3, num_delivered=0) is error


def test_a_full_rank_is_left_for_another_or_said_at_once():
    error = Overloaded("full")
    assert tried(Retries(3), error, 1, has_other=False) is error
    assert tried(Retries(3), error, 1, has_other=True) is None


@pytest.mark.parametrize("error", [LayoutMismatch("other rows"), InvalidRequest("no")])
def test_what_cannot_be_helped_ends_at_once(error):
    assert tried(Retries(3), error, 1) is error


def test_engines_that_die_under_one_request_end_it_but_planned_restarts_do_not():
    dead = Unavailable("gone", reason="LINK_LOST")
    assert tried(Retries(9), dead, MAX_DEATHS - 1, num_new=1, num_delivered=9) is None
    assert tried(Retries(9), dead, MAX_DEATHS, num_new=1, num_delivered=9).reason == "POISON_REQUEST"
    planned = place(prefill=RankState.LEAVING)
    assert tried(Retries(9), dead, 20, num_new=1, num_delivered=9, place=planned) is None


def test_waits_grow_and_keep_to_what_a_full_rank_asks_for():
    retries, lost = Retries(9), LostAttempt(InternalError("mine"), prefill=True)
    waits = []
    for _ in range(8):
        retries.attempts += 1
        waits.append(retries.wait_s(lost))
    assert waits == sorted(waits) and waits[0] == 0.05 and waits[-1] == MAX_WAIT_S
    retries.attempts = 1
    assert retries.wait_s(LostAttempt(Overloaded("full", retry_after_s=0.4), decode=True)) == 0.4
