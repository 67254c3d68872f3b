"""The record of a request: numbers while it runs, spans at its end."""

from __future__ import annotations

import re
import time

import pytest

from headrace.config import TelemetryConfig
from headrace.observe import telemetry
from headrace.observe.record import Record

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def recording(tmp_path):
    telemetry.setup("router", "e" * 16, TelemetryConfig(), tmp_path)
    yield
    telemetry.shutdown()


def test_a_whole_request_is_one_tree_below_the_callers_span(recording):
    record = Record(PARENT, root="router.generate")
    now = time.monotonic()
    record.stage("router.route", now, now + 0.5, tokens=7, missing=None)
    record.emit(request_id="q", tokens=7)
    route, whole = telemetry.memory()
    assert (whole.name, whole.trace_id, whole.parent_id) == ("router.generate", PARENT[3:35], PARENT[36:52])
    assert (route.name, route.parent_id, route.attributes) == ("router.route", whole.span_id, {"tokens": 7})
    assert whole.attributes == {"request_id": "q", "tokens": 7}
    assert record.trace_parent == f"00-{whole.trace_id}-{whole.span_id}-01", "the next hop hangs below the root"
    assert abs(route.duration_s - 0.5) < 1e-3 and abs(route.start_s - time.time()) < 2


def test_a_leg_adds_its_stages_to_the_callers_span(recording):
    record = Record(PARENT, root=None)
    record.stage("decode.reserve", 10.0, 11.0, blocks=2)
    record.emit(request_id="q", attempt=1)
    (stage,) = telemetry.memory()
    assert (stage.parent_id, record.trace_parent) == (PARENT[36:52], PARENT)
    assert stage.attributes == {"blocks": 2, "request_id": "q", "attempt": 1}


def test_without_a_parent_a_new_trace_begins(recording):
    for header in ("", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"):
        record = Record(header, root="router.generate")
        assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-01", record.trace_parent) and record.is_sampled
        assert record.trace_parent[3:35] == record.trace_id
    record.emit()
    (whole,) = telemetry.memory()
    assert whole.parent_id == ""


def test_spans_are_made_once_and_only_at_the_end(recording):
    record = Record("", root="router.generate")
    record.stage("router.route", 0.0, 1.0)
    assert telemetry.memory() == []
    record.emit()
    record.emit()
    assert len(telemetry.memory()) == 2


def test_what_went_wrong_is_the_spans_error(recording):
    record = Record("", root="router.generate")
    record.emit(**{"error.type": "NO_WORKERS"})
    (whole,) = telemetry.memory()
    assert whole.error == "NO_WORKERS"


def test_a_trace_that_is_not_sampled_travels_on_and_makes_no_span(recording):
    record = Record(PARENT[:-2] + "00", root="router.generate")
    record.stage("router.route", 0.0, 1.0)
    record.emit()
    assert not record.is_sampled and telemetry.memory() == []
    assert record.trace_parent.startswith(PARENT[:36]) and record.trace_parent.endswith("-00")


def test_without_telemetry_ids_still_travel():
    record = Record("", root="router.generate")
    record.stage("router.route", 0.0, 1.0)
    record.emit()
    assert not record.is_sampled and telemetry.trace_id(record.trace_parent) == record.trace_id
