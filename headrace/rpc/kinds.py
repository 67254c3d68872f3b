"""The five kinds of links: which call opens one, and what travels in each direction."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.v1 import decode_pb2, kvstore_pb2, prefill_pb2
from headrace.wire.decode import DECODE_ANSWERS, DECODE_COMMANDS, WRITE_CONTROL_ITEMS, WRITER_ITEMS
from headrace.wire.kvstore import CATALOGUE_ANSWERS, CATALOGUE_COMMANDS
from headrace.wire.link import ItemCodec
from headrace.wire.prefill import PREFILL_COMMANDS, PREFILL_EVENTS
from headrace.wire.tokens import FrameCodec


@dataclass(frozen=True)
class Direction:
    """What one side sends: the message of the stream, and the items in it. `items` None: only headers travel this way."""

    message: type
    items: ItemCodec | FrameCodec | None


@dataclass(frozen=True)
class LinkKind:
    """One kind of link. `method` is the full name of the call that opens it."""

    name: str
    method: str
    from_opener: Direction
    from_server: Direction


DECODE_LINK = LinkKind(
    "decode",
    "/headrace.v1.DecodeService/OpenDecodeLink",
    Direction(decode_pb2.OpenDecodeLinkRequest, DECODE_COMMANDS),
    Direction(decode_pb2.OpenDecodeLinkResponse, DECODE_ANSWERS),
)
TOKEN_LINK = LinkKind(
    "token",
    "/headrace.v1.DecodeService/OpenTokenLink",
    Direction(decode_pb2.OpenTokenLinkRequest, None),
    Direction(decode_pb2.OpenTokenLinkResponse, FrameCodec()),
)
WRITER_LINK = LinkKind(
    "writer",
    "/headrace.v1.DecodeService/OpenWriterLink",
    Direction(decode_pb2.OpenWriterLinkRequest, WRITER_ITEMS),
    Direction(decode_pb2.OpenWriterLinkResponse, WRITE_CONTROL_ITEMS),
)
PREFILL_LINK = LinkKind(
    "prefill",
    "/headrace.v1.PrefillService/OpenPrefillLink",
    Direction(prefill_pb2.OpenPrefillLinkRequest, PREFILL_COMMANDS),
    Direction(prefill_pb2.OpenPrefillLinkResponse, PREFILL_EVENTS),
)
CATALOGUE_LINK = LinkKind(
    "catalogue",
    "/headrace.v1.KvStoreService/OpenCatalogueLink",
    Direction(kvstore_pb2.OpenCatalogueLinkRequest, CATALOGUE_COMMANDS),
    Direction(kvstore_pb2.OpenCatalogueLinkResponse, CATALOGUE_ANSWERS),
)
