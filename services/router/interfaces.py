"""What the router needs of others, as small protocols; and `PeerDialer`, the real way to workers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Protocol

from headrace.errors import HeadraceError, Unavailable
from headrace.protocol import (
    PrefillCommand,
    PrefillEvent,
    Reservation,
    ReserveCommand,
    TokenFrame,
    WorkerIdentity,
    WorkerInfo,
)


class PrefillPort(Protocol):
    """headrace.client.PrefillClient, as far as the router uses it."""

    def prefill(self, command: PrefillCommand, timeout_s: float) -> AsyncIterator[PrefillEvent]: ...


class DecodePort(Protocol):
    """headrace.client.DecodeClient, as far as the router uses it."""

    async def reserve(self, command: ReserveCommand, timeout_s: float) -> Reservation: ...

    async def release(
        self, request_id: str, attempt: int, decode_epoch: str, sample_indices: Sequence[int], timeout_s: float
    ) -> None: ...

    def stream_tokens(
        self, router: WorkerIdentity, decode_epoch: str, resume_after_frame: int = 0
    ) -> AsyncIterator[TokenFrame]: ...


class Dialer(Protocol):
    """Opens clients and asks workers who they are."""

    def prefill(self, address: str) -> PrefillPort: ...

    def decode(self, address: str) -> DecodePort: ...

    async def probe(self, role: str, address: str, timeout_s: float) -> WorkerInfo:
        """What serves there. Raises Unavailable when nothing does, or it says NOT_SERVING."""
        ...

    async def forget(self, address: str) -> None: ...


class Member(Protocol):
    """headrace.process.registry.Member, as far as the router uses it."""

    @property
    def identity(self) -> WorkerIdentity: ...


class Membership(Protocol):
    """headrace.process.registry.Registry, as far as the router uses it."""

    version: int

    def members(self, role: str) -> Sequence[Member]: ...

    async def wait_change(self, timeout_s: float, since: int | None = None) -> bool: ...


class PeerDialer:
    """The real Dialer, over headrace.client.Peers."""

    def __init__(self, peers: Any, check_health: Callable[..., Awaitable[bool]]):
        self._peers, self._check_health = peers, check_health

    def prefill(self, address: str) -> PrefillPort:
        """A client of a prefill rank."""
        return self._peers.prefill(address)

    def decode(self, address: str) -> DecodePort:
        """A client of a decode rank."""
        return self._peers.decode(address)

    async def probe(self, role: str, address: str, timeout_s: float) -> WorkerInfo:
        """GetInfo, then health."""
        client = self._peers.prefill(address) if role == "prefill" else self._peers.decode(address)
        info = await client.info(timeout_s)
        if not await self._check_health(self._peers.channel(address), timeout_s=timeout_s):
            raise Unavailable(f"{address} says NOT_SERVING", reason="NOT_SERVING")
        return info

    async def forget(self, address: str) -> None:
        """Closes the channel."""
        with contextlib.suppress(HeadraceError):
            await self._peers.forget(address)
