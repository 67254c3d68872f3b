"""The arithmetic of `headrace bench stream`: the fit, the goals, the mock engines, the prompts."""

from __future__ import annotations

import asyncio
import threading

import pytest

from bench.stream import goals
from bench.stream.engines import MockDecode, MockPrefill, NoRows, token_at
from bench.stream.fit import Point, fit
from bench.stream.load import PROMPT_TOKENS, Job, Seen, prompts
from bench.stream.mesh import cpu_s, resident_bytes
from bench.stream.rivals import measure
from headrace.engine.request import DecodeSequence, PrefillJob, PrefillSequence
from headrace.protocol.common import FinishReason, SamplingParams


def line(intercept: float, slopes: dict[int, float], lengths=(2, 16, 64)) -> list[Point]:
    return [Point(i, n, intercept + slope * n) for i, slope in slopes.items() for n in lengths]


def test_a_fit_finds_the_line_that_the_points_were_made_from():
    found = fit(line(800.0, {1: 40.0, 10: 5.0}))
    assert found.us_per_request == pytest.approx(800.0)
    assert found.us_per_token == pytest.approx({1: 40.0, 10: 5.0})
    assert found.residual == pytest.approx(0.0, abs=1e-9)
    assert found.at(10, 100) == pytest.approx(1300.0)


def test_a_fit_says_how_far_the_worst_point_is_from_the_line():
    points = line(800.0, {1: 40.0}, lengths=(2, 16, 64, 256))
    bent = [Point(p.interval, p.tokens, p.us * (1.2 if p.tokens == 64 else 1.0)) for p in points]
    found = fit(bent)
    worst = max(abs(found.at(p.interval, p.tokens) / p.us - 1.0) for p in bent)
    assert found.residual == pytest.approx(worst)
    assert 0.02 < found.residual < 0.2


def test_a_short_request_counts_as_much_as_a_long_one():
    points = [Point(1, 2, 1010.0), Point(1, 2, 990.0), Point(1, 1000, 110_000.0), Point(1, 1000, 90_000.0)]
    assert fit(points).at(1, 2) == pytest.approx(1000.0, rel=0.02)


def test_one_length_is_no_line():
    with pytest.raises(ValueError, match="interval 10 has one length"):
        fit([*line(1.0, {1: 1.0}), Point(10, 5, 3.0)])


JOB = Job("mesh", "", 1)
RESULT = {
    "floor": {"us_per_call": 400.0, "us_per_message": 30.0},
    "processes": {
        "router": {"us_per_request": 800.0, "us_per_token": {"1": 60.0, "10": 6.0}},
        "kvstore": {"us_per_request": 90.0},
        "prefill": {"us_per_request": 500.0},
        "decode": {"us_per_request": 700.0},
    },
    "first_token": {"mesh": {"p99": 6.0}, "chain": {"p99": 5.0}},
    "streams_1024": {
        "failures": {},
        "gap_ms": {"p50": 510.0},
        "pace_gap_ms": 500.0,
        "unpaced": {"ratio": 1.6},
    },
}


def test_goals_are_counted_in_calls_and_messages_of_the_same_run():
    found = {goal["name"]: goal for goal in goals.check(RESULT)}
    assert found["router, a request"] | {"measured": 2.0, "goal": 2.2, "met": True} == found["router, a request"]
    assert found["router, a token at interval 1"]["met"] is False  # 2.0 messages
    assert found["router, a token at interval 10"]["met"] is True
    assert (found["prefill, a request"]["met"], found["decode, a request"]["met"]) == (True, False)
    assert found["streams at a fixed pace, median gap off the pace"]["measured"] == pytest.approx(0.02)
    assert found["unpaced streams, interval 20 against 1"]["met"] is True


def test_a_lost_stream_misses_the_goal():
    lost = RESULT | {"streams_1024": RESULT["streams_1024"] | {"failures": {"RESOURCE_EXHAUSTED: full": 2}}}
    found = next(goal for goal in goals.check(lost) if "refusals" in goal["name"])
    assert (found["measured"], found["met"]) == (2, False)


def test_prompts_are_texts_of_64_tokens_and_all_different():
    made = prompts(50)
    assert len(set(made)) == 50 and PROMPT_TOKENS == 64
    assert made[:10] == prompts(10)


def test_percentiles_of_nothing_are_nothing():
    assert Seen().report(JOB, 1.0)["gap_ms"] == {}
    seen = Seen(first_s=[0.001, 0.002, 0.003])
    assert seen.report(JOB, 1.0)["first_token_ms"]["p50"] == pytest.approx(2.0)


def test_decode_steps_every_sequence_to_its_length_and_keeps_the_tokens_in_order():
    sampling = SamplingParams(max_tokens=5, ignore_eos=True, seed=1)
    sequences = [DecodeSequence(h, 0, sampling, (1, 2), [token_at(0)], []) for h in (1, 2)]
    seen: list = []

    async def run() -> None:
        ended = asyncio.Event()
        loop, engine = asyncio.get_running_loop(), MockDecode(4096)

        def on_step(tokens) -> None:
            seen.extend(tokens)
            if sum(token.finish_reason is FinishReason.LENGTH for token in seen) == 2:
                loop.call_soon_threadsafe(ended.set)

        engine.connect(on_step, lambda sequences, error: None)
        engine.add(sequences)
        await asyncio.wait_for(ended.wait(), 10)
        engine.stop()

    asyncio.run(run())
    for handle in (1, 2):
        own = [(t.position, t.token_id) for t in seen if t.handle == handle]
        assert own == [(place, token_at(place)) for place in range(1, 5)]


def test_a_removed_sequence_steps_no_more():
    async def run() -> list[int]:
        engine, seen = MockDecode(4096), []
        first = asyncio.Event()
        loop = asyncio.get_running_loop()

        def on_step(tokens) -> None:
            seen.extend(token.handle for token in tokens)
            loop.call_soon_threadsafe(first.set)

        engine.connect(on_step, lambda sequences, error: None)
        sampling = SamplingParams(max_tokens=10**6, ignore_eos=True, seed=1)
        engine.add([DecodeSequence(1, 0, sampling, (1,), [token_at(0)], [])])
        await asyncio.wait_for(first.wait(), 10)
        await engine.remove(1)
        before = len(seen)
        engine.add([DecodeSequence(2, 0, SamplingParams(max_tokens=3, seed=1), (1,), [token_at(0)], [])])
        while seen.count(2) < 2:
            await asyncio.sleep(0.001)
        engine.stop()
        return seen[before + 1 :]  # a step that was under way may still be told

    assert set(asyncio.run(run())) == {2}


def test_prefill_hands_over_every_layer_and_then_the_first_token():
    heard: list = []
    done = threading.Event()
    job = PrefillJob(
        "a",
        [PrefillSequence(0, [1, 2, 3], [0])],
        SamplingParams(max_tokens=4, ignore_eos=True),
        on_layer=lambda layer, ready: heard.append(layer),
        on_tokens=lambda tokens: (heard.extend(tokens), done.set()),
    )
    engine = MockPrefill(3, 4096)
    engine.start()
    engine.add(job)
    assert done.wait(10)
    engine.stop()
    assert heard[:3] == [0, 1, 2]
    assert (heard[3].token_id, heard[3].finish_reason) == (token_at(0), FinishReason.NONE)


def test_both_ends_of_a_transfer_of_nothing_agree_on_what_was_written():
    rows = NoRows(2, 10, 16, 640)
    written = [rows.begin_checksum(layer, [1], 0, 20)() for layer in range(2)]
    assert written == rows.layer_checksums([7, 8], 0, 20)
    assert written != rows.layer_checksums([7, 8], 0, 21)


def test_the_account_of_a_process_grows_with_its_work():
    import os

    before, end = cpu_s(os.getpid()), 0
    while cpu_s(os.getpid()) < before + 0.05:
        end += sum(range(1000))
    assert cpu_s(os.getpid(), threading.get_native_id()) > 0
    assert resident_bytes(os.getpid()) > 1 << 20


def test_a_rival_that_is_not_there_says_so_and_has_no_figure(monkeypatch, tmp_path):
    monkeypatch.setattr("bench.stream.rivals.PYTHON", tmp_path / "bin" / "python")
    found = measure("smg", None, print)
    assert set(found) == {"name", "why_not"} and "make routers" in found["why_not"]
