"""Who is alive: services announce themselves in Redis and watch one another there.

Redis is a cache of truth and never on the token path. Every call has a short time-out. When Redis is away, flushed or
frozen, everybody keeps the last view and announces again once a second; a member whose key is missing stays as long as the
process itself answers with the same epoch. A new epoch at an address replaces the old one at once.

Keys, all with a time to live, all in one hash slot so that scripts also work on a cluster:
    headrace:{<mesh>}:members                    set of member names
    headrace:{<mesh>}:member:<member name>       {"epoch", "details"} as JSON; the lease
    headrace:{<mesh>}:claim:<name>               a name that one router has taken, such as a request id
Channel: headrace:{<mesh>}:changed. A member name is `<role> <address>`, with the epoch added where processes share a port.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from headrace.clock import Clock, first_of
from headrace.config import RegistryConfig
from headrace.errors import ConfigError, HeadraceError
from headrace.observe import logs
from headrace.protocol.common import WorkerIdentity
from headrace.rpc.channel import check_health, open_channel
from headrace.rpc.clients import DecodeClient, PrefillClient

log = logs.get(__name__)

CALL_S = 1.0
"""Longest wait for one answer of Redis."""
POLL_S = 0.5
"""Pause between two looks at the members; a hint by pub/sub ends it early."""
PROBE_S = 1.0
"""Longest wait for a member whose key is missing."""
PROBES = 2
"""Failed probes in a row after which such a member is gone."""
REDIS_ERRORS = (RedisError, OSError, asyncio.TimeoutError)
"""What a client raises when Redis is away."""


def connect(url: str) -> redis.asyncio.Redis:
    """A client that never retries by itself; every call on it goes through `bounded`. Raises ConfigError for a bad URL."""
    if not url:
        raise ConfigError("registry.url is empty: start with `headrace up`, or name a Redis", field="registry.url")
    try:
        return redis.asyncio.Redis.from_url(
            url,
            decode_responses=True,
            socket_timeout=None,
            socket_connect_timeout=CALL_S,
            retry=Retry(NoBackoff(), 0),
        )
    except ValueError as error:
        raise ConfigError(f"registry.url = {url!r}: {error}", field="registry.url") from error


async def bounded(call: Awaitable[Any], timeout_s: float = CALL_S) -> Any:
    """What Redis answers, or TimeoutError.

    Not the client's own `socket_timeout`: it sends through asyncio.wait_for, which on Python 3.11 returns as if nothing
    had happened when a cancellation arrives together with the result, and the task that was to end lives on.
    """
    async with asyncio.timeout(timeout_s):
        return await call


def key(mesh: str, *parts: str) -> str:
    """A key or channel of this mesh."""
    return ":".join((f"headrace:{{{mesh}}}", *parts))


@dataclass(frozen=True)
class Member:
    """A process that announced itself. `details` is what it says of itself, JSON values only."""

    role: str
    identity: WorkerIdentity
    details: Mapping[str, Any] = field(default_factory=dict, hash=False)


Probe = Callable[[Member], Awaitable[bool]]

_BEAT = """
local old = redis.call('GET', KEYS[2])
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
redis.call('SADD', KEYS[1], ARGV[1])
redis.call('PEXPIRE', KEYS[1], 10 * ARGV[3])
if old ~= ARGV[2] then redis.call('PUBLISH', ARGV[4], ARGV[1]) end
"""
_LEAVE = """
if redis.call('GET', KEYS[2]) == ARGV[2] then
  redis.call('DEL', KEYS[2])
  redis.call('SREM', KEYS[1], ARGV[1])
  redis.call('PUBLISH', ARGV[3], ARGV[1])
end
"""
_LIST = """
local found = {}
for _, name in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local value = redis.call('GET', ARGV[1] .. name)
  if value then
    found[#found + 1] = name
    found[#found + 1] = value
  else
    redis.call('SREM', KEYS[1], name)
  end
end
return found
"""
_UNCLAIM = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"


class Registry:
    """One process's view of its mesh. Use `async with Registry.open(...)`."""

    def __init__(self, url: str, mesh: str, config: RegistryConfig, clock: Clock, probe: Probe | None = None):
        self._redis = connect(url)
        self._mesh = mesh
        self._config = config
        self._clock = clock
        self._probe = probe or answers_as
        self._own: dict[str, Member] = {}
        self._view: dict[str, Member] = {}
        self._failed_probes: dict[str, int] = {}
        self._reachable: bool | None = None
        self._hint = asyncio.Event()
        self._change = asyncio.Event()
        self._token = secrets.token_hex(8)
        self.version = 0
        """Grows with every change of the view."""

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, url: str, mesh: str, config: RegistryConfig, clock: Clock, *, probe: Probe | None = None
    ) -> AsyncIterator[Registry]:
        """The view with its background tasks. Redis may be away, now and later. Leaving withdraws our announcements.

        `probe(member)` says whether a member whose key is missing still answers with the same epoch.
        """
        registry = cls(url, mesh, config, clock, probe)
        try:
            async with asyncio.TaskGroup() as tasks:
                loops = [tasks.create_task(run()) for run in (registry._beat, registry._watch, registry._listen)]
                try:
                    yield registry
                finally:
                    for task in loops:
                        task.cancel()
        finally:
            await registry.withdraw()
            with contextlib.suppress(*REDIS_ERRORS):
                await registry._redis.aclose()

    # --- what we say -----------------------------------------------------------------------------------------------------

    async def announce(
        self, role: str, identity: WorkerIdentity, details: Mapping[str, Any], *, shares_address: bool = False
    ) -> None:
        """Makes this process known and keeps it so. Returns after one try; the heartbeat repeats it.

        `shares_address`: other processes with the same role serve the same port and must not replace one another.
        """
        name = f"{role} {identity.address}" + (f" {identity.epoch}" if shares_address else "")
        self._own[name] = Member(role, identity, dict(details))
        await self._beat_once()

    def update(self, details: Mapping[str, Any], role: str | None = None) -> None:
        """Replaces what is said of this process, for one role or for all; the next heartbeat carries it."""
        for name, member in self._own.items():
            if role in (None, member.role):
                self._own[name] = Member(member.role, member.identity, dict(details))

    async def withdraw(self) -> None:
        """Says that this process takes no new work. Safe to repeat."""
        own, self._own = self._own, {}
        for name, member in own.items():
            keys = (self._key("members"), self._key("member", name))
            arguments = (name, _value(member), self._key("changed"))
            with contextlib.suppress(*REDIS_ERRORS):
                await bounded(self._redis.eval(_LEAVE, 2, *keys, *arguments))

    async def claim(self, name: str, ttl_s: float) -> bool:
        """Takes a name that no other process of the mesh may take for `ttl_s`. True as well when Redis is away."""
        try:
            claim = self._redis.set(self._key("claim", name), self._token, nx=True, px=int(ttl_s * 1000))
            taken = await bounded(claim)
        except REDIS_ERRORS:
            return True
        return taken is not None

    async def unclaim(self, name: str) -> None:
        """Gives a claimed name back."""
        with contextlib.suppress(*REDIS_ERRORS):
            await bounded(self._redis.eval(_UNCLAIM, 1, self._key("claim", name), self._token))

    # --- what we see -----------------------------------------------------------------------------------------------------

    def members(self, role: str) -> tuple[Member, ...]:
        """The last known members of one role, by address."""
        found = (member for member in self._view.values() if member.role == role)
        return tuple(sorted(found, key=lambda member: (member.identity.address, member.identity.epoch)))

    async def wait_change(self, timeout_s: float, since: int | None = None) -> bool:
        """Waits until the view changes; False after `timeout_s`. With `since` (an earlier `version`) nothing is missed."""
        if since is not None and since != self.version:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._change.wait()
        except TimeoutError:
            return False
        return True

    @property
    def reachable(self) -> bool:
        """Whether Redis answered the last time we asked; True before we did."""
        return self._reachable is not False

    # --- the three loops -------------------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        while True:
            await self._clock.wait(self._config.heartbeat_s)
            await self._beat_once()

    async def _beat_once(self) -> None:
        lease_ms = int(self._config.lease_s * 1000)
        for name, member in list(self._own.items()):
            if name not in self._own:  # withdrawn while we waited for Redis
                continue
            keys = (self._key("members"), self._key("member", name))
            try:
                beat = self._redis.eval(_BEAT, 2, *keys, name, _value(member), lease_ms, self._key("changed"))
                await bounded(beat)
            except REDIS_ERRORS as error:
                self._note_reachable(False, error)
                return

    async def _watch(self) -> None:
        while True:
            self._hint.clear()
            try:
                found = await bounded(self._redis.eval(_LIST, 1, self._key("members"), self._key("member", "")))
            except REDIS_ERRORS as error:
                self._note_reachable(False, error)
            else:
                self._note_reachable(True)
                await self._take(dict(zip(found[::2], found[1::2], strict=True)))
            await self._pause()

    async def _pause(self) -> None:
        await first_of(self._clock.wait(POLL_S), self._hint.wait())

    async def _take(self, found: dict[str, str]) -> None:
        """Makes what Redis says the view; asks those it does not name whether they are there."""
        fresh = {name: member for name, value in found.items() if (member := _member(name, value)) is not None}
        for name, member in fresh.items():
            self._failed_probes.pop(name, None)
            if self._view.get(name) != member:
                self._view[name] = member
                self._changed()
        missing = [name for name in self._view if name not in fresh and name not in self._own]
        answers = await asyncio.gather(*(self._still_there(self._view[name]) for name in missing))
        for name, alive in zip(missing, answers, strict=True):
            self._count_probe(name, alive)

    def _count_probe(self, name: str, alive: bool) -> None:
        failed = 0 if alive else self._failed_probes.get(name, 0) + 1
        self._failed_probes[name] = failed
        if failed >= PROBES:
            del self._view[name], self._failed_probes[name]
            self._changed()
            log.info("member gone", member=name)

    async def _still_there(self, member: Member) -> bool:
        try:
            async with asyncio.timeout(PROBE_S):
                return await self._probe(member)
        except (HeadraceError, TimeoutError):
            return False

    async def _listen(self) -> None:
        """Turns messages on the channel into early looks. Subscribes anew whenever Redis was away."""
        while True:
            with contextlib.suppress(*REDIS_ERRORS):
                async with self._redis.pubsub(ignore_subscribe_messages=True) as messages:
                    await bounded(messages.subscribe(self._key("changed")))
                    self._hint.set()
                    while self._reachable is not False:
                        if await messages.get_message(timeout=1.0) is not None:
                            self._hint.set()
            await self._clock.wait(POLL_S)

    def _changed(self) -> None:
        self.version += 1
        self._change.set()
        self._change = asyncio.Event()

    def _note_reachable(self, reachable: bool, error: BaseException | None = None) -> None:
        if self._reachable is reachable:
            return
        if not reachable:
            log.warning("redis is away; the last known view stays", reason=str(error) or type(error).__name__)
        elif self._reachable is False:
            log.info("redis answers again")
        self._reachable = reachable

    def _key(self, *parts: str) -> str:
        return key(self._mesh, *parts)


def _value(member: Member) -> str:
    return json.dumps({"epoch": member.identity.epoch, "details": dict(member.details)}, sort_keys=True)


def _member(name: str, value: str) -> Member | None:
    try:
        role, address, *_ = name.split(" ")
        fields = json.loads(value)
        return Member(role, WorkerIdentity(address, fields["epoch"]), fields["details"])
    except (ValueError, KeyError, TypeError):
        log.warning("a member's entry cannot be read", member=name)
        return None


async def answers_as(member: Member) -> bool:
    """Whether the process at the member's address says SERVING and, for workers, still has the member's epoch."""
    async with open_channel(member.identity.address) as channel:
        if not await check_health(channel, timeout_s=PROBE_S):
            return False
        if member.role not in ("prefill", "decode"):
            return True
        client = PrefillClient(channel) if member.role == "prefill" else DecodeClient(channel)
        return (await client.info(PROBE_S)).identity.epoch == member.identity.epoch
