"""The stages of one request (on a router) or of one leg (on a worker), as numbers; spans are made of them once, at the end.

A record costs nothing but a list while a request runs, and no span at all when its trace is not sampled or nobody listens. The ids that
the next hop needs are drawn here, without the SDK.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

from headrace.observe import telemetry


class Record:
    """Stages under one root. `root` names the span of the whole, None makes stages direct children of the caller's span.

    `trace_parent` in is the W3C header of whoever asked; absent or malformed, a new trace begins and is sampled. `trace_parent` out is
    for the next hop, whose spans become children of the root (or of the caller's span where there is none).
    """

    def __init__(self, trace_parent: str, *, root: str | None):
        parent = telemetry.parse_trace_parent(trace_parent)
        self.trace_id = parent.trace_id if parent is not None else secrets.token_hex(16)
        self.is_sampled = telemetry.is_recording() and (parent is None or parent.is_sampled)
        self._parent_id = parent.span_id if parent is not None else ""
        self._root = root
        own = secrets.token_hex(8) if root is not None else self._parent_id
        self._root_id = own
        flags = "01" if parent is None or parent.is_sampled else "00"
        self.trace_parent = f"00-{self.trace_id}-{own}-{flags}" if own else ""
        self._began_s = time.monotonic()
        self._stages: list[tuple[str, float, float, dict[str, Any]]] = []
        self._is_emitted = False

    def stage(self, name: str, start_s: float, end_s: float, **attributes: Any) -> None:
        """A stage from `start_s` to `end_s`, seconds of the process's monotonic clock. None attributes are left out."""
        if self.is_sampled:
            self._stages.append((name, start_s, end_s, attributes))

    def emit(self, *, error: str = "", **attributes: Any) -> None:
        """Hands the spans on, once; later calls do nothing. `attributes` and `error` (what went wrong) belong to the root, or to every
        stage where there is none."""
        if self._is_emitted or not self.is_sampled:
            return
        self._is_emitted = True
        shift_s = time.time() - time.monotonic()
        shared = {} if self._root is not None else {**attributes, **({"error.type": error} if error else {})}
        for name, start_s, end_s, own in self._stages:
            self._hand_on(name, secrets.token_hex(8), self._root_id, start_s + shift_s, end_s + shift_s, shared | own)
        if self._root is not None:
            began_s = min([self._began_s, *(start_s for _, start_s, _, _ in self._stages)])
            whole = {**attributes, **({"error.type": error} if error else {})}
            self._hand_on(self._root, self._root_id, self._parent_id, began_s + shift_s, time.time(), whole)

    def _hand_on(
        self, name: str, span_id: str, parent_id: str, start_s: float, end_s: float, attributes: dict[str, Any]
    ) -> None:
        telemetry.hand_on(name, self.trace_id, span_id, parent_id, start_s, end_s, attributes)
