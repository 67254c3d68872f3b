"""The catalogue in Redis.

Keys, all in the mesh's hash slot, all with a time to live:
    block:<key>         hash: `w:<address>` -> "<epoch> <generation> <expiry>", `l:<lease id>` -> "<expiry>"
    holder:<address>    "<epoch> <generation>": which entries of that address count
    retired:<address>   set of earlier epochs, which may not publish any more
    lease:<lease id>    list of pinned keys
Times are milliseconds of the Redis server's clock. An entry counts while its epoch and generation are the holder's and its
expiry, or a lease on its key, lies ahead; so withdrawing all blocks of a process, or learning of its successor, is one write.
Long calls go in pieces of PIECE keys, so that no script holds the server for long.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass

from headrace.clock import Clock
from headrace.errors import StaleEpoch, Unavailable
from headrace.observe import logs
from headrace.process.registry import REDIS_ERRORS, bounded, connect, key
from headrace.protocol import PrefixHolder, WorkerIdentity
from services.kvstore.core import LOST, Change

log = logs.get(__name__)

PIECE = 1024
"""Most keys in one script or pipeline."""
FIRST_PIECE = 64
"""Keys asked for first by Lookup: most prefixes are short."""
RESUBSCRIBE_S = 0.5
RETIRED_S = 3600.0
"""How long the epochs before the present one are remembered."""

# Common beginning: the holder's tag for ARGV[1] = epoch, ARGV[2] = address, made anew when another epoch held the address.
_ENTER = """
local holder, retired, channel = KEYS[1], KEYS[2], KEYS[3]
local epoch, address, ttl, retired_ttl = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
if redis.call('SISMEMBER', retired, epoch) == 1 then return 'STALE' end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local tag = redis.call('GET', holder)
local held_by = tag and string.match(tag, '^(%S+) ')
if held_by ~= epoch then
  if held_by then
    redis.call('SADD', retired, held_by)
    redis.call('PEXPIRE', retired, retired_ttl)
    redis.call('PUBLISH', channel, cjson.encode({'WITHDRAWN', address, held_by}))
  elseif ttl == 0 then
    return 'OK'
  end
  tag = epoch .. ' ' .. time[1] .. string.format('%06d', time[2])
end
redis.call('SET', holder, tag, 'PX', math.max(ttl, 1000, redis.call('PTTL', holder)))
"""
_PUBLISH = (
    _ENTER
    + """
local value = tag .. ' ' .. string.format('%.0f', now + ttl)
local new = {}
for i = 6, #ARGV do
  local block = ARGV[5] .. ARGV[i]
  local old = redis.call('HGET', block, 'w:' .. address)
  redis.call('HSET', block, 'w:' .. address, value)
  if redis.call('PTTL', block) < ttl then redis.call('PEXPIRE', block, ttl) end
  if not old or string.sub(old, 1, #tag) ~= tag then new[#new + 1] = ARGV[i] end
end
if #new > 0 then redis.call('PUBLISH', channel, cjson.encode({'PUBLISHED', address, epoch, new})) end
return 'OK'
"""
)
_REPLACE = _ENTER + "return 'OK'"
_WITHDRAW = """
local address, epoch = ARGV[2], ARGV[1]
local gone = {}
for i = 4, #ARGV do
  local block = ARGV[3] .. ARGV[i]
  local old = redis.call('HGET', block, 'w:' .. address)
  if old and string.sub(old, 1, #epoch + 1) == epoch .. ' ' then
    redis.call('HDEL', block, 'w:' .. address)
    gone[#gone + 1] = ARGV[i]
  end
end
if #gone > 0 then redis.call('PUBLISH', KEYS[1], cjson.encode({'WITHDRAWN', address, epoch, gone})) end
"""
_WITHDRAW_ALL = """
local tag = redis.call('GET', KEYS[1])
if not tag or string.match(tag, '^(%S+) ') ~= ARGV[1] then return end
local time = redis.call('TIME')
redis.call('SET', KEYS[1], ARGV[1] .. ' ' .. time[1] .. string.format('%06d', time[2]), 'KEEPTTL')
redis.call('PUBLISH', KEYS[2], cjson.encode({'WITHDRAWN', ARGV[2], ARGV[1]}))
"""
_PIN = """
local ttl = tonumber(ARGV[2])
local time = redis.call('TIME')
local expiry = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000) + ttl)
local count = 0
for i = 4, #ARGV do
  local block = ARGV[3] .. ARGV[i]
  if redis.call('EXISTS', block) == 0 then break end
  redis.call('HSET', block, 'l:' .. ARGV[1], expiry)
  if redis.call('PTTL', block) < ttl then redis.call('PEXPIRE', block, ttl) end
  redis.call('RPUSH', KEYS[1], ARGV[i])
  count = count + 1
end
if count > 0 then redis.call('PEXPIRE', KEYS[1], ttl) end
for i = 2, #KEYS do
  if redis.call('PTTL', KEYS[i]) < ttl then redis.call('PEXPIRE', KEYS[i], ttl) end
end
return count
"""


@dataclass(frozen=True)
class _Entry:
    address: str
    tag: str


class RedisIndex:
    """The catalogue of one mesh. Every method raises Unavailable when Redis does not answer."""

    def __init__(self, url: str, mesh: str, clock: Clock, reachable: Callable[[], bool]):
        """`reachable()` says whether Redis answered lately; while it did not, calls fail at once instead of waiting."""
        self._redis = connect(url)
        self._mesh = mesh
        self._clock = clock
        self._reachable = reachable

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, url: str, mesh: str, clock: Clock, reachable: Callable[[], bool] = lambda: True
    ) -> AsyncIterator[RedisIndex]:
        """The index with its connections, which close on leaving."""
        index = cls(url, mesh, clock, reachable)
        try:
            yield index
        finally:
            with contextlib.suppress(*REDIS_ERRORS):
                await index._redis.aclose()

    async def lookup(self, keys: Sequence[str]) -> tuple[PrefixHolder, ...]:
        """How many leading blocks each worker holds, workers with none left out."""
        counts: dict[str, int] = {}
        tags: dict[str, str] = {}
        position = 0
        async with contextlib.aclosing(self._entries(keys, tags)) as entries_by_key:
            async for entries in entries_by_key:
                unbroken = [entry.address for entry in entries if counts.get(entry.address, 0) == position]
                position += 1
                counts.update((address, position) for address in unbroken)
                if not unbroken:
                    break
        return tuple(
            PrefixHolder(WorkerIdentity(address, tags[address].partition(" ")[0]), count)
            for address, count in counts.items()
        )

    async def publish(self, worker: WorkerIdentity, keys: Sequence[str], ttl_s: float) -> None:
        """Registers blocks. Raises StaleEpoch when the address has a later epoch."""
        for piece in _pieces(keys):
            arguments = (worker.epoch, worker.address, _ms(ttl_s), _ms(RETIRED_S), self._key("block", ""), *piece)
            if await self._script(_PUBLISH, self._holder_keys(worker), arguments) == "STALE":
                raise StaleEpoch(f"{worker.address} has been restarted since epoch {worker.epoch}")

    async def replace_epoch(self, worker: WorkerIdentity) -> None:
        """Drops what earlier epochs of this address registered; keeps what this one did. Late news changes nothing."""
        arguments = (worker.epoch, worker.address, 0, _ms(RETIRED_S))
        await self._script(_REPLACE, self._holder_keys(worker), arguments)

    async def withdraw(self, worker: WorkerIdentity, keys: Sequence[str]) -> None:
        """Takes out the given blocks of this address and epoch, or all."""
        if not keys:
            holder, _, channel = self._holder_keys(worker)
            await self._script(_WITHDRAW_ALL, (holder, channel), (worker.epoch, worker.address))
        for piece in _pieces(keys):
            arguments = (worker.epoch, worker.address, self._key("block", ""), *piece)
            await self._script(_WITHDRAW, (self._key("changes"),), arguments)

    async def acquire(self, keys: Sequence[str], ttl_s: float) -> tuple[str, int]:
        """A lease on the leading keys that somebody holds."""
        tags: dict[str, str] = {}
        held = 0
        async with contextlib.aclosing(self._entries(keys, tags)) as entries_by_key:
            async for entries in entries_by_key:
                if not entries:
                    break
                held += 1
        lease_id, pinned = secrets.token_hex(16), 0
        holders = [self._key("holder", address) for address in tags]
        for piece in _pieces(keys[:held]):
            arguments = (lease_id, _ms(ttl_s), self._key("block", ""), *piece)
            count = await self._script(_PIN, (self._key("lease", lease_id), *holders), arguments)
            pinned += int(count)
            if count < len(piece):
                break
        return lease_id, pinned

    async def release(self, lease_id: str) -> None:
        """Takes the lease off its keys."""
        name = self._key("lease", lease_id)
        with _unavailable():
            keys = await bounded(self._redis.lrange(name, 0, -1))
            for piece in _pieces(keys):
                async with self._redis.pipeline(transaction=False) as pipeline:
                    for block in piece:
                        pipeline.hdel(self._key("block", block), f"l:{lease_id}")
                    await bounded(pipeline.execute())
            await bounded(self._redis.delete(name))

    async def listen(self, on_change: Callable[[Change], None]) -> None:
        """Hands on changes for ever; LOST whenever some may have been missed."""
        while True:
            with contextlib.suppress(*REDIS_ERRORS, Unavailable):
                self._check_reachable()
                async with self._redis.pubsub(ignore_subscribe_messages=True) as messages:
                    await bounded(messages.subscribe(self._key("changes")))
                    on_change(LOST)
                    while self._reachable():
                        message = await messages.get_message(timeout=1.0)
                        if message is not None:
                            on_change(_change(message["data"]))
            await self._clock.wait(RESUBSCRIBE_S)

    # --- how -------------------------------------------------------------------------------------------------------------

    async def _entries(self, keys: Sequence[str], tags: dict[str, str]) -> AsyncIterator[list[_Entry]]:
        """The entries that count, key by key; `tags` gathers the holders' tags by address."""
        start, size = 0, FIRST_PIECE
        while start < len(keys):
            piece = keys[start : start + size]
            now, hashes = await self._read(piece)
            parsed = [list(_living(fields, now)) for fields in hashes]
            await self._read_tags({entry.address for entries in parsed for entry in entries} - set(tags), tags)
            for entries in parsed:
                yield [entry for entry in entries if entry.tag == tags[entry.address]]
            start, size = start + size, PIECE

    async def _read(self, keys: Sequence[str]) -> tuple[int, list[dict[str, str]]]:
        self._check_reachable()
        with _unavailable():
            async with self._redis.pipeline(transaction=False) as pipeline:
                pipeline.time()
                for block in keys:
                    pipeline.hgetall(self._key("block", block))
                (seconds, micros), *hashes = await bounded(pipeline.execute())
        return int(seconds) * 1000 + int(micros) // 1000, hashes

    async def _read_tags(self, addresses: set[str], tags: dict[str, str]) -> None:
        if addresses:
            names = sorted(addresses)
            with _unavailable():
                values = await bounded(self._redis.mget([self._key("holder", address) for address in names]))
            tags.update((name, value or "") for name, value in zip(names, values, strict=True))

    async def _script(self, script: str, keys: Sequence[str], arguments: Sequence[object]):
        self._check_reachable()
        with _unavailable():
            return await bounded(self._redis.eval(script, len(keys), *keys, *arguments))

    def _check_reachable(self) -> None:
        if not self._reachable():
            raise Unavailable("the catalogue's Redis is away", reason="REDIS_AWAY")

    def _holder_keys(self, worker: WorkerIdentity) -> tuple[str, str, str]:
        return self._key("holder", worker.address), self._key("retired", worker.address), self._key("changes")

    def _key(self, *parts: str) -> str:
        return key(self._mesh, *parts)


@contextlib.contextmanager
def _unavailable():
    try:
        yield
    except REDIS_ERRORS as error:
        raise Unavailable("the catalogue's Redis does not answer", reason="REDIS_AWAY") from error


def _living(fields: dict[str, str], now: int) -> Iterable[_Entry]:
    pinned = any(name.startswith("l:") and int(expiry) > now for name, expiry in fields.items())
    for name, value in fields.items():
        if name.startswith("w:"):
            tag, _, expiry = value.rpartition(" ")
            if pinned or int(expiry) > now:
                yield _Entry(name[2:], tag)


def _pieces(keys: Sequence[str]) -> Iterable[Sequence[str]]:
    return (keys[start : start + PIECE] for start in range(0, len(keys), PIECE))


def _ms(seconds: float) -> int:
    return int(seconds * 1000)


def _change(data: str) -> Change:
    kind, address, epoch, *keys = json.loads(data)
    return Change(kind, WorkerIdentity(address, epoch), tuple(keys[0]) if keys else ())
