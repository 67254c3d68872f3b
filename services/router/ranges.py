"""Ranges of the public sampling fields, as the protos state them. For requests and for a checkpoint's own defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from headrace.errors import InvalidRequest
from headrace.protocol.common import SamplingParams

_RANGES = {
    "temperature": (0.0, 10.0),
    "top_k": (0, 2**31 - 1),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "n": (1, 16),
    "max_tokens": (0, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "logprobs": (0, 20),
}

_NAMES = frozenset(entry.name for entry in dataclasses.fields(SamplingParams))


def check_sampling(given: dict[str, object], vocabulary_size: int) -> None:
    """Raises InvalidRequest naming the field as `sampling.<name>`; None stands for "not given"."""
    for name, value in given.items():
        need(name in _NAMES, f"sampling.{name}", "is unknown")
        if value is not None and name in _RANGES:
            low, high = _RANGES[name]
            need(low <= value <= high, f"sampling.{name}", f"= {value} must be {low} to {high}")  # type: ignore[operator]
    _check_open_range(given, "top_p", lambda x: 0.0 < x <= 1.0, "(0, 1]")
    _check_open_range(given, "min_p", lambda x: 0.0 <= x < 1.0, "[0, 1)")
    _check_open_range(given, "repetition_penalty", lambda x: 0.01 <= x <= 10.0, "[0.01, 10]")
    _check_lists(given, vocabulary_size)


def _check_open_range(given: dict[str, object], name: str, inside: Callable, wanted: str) -> None:
    value = given.get(name)
    if value is not None:
        need(inside(value), f"sampling.{name}", f"= {value} must be in {wanted}")


def _check_lists(given: dict[str, object], vocabulary_size: int) -> None:
    if not {"stop", "stop_token_ids", "logit_bias"} & given.keys():
        return
    stops: tuple[int, ...] = tuple(given.get("stop_token_ids") or ())  # type: ignore[arg-type]
    texts: tuple[str, ...] = tuple(given.get("stop") or ())  # type: ignore[arg-type]
    bias: tuple[tuple[int, float], ...] = tuple(given.get("logit_bias") or ())  # type: ignore[arg-type]
    in_vocabulary = f"must name tokens from 0 to {vocabulary_size - 1}"
    need(len(stops) <= 64, "sampling.stop_token_ids", f"has {len(stops)} entries; at most 64")
    need(all(0 <= x < vocabulary_size for x in stops), "sampling.stop_token_ids", in_vocabulary)
    need(len(texts) <= 16, "sampling.stop", f"has {len(texts)} strings; at most 16")
    need(all(1 <= len(x) <= 256 for x in texts), "sampling.stop", "must hold strings of 1 to 256 characters")
    need(len(bias) <= 1024, "sampling.logit_bias", f"has {len(bias)} entries; at most 1,024")
    need(len({token for token, _ in bias}) == len(bias), "sampling.logit_bias", "names a token twice")
    need(all(0 <= token < vocabulary_size for token, _ in bias), "sampling.logit_bias", in_vocabulary)
    need(all(-100.0 <= value <= 100.0 for _, value in bias), "sampling.logit_bias", "must be -100 to 100")


def need(condition: object, field: str, text: str) -> None:
    """Raises InvalidRequest `<field> <text>` unless the condition holds."""
    if not condition:
        raise InvalidRequest(f"{field} {text}", field=field)
