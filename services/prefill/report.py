"""What an attempt tells of itself, once, when it is over: stages for the trace, the same stages for the router."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.observe import telemetry
from headrace.observe.record import Record
from headrace.protocol.common import Stage, WorkerIdentity
from services.prefill.leg import Leg

push_bandwidth = telemetry.histogram(*telemetry.PUSH_BANDWIDTH)


class Report:
    """Stages of one rank's attempts."""

    def __init__(self, identity: WorkerIdentity):
        self._rank = {"rank": identity.address, "epoch": identity.epoch}

    def stages(self, leg: Leg) -> tuple[Stage, ...]:
        """Of an attempt that has ended well, counted from its arrival here."""
        zero = leg.moments.received
        return tuple(
            Stage(name, start - zero, end - start, tokens, num_bytes)
            for name, start, end, tokens, num_bytes in _stages(leg)
        )

    def finish(self, leg: Leg) -> None:
        """Spans of what happened, children of the caller's span, when the trace is sampled."""
        moments = leg.moments
        if moments.push_started is not None and moments.push_ended is not None:
            push_bandwidth.record(leg.pushed_bytes / max(moments.push_ended - moments.push_started, 1e-9))
        record = Record(leg.command.trace_parent, root=None)
        if not record.is_sampled:
            return
        common = {"attempt": leg.command.attempt, "request_id": leg.command.display_id, **self._rank}
        for name, start, end, tokens, num_bytes in _stages(leg):
            if name == "decode.commit":
                continue  # decode tells that itself
            record.stage(name, start, end, **_attributes(name, end - start, tokens, num_bytes), **common)
        record.emit()


def _stages(leg: Leg) -> Iterator[tuple[str, float, float, int, int]]:
    """(name, start, end, tokens, bytes) of the stages that happened, in order; times are readings of the clock."""
    moments, tokens = leg.moments, len(leg.command.prompt_token_ids)
    if moments.started is None:
        return
    yield "prefill.queue", moments.received, moments.started, tokens, 0
    yield "prefill.fetch", moments.received, moments.received, leg.cached_tokens, 0
    if moments.computed is None:
        return
    yield "prefill.forward", moments.started, moments.computed, tokens - leg.cached_tokens, 0
    if moments.push_started is None or moments.push_ended is None or moments.committed is None:
        return
    yield "prefill.push", moments.push_started, moments.push_ended, tokens, leg.pushed_bytes
    yield "decode.commit", moments.push_ended, moments.committed, 0, 0


def _attributes(name: str, duration_s: float, tokens: int, num_bytes: int) -> dict[str, float]:
    """As docs/telemetry.md lists them."""
    if name == "prefill.push":
        return {"bytes": num_bytes, "bytes_per_s": num_bytes / max(duration_s, 1e-9)}
    return {"cached_tokens" if name == "prefill.fetch" else "tokens": tokens}
