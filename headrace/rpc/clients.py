"""Typed clients of what services answer to operators, tools and tests. What services say to one another goes over links.

Every method takes seconds, returns plain values and raises headrace.errors.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import TYPE_CHECKING

import grpc

from headrace.protocol.common import WorkerIdentity, WorkerInfo
from headrace.protocol.decode import DecodeLedger
from headrace.protocol.kvstore import CatalogueChange, PrefixHolder
from headrace.protocol.prefill import PrefillLedger
from headrace.protocol.router import RouterLedger, WorkerView
from headrace.rpc.channel import call_stream, call_unary, open_blocking_channel, open_channel
from headrace.rpc.status import error_from_rpc
from headrace.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    kvstore_pb2,
    kvstore_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
)
from headrace.wire.common import duration_to_pb, identity_to_pb, keys_to_pb, worker_info_from_pb
from headrace.wire.decode import decode_ledger_from_pb
from headrace.wire.kvstore import change_from_pb, holders_from_pb
from headrace.wire.prefill import prefill_ledger_from_pb
from headrace.wire.router import router_ledger_from_pb, worker_view_from_pb

if TYPE_CHECKING:
    from headrace.transfer.grpc import RowChunk


class DecodeClient:
    """One decode rank, as its operator sees it."""

    def __init__(self, channel: grpc.aio.Channel):
        self._stub = decode_pb2_grpc.DecodeServiceStub(channel)

    async def info(self, timeout_s: float = 5.0) -> WorkerInfo:
        """What the rank says of itself."""
        answer = await call_unary(self._stub.GetDecodeInfo, decode_pb2.GetDecodeInfoRequest(), timeout_s)
        return worker_info_from_pb(answer.info)

    async def ledger(self, timeout_s: float = 5.0) -> DecodeLedger:
        """Who holds what."""
        answer = await call_unary(self._stub.GetDecodeLedger, decode_pb2.GetDecodeLedgerRequest(), timeout_s)
        return decode_ledger_from_pb(answer)


class PrefillClient:
    """One prefill rank, as its operator sees it."""

    def __init__(self, channel: grpc.aio.Channel):
        self._stub = prefill_pb2_grpc.PrefillServiceStub(channel)

    async def info(self, timeout_s: float = 5.0) -> WorkerInfo:
        """What the rank says of itself."""
        answer = await call_unary(self._stub.GetPrefillInfo, prefill_pb2.GetPrefillInfoRequest(), timeout_s)
        return worker_info_from_pb(answer.info)

    async def ledger(self, timeout_s: float = 5.0) -> PrefillLedger:
        """Who holds what."""
        answer = await call_unary(self._stub.GetPrefillLedger, prefill_pb2.GetPrefillLedgerRequest(), timeout_s)
        return prefill_ledger_from_pb(answer)


class KvStoreClient:
    """The block catalogue, without what workers publish."""

    def __init__(self, channel: grpc.aio.Channel):
        self._stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)

    async def lookup(self, keys: Sequence[bytes], timeout_s: float) -> tuple[PrefixHolder, ...]:
        """Who holds how many leading blocks of `keys`, longest first."""
        request = kvstore_pb2.LookupRequest(keys=keys_to_pb(keys))
        return holders_from_pb(await call_unary(self._stub.Lookup, request, timeout_s))

    async def acquire(
        self, holder: WorkerIdentity, keys: Sequence[bytes], ttl_s: float, timeout_s: float
    ) -> tuple[str, int]:
        """A lease id and how many leading keys it pins."""
        request = kvstore_pb2.AcquireRequest(
            holder=identity_to_pb(holder), keys=keys_to_pb(keys), time_to_live=duration_to_pb(ttl_s)
        )
        answer = await call_unary(self._stub.Acquire, request, timeout_s)
        return answer.lease_id, answer.key_count

    async def release_lease(self, lease_id: str, timeout_s: float) -> None:
        """Ends a lease early."""
        await call_unary(self._stub.ReleaseLease, kvstore_pb2.ReleaseLeaseRequest(lease_id=lease_id), timeout_s)

    async def watch(self) -> AsyncIterator[CatalogueChange]:
        """The catalogue as it is, then its changes as they happen."""
        request = kvstore_pb2.WatchRequest()
        async with contextlib.aclosing(call_stream(self._stub.Watch, request, None)) as messages:
            async for message in messages:
                yield change_from_pb(message)


class RouterClient:
    """The operator's view of a router."""

    def __init__(self, channel: grpc.aio.Channel):
        self._stub = router_pb2_grpc.RouterServiceStub(channel)

    async def workers(self, timeout_s: float = 5.0) -> tuple[WorkerView, ...]:
        """Every worker it knows."""
        answer = await call_unary(self._stub.ListWorkers, router_pb2.ListWorkersRequest(), timeout_s)
        return tuple(worker_view_from_pb(view) for view in answer.workers)

    async def ledger(self, timeout_s: float = 5.0) -> RouterLedger:
        """Requests in flight."""
        answer = await call_unary(self._stub.GetRouterLedger, router_pb2.GetRouterLedgerRequest(), timeout_s)
        return router_ledger_from_pb(answer)


class RowSender:
    """Carries rows to decode ranks for the `grpc` transfer, blocking; called from a transfer thread."""

    def __init__(self, timeout_s: float):
        self._timeout_s = timeout_s
        self._channels: dict[str, grpc.Channel] = {}

    def __enter__(self) -> RowSender:
        return self

    def __exit__(self, *exception: object) -> None:
        for channel in self._channels.values():
            channel.close()

    def __call__(self, address: str, chunks: Iterable[RowChunk]) -> int:
        """Bytes written at `address`. Raises headrace.errors."""
        if address not in self._channels:
            self._channels[address] = open_blocking_channel(address)
        stub = decode_pb2_grpc.DecodeServiceStub(self._channels[address])
        requests = (
            decode_pb2.WriteRowsRequest(
                session=chunk.session, layer=chunk.layer, target_row=chunk.target_row, payload=chunk.payload
            )
            for chunk in chunks
        )
        try:
            return stub.WriteRows(requests, timeout=self._timeout_s).byte_count
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error


class Peers:
    """Channels to other processes, one per address, kept until `close`."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}

    def channel(self, address: str) -> grpc.aio.Channel:
        """The channel to `address`, opened at first use."""
        if address not in self._channels:
            self._channels[address] = open_channel(address)
        return self._channels[address]

    def decode(self, address: str) -> DecodeClient:
        """A decode rank."""
        return DecodeClient(self.channel(address))

    def prefill(self, address: str) -> PrefillClient:
        """A prefill rank."""
        return PrefillClient(self.channel(address))

    def kvstore(self, address: str) -> KvStoreClient:
        """A kvstore process."""
        return KvStoreClient(self.channel(address))

    async def forget(self, address: str) -> None:
        """Closes the channel to an address that is gone."""
        channel = self._channels.pop(address, None)
        if channel is not None:
            await channel.close()

    async def close(self) -> None:
        """Closes all channels."""
        for address in list(self._channels):
            await self.forget(address)
