"""The catalogue in Redis: `scripts` says what stands where. Long calls go in pieces, so that no script holds the server for long."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Callable, Sequence

from headrace.clock import Clock
from headrace.errors import HeadraceError, StaleEpoch, Unavailable
from headrace.process.registry import REDIS_ERRORS, bounded
from headrace.protocol.common import CacheTier, WorkerIdentity
from headrace.protocol.kvstore import PrefixHolder, PublishCommand, WithdrawCommand
from services.kvstore import scripts
from services.kvstore.changes import LOST, Change
from services.kvstore.connection import Call, Connection, script
from services.kvstore.reading import Reader, pieces

RESUBSCRIBE_S = 0.5
RETIRED_S = 3600.0
"""How long the epochs before the present one are remembered."""


class RedisIndex:
    """The catalogue of one mesh. Every method raises Unavailable when Redis does not answer."""

    def __init__(self, connection: Connection, clock: Clock):
        self._connection = connection
        self._clock = clock

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, url: str, mesh: str, clock: Clock, reachable: Callable[[], bool] = lambda: True
    ) -> AsyncIterator[RedisIndex]:
        """The index with its connections, which close on leaving. `reachable` as for Connection."""
        async with Connection.open(url, mesh, reachable) as connection:
            yield cls(connection, clock)

    async def apply(
        self, worker: WorkerIdentity, commands: Sequence[PublishCommand | WithdrawCommand]
    ) -> list[HeadraceError | None]:
        """Carries out commands of one worker, in order, in one round trip. None, or what became of each: StaleEpoch when the
        address has a later epoch."""
        calls = [self._calls_of(worker, command) for command in commands]
        answers = iter(await self._connection.calls([call for several in calls for call in several]))
        return [_outcome(worker, [next(answers) for _ in several]) for several in calls]

    async def replace_epoch(self, worker: WorkerIdentity) -> None:
        """Drops what earlier epochs of this address registered; keeps what this one did. Late news changes nothing."""
        arguments = (worker.epoch, worker.address, 0, _ms(RETIRED_S))
        await self._connection.call(*script(scripts.REPLACE, self._holder_keys(worker), arguments))

    async def lookup(self, keys: Sequence[bytes]) -> tuple[PrefixHolder, ...]:
        """How many leading blocks each worker holds, workers with none left out."""
        return await Reader(self._connection).holders(keys)

    async def snapshot(self) -> AsyncIterator[Change]:
        """Everything that is published now, as changes."""
        async for page in Reader(self._connection).everything():
            for (worker, tier), keys in page.items():
                yield Change("PUBLISHED", worker, tuple(keys), tier=tier, is_snapshot=True)

    async def acquire(self, keys: Sequence[bytes], ttl_s: float) -> tuple[str, int]:
        """A lease on the leading keys that somebody holds."""
        reader = Reader(self._connection)
        held = await reader.count_held(keys)
        lease_id, pinned = secrets.token_hex(16), 0
        names = [self._key("lease", lease_id), *(self._key("holder", address) for address in reader.tags)]
        for piece in pieces(keys[:held]):
            arguments = (lease_id, _ms(ttl_s), self._key("block", ""), *_hexadecimal(piece))
            count = int(await self._connection.call(*script(scripts.PIN, names, arguments)))
            pinned += count
            if count < len(piece):
                break
        return lease_id, pinned

    async def release(self, lease_id: str) -> None:
        """Takes the lease off its keys."""
        name = self._key("lease", lease_id)
        pinned = await self._connection.call("LRANGE", name, 0, -1)
        for piece in pieces(pinned):
            await self._connection.calls([("HDEL", self._key("block", block), f"l:{lease_id}") for block in piece])
        await self._connection.call("DEL", name)

    async def listen(self, on_change: Callable[[Change], None]) -> None:
        """Hands on changes for ever; LOST whenever some may have been missed."""
        while True:
            with contextlib.suppress(*REDIS_ERRORS, Unavailable):
                self._connection.check_reachable()
                async with self._connection.client.pubsub(ignore_subscribe_messages=True) as messages:
                    await bounded(messages.subscribe(self._key("changes")))
                    on_change(LOST)
                    while self._connection.reachable():
                        message = await messages.get_message(timeout=1.0)
                        if message is not None:
                            on_change(_change(message["data"]))
            await self._clock.wait(RESUBSCRIBE_S)

    # --- how -------------------------------------------------------------------------------------------------------------

    def _calls_of(self, worker: WorkerIdentity, command: PublishCommand | WithdrawCommand) -> list[Call]:
        blocks, (holder, _, channel) = self._key("block", ""), self._holder_keys(worker)
        if isinstance(command, PublishCommand):
            ttls = _ms(command.time_to_live_s), _ms(RETIRED_S)
            head = (worker.epoch, worker.address, *ttls, blocks, int(command.tier))
            names = self._holder_keys(worker)
            return [script(scripts.PUBLISH, names, (*head, *_hexadecimal(keys))) for keys in pieces(command.keys)]
        if command.all:
            return [script(scripts.WITHDRAW_ALL, (holder, channel), (worker.epoch, worker.address))]
        head = (worker.epoch, worker.address, blocks)
        return [script(scripts.WITHDRAW, (channel,), (*head, *_hexadecimal(keys))) for keys in pieces(command.keys)]

    def _holder_keys(self, worker: WorkerIdentity) -> tuple[str, str, str]:
        return self._key("holder", worker.address), self._key("retired", worker.address), self._key("changes")

    def _key(self, *parts: str) -> str:
        return self._connection.key(*parts)


def _outcome(worker: WorkerIdentity, answers: Sequence[object]) -> HeadraceError | None:
    for answer in answers:
        if answer == "STALE":
            return StaleEpoch(f"{worker.address} has been restarted since epoch {worker.epoch}")
        if isinstance(answer, Exception):
            return Unavailable(f"the catalogue's Redis refused: {answer}", reason="REDIS_AWAY")
    return None


def _hexadecimal(keys: Sequence[bytes]) -> list[str]:
    return [key.hex() for key in keys]


def _ms(seconds: float) -> int:
    return int(seconds * 1000)


def _change(data: str) -> Change:
    kind, address, epoch, tier, *keys = json.loads(data)
    named = tuple(bytes.fromhex(key) for key in keys[0]) if keys else ()
    return Change(kind, WorkerIdentity(address, epoch), named, all=not keys, tier=CacheTier(tier))
