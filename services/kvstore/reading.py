"""Reads the catalogue: which entries of some keys count, and everything there is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from headrace.errors import Unavailable
from headrace.protocol.common import CacheTier, WorkerIdentity
from headrace.protocol.kvstore import PrefixHolder
from services.kvstore.connection import Connection

PIECE = 1024
"""Most keys in one script or pipeline."""
FIRST_PIECE = 64
"""Keys asked for first: most prefixes are short."""


@dataclass(frozen=True)
class Entry:
    """One worker's entry of one key."""

    address: str
    tag: str
    tier: CacheTier


@dataclass
class Prefix:
    """How far a worker holds the keys without a gap, and the slowest tier on the way."""

    num_blocks: int
    tier: CacheTier


class Reader:
    """Reads through one connection; `tags` (address -> epoch and generation) are asked for once a reader."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self.tags: dict[str, str] = {}

    def worker(self, address: str) -> WorkerIdentity:
        """The process whose entries at that address count."""
        return WorkerIdentity(address, self.tags[address].partition(" ")[0])

    async def holders(self, keys: Sequence[bytes]) -> tuple[PrefixHolder, ...]:
        """How many leading keys each worker holds, workers with none left out."""
        prefixes: dict[str, Prefix] = {}
        position = 0
        for piece in pieces(keys, FIRST_PIECE):
            for entries in await self.entries(piece):
                if not _lengthen(prefixes, entries, position):
                    return self._named(prefixes)
                position += 1
        return self._named(prefixes)

    async def count_held(self, keys: Sequence[bytes]) -> int:
        """How many leading keys somebody holds."""
        held = 0
        for piece in pieces(keys, FIRST_PIECE):
            for entries in await self.entries(piece):
                if not entries:
                    return held
                held += 1
        return held

    async def everything(self) -> AsyncIterator[dict[tuple[WorkerIdentity, CacheTier], list[bytes]]]:
        """The keys of all workers and tiers, a page of the catalogue at a time."""
        cursor, start = 0, self._connection.key("block", "")
        while True:
            cursor, names = await self._connection.call("SCAN", cursor, "MATCH", _literal(start) + "*", "COUNT", PIECE)
            keys = [bytes.fromhex(name.removeprefix(start)) for name in names]
            page: dict[tuple[WorkerIdentity, CacheTier], list[bytes]] = {}
            for key, entries in zip(keys, await self.entries(keys), strict=True):
                for entry in entries:
                    page.setdefault((self.worker(entry.address), entry.tier), []).append(key)
            if page:
                yield page
            if not int(cursor):
                return

    async def entries(self, keys: Sequence[bytes]) -> list[list[Entry]]:
        """The entries that count, key by key."""
        blocks = [("HGETALL", self._connection.key("block", key.hex())) for key in keys]
        answers = await self._connection.calls([("TIME",), *blocks])
        refused = next((answer for answer in answers if isinstance(answer, Exception)), None)
        if refused is not None:
            raise Unavailable("the catalogue cannot be read", reason="REDIS_AWAY") from refused
        (seconds, micros), *hashes = answers
        now = int(seconds) * 1000 + int(micros) // 1000
        parsed = [list(_living(fields, now)) for fields in hashes]
        await self._learn_tags({entry.address for entries in parsed for entry in entries} - set(self.tags))
        return [[entry for entry in entries if entry.tag == self.tags[entry.address]] for entries in parsed]

    async def _learn_tags(self, addresses: set[str]) -> None:
        if addresses:
            names = sorted(addresses)
            values = await self._connection.call("MGET", *(self._connection.key("holder", name) for name in names))
            self.tags.update((name, value or "") for name, value in zip(names, values, strict=True))

    def _named(self, prefixes: Mapping[str, Prefix]) -> tuple[PrefixHolder, ...]:
        return tuple(
            PrefixHolder(self.worker(address), prefix.num_blocks, prefix.tier) for address, prefix in prefixes.items()
        )


def pieces(keys: Sequence[bytes], first: int = PIECE) -> Iterator[Sequence[bytes]]:
    """The keys in pieces of PIECE, the first one of `first`."""
    start, size = 0, first
    while start < len(keys):
        yield keys[start : start + size]
        start, size = start + size, PIECE


def _lengthen(prefixes: dict[str, Prefix], entries: Iterable[Entry], position: int) -> bool:
    """Counts key number `position` for whom it goes on without a gap; whether there is anybody."""
    goes_on = False
    for entry in entries:
        prefix = prefixes.get(entry.address) or Prefix(0, entry.tier)
        if prefix.num_blocks == position:
            prefixes[entry.address] = Prefix(position + 1, max(prefix.tier, entry.tier))
            goes_on = True
    return goes_on


def _living(fields: Mapping[str, str], now: int) -> Iterator[Entry]:
    pinned = any(name.startswith("l:") and int(expiry) > now for name, expiry in fields.items())
    for name, value in fields.items():
        if name.startswith("w:"):
            tag, tier, expiry = value.rsplit(" ", 2)
            if pinned or int(expiry) > now:
                yield Entry(name[2:], tag, CacheTier(int(tier)))


def _literal(text: str) -> str:
    """A pattern that matches only this text."""
    return "".join(f"\\{letter}" if letter in "*?[]\\" else letter for letter in text)
