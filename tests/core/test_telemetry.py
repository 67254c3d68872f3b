"""Spans, their ring file, metrics over OTLP; log lines."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import re
import threading
import time
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from headrace.config import TelemetryConfig
from headrace.errors import ConfigError, Overloaded
from headrace.observe import logs, ring, telemetry
from headrace.observe.context import request_id_var, traceparent_var

HEADER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def traces(tmp_path):
    """Telemetry of a service called `router`; yields its trace directory."""
    with started(tmp_path):
        yield tmp_path / "traces"


@contextlib.contextmanager
def started(directory, service="router", **config):
    telemetry.setup(service, "e1", TelemetryConfig(**config), directory)
    try:
        yield
    finally:
        telemetry.shutdown()
        traceparent_var.set("")
        request_id_var.set("")


def test_verbs_do_nothing_before_setup():
    with telemetry.span("router.route", tokens=1) as span:
        span.set(bytes=2)
        span.fail("x")
        assert telemetry.traceparent() == ""
    telemetry.emit("prefill.forward", 1.0, 2.0)
    telemetry.counter("headrace.test.nothing").add(1)
    telemetry.gauge("headrace.test.level").set(1)
    telemetry.histogram(*telemetry.TIME_TO_FIRST_TOKEN).record(0.1)
    assert telemetry.memory() == []


def test_inner_spans_are_children_of_outer_ones(traces):
    with telemetry.span("router.generate") as outer:
        with telemetry.span("router.route", tokens=5, left_out=None) as inner:
            inner.set(prefill="a:1")
            assert telemetry.traceparent() == inner.traceparent
        telemetry.emit("prefill.forward", 10.0, 12.5, tokens=3)
        assert telemetry.traceparent() == outer.traceparent
    assert telemetry.traceparent() == ""
    route, forward, root = telemetry.memory()
    assert (route.parent_id, forward.parent_id, root.parent_id) == (root.span_id, root.span_id, "")
    assert len({span.trace_id for span in (route, forward, root)}) == 1
    assert route.attributes == {"tokens": 5, "prefill": "a:1"}
    assert (forward.start_s, forward.end_s, forward.duration_s) == (10.0, 12.5, 2.5)
    assert (root.service, root.epoch) == ("router", "e1")


def test_an_incoming_traceparent_is_honoured(traces):
    with telemetry.span("router.generate", parent=HEADER) as span:
        assert telemetry.trace_id(span.traceparent) == telemetry.trace_id(HEADER) == HEADER[3:35]
    assert telemetry.memory()[0].parent_id == HEADER[36:52]


@pytest.mark.parametrize(
    "header",
    [
        "",
        "x",
        HEADER[:-1],
        "ff" + HEADER[2:],
        HEADER + "-more",
        HEADER.replace("0af7", "0AF7"),
        "00-" + "0" * 32 + HEADER[35:],
    ],
)
def test_a_header_that_is_none_starts_a_new_trace(traces, header):
    assert telemetry.trace_id(header) == ""
    with telemetry.span("router.generate", parent=header):
        pass
    assert telemetry.memory()[0].parent_id == ""


def test_a_later_version_of_the_header_is_understood(traces):
    assert telemetry.trace_id("01" + HEADER[2:] + "-more") == HEADER[3:35]


def test_the_request_id_of_the_context_is_on_every_span(traces):
    request_id_var.set("r-1")
    with telemetry.span("router.route"):
        pass
    telemetry.emit("router.queue", 1.0, 2.0, request_id="r-2")
    assert [span.attributes["request_id"] for span in telemetry.memory()] == ["r-1", "r-2"]


def test_a_failed_block_names_the_reason_and_keeps_no_message(traces):
    with pytest.raises(Overloaded), telemetry.span("decode.reserve"):
        raise Overloaded("the prompt 'secret' does not fit")
    span = telemetry.memory()[0]
    assert span.error == "OVERLOADED"
    telemetry.flush()
    assert "secret" not in next(traces.iterdir()).read_text()


def test_concurrent_tasks_do_not_see_each_others_spans(traces):
    async def request(number: int) -> str:
        with telemetry.span("router.generate", number=number):
            await asyncio.sleep(0)
            with telemetry.span("router.route", number=number) as inner:
                await asyncio.sleep(0)
                return telemetry.trace_id(inner.traceparent)

    async def all_requests() -> list[str]:
        return await asyncio.gather(*(request(number) for number in range(8)))

    assert len(set(asyncio.run(all_requests()))) == 8
    roots = {span.span_id: span for span in telemetry.memory() if span.name == "router.generate"}
    for span in telemetry.memory():
        if span.name == "router.route":
            assert roots[span.parent_id].attributes == span.attributes


def test_a_block_inside_an_abandoned_generator_ends_quietly(traces, caplog):
    async def events():
        with telemetry.span("router.stream"):
            yield 1
            yield 2

    async def leave_early():
        async for _ in events():
            break

    with caplog.at_level(logging.WARNING):
        asyncio.run(leave_early())
    assert [span.name for span in telemetry.memory()] == ["router.stream"]
    assert caplog.records == []


def test_spans_reach_the_ring_file_by_themselves(traces):
    telemetry.emit("prefill.forward", 1.0, 2.0, tokens=3)
    end = time.monotonic() + 2.0
    while not ring.read_ring(traces) and time.monotonic() < end:
        time.sleep(0.01)
    assert [span.name for span in ring.read_ring(traces)] == ["prefill.forward"]


def test_shutdown_writes_what_is_left(tmp_path):
    with started(tmp_path):
        telemetry.emit("prefill.forward", 1.0, 2.0)
    assert len(ring.read_ring(tmp_path / "traces")) == 1


def test_the_ring_is_bounded_and_keeps_the_newest(tmp_path):
    with started(tmp_path, ring_bytes=20_000):
        for number in range(1000):
            telemetry.emit("decode.generate", float(number), number + 1.0, number=number)
            if number % 50 == 0:
                telemetry.flush()
    files = list((tmp_path / "traces").iterdir())
    kept = [span.attributes["number"] for span in ring.read_ring(tmp_path / "traces")]
    assert sum(file.stat().st_size for file in files) <= 20_000
    assert kept == list(range(kept[0], 1000)) and len(kept) >= 20


def test_old_rings_are_cleared_away(tmp_path):
    directory = tmp_path / "traces"
    directory.mkdir()
    for number in range(ring.KEPT_RINGS + 10):
        (directory / f"prefill-{number}.jsonl").write_text("{}\n")
    with started(tmp_path):
        telemetry.emit("prefill.forward", 1.0, 2.0)
    assert len(list(directory.iterdir())) <= ring.KEPT_RINGS + 1


def test_a_line_that_is_still_being_written_is_left_out(tmp_path):
    with started(tmp_path):
        telemetry.emit("prefill.forward", 1.0, 2.0)
    file = next((tmp_path / "traces").iterdir())
    whole = file.read_text()
    file.write_text(whole + whole[: len(whole) // 2])
    assert len(ring.read_ring(tmp_path / "traces")) == 1


def test_a_directory_that_cannot_be_written_costs_spans_and_one_line(tmp_path, caplog):
    (tmp_path / "traces").write_text("a file where a directory should be")
    with caplog.at_level(logging.WARNING), started(tmp_path):
        telemetry.emit("prefill.forward", 1.0, 2.0)
        telemetry.flush()
        telemetry.emit("prefill.forward", 1.0, 2.0)
        telemetry.flush()
        assert len(telemetry.memory()) == 2
    assert sum("spans are lost" in record.getMessage() for record in caplog.records) == 1


def test_a_trace_is_found_by_trace_id_by_request_id_or_as_the_latest(tmp_path):
    for service in ("router", "prefill"):
        with started(tmp_path, service):
            for number in (1, 2):
                parent = f"00-{number:032x}-{number:016x}-01"
                if service == "router":
                    telemetry.emit(
                        "router.generate", 10.0 * number, 10.0 * number + 9, parent=parent, request_id=f"r-{number}"
                    )
                telemetry.emit("prefill.forward", 10.0 * number + 1, 10.0 * number + 2, parent=parent)
    directory = tmp_path / "traces"
    assert [span.name for span in ring.trace(directory, "r-1")][0] == "router.generate"
    assert {span.trace_id for span in ring.trace(directory, "r-1")} == {f"{1:032x}"}
    assert {span.service for span in ring.trace(directory, f"{2:032x}")} == {"router", "prefill"}
    assert ring.trace(directory) == ring.trace(directory, "r-2")
    assert ring.trace(directory, "unknown") == []
    assert ring.trace(tmp_path / "nowhere") == []


def test_waiting_for_a_trace_ends_when_every_name_is_there(traces):
    parent = f"00-{7:032x}-{7:016x}-01"
    late = threading.Timer(0.1, lambda: telemetry.emit("decode.generate", 2.0, 3.0, parent=parent))
    late.start()
    telemetry.emit("router.generate", 1.0, 4.0, parent=parent)
    found = ring.wait_trace(traces, f"{7:032x}", ["router.generate", "decode.generate"])
    late.join()
    assert [span.name for span in found] == ["router.generate", "decode.generate"]


class Collector(trace_service_pb2_grpc.TraceServiceServicer, metrics_service_pb2_grpc.MetricsServiceServicer):
    """An OTLP collector that remembers names."""

    def __init__(self):
        self.spans: list[str] = []
        self.metrics: dict[str, object] = {}
        self.resource: dict[str, str] = {}

    def Export(self, request, context):
        for group in getattr(request, "resource_spans", ()):
            self.resource = {pair.key: pair.value.string_value for pair in group.resource.attributes}
            self.spans += [span.name for scope in group.scope_spans for span in scope.spans]
        for group in getattr(request, "resource_metrics", ()):
            self.metrics.update((metric.name, metric) for scope in group.scope_metrics for metric in scope.metrics)
        if hasattr(request, "resource_spans"):
            return trace_service_pb2.ExportTraceServiceResponse()
        return metrics_service_pb2.ExportMetricsServiceResponse()


def test_spans_and_metrics_reach_a_collector_when_one_is_named(tmp_path):
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    early = telemetry.counter("headrace.test.early")
    with started(tmp_path, otlp_endpoint=f"http://127.0.0.1:{port}"):
        telemetry.emit("router.generate", 1.0, 2.0)
        early.add(2, reason="x")
        telemetry.gauge("headrace.test.free_blocks").set(7)
        telemetry.histogram(*telemetry.TIME_TO_FIRST_TOKEN).record(0.03, **telemetry.GENAI_ATTRIBUTES)
    server.stop(0).wait()
    assert collector.spans == ["router.generate"]
    assert collector.resource["service.name"] == "headrace-router"
    assert collector.metrics["headrace.test.early"].sum.data_points[0].as_int == 2
    assert collector.metrics["headrace.test.free_blocks"].gauge.data_points[0].as_int == 7
    buckets = collector.metrics["gen_ai.server.time_to_first_token"].histogram.data_points[0].explicit_bounds
    assert tuple(buckets) == telemetry.TIME_TO_FIRST_TOKEN.buckets


def test_a_collector_that_is_away_delays_neither_spans_nor_the_end(tmp_path):
    begin = time.monotonic()
    with started(tmp_path, otlp_endpoint="http://127.0.0.1:9"):
        for number in range(200):
            telemetry.emit("router.generate", 1.0, 2.0, number=number)
        emitted = time.monotonic() - begin
    assert emitted < 1.5 and time.monotonic() - begin < telemetry.SHUTDOWN_S + 2
    assert len(ring.read_ring(tmp_path / "traces")) == 200


# --- logs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def lines():
    """Sets up logging to a buffer; call it with a level, it returns a function that gives the lines so far."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level

    def begin(level: str = "INFO", terminal: bool = False):
        stream = io.StringIO()
        stream.isatty = lambda: terminal  # type: ignore[method-assign]
        logs.setup("decode", "e1", level, stream)
        return lambda: stream.getvalue().splitlines()

    yield begin
    root.handlers[:] = before
    root.setLevel(level)
    request_id_var.set("")
    traceparent_var.set("")


def test_a_line_is_an_event_with_fields_and_the_running_request(lines):
    read = lines()
    request_id_var.set("r-1")
    traceparent_var.set(HEADER)
    logs.get("headrace.test").info("reservation expired", attempt=2)
    line = json.loads(read()[0])
    assert line["event"] == "reservation expired" and line["attempt"] == 2
    assert (line["service"], line["epoch"], line["request_id"]) == ("decode", "e1", "r-1")
    assert line["trace_id"] == HEADER[3:35]


@pytest.mark.parametrize("field", sorted(logs.PRIVATE))
def test_what_a_user_wrote_is_hidden_above_debug(lines, field):
    read = lines("DEBUG")
    log = logs.get("headrace.test")
    log.info("event", **{field: "secret"})
    log.error("event", **{field: "secret"})
    log.debug("event", **{field: "secret"})
    assert ["secret" in line for line in read()] == [False, False, True]


def test_an_error_brings_its_traceback_in_the_same_line(lines):
    read = lines()
    try:
        raise RuntimeError("broken\npromise")
    except RuntimeError as error:
        logs.get("headrace.test").error("step failed", error=error)
    assert len(read()) == 1 and "broken\npromise" in json.loads(read()[0])["traceback"]


def test_fields_of_the_plain_logging_module_are_kept(lines):
    read = lines("DEBUG")
    logging.getLogger("headrace.test").debug("catalogue unreachable", extra={"fields": {"reason": "UNAVAILABLE"}})
    assert json.loads(read()[0])["reason"] == "UNAVAILABLE"


def test_a_terminal_gets_key_and_value(lines):
    read = lines(terminal=True)
    logs.get("headrace.test").warning("engine replaced", reason="no answer", count=3)
    assert "WARNING engine replaced" in read()[0] and 'reason="no answer" count=3' in read()[0]


def test_an_unknown_level_stops_the_start(lines):
    with pytest.raises(ConfigError) as caught:
        lines("LOUD")
    assert caught.value.field == "telemetry.log_level"


def test_the_page_names_every_metric_and_no_other():
    root = Path(__file__).resolve().parents[2]
    sources = [path.read_text() for folder in ("headrace", "services") for path in (root / folder).rglob("*.py")]
    found = {name for text in sources for name in re.findall(r'(?:counter|gauge|histogram)\(\s*"([a-z_.]+)"', text)}
    found |= {measure.name for measure in vars(telemetry).values() if isinstance(measure, telemetry.Measure)}
    page = (root / "docs" / "telemetry.md").read_text()
    assert set(re.findall(r"`((?:headrace|gen_ai)\.[a-z_.]+)`", page)) == found
