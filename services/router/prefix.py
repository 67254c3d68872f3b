"""Which workers hold the beginning of a prompt: a hint from the kvstore, never waited for longer than LOOKUP_TIMEOUT_S."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from headrace.cache.blocks import block_keys
from headrace.errors import HeadraceError
from headrace.observe import telemetry
from headrace.protocol import PrefixHolder
from services.router.interfaces import Membership

LOOKUP_TIMEOUT_S = 0.05
MAX_KEYS = 65_536


class PrefixIndex(Protocol):
    """What routing asks about prefixes."""

    async def lookup(self, salt: str, token_ids: Sequence[int], block_size: int) -> tuple[PrefixHolder, ...]: ...


class NoPrefixes:
    """Nothing is known."""

    async def lookup(self, salt: str, token_ids: Sequence[int], block_size: int) -> tuple[PrefixHolder, ...]:
        """Nobody."""
        return ()


class KvStorePrefixes:
    """Asks the first kvstore process that is announced; `peers` is headrace.client.Peers."""

    def __init__(self, membership: Membership, peers: Any):
        self._membership, self._peers = membership, peers

    async def lookup(self, salt: str, token_ids: Sequence[int], block_size: int) -> tuple[PrefixHolder, ...]:
        """Holders, longest first; nobody when the kvstore is away or slow, which is counted."""
        members = self._membership.members("kvstore")
        keys = block_keys(salt, token_ids, block_size)[:MAX_KEYS] if block_size else []
        if not members or not keys:
            return ()
        try:
            return await self._peers.kvstore(members[0].identity.address).lookup(keys, LOOKUP_TIMEOUT_S)
        except HeadraceError as error:
            telemetry.counter("headrace.router.failed_lookups").add(1, reason=error.reason)
            return ()
