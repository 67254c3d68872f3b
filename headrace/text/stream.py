"""Token ids of one sample become text, piece by piece, and stop at stop strings.

What `TextStream` gives out is final: joined together it equals the decoded whole, cut before the stop string, however
often the caller takes. So two things are held back: bytes that do not make a character yet, and a suffix that could be
the beginning of a stop string.

The stop string that counts is the one whose last character comes first; of several that end there, the longest. That
is what a reader of single characters would find, hence the same for every way of cutting text into tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from headrace.errors import InvalidRequest

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class TokenBytes(Protocol):
    """The one thing asked of a tokenizer here."""

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes a token adds to the text; empty for a special token."""


class TextStream:
    """Text of one sample. `push` every token, `take` when something is to be shown, `finish` once at the end."""

    def __init__(self, tokenizer: TokenBytes, stop: Sequence[str] = ()):
        """Raises InvalidRequest for an empty stop string, which would stop everything."""
        if not all(stop):
            raise InvalidRequest("a stop string must not be empty", field="stop")
        self.matched_stop: str | None = None
        self._bytes_of = tokenizer.token_bytes
        self._decode = _utf8_decoder("replace").decode
        self._stop = tuple(stop)
        self.is_plain = not stop
        """Whether there is no stop string to look for, so that `push_run` may take tokens together."""
        self._overlap = max(map(len, stop), default=1) - 1  # a stop string can begin this many characters back
        self._ready: list[str] = []  # decoded, not yet taken, and too far back to be part of a stop string
        self._tail = ""  # decoded after that

    def push(self, token_id: int) -> bool:
        """Append a token; True when a stop string is complete, after which further tokens are not accepted."""
        if self.matched_stop is not None:
            return True
        return self._append(self._decode(self._bytes_of(token_id)))

    def push_run(self, token_ids: Sequence[int]) -> None:
        """Append tokens of a stream without stop strings: the same text as one by one, decoded once."""
        assert self.is_plain
        self._ready.append(self._decode(b"".join(map(self._bytes_of, token_ids))))

    def take(self) -> str:
        """Everything that may be shown now and was not taken before."""
        if self.is_plain:
            return self._take_ready()
        shown = len(self._tail) - self._held_characters()
        self._move_to_ready(shown)
        return self._take_ready()

    def finish(self) -> str:
        """The rest: what was held back, and U+FFFD where a character was never completed. Taking again gives nothing."""
        if self.matched_stop is None:
            self._append(self._decode(b"", final=True))
        self._move_to_ready(len(self._tail))
        return self._take_ready()

    def _append(self, new: str) -> bool:
        self._tail += new
        if self._stop and new and self._cut_at_stop():
            return True
        self._move_to_ready(len(self._tail) - self._overlap)
        return False

    def _cut_at_stop(self) -> bool:
        """Find the stop string that ends first in the tail, and drop it with everything after it."""
        tail = self._tail
        found = [(start + len(stop), start, stop) for stop in self._stop if (start := tail.find(stop)) >= 0]
        if not found:
            return False
        _, start, self.matched_stop = min(found)
        self._tail = tail[:start]
        return True

    def _move_to_ready(self, count: int) -> None:
        if count > 0:
            self._ready.append(self._tail[:count])
            self._tail = self._tail[count:]

    def _take_ready(self) -> str:
        ready = self._ready
        text = ready[0] if len(ready) == 1 else "".join(ready)
        ready.clear()
        return text

    def _held_characters(self) -> int:
        """Length of the longest suffix that begins a stop string, 0 when stopped or when there is none."""
        if self.matched_stop is not None:
            return 0
        for count in range(min(self._overlap, len(self._tail)), 0, -1):
            suffix = self._tail[-count:]
            if any(len(stop) > count and stop.startswith(suffix) for stop in self._stop):
                return count
        return 0
