"""Which ranks an attempt runs on: pure scoring of snapshots, then the choice, booked.

A prefill rank costs the tokens that must be computed before our first token: those queued there and ours that it does not
hold. A decode rank costs nothing while it has room; the one that keeps the largest share of its pool free wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.protocol.common import WorkerIdentity
from services.router.prefix import PromptKeys
from services.router.rank import RankView

NOBODY: frozenset[WorkerIdentity] = frozenset()


@dataclass(frozen=True)
class PrefillCandidate:
    """A ready prefill rank. Prompt tokens not prefilled yet: `queued_tokens` of ours, `others_tokens` of other routers; requests of
    ours; tokens of the prefix it holds."""

    identity: WorkerIdentity
    queued_tokens: int
    others_tokens: int = 0
    in_flight: int = 0
    cached_tokens: int = 0
    avoid: bool = False


@dataclass(frozen=True)
class DecodeCandidate:
    """A ready decode rank: blocks of its pool, those that are taken, requests of ours."""

    identity: WorkerIdentity
    num_blocks: int
    taken_blocks: int
    in_flight: int = 0
    avoid: bool = False


def prefill_cost(candidate: PrefillCandidate, prompt_tokens: int) -> tuple[bool, int, int, str]:
    """Smaller is better. At least one token is always computed; ties go to the idler rank, then by address."""
    uncached = max(1, prompt_tokens - candidate.cached_tokens)
    queued = candidate.queued_tokens + candidate.others_tokens
    return candidate.avoid, queued + uncached, candidate.in_flight, candidate.identity.address


def has_room(candidate: PrefillCandidate, prompt_tokens: int, reserve_ahead_tokens: int) -> bool:
    """Whether a rank may be sent the prompt now: one with nothing of ours always, however long the prompt and busy the others."""
    queued = candidate.queued_tokens + candidate.others_tokens
    return candidate.queued_tokens == 0 or queued + prompt_tokens <= reserve_ahead_tokens


def decode_cost(candidate: DecodeCandidate, needed_blocks: int) -> tuple[bool, bool, float, int, str]:
    """Smaller is better: not to be avoided, has room now, fullest last, idlest first, then by address."""
    free = candidate.num_blocks - candidate.taken_blocks
    filled = (candidate.taken_blocks + needed_blocks) / max(1, candidate.num_blocks)
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


@dataclass(frozen=True)
class PlaceNeed:
    """What an attempt needs: tokens to prefill, prompt plus output, decode blocks by block size, whether decode follows."""

    num_tokens: int
    total_tokens: int
    blocks: Callable[[int], int]
    decode: bool


class Place:
    """Where an attempt runs, with what is booked there. `release` gives everything back, and may be called twice."""

    __slots__ = (
        "prefill",
        "decode",
        "cached_tokens",
        "_num_tokens",
        "_num_blocks",
        "_on_room",
        "_is_queued",
        "_is_booked",
    )

    def __init__(
        self,
        prefill: RankView,
        decode: RankView | None,
        num_tokens: int,
        num_blocks: int,
        on_room: Callable[[], None],
        cached_tokens: int = 0,
    ):
        self.prefill, self.decode, self.cached_tokens = prefill, decode, cached_tokens
        self._num_tokens, self._num_blocks, self._on_room = num_tokens, num_blocks, on_room
        self._is_queued = self._is_booked = True
        prefill.in_flight += 1
        prefill.queued_tokens += num_tokens
        if decode is not None:
            decode.in_flight += 1
            decode.booked_blocks += num_blocks

    def prefilled(self) -> None:
        """The prompt no longer waits on the prefill rank."""
        if self._is_queued:
            self._is_queued = False
            self.prefill.queued_tokens -= self._num_tokens
            self._on_room()

    def release(self) -> None:
        """The attempt is over."""
        if not self._is_booked:
            return
        self._is_booked = False
        self.prefill.in_flight -= 1
        if self.decode is not None:
            self.decode.in_flight -= 1
            self.decode.booked_blocks -= self._num_blocks
        if self._is_queued:
            self.prefilled()
        else:
            self._on_room()


class Ranks(Protocol):
    """Who is there: services.router.fleet.Fleet."""

    def prefills(self) -> Sequence[RankView]: ...

    def decodes(self) -> Sequence[RankView]: ...


class Placing:
    """Chooses among the ranks that are ready. `on_room` is called whenever a booked place is given back."""

    def __init__(self, ranks: Ranks, on_room: Callable[[], None]):
        self._ranks, self._on_room = ranks, on_room

    def book(self, prefill: RankView, decode: RankView | None, need: PlaceNeed, cached_tokens: int = 0) -> Place:
        """This place, whoever else would be better."""
        blocks = need.blocks(decode.block_size) if decode is not None else 0
        return Place(prefill, decode, need.num_tokens, blocks, self._on_room, cached_tokens)

    def choose(
        self,
        need: PlaceNeed,
        *,
        keys: PromptKeys | None = None,
        reserve_ahead_tokens: int | None = None,
        avoid: frozenset[WorkerIdentity] = NOBODY,
        keep: RankView | None = None,
    ) -> Place | None:
        """The best place now, booked, or None. Ranks in `avoid` come last; `keep` is the decode rank to stay on."""
        decodes = [x for x in self._ranks.decodes() if x.is_ready and _holds(x, need)]
        kept = [keep] if keep is not None and keep in decodes and keep.identity not in avoid else []
        partners = self._partners(kept or decodes, need)
        candidates = _prefill_candidates(partners, keys, avoid)
        chosen = choose_prefill(candidates, need.num_tokens, reserve_ahead_tokens)
        if chosen is None:
            return None
        prefill = next(x for x in partners if x.identity == chosen)
        cached = next(x.cached_tokens for x in candidates if x.identity == chosen)
        if not need.decode:
            return self.book(prefill, None, need, cached)
        decode = _choose_decode([x for x in kept or decodes if x.fingerprint == prefill.fingerprint], need, avoid)
        return self.book(prefill, decode, need, cached) if decode is not None else None

    def _partners(self, decodes: Sequence[RankView], need: PlaceNeed) -> list[RankView]:
        """Ready prefill ranks; when decode follows, those that share a layout with one of `decodes`."""
        fingerprints = {x.fingerprint for x in decodes}
        return [
            x
            for x in self._ranks.prefills()
            if x.is_ready and _holds(x, need) and (not need.decode or x.fingerprint in fingerprints)
        ]


def _prefill_candidates(
    ranks: Sequence[RankView], keys: PromptKeys | None, avoid: frozenset[WorkerIdentity]
) -> list[PrefillCandidate]:
    """Prefixes are looked at only where there is a choice."""
    look = keys is not None and len(ranks) > 1
    return [
        PrefillCandidate(
            x.identity,
            x.queued_tokens,
            x.others_tokens,
            x.in_flight,
            x.held.num_held(keys.of(x.block_size)) * x.block_size if look and keys is not None and len(x.held) else 0,
            x.identity in avoid,
        )
        for x in ranks
    ]


def _choose_decode(ranks: Sequence[RankView], need: PlaceNeed, avoid: frozenset[WorkerIdentity]) -> RankView | None:
    if not ranks:
        return None
    candidates = [
        DecodeCandidate(x.identity, x.num_blocks, x.booked_blocks + x.others_blocks, x.in_flight, x.identity in avoid)
        for x in ranks
    ]
    chosen = choose_decode(candidates, need.blocks(ranks[0].block_size))
    return next((x for x in ranks if x.identity == chosen), None)


def _holds(rank: RankView, need: PlaceNeed) -> bool:
    return rank.info is not None and rank.info.max_context_tokens >= need.total_tokens
