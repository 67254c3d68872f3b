"""What issue and design ask of a run, each beside what the run measured, against the run's own floor."""

from __future__ import annotations

from typing import Any

GAP_TOLERANCE = 0.05


def check(result: dict[str, Any]) -> list[dict[str, Any]]:
    """[{name, measured, goal, unit, met}] for every goal whose part was measured."""
    floor, processes = result["floor"], result["processes"]
    call, message = floor["us_per_call"], floor["us_per_message"]
    router = processes["router"]
    made = [
        _at_most("router, a request", router["us_per_request"] / call, 2.2, "bare calls"),
        _at_most("router, a token at interval 1", router["us_per_token"]["1"] / message, 1.8, "bare messages"),
        _at_most("router, a token at interval 10", router["us_per_token"]["10"] / message, 0.25, "bare messages"),
        _at_most("kvstore, a request", processes["kvstore"]["us_per_request"], 100.0, "us"),
    ]
    for name in ("prefill", "decode"):
        made.append(_at_most(f"{name}, a request", processes[name]["us_per_request"] / call, 1.5, "bare calls"))
    first = result["first_token"]
    ratio = first["mesh"]["p99"] / first["chain"]["p99"]
    made.append(_at_most("first token p99 at a rate of arrivals", ratio, 1.5, "bare chains"))
    return made + _streams(result["streams_1024"])


def _streams(streams: dict[str, Any]) -> list[dict[str, Any]]:
    off = abs(streams["gap_ms"]["p50"] / streams["pace_gap_ms"] - 1.0)
    return [
        _at_most("streams at a fixed pace, refusals and failures", sum(streams["failures"].values()), 0, "requests"),
        _at_most("streams at a fixed pace, median gap off the pace", off, GAP_TOLERANCE, "of the pace"),
        _at_least("unpaced streams, interval 20 against 1", streams["unpaced"]["ratio"], 1.57, "times"),
    ]


def _at_most(name: str, measured: float, goal: float, unit: str) -> dict[str, Any]:
    return {"name": name, "measured": round(measured, 3), "goal": goal, "unit": unit, "met": measured <= goal}


def _at_least(name: str, measured: float, goal: float, unit: str) -> dict[str, Any]:
    return _at_most(name, measured, goal, unit) | {"met": measured >= goal}
