"""How much of everything `headrace bench stream` measures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """Counts are requests, lengths tokens, `rate` requests a second. The defaults take about ten minutes on two cores."""

    requests: int = 2000
    in_flight: tuple[int, ...] = (16, 64)
    outputs: tuple[int, ...] = (2, 16, 64, 256)
    intervals: tuple[int, ...] = (1, 4, 10, 20)
    floor_requests: int = 4000
    floor_messages: tuple[int, ...] = (1, 16, 64, 256)
    rate: float = 100.0
    rate_requests: int = 2000
    streams: int = 1024
    stream_rate: float = 100.0
    stream_pace_s: float = 0.05
    stream_output: int = 500
    unpaced_output: int = 128
    rival_requests: int = 2000
    rival_chunks: tuple[int, ...] = (1, 10)


QUICK = Plan(
    requests=150,
    in_flight=(8,),
    outputs=(2, 48),
    intervals=(1, 10),
    floor_requests=300,
    floor_messages=(1, 64),
    rate=30.0,
    rate_requests=60,
    streams=32,
    stream_rate=64.0,
    stream_output=40,
    unpaced_output=32,
    rival_requests=100,
)
"""For tests: every part runs, no figure is steady."""
