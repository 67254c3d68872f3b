"""protobuf <-> our values: `kvstore.proto`."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.errors import HeadraceError, InvalidRequest
from headrace.protocol import kvstore as p
from headrace.protocol.common import CacheTier
from headrace.protocol.link import Done
from headrace.v1 import kvstore_pb2
from headrace.wire.common import (
    duration_from_pb,
    duration_to_pb,
    enum_from_pb,
    identity_from_pb,
    identity_to_pb,
    keys_from_pb,
    keys_to_pb,
)
from headrace.wire.link import DONE, FAILURE, ItemCodec

_CHANGE_PREFIX = "CATALOGUE_CHANGE_"


def publish_to_pb(value: p.PublishCommand) -> kvstore_pb2.PublishCommand:
    """Blocks a worker holds now."""
    return kvstore_pb2.PublishCommand(
        keys=keys_to_pb(value.keys),
        time_to_live=duration_to_pb(value.time_to_live_s),
        tier=int(value.tier),  # type: ignore[arg-type]
    )


def publish_from_pb(message: kvstore_pb2.PublishCommand) -> p.PublishCommand:
    """Blocks a worker holds now."""
    return p.PublishCommand(
        keys_from_pb(message.keys),
        duration_from_pb(message.time_to_live),
        enum_from_pb(CacheTier, message.tier, "tier"),
    )


def withdraw_to_pb(value: p.WithdrawCommand) -> kvstore_pb2.WithdrawCommand:
    """Blocks a worker holds no longer."""
    return kvstore_pb2.WithdrawCommand(keys=keys_to_pb(value.keys), all=value.all)


def withdraw_from_pb(message: kvstore_pb2.WithdrawCommand) -> p.WithdrawCommand:
    """Blocks a worker holds no longer."""
    if message.all and message.keys:
        raise InvalidRequest("keys: must be empty with `all`", field="keys")
    return p.WithdrawCommand(keys_from_pb(message.keys), message.all)


def holders_to_pb(holders: Sequence[p.PrefixHolder]) -> kvstore_pb2.LookupResponse:
    """Who holds how much of a prefix."""
    return kvstore_pb2.LookupResponse(
        holders=[
            kvstore_pb2.PrefixHolder(worker=identity_to_pb(x.worker), block_count=x.num_blocks, tier=int(x.tier))  # type: ignore[arg-type]
            for x in holders
        ]
    )


def holders_from_pb(message: kvstore_pb2.LookupResponse) -> tuple[p.PrefixHolder, ...]:
    """Workers that hold how much of a prefix. A store is no worker and is left out until blocks are fetched from one."""
    return tuple(
        p.PrefixHolder(identity_from_pb(x.worker), x.block_count, enum_from_pb(CacheTier, x.tier, "holders.tier"))
        for x in message.holders
        if x.WhichOneof("holder") == "worker"
    )


def change_to_pb(value: p.CatalogueChange) -> kvstore_pb2.WatchResponse:
    """What happened to some keys."""
    return kvstore_pb2.WatchResponse(
        change=kvstore_pb2.CatalogueChange.Value(_CHANGE_PREFIX + value.kind),
        worker=identity_to_pb(value.worker),
        keys=keys_to_pb(value.keys),
        all=value.all,
        number=value.number,
        is_snapshot=value.is_snapshot,
        tier=int(value.tier),  # type: ignore[arg-type]
    )


def change_from_pb(message: kvstore_pb2.WatchResponse) -> p.CatalogueChange:
    """What happened to some keys."""
    return p.CatalogueChange(
        kvstore_pb2.CatalogueChange.Name(message.change).removeprefix(_CHANGE_PREFIX),
        identity_from_pb(message.worker),
        keys_from_pb(message.keys),
        message.all,
        message.number,
        message.is_snapshot,
        enum_from_pb(CacheTier, message.tier, "tier"),
    )


CATALOGUE_COMMANDS = ItemCodec(
    kvstore_pb2.CatalogueCommand,
    {
        p.PublishCommand: ("publish", publish_to_pb, publish_from_pb),
        p.WithdrawCommand: ("withdraw", withdraw_to_pb, withdraw_from_pb),
    },
)
CATALOGUE_ANSWERS = ItemCodec(kvstore_pb2.CatalogueAnswer, {Done: DONE, HeadraceError: FAILURE})
