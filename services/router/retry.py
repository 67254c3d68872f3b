"""What follows a lost attempt: who is blamed, whether there is another one, whom it avoids, and how long it waits.

An attempt that brought tokens uses no budget. One that brought none does, unless only the surroundings were to blame (a rank that
went away, a full queue) and the client has tokens already: then the deadline bounds the request. But a request under which
MAX_DEATHS engines died or stalled is taken to be what kills them.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import (
    Cancelled,
    DeadlineExceeded,
    HeadraceError,
    InternalError,
    InvalidRequest,
    Overloaded,
    StaleAttempt,
    StaleEpoch,
    TransferError,
    Unavailable,
)
from headrace.protocol.common import WorkerIdentity
from services.router.placing import NOBODY, Place
from services.router.rank import RankState, RankView

MAX_DEATHS = 6
FIRST_WAIT_S, MAX_WAIT_S = 0.05, 1.0
POLL_S = 0.05
"""How often a request that has no place to go looks again."""
RETRY_WAIT_S = 60.0
"""How long a request without tokens waits for ranks to come back, within its deadline."""
_DEATHS = frozenset({"LINK_LOST", "ENGINE_FAILED", "FORWARD_FAILED"})
_ONLY_PREFILL = frozenset({"LINK_LOST", "LINK_BROKEN", "DRAINING", "STARTING", "STOPPING"})
"""Reasons that a prefill rank, or the link to it, gives for itself alone."""


@dataclass(frozen=True)
class LostAttempt:
    """Why an attempt is lost, and which legs may be to blame."""

    error: HeadraceError
    prefill: bool = False
    decode: bool = False


def lost_on_prefill(error: HeadraceError) -> LostAttempt:
    """What the prefill leg reports: it may speak of the decode rank that it talked to."""
    may_be_decode = isinstance(error, StaleEpoch | TransferError | Unavailable | DeadlineExceeded)
    return LostAttempt(error, prefill=True, decode=may_be_decode and error.reason not in _ONLY_PREFILL)


def is_fault(error: HeadraceError) -> bool:
    """Whether breakers count it: transport errors and ranks' own faults, not what callers asked for, overload or late attempts."""
    return not isinstance(error, InvalidRequest | Overloaded | StaleAttempt) and error.reason != "NO_TOKEN_LINK"


def suspects(lost: LostAttempt, place: Place, moved_before: tuple[object, object]) -> list[RankView]:
    """Ranks that must be seen to serve before they get anything new.

    A deadline that passed counts only against a rank that has completed nothing since the attempt began (`moved_before`: what the
    prefill and the decode rank had completed then): clients with short deadlines must not condemn ranks.
    """
    if not is_fault(lost.error):
        return []
    found = []
    for may_be, rank, before in zip(
        (lost.prefill, lost.decode), (place.prefill, place.decode), moved_before, strict=True
    ):
        if (
            may_be
            and rank is not None
            and not (isinstance(lost.error, DeadlineExceeded) and rank.moved_count != before)
        ):
            found.append(rank)
    return found


class Retries:
    """One request's attempts so far."""

    def __init__(self, max_attempts: int):
        self._max_attempts = max_attempts
        self._fruitless = self._deaths = 0
        self.attempts = 0
        self.avoid: frozenset[WorkerIdentity] = NOBODY
        """Ranks that come last for the next attempt: every one that may have lost an earlier one."""
        self.keep: RankView | None = None
        """The decode rank to stay on, when prefill may be to blame: the request keeps its place there."""

    def note(self, lost: LostAttempt, place: Place, num_new: int, num_delivered: int) -> None:
        """An attempt is lost that brought `num_new` tokens; the client has `num_delivered`."""
        blamed = [
            rank for may_be, rank in ((lost.prefill, place.prefill), (lost.decode, place.decode)) if may_be and rank
        ]
        surroundings = isinstance(lost.error, Overloaded | Unavailable | StaleEpoch)
        if not num_new and not (num_delivered and surroundings):
            self._fruitless += 1
        if lost.error.reason in _DEATHS and all(rank.state is not RankState.LEAVING for rank in blamed):
            self._deaths += 1
        self.avoid |= {rank.identity for rank in blamed}
        self.keep = None if lost.decode and not lost.prefill else place.decode

    def why_no_more(self, lost: LostAttempt, num_delivered: int, has_other: bool) -> HeadraceError | None:
        """The error that ends the request, or None: there may be another attempt. `has_other`: another rank could take the lost
        part."""
        error = lost.error
        if error.reason == "READER_STALLED" and not lost.prefill and not lost.decode:  # our client, not ourselves
            return error
        if self._deaths >= MAX_DEATHS:
            text = f"{self._deaths} engines died or stalled under this request: {error.message}"
            return InternalError(text, reason="POISON_REQUEST")
        if isinstance(error, Overloaded) and not num_delivered and not has_other:
            return error
        may_help = error.retryable or isinstance(error, Cancelled | DeadlineExceeded | InternalError)
        return None if may_help and self._fruitless < self._max_attempts else error

    def wait_s(self, lost: LostAttempt) -> float:
        """Before the next attempt: longer with every one, and at least what a full rank asked for."""
        wait_s = min(MAX_WAIT_S, FIRST_WAIT_S * 2 ** (self.attempts - 1))
        return max(wait_s, min(MAX_WAIT_S, lost.error.retry_after_s)) if isinstance(lost.error, Overloaded) else wait_s
