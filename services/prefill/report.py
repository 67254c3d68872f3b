"""What a prefill attempt tells of itself: spans of its stages for the trace, the same times for the router."""

from __future__ import annotations

from headrace.observe import telemetry
from headrace.protocol import Stage, WorkerIdentity
from services.prefill.leg import Leg


class Report:
    """Spans of one rank's attempts, children of the caller's span `parent`."""

    def __init__(self, identity: WorkerIdentity):
        self._rank = {"rank": identity.address, "epoch": identity.epoch}

    def forward(self, leg: Leg, parent: str, cached: int) -> None:
        """`prefill.queue`, `prefill.fetch`, `prefill.forward`, once the first tokens are there."""
        times, common = leg.times, self._common(leg)
        assert times.started is not None and times.computed is not None
        tokens = len(leg.command.prompt_token_ids)
        telemetry.emit("prefill.queue", times.received, times.started, parent=parent, tokens=tokens, **common)
        telemetry.emit("prefill.fetch", times.received, times.received, parent=parent, cached_tokens=cached, **common)
        telemetry.emit(
            "prefill.forward", times.started, times.computed, parent=parent, tokens=tokens - cached, **common
        )

    def queue(self, num_tokens: int) -> None:
        """Prompt tokens that wait for blocks or for a batch."""
        telemetry.gauge("headrace.prefill.queued_tokens").set(num_tokens)

    def push(self, leg: Leg, parent: str) -> None:
        """`prefill.push`, once the last layer is written."""
        start, end = leg.times.push_started, leg.times.push_ended
        assert start is not None and end is not None
        rate = leg.pushed_bytes / max(end - start, 1e-9)
        telemetry.histogram(*telemetry.PUSH_BANDWIDTH).record(rate)
        telemetry.emit(
            "prefill.push", start, end, parent=parent, bytes=leg.pushed_bytes, bytes_per_s=rate, **self._common(leg)
        )

    def _common(self, leg: Leg) -> dict[str, object]:
        return {"attempt": leg.command.attempt, **self._rank}


def stages_of(leg: Leg, cached: int) -> tuple[Stage, ...]:
    """The stages of a finished attempt, counted from its arrival here; push and commit only where they happened."""
    times, zero = leg.times, leg.times.received
    assert times.started is not None and times.computed is not None
    tokens = len(leg.command.prompt_token_ids)
    stages = [
        Stage("prefill.queue", 0.0, times.started - zero, tokens),
        Stage("prefill.fetch", 0.0, 0.0, cached),
        Stage("prefill.forward", times.started - zero, times.computed - times.started, tokens - cached),
    ]
    if times.committed is not None and times.push_started is not None and times.push_ended is not None:
        push_s = times.push_ended - times.push_started
        stages.append(Stage("prefill.push", times.push_started - zero, push_s, tokens, leg.pushed_bytes))
        stages.append(Stage("decode.commit", times.push_ended - zero, times.committed - times.push_ended))
    return tuple(stages)
