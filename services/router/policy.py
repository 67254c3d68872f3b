"""Which worker should get a request: pure functions of snapshots, no I/O.

A prefill rank costs the tokens that must be computed before our first token: those queued there and ours that it does not
hold. A decode rank costs nothing while it has room; the one that keeps the largest share of its pool free wins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from headrace.protocol import PrefixHolder, WorkerIdentity


@dataclass(frozen=True)
class PrefillCandidate:
    """A ready prefill rank: prompt tokens sent to it and not prefilled yet, requests of ours, tokens of the prefix it holds."""

    identity: WorkerIdentity
    queued_tokens: int
    in_flight: int = 0
    cached_tokens: int = 0
    avoid: bool = False


@dataclass(frozen=True)
class DecodeCandidate:
    """A ready decode rank: blocks of its pool, those our requests hold, requests of ours, samples that step together."""

    identity: WorkerIdentity
    num_blocks: int
    booked_blocks: int
    in_flight: int = 0
    avoid: bool = False


def prefill_cost(candidate: PrefillCandidate, prompt_tokens: int) -> tuple[bool, int, int, str]:
    """Smaller is better. At least one token is always computed; ties go to the idler rank, then by address."""
    uncached = max(1, prompt_tokens - candidate.cached_tokens)
    return candidate.avoid, candidate.queued_tokens + uncached, candidate.in_flight, candidate.identity.address


def has_room(candidate: PrefillCandidate, prompt_tokens: int, reserve_ahead_tokens: int) -> bool:
    """Whether a rank may be sent the prompt now: an idle one always, however long the prompt."""
    return candidate.queued_tokens == 0 or candidate.queued_tokens + prompt_tokens <= reserve_ahead_tokens


def decode_cost(candidate: DecodeCandidate, needed_blocks: int) -> tuple[bool, bool, float, int, str]:
    """Smaller is better: not to be avoided, has room now, fullest last, idlest first, then by address."""
    free = candidate.num_blocks - candidate.booked_blocks
    filled = (candidate.booked_blocks + needed_blocks) / max(1, candidate.num_blocks)
    return candidate.avoid, free < needed_blocks, filled, candidate.in_flight, candidate.identity.address


def choose_prefill(
    candidates: Iterable[PrefillCandidate], prompt_tokens: int, reserve_ahead_tokens: int | None
) -> WorkerIdentity | None:
    """The cheapest rank that has room (all have when `reserve_ahead_tokens` is None), or None."""
    able = [x for x in candidates if reserve_ahead_tokens is None or has_room(x, prompt_tokens, reserve_ahead_tokens)]
    return min(able, key=lambda x: prefill_cost(x, prompt_tokens)).identity if able else None


def choose_decode(candidates: Iterable[DecodeCandidate], needed_blocks: int) -> WorkerIdentity | None:
    """The cheapest rank whose pool could hold `needed_blocks` at all, or None."""
    able = [x for x in candidates if x.num_blocks >= needed_blocks]
    return min(able, key=lambda x: decode_cost(x, needed_blocks)).identity if able else None


def cached_tokens(holders: Sequence[PrefixHolder], block_size: int) -> Mapping[WorkerIdentity, int]:
    """Tokens of the prompt's prefix by worker."""
    return {holder.worker: holder.num_blocks * block_size for holder in holders}
