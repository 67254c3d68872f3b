"""One request is one trace over all processes, with and without a caller's trace; bytes and times are what they say."""

from __future__ import annotations

import asyncio
import json
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
from scenario import ids

from headrace.observe import ring
from headrace.rpc.channel import open_channel
from headrace.rpc.clients import DecodeClient
from headrace.v1 import inference_pb2, inference_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
STAGES = {
    "router.generate": "router",
    "router.tokenize": "router",
    "router.queue": "router",
    "router.route": "router",
    "kvstore.lookup": "kvstore",
    "decode.reserve": "decode",
    "prefill.queue": "prefill",
    "prefill.fetch": "prefill",
    "prefill.forward": "prefill",
    "prefill.push": "prefill",
    "decode.commit": "decode",
    "decode.queue": "decode",
    "decode.generate": "decode",
    "router.stream": "router",
}
"""Every span of a request that decodes, and the service it comes from."""
PARENT = "00f067aa0ba902b7"


def ask(mesh, length: int, traceparent: str = "", request_id: str = ""):
    """One raw call: (request id, final message, trailing metadata)."""

    async def call():
        request = inference_pb2.GenerateRequest(request_id=request_id)
        request.tokens.token_ids.extend(ids(length, length))
        request.sampling.max_tokens, request.sampling.ignore_eos = 6, True
        async with open_channel(mesh.router_address) as channel:
            metadata = (("traceparent", traceparent),) if traceparent else ()
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            stream = stub.Generate(request, timeout=60, metadata=metadata)
            messages = [message async for message in stream]
            trailers = dict(await stream.trailing_metadata())
        await mesh.wait_idle()
        return messages[-1].request_id, messages[-1].final, trailers

    return asyncio.run(call())


def spans_of(mesh, which: str) -> list[ring.Span]:
    return ring.wait_trace(Path(mesh.plan.run_directory) / "traces", which, tuple(STAGES), timeout_s=5.0)


@pytest.mark.parametrize("sampled", ["01", "00"])
@pytest.mark.parametrize("request_id", ["", "chosen-by-the-client"])
def test_a_request_continues_its_callers_trace_and_no_other_begins(mesh, sampled, request_id):
    trace = secrets.token_hex(16)
    name, final, _ = ask(mesh, 37, f"00-{trace}-{PARENT}-{sampled}", request_id and f"{request_id}-{sampled}")
    assert final.trace_id == trace
    spans = spans_of(mesh, trace)
    check_tree(spans, PARENT)
    assert {span.attributes.get("request_id") for span in spans} == {name}
    assert not [x for x in all_spans(mesh) if x.attributes.get("request_id") == name and x.trace_id != trace]


def test_without_a_caller_a_request_is_exactly_one_trace_over_four_processes(mesh):
    before = {span.trace_id for span in all_spans(mesh)}
    name, final, _ = ask(mesh, 53)
    spans = spans_of(mesh, final.trace_id)
    check_tree(spans, "")
    assert {span.attributes.get("request_id") for span in spans} == {name}
    assert ring.trace(Path(mesh.plan.run_directory) / "traces", name) == spans
    own = {span.trace_id for span in all_spans(mesh) if span.name != "router.canary"}
    assert own - before == {final.trace_id}


def check_tree(spans: list[ring.Span], outer: str) -> None:
    """Every stage once, from its service, all below one root whose parent is `outer`; one process a service."""
    assert sorted(span.name for span in spans) == sorted(STAGES)
    assert {span.name: span.service for span in spans} == STAGES
    by_id = {span.span_id: span for span in spans}
    assert [(span.name, span.parent_id) for span in spans if span.parent_id not in by_id] == [
        ("router.generate", outer)
    ]
    assert len({span.epoch for span in spans}) == 4
    root = next(span for span in spans if span.name == "router.generate")
    for span in spans:
        assert not span.error
        assert root.start_s - 0.01 <= span.start_s <= span.end_s <= root.end_s + 0.05, span


def all_spans(mesh) -> list[ring.Span]:
    return ring.read_ring(Path(mesh.plan.run_directory) / "traces")


@pytest.mark.parametrize("length", [16, 17, 37])
def test_bytes_pushed_are_rows_times_layers_times_row_bytes(mesh, length):
    async def layout():
        async with open_channel(mesh.address("decode-0")) as channel:
            return (await DecodeClient(channel).info()).layout

    kv = asyncio.run(layout())
    _, final, _ = ask(mesh, length)
    owed = length * kv.layer_count * kv.row_dim * {"fp32": 4, "bf16": 2}[kv.dtype]
    assert [stage.byte_count for stage in final.stages if stage.name == "prefill.push"] == [owed]
    push = next(span for span in spans_of(mesh, final.trace_id) if span.name == "prefill.push")
    assert push.attributes["bytes"] == owed
    assert push.attributes["bytes_per_s"] == pytest.approx(owed / push.duration_s, rel=0.2)


def test_the_last_message_and_the_trailers_carry_the_same_stages_as_the_trace(mesh):
    _, final, trailers = ask(mesh, 40)
    told = {stage.name: stage for stage in final.stages}
    assert set(told) == set(STAGES) - {"kvstore.lookup"} and len(final.stages) == len(told)
    times = dict(part.split("=") for part in trailers["headrace-stages"].split(","))
    spans = {span.name: span for span in spans_of(mesh, final.trace_id)}
    zero = spans["router.generate"].start_s
    for name, stage in told.items():
        start_s, duration_s = seconds(stage.start), seconds(stage.duration)
        assert [float(part) for part in times[name].split("+")] == pytest.approx([start_s, duration_s], abs=2e-6)
        assert start_s >= 0.0
        assert abs(spans[name].start_s - zero - start_s) <= 0.25, name
        if name != "decode.commit":  # prefill counts the way there and back, decode its own work
            assert abs(spans[name].duration_s - duration_s) <= 0.25, name
    assert spans["decode.generate"].attributes["steps"] == 5 == told["decode.generate"].token_count
    assert spans["decode.generate"].attributes["itl_p99_s"] >= spans["decode.generate"].attributes["itl_mean_s"] > 0
    assert spans["prefill.forward"].attributes["tokens"] == 40 - spans["prefill.fetch"].attributes["cached_tokens"]


def seconds(duration) -> float:
    return duration.ToTimedelta().total_seconds()


def test_the_trace_command_prints_the_same_spans(mesh):
    name, final, _ = ask(mesh, 21)
    spans = spans_of(mesh, final.trace_id)
    command = [
        sys.executable,
        "-m",
        "headrace.cli.main",
        "trace",
        "--set",
        f"mesh.run_directory={mesh.plan.run_directory}",
    ]
    for which in (final.trace_id, name):
        printed = subprocess.run([*command, "--json", which], capture_output=True, text=True, check=True, cwd=ROOT)
        assert [ring.Span(**span) for span in json.loads(printed.stdout)] == spans
    drawn = subprocess.run([*command, name], capture_output=True, text=True, check=True, cwd=ROOT)
    assert all(stage in drawn.stdout for stage in STAGES) and name in drawn.stdout
    missing = subprocess.run([*command, "no-such-request"], capture_output=True, text=True, cwd=ROOT)
    assert missing.returncode == 2 and "no-such-request" in missing.stderr
