"""Translates between protobuf and the catalogue core; every decision is in `KvStore`."""

from __future__ import annotations

import asyncio
import contextlib

from headrace.observe import telemetry
from headrace.rpc.links import LinkServer
from headrace.rpc.status import time_left_s
from headrace.v1 import kvstore_pb2, kvstore_pb2_grpc
from headrace.wire import common as common_wire
from headrace.wire import kvstore as kvstore_wire
from services.kvstore.core import KvStore

SERVICE = "headrace.v1.KvStoreService"


class KvStoreServicer(kvstore_pb2_grpc.KvStoreServiceServicer):
    """headrace.v1.KvStoreService."""

    def __init__(self, core: KvStore, links: LinkServer):
        self._core, self._links = core, links

    async def OpenCatalogueLink(self, request_iterator, context):
        async for message in self._links.serve(request_iterator, context):
            yield message

    async def Lookup(self, request, context):
        keys = kvstore_wire.keys_from_pb(request.keys)
        with telemetry.span("kvstore.lookup", blocks=len(keys)) as span:
            async with asyncio.timeout(time_left_s(context)):
                holders = await self._core.lookup(keys)
            span.set(held_blocks=max((holder.num_blocks for holder in holders), default=0))
            return kvstore_wire.holders_to_pb(holders)

    async def Acquire(self, request, context):
        holder, ttl_s = common_wire.identity_from_pb(request.holder), common_wire.duration_from_pb(request.time_to_live)
        async with asyncio.timeout(time_left_s(context)):
            lease_id, count = await self._core.acquire(holder, kvstore_wire.keys_from_pb(request.keys), ttl_s)
        return kvstore_pb2.AcquireResponse(lease_id=lease_id, key_count=count)

    async def ReleaseLease(self, request, context):
        async with asyncio.timeout(time_left_s(context)):
            await self._core.release(request.lease_id)
        return kvstore_pb2.ReleaseLeaseResponse()

    async def Watch(self, request, context):
        async with contextlib.aclosing(self._core.watch()) as changes:
            async for change in changes:
                yield kvstore_wire.change_to_pb(change)


def register(core: KvStore, links: LinkServer):
    """What `rpc.start_server` calls to add this service."""
    return lambda server: kvstore_pb2_grpc.add_KvStoreServiceServicer_to_server(KvStoreServicer(core, links), server)
