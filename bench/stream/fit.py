"""cost = a + b x tokens, with one a for a process and one b for each stream interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Point:
    """What a request of `tokens` output tokens cost, in microseconds of CPU."""

    interval: int
    tokens: int
    us: float


@dataclass(frozen=True)
class Fit:
    """`residual` is the largest relative difference between a point and the line."""

    us_per_request: float
    us_per_token: dict[int, float]
    residual: float

    def at(self, interval: int, tokens: int) -> float:
        """The line's cost of a request, microseconds."""
        return self.us_per_request + self.us_per_token[interval] * tokens

    def as_json(self) -> dict:
        """{us_per_request, us_per_token: {"1": x}, residual}."""
        slopes = {str(interval): round(slope, 2) for interval, slope in self.us_per_token.items()}
        return {
            "us_per_request": round(self.us_per_request, 1),
            "us_per_token": slopes,
            "residual": round(self.residual, 3),
        }


def fit(points: Sequence[Point]) -> Fit:
    """Least squares of the relative differences: a point of 2 tokens counts as much as one of 256.

    Raises ValueError when an interval has fewer than two lengths.
    """
    intervals = sorted({point.interval for point in points})
    for interval in intervals:
        if len({point.tokens for point in points if point.interval == interval}) < 2:
            raise ValueError(f"interval {interval} has one length: no line goes through one point")
    weights = np.array([1.0 / max(point.us, 1e-3) for point in points])
    columns = [np.ones(len(points))]
    columns += [np.array([p.tokens if p.interval == interval else 0 for p in points]) for interval in intervals]
    matrix = np.stack(columns, 1) * weights[:, None]
    solution, *_ = np.linalg.lstsq(matrix, np.ones(len(points)), rcond=None)
    residual = float(np.abs(matrix @ solution - 1.0).max())
    return Fit(float(solution[0]), dict(zip(intervals, solution[1:].tolist(), strict=True)), residual)
