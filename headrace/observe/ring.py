"""Finished spans in a bounded local file, one for each process, and their readers: no collector is needed to see a trace."""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

log = logging.getLogger(__name__)

FLUSH_S = 0.1
"""How long finished spans gather before they are written."""
MEMORY_SPANS = 10_000
"""Finished spans that a process still knows."""
KEPT_RINGS = 64
"""Ring files that stay in a trace directory when a new process starts its own."""


@dataclass(frozen=True)
class Span:
    """A finished span. Times are seconds since 1970; `parent_id` is empty for a root; `error` names what went wrong."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_s: float
    end_s: float
    service: str = ""
    epoch: str = ""
    error: str = ""
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s


class Ring(SpanProcessor):
    """A bounded file of finished spans, one JSON object a line. When half the bound is full it becomes the older half.

    A disk that fails costs spans and one log line, nothing else.
    """

    def __init__(self, directory: Path, service: str, epoch: str, limit_bytes: int):
        self.path = directory / f"{service}-{epoch}.jsonl"
        self.service, self.epoch = service, epoch
        self.recent: collections.deque[Span] = collections.deque(maxlen=MEMORY_SPANS)
        self._half_bytes = max(1, limit_bytes // 2)
        self._waiting: collections.deque[Span] = collections.deque(maxlen=MEMORY_SPANS)
        self._arrived = threading.Event()
        self._stopping = threading.Event()
        self._writing = threading.Lock()
        self._failed = False
        self._prepare(directory)
        self._thread = threading.Thread(target=self._run, name="telemetry-ring", daemon=True)
        self._thread.start()

    def on_end(self, span: ReadableSpan) -> None:
        """Takes a finished span of the SDK."""
        self.keep(plain(span))

    def keep(self, span: Span) -> None:
        """Takes a finished span; never waits."""
        self.recent.append(span)
        self._waiting.append(span)
        if not self._arrived.is_set():
            self._arrived.set()

    def shutdown(self) -> None:
        """Writes the rest and ends the thread."""
        self._stopping.set()
        self._arrived.set()
        self._thread.join(2.0)

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """OpenTelemetry's name for `flush`."""
        self.flush()
        return True

    def flush(self) -> None:
        """Writes what has gathered, in the caller's thread."""
        with self._writing:
            lines = []
            with contextlib.suppress(IndexError):
                while True:
                    lines.append(_line(vars(self._waiting.popleft())).encode() + b"\n")
            try:
                self._write(lines)
            except OSError as error:
                if not self._failed:
                    log.warning("spans are lost: %s", error)
                self._failed = True

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._arrived.wait()
            self._stopping.wait(FLUSH_S)
            self._arrived.clear()
            self.flush()

    def _write(self, lines: Sequence[bytes]) -> None:
        size = self.path.stat().st_size if self.path.exists() else 0
        fitting: list[bytes] = []
        for line in lines:
            if size + len(line) > self._half_bytes:
                self._append(fitting)
                if self.path.exists():
                    self.path.replace(self.path.with_suffix(".jsonl.1"))
                size, fitting = 0, []
            size += len(line)
            fitting.append(line)
        self._append(fitting)

    def _append(self, lines: Sequence[bytes]) -> None:
        if lines:
            with self.path.open("ab", buffering=0) as file:
                file.write(b"".join(lines))

    def _prepare(self, directory: Path) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            files = sorted(_ring_files(directory), key=lambda file: file.stat().st_mtime, reverse=True)
            for file in files[KEPT_RINGS:]:
                file.unlink(missing_ok=True)
        except OSError as error:
            log.warning("spans may be lost: %s", error)


_line = json.JSONEncoder(separators=(",", ":")).encode


def plain(inner: ReadableSpan) -> Span:
    """A finished span of the SDK as ours."""
    context, parent = inner.get_span_context(), inner.parent
    attributes = dict(inner.attributes or {})
    assert context is not None and inner.start_time is not None and inner.end_time is not None
    return Span(
        name=inner.name,
        trace_id=f"{context.trace_id:032x}",
        span_id=f"{context.span_id:016x}",
        parent_id=f"{parent.span_id:016x}" if parent is not None else "",
        start_s=inner.start_time / 1e9,
        end_s=inner.end_time / 1e9,
        service=str(inner.resource.attributes.get("service.name", "")).removeprefix("headrace-"),
        epoch=str(inner.resource.attributes.get("service.instance.id", "")),
        error=str(attributes.pop("error.type", "")),
        attributes=attributes,
    )


# --- readers ---------------------------------------------------------------------------------------------------------


def _ring_files(directory: Path) -> list[Path]:
    return [*directory.glob("*.jsonl"), *directory.glob("*.jsonl.1")]


def read_ring(directory: Path) -> list[Span]:
    """Every span in a trace directory, of all services, by start. A line that is still being written is left out."""
    spans = [found for file in _ring_files(Path(directory)) for found in _read_file(file)]
    return sorted(spans, key=lambda found: found.start_s)


def _read_file(file: Path) -> Iterable[Span]:
    try:
        text = file.read_text(errors="replace")
    except FileNotFoundError:  # replaced by its owner meanwhile
        return
    for line in text.splitlines():
        with contextlib.suppress(ValueError, TypeError):
            yield Span(**json.loads(line))


def trace(directory: Path, which: str | None = None) -> list[Span]:
    """The spans of one trace by start: `which` is a trace id or a request id; None is the request that ended last."""
    spans = read_ring(directory)
    wanted = _latest(spans) if which is None else _trace_of(spans, which)
    return [found for found in spans if found.trace_id == wanted]


def wait_trace(directory: Path, which: str, names: Sequence[str], timeout_s: float = 2.0) -> list[Span]:
    """The same, read again until every span name in `names` is there or `timeout_s` is over: services write on their own."""
    end = time.monotonic() + timeout_s
    while True:
        spans = trace(directory, which)
        if set(names) <= {found.name for found in spans} or time.monotonic() >= end:
            return spans
        time.sleep(0.05)


def _latest(spans: Sequence[Span]) -> str:
    roots = [found for found in spans if found.name == "router.generate"] or spans
    return max(roots, key=lambda found: found.end_s).trace_id if roots else ""


def _trace_of(spans: Sequence[Span], which: str) -> str:
    for found in reversed(spans):
        if which in (found.trace_id, found.attributes.get("request_id")):
            return found.trace_id
    return ""
