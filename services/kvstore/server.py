"""Translates between protobuf and the catalogue core; every decision is in `KvStore`."""

from __future__ import annotations

import asyncio

from headrace import rpc, wire
from headrace.observe import telemetry
from headrace.v1 import kvstore_pb2, kvstore_pb2_grpc
from services.kvstore.core import KvStore

SERVICE = "headrace.v1.KvStoreService"


class KvStoreServicer(kvstore_pb2_grpc.KvStoreServiceServicer):
    """headrace.v1.KvStoreService."""

    def __init__(self, core: KvStore):
        self._core = core

    async def Lookup(self, request, context):
        with telemetry.span("kvstore.lookup", blocks=len(request.keys)) as span:
            async with asyncio.timeout(rpc.time_left_s(context)):
                holders = await self._core.lookup(request.keys)
            span.set(held_blocks=max((holder.num_blocks for holder in holders), default=0))
            return wire.holders_to_pb(holders)

    async def Publish(self, request, context):
        worker, ttl_s = wire.identity_from_pb(request.worker), wire.duration_from_pb(request.time_to_live)
        async with asyncio.timeout(rpc.time_left_s(context)):
            await self._core.publish(worker, request.keys, ttl_s)
        return kvstore_pb2.PublishResponse()

    async def Withdraw(self, request, context):
        async with asyncio.timeout(rpc.time_left_s(context)):
            await self._core.withdraw(wire.identity_from_pb(request.worker), request.keys)
        return kvstore_pb2.WithdrawResponse()

    async def Acquire(self, request, context):
        holder, ttl_s = wire.identity_from_pb(request.holder), wire.duration_from_pb(request.time_to_live)
        async with asyncio.timeout(rpc.time_left_s(context)):
            lease_id, count = await self._core.acquire(holder, request.keys, ttl_s)
        return kvstore_pb2.AcquireResponse(lease_id=lease_id, key_count=count)

    async def ReleaseLease(self, request, context):
        async with asyncio.timeout(rpc.time_left_s(context)):
            await self._core.release(request.lease_id)
        return kvstore_pb2.ReleaseLeaseResponse()

    async def Watch(self, request, context):
        async for change in self._core.watch():
            yield kvstore_pb2.WatchResponse(
                change=kvstore_pb2.CatalogueChange.Value(f"CATALOGUE_CHANGE_{change.kind}"),
                worker=wire.identity_to_pb(change.worker),
                keys=change.keys,
            )


def register(core: KvStore):
    """What `rpc.start_server` calls to add this service."""
    return lambda server: kvstore_pb2_grpc.add_KvStoreServiceServicer_to_server(KvStoreServicer(core), server)
