"""Spans and metrics: a few verbs over OpenTelemetry, and the local ring file that needs no collector.

    telemetry.setup("prefill", epoch, config.telemetry, run_directory)
    with telemetry.span("router.route", tokens=5) as span:      # child of the running context's span
        span.set(prefill="10.0.0.1:20601")
    telemetry.emit("prefill.forward", start_s, end_s, parent=traceparent)   # times already known, any thread
    telemetry.counter("headrace.push.repeats").add(1)

Names of spans and their attributes stand in docs/telemetry.md. Every finished span goes to `<service>-<epoch>.jsonl` in the
trace directory, written by a thread of its own within about 0.2 s and at shutdown; with `telemetry.otlp_endpoint` set spans
and metrics also go there. Nothing here waits for a disk or a network. Before `setup` every verb is a cheap no-op. `span`
and `emit` always record; the stages of a request come from `record.py`, at its end, when its trace is sampled.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from opentelemetry import trace as otel
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from headrace.config import TelemetryConfig
from headrace.observe.context import request_id_var, traceparent_var
from headrace.observe.ring import Ring, Span

log = logging.getLogger(__name__)

SHUTDOWN_S = 3.0
"""Longest wait for a collector at shutdown."""


# --- names and buckets -----------------------------------------------------------------------------------------------


class Measure(NamedTuple):
    """A histogram's name, unit and bucket borders, for `histogram(*measure)`."""

    name: str
    unit: str
    buckets: tuple[float, ...]


# OpenTelemetry's generative AI conventions (status: development); own constants, because the package deprecates its own.
TIME_TO_FIRST_TOKEN = Measure(
    "gen_ai.server.time_to_first_token",
    "s",
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
)
TIME_PER_OUTPUT_TOKEN = Measure(
    "gen_ai.server.time_per_output_token",
    "s",
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5),
)
REQUEST_DURATION = Measure(
    "gen_ai.server.request.duration",
    "s",
    (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
)
# The conventions' borders start at 10 ms, where decode has long finished a step.
STEP_DURATION = Measure(
    "headrace.decode.step.duration", "s", (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
)
PUSH_BANDWIDTH = Measure("headrace.push.bandwidth", "By/s", tuple(float(10**power) for power in range(5, 12)))
GENAI_ATTRIBUTES = {"gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "headrace"}
"""Attributes the conventions require on every gen_ai histogram."""


# --- spans -----------------------------------------------------------------------------------------------------------


class OpenSpan:
    """A span that runs. Without telemetry it does nothing."""

    def __init__(self, inner: otel.Span | None):
        self._inner = inner
        self.traceparent = _format(inner.get_span_context()) if inner is not None else ""

    def set(self, **attributes: Any) -> None:
        """Adds attributes: numbers, text, booleans or sequences of one of them. None is left out."""
        if self._inner is not None:
            self._inner.set_attributes(_given(attributes))

    def fail(self, error: BaseException | str) -> None:
        """Marks the span as failed. Its message is left out: it may quote a prompt."""
        if self._inner is not None:
            name = error if isinstance(error, str) else str(getattr(error, "reason", "") or type(error).__name__)
            self._inner.set_attribute("error.type", name)
            self._inner.set_status(otel.StatusCode.ERROR)


@contextlib.contextmanager
def span(name: str, parent: str | None = None, **attributes: Any) -> Iterator[OpenSpan]:
    """Times a block. `parent` is a traceparent, "" starts a new trace, None continues the running context's.

    While the block runs, the context's traceparent is this span's, so inner spans and outgoing calls are its children.
    """
    state = _state
    if state is None:
        yield OpenSpan(None)
        return
    outer = traceparent_var.get()
    running = OpenSpan(state.start(name, outer if parent is None else parent, attributes, None))
    traceparent_var.set(running.traceparent)
    try:
        yield running
    except BaseException as error:
        running.fail(error)
        raise
    finally:
        # Not reset(token): a block inside an async generator may end in another context than it began in.
        traceparent_var.set(outer)
        running._inner.end()  # type: ignore[union-attr]


def emit(name: str, start_s: float, end_s: float, *, parent: str | None = None, **attributes: Any) -> None:
    """A span whose times (`time.time()` seconds) are already known. May be called from any thread."""
    state = _state
    if state is not None:
        parent = traceparent_var.get() if parent is None else parent
        inner = state.start(name, parent, attributes, _nanoseconds(start_s))
        inner.end(_nanoseconds(max(start_s, end_s)))


class TraceParent(NamedTuple):
    """A W3C trace parent, as hexadecimal digits."""

    trace_id: str
    span_id: str
    is_sampled: bool


def parse_trace_parent(header: str) -> TraceParent | None:
    """What a header says; None when it is not one."""
    context = _parse(header)
    if context is None:
        return None
    return TraceParent(f"{context.trace_id:032x}", f"{context.span_id:016x}", context.trace_flags.sampled)


def is_recording() -> bool:
    """Whether a finished span would go anywhere."""
    return _state is not None


def hand_on(
    name: str,
    trace_id: str,
    span_id: str,
    parent_id: str,
    start_s: float,
    end_s: float,
    attributes: dict[str, Any],
) -> None:
    """A finished span whose ids (hexadecimal digits; no parent: empty) and times (`time.time()` seconds) are known. From any thread."""
    state = _state
    if state is not None:
        state.hand_on(name, trace_id, span_id, parent_id, start_s, max(start_s, end_s), _given(attributes))


def traceparent() -> str:
    """The W3C header of the running context's span; empty when there is none."""
    return traceparent_var.get()


_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


def trace_id(header: str) -> str:
    """The trace id in a traceparent, 32 hexadecimal digits; empty when the header is not one."""
    context = _parse(header)
    return f"{context.trace_id:032x}" if context is not None else ""


def _parse(header: str) -> otel.SpanContext | None:
    match = _TRACEPARENT.fullmatch(header)
    if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
        return None
    context = otel.SpanContext(int(match[2], 16), int(match[3], 16), True, otel.TraceFlags(int(match[4], 16)))
    return context if context.is_valid else None


def _format(context: otel.SpanContext) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _given(attributes: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in attributes.items() if value is not None}


# --- metrics ---------------------------------------------------------------------------------------------------------


class Instrument:
    """A counter, gauge or histogram, made in the collector's terms when there is one. Calls cost next to nothing else."""

    def __init__(self, kind: str, name: str, unit: str, buckets: Sequence[float]):
        self._arguments = (kind, name, unit, tuple(buckets))
        self._owner: _Telemetry | None = None
        self._inner: Any = None

    def _target(self) -> Any:
        state = _state
        if state is None or state.meter is None:
            return None
        if self._owner is not state:
            self._inner, self._owner = _make(state.meter, *self._arguments), state
        return self._inner

    def add(self, amount: float, **attributes: Any) -> None:
        """Counts up. Only for counters."""
        if (inner := self._target()) is not None:
            inner.add(amount, _given(attributes))

    def record(self, value: float, **attributes: Any) -> None:
        """One observation. Only for histograms."""
        if (inner := self._target()) is not None:
            inner.record(value, _given(attributes))

    def set(self, value: float, **attributes: Any) -> None:
        """The value now. Only for gauges."""
        if (inner := self._target()) is not None:
            inner.set(value, _given(attributes))


def _make(meter: Any, kind: str, name: str, unit: str, buckets: Sequence[float]) -> Any:
    if kind == "counter":
        return meter.create_counter(name, unit)
    if kind == "gauge":
        return meter.create_gauge(name, unit)
    return meter.create_histogram(name, unit, explicit_bucket_boundaries_advisory=list(buckets) or None)


_instruments: dict[str, Instrument] = {}


def _instrument(kind: str, name: str, unit: str, buckets: Sequence[float] = ()) -> Instrument:
    found = _instruments.get(name)
    return found if found is not None else _instruments.setdefault(name, Instrument(kind, name, unit, buckets))


def counter(name: str, unit: str = "1") -> Instrument:
    """What only grows: `.add(n, **attributes)`."""
    return _instrument("counter", name, unit)


def gauge(name: str, unit: str = "1") -> Instrument:
    """What goes up and down: `.set(value, **attributes)`."""
    return _instrument("gauge", name, unit)


def histogram(name: str, unit: str = "s", buckets: Sequence[float] = ()) -> Instrument:
    """A distribution: `.record(value, **attributes)`. `histogram(*TIME_TO_FIRST_TOKEN)` takes a constant from above."""
    return _instrument("histogram", name, unit, buckets)


# --- this process ----------------------------------------------------------------------------------------------------


def setup(service: str, epoch: str, config: TelemetryConfig, run_directory: Path) -> None:
    """Starts telemetry for this process. A second call replaces the first."""
    global _state
    shutdown()
    directory = Path(config.ring_directory or run_directory / "traces")
    _state = _Telemetry(service, epoch, config, directory)


def shutdown() -> None:
    """Writes what is left and stops; at most about SHUTDOWN_S. Safe to repeat."""
    global _state
    state, _state = _state, None
    if state is not None:
        state.close()


def flush() -> None:
    """Waits until every finished span is in the ring file. For tests and for tools that read at once."""
    if _state is not None:
        _state.ring.flush()


def memory() -> list[Span]:
    """The last MEMORY_SPANS finished spans of this process, oldest first."""
    return list(_state.ring.recent) if _state is not None else []


class _Telemetry:
    """What `setup` made: a tracer, a ring and perhaps exporters."""

    def __init__(self, service: str, epoch: str, config: TelemetryConfig, directory: Path):
        resource = Resource({"service.name": f"headrace-{service}", "service.instance.id": epoch})
        self.provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False)
        self.ring = Ring(directory, service, epoch, config.ring_bytes)
        self.provider.add_span_processor(self.ring)
        self._exporters: list[SpanProcessor] = []
        self.meter: Any = None
        self._meters: Any = None
        if config.otlp_endpoint:
            self._export(config.otlp_endpoint, resource)
        self._tracer = self.provider.get_tracer("headrace")
        atexit.register(self.close)

    def _export(self, endpoint: str, resource: Resource) -> None:
        # Imported here: most processes have no collector and need not load the exporter.
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        spans = OTLPSpanExporter(endpoint=endpoint, timeout=5)
        batches = BatchSpanProcessor(spans, schedule_delay_millis=500)
        self.provider.add_span_processor(batches)
        self._exporters.append(batches)
        reader = PeriodicExportingMetricReader(OTLPMetricExporter(endpoint=endpoint, timeout=5), 5000)
        self._meters = MeterProvider(metric_readers=[reader], resource=resource, shutdown_on_exit=False)
        self.meter = self._meters.get_meter("headrace")

    def start(self, name: str, parent: str, attributes: dict[str, Any], start_time: int | None) -> otel.Span:
        """An open span below `parent`."""
        context = _parse(parent)
        above = otel.set_span_in_context(otel.NonRecordingSpan(context) if context is not None else otel.INVALID_SPAN)
        values = _given(attributes)
        if "request_id" not in values and (request_id := request_id_var.get()):
            values["request_id"] = request_id
        return self._tracer.start_span(name, above, attributes=values, start_time=start_time)

    def hand_on(
        self,
        name: str,
        trace_id: str,
        span_id: str,
        parent_id: str,
        start_s: float,
        end_s: float,
        attributes: dict[str, Any],
    ) -> None:
        """A finished span to the ring and to exporters, without an open one. What only the SDK needs is made only for them."""
        error = str(attributes.get("error.type", ""))
        own = {key: value for key, value in attributes.items() if key != "error.type"} if error else attributes
        ring = self.ring
        ring.keep(Span(name, trace_id, span_id, parent_id, start_s, end_s, ring.service, ring.epoch, error, own))
        if not self._exporters:
            return
        flags, trace = otel.TraceFlags(otel.TraceFlags.SAMPLED), int(trace_id, 16)
        parent = otel.SpanContext(trace, int(parent_id, 16), True, flags) if parent_id else None
        failed = otel.Status(otel.StatusCode.ERROR) if error else otel.Status()
        span = ReadableSpan(
            name,
            context=otel.SpanContext(trace, int(span_id, 16), False, flags),
            parent=parent,
            resource=self.provider.resource,
            attributes=attributes,
            kind=otel.SpanKind.INTERNAL,
            instrumentation_scope=InstrumentationScope("headrace"),
            status=failed,
            start_time=_nanoseconds(start_s),
            end_time=_nanoseconds(end_s),
        )
        for exporter in self._exporters:
            exporter.on_end(span)

    def close(self) -> None:
        """Ends the ring at once and gives a collector SHUTDOWN_S."""
        atexit.unregister(self.close)
        self.ring.shutdown()
        if self._meters is not None:
            leaving = threading.Thread(target=self._leave, name="telemetry-shutdown", daemon=True)
            leaving.start()
            leaving.join(SHUTDOWN_S)

    def _leave(self) -> None:
        self.provider.shutdown()
        self._meters.shutdown(timeout_millis=SHUTDOWN_S * 1000)


_state: _Telemetry | None = None
