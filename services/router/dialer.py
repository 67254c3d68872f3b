"""The real way to ranks: links over gRPC. (Interfaces of it stand in `interfaces.py`; tests have one in memory.)"""

from __future__ import annotations

from headrace.clock import Clock
from headrace.protocol.common import WorkerIdentity
from headrace.rpc.links import DECODE_LINK, PREFILL_LINK, TOKEN_LINK, LinkKind, LinkOpener, LinkSettings
from services.router.interfaces import LinkHandler, LinkKeeper


class LinkDialer:
    """Opens links in the name of one router process: whoever serves them tells routers apart by `own.epoch`."""

    def __init__(self, own: WorkerIdentity, clock: Clock, settings: LinkSettings):
        self._own, self._clock, self._settings = own, clock, settings

    def open_prefill_link(self, rank: WorkerIdentity, handler: LinkHandler) -> LinkKeeper:
        """Prompts, and what the rank holds."""
        return self._open(PREFILL_LINK, rank, handler)

    def open_decode_link(self, rank: WorkerIdentity, handler: LinkHandler) -> LinkKeeper:
        """Reserve and release."""
        return self._open(DECODE_LINK, rank, handler)

    def open_token_link(self, rank: WorkerIdentity, handler: LinkHandler) -> LinkKeeper:
        """Tokens."""
        return self._open(TOKEN_LINK, rank, handler)

    def _open(self, kind: LinkKind, rank: WorkerIdentity, handler: LinkHandler) -> LinkKeeper:
        return LinkOpener(kind, rank.address, self._own, rank.epoch, handler, self._clock, self._settings)  # type: ignore[arg-type,return-value]
