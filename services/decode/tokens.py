"""Tokens on their way to routers: one link for each router epoch, at most one columnar frame a step.

Numbering, acknowledgement and resuming are the link's business. Here a frame that is too large is split at its records, and a request
whose reader leaves too much unacknowledged ends alone, before the link's own bound ends every request of that router.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence

from headrace.errors import HeadraceError, InternalError, Overloaded
from headrace.observe import logs, telemetry
from headrace.protocol.common import FinishReason
from headrace.protocol.decode import SampleEnd, TokenFrame, TokenRecord
from services.decode.interfaces import TokenLink

log = logs.get(__name__)

FRAME_BYTES = 240 * 1024
"""A frame is split above this: a message of a link holds 256 KiB, its header included."""
END_BYTES = 192
"""An end with its stages, at most about this."""

OnLost = Callable[[str, int, str, HeadraceError], None]
"""(router epoch, the router's handle of a request, reason, error): the request cannot go on."""

_frames = telemetry.counter("headrace.stream.messages")
_tokens = telemetry.counter("headrace.stream.tokens")


def record_bytes(record: TokenRecord) -> int:
    """What a record takes in a frame, nearly."""
    size = 24 + 4 * len(record.token_ids)
    if record.logprobs is not None:
        size += 4 * len(record.logprobs) + sum(8 * len(top) for top in record.top)
    return size


def split(records: Sequence[TokenRecord], ends: Sequence[SampleEnd]) -> Iterator[TokenFrame]:
    """Frames below FRAME_BYTES, ends last."""
    some: list[TokenRecord] = []
    size = 0
    for record in records:
        needed = record_bytes(record)
        if some and size + needed > FRAME_BYTES:
            yield TokenFrame(tuple(some), ())
            some, size = [], 0
        some.append(record)
        size += needed
    room = max(1, (FRAME_BYTES - size) // END_BYTES)
    if some or ends:
        yield TokenFrame(tuple(some), tuple(ends[:room]))
    per_frame = FRAME_BYTES // END_BYTES
    for first in range(room, len(ends), per_frame):
        yield TokenFrame((), tuple(ends[first : first + per_frame]))


class RouterTokens:
    """What is on its way to one router."""

    def __init__(self, link: TokenLink, credit_bytes: int, on_lost: OnLost):
        self.link = link
        self._credit_bytes, self._on_lost = credit_bytes, on_lost
        self._records: list[TokenRecord] = []
        self._ends: list[SampleEnd] = []
        self._under_way: deque[tuple[int, TokenFrame]] = deque()
        """Frames that are not acknowledged, with their numbers."""
        self._look_above = credit_bytes
        """No request is above its credit before the link has so many bytes unacknowledged."""

    def add_record(self, record: TokenRecord) -> None:
        """For the next frame."""
        self._records.append(record)

    def add_end(self, end: SampleEnd) -> None:
        """For the next frame."""
        self._ends.append(end)

    def flush(self) -> None:
        """Sends what was added."""
        records, self._records = self._records, []
        ends, self._ends = self._ends, []
        for frame in split(records, ends):
            self._send(frame)
        self._look_at_credit()

    def _send(self, frame: TokenFrame) -> None:
        try:
            self._under_way.append((self.link.send(frame), frame))
        except Exception as error:
            if not self.link.is_lost:  # else everything of this router has ended
                self._unsent(frame, error)
            return
        _frames.add(1)
        _tokens.add(sum([len(record.token_ids) for record in frame.records]))

    def _unsent(self, frame: TokenFrame, error: Exception) -> None:
        """Without its tokens a request cannot go on, and a sample has not ended well. Its router must hear that, or lose us."""
        log.error("a frame of tokens could not be sent", error=error, records=len(frame.records), ends=len(frame.ends))
        if not frame.records and all(end.error_reason for end in frame.ends):
            self.link.lose(InternalError("frames of tokens cannot be sent"))
            return
        handles = {record.handle for record in frame.records}
        for end in frame.ends:
            self._ends.append(SampleEnd(end.handle, end.sample_index, FinishReason.NONE, "OUTPUT_FAILED"))
        for handle in handles:
            lost = InternalError("a frame of tokens could not be sent", retryable=True)
            self._on_lost(self.link.peer.epoch, handle, "OUTPUT_FAILED", lost)
        self.flush()

    def _look_at_credit(self) -> None:
        acknowledged, under_way = self.link.acknowledged_through, self._under_way
        while under_way and under_way[0][0] <= acknowledged:
            under_way.popleft()
        unacknowledged = self.link.unacknowledged_bytes
        if unacknowledged <= self._credit_bytes:
            self._look_above = self._credit_bytes
        elif unacknowledged > self._look_above:
            self._look_above = unacknowledged + self._credit_bytes // 4
            self._end_stalled()

    def _end_stalled(self) -> None:
        held: Counter[int] = Counter()
        for _, frame in self._under_way:
            for record in frame.records:
                held[record.handle] += record_bytes(record)
        for handle, size in held.items():
            if size > self._credit_bytes:
                error = Overloaded(f"{size} bytes of tokens are not acknowledged", reason="READER_STALLED")
                self._on_lost(self.link.peer.epoch, handle, "READER_STALLED", error)


class TokenLinks:
    """All routers' links. `on_lost` ends a single request."""

    def __init__(self, credit_bytes: int, on_lost: OnLost):
        self._credit_bytes, self._on_lost = credit_bytes, on_lost
        self._by_epoch: dict[str, RouterTokens] = {}

    def open(self, link: TokenLink) -> bool:
        """A link is connected, for the first time or again. True when an older one of the same router is lost by this."""
        known = self._by_epoch.get(link.peer.epoch)
        if known is not None and known.link is link:
            return False
        self._by_epoch[link.peer.epoch] = RouterTokens(link, self._credit_bytes, self._on_lost)
        return known is not None

    def lose(self, link: TokenLink) -> bool:
        """A link is lost for good. False when a newer one has taken its place, or it was never here."""
        known = self._by_epoch.get(link.peer.epoch)
        if known is None or known.link is not link:
            return False
        del self._by_epoch[link.peer.epoch]
        return True

    def find(self, router_epoch: str) -> RouterTokens | None:
        """The link of a router, connected or being resumed."""
        return self._by_epoch.get(router_epoch)

    def is_open(self, router_epoch: str) -> bool:
        """Whether the router's link is connected now."""
        known = self._by_epoch.get(router_epoch)
        return known is not None and known.link.is_open

    @property
    def num_open(self) -> int:
        """Links that are connected now."""
        return sum(known.link.is_open for known in self._by_epoch.values())
