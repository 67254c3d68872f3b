"""Faults on purpose: rules in `Config.faults` break one named thing in one named place, as often as asked.

A rule is `<point>:<kind> [key=value ...]`, such as `prefill.push:drop layer=3 times=1`.

point             kinds                              what the caller does with it
prefill.forward   fail hang slow                     the batch raises, never ends (`seconds`), or takes `seconds` longer
prefill.push      fail drop flip repeat delay hang   the layer is refused, not written, written with one byte changed,
                                                     written twice, or written `seconds` later
prefill.commit    fail delay                         the hand-over raises, or is sent `seconds` later
decode.reserve    fail delay                         the answer is an error, or comes `seconds` later
decode.commit     fail delay                         the same for Commit
decode.step       fail hang slow                     the step raises, or takes `seconds` (longer)
transfer.fence    fail delay                         replacing the transfer engine raises, or takes `seconds` longer

Keys of every rule: `times` (how often it fires, 1 unless said; 0 is always), `after` (matches let pass first, 0), `seconds`
(0 unless said, needed by hang, slow and delay), `rank` (only that rank of the service, unless said every one). Keys that
must equal what the point says of itself: `layer`, `attempt`, `request_id`. `request_id` is the id that the client sees, and
may end in `*` for every id that begins so. The first rule that matches and has not been used up fires. Unknown points, kinds
and keys stop the start.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.errors import ConfigError

POINTS: dict[str, frozenset[str]] = {
    "prefill.forward": frozenset({"fail", "hang", "slow"}),
    "prefill.push": frozenset({"fail", "drop", "flip", "repeat", "delay", "hang"}),
    "prefill.commit": frozenset({"fail", "delay"}),
    "decode.reserve": frozenset({"fail", "delay"}),
    "decode.commit": frozenset({"fail", "delay"}),
    "decode.step": frozenset({"fail", "hang", "slow"}),
    "transfer.fence": frozenset({"fail", "delay"}),
}
_TIMED = frozenset({"hang", "slow", "delay"})
_MATCHED = frozenset({"layer", "attempt", "request_id"})
_COUNTS = frozenset({"times", "after", "rank"})


@dataclass(frozen=True)
class Fault:
    """What to break now. `seconds` is 0 for kinds that take no time."""

    point: str
    kind: str
    seconds: float = 0.0


@dataclass
class _Rule:
    fault: Fault
    match: dict[str, str] = field(default_factory=dict)
    times: int = 1
    after: int = 0
    rank: int | None = None
    fired: int = 0

    def take(self, match: dict[str, str]) -> bool:
        """Counts one matching call; whether the rule fires for it."""
        if self.times and self.fired >= self.times:
            return False
        if not all(_matches(key, match.get(key), value) for key, value in self.match.items()):
            return False
        if self.after:
            self.after -= 1
            return False
        self.fired += 1
        return True


class Faults:
    """The rules of one process. `fire` may be called from any thread and costs one look-up when there are none."""

    def __init__(self, rules: Sequence[_Rule] = ()):
        self._rules: dict[str, list[_Rule]] = {}
        for rule in rules:
            self._rules.setdefault(rule.fault.point, []).append(rule)
        self._lock = threading.Lock()

    @classmethod
    def parse(cls, rules: Sequence[str], rank: int = 0) -> Faults:
        """Reads `Config.faults`, keeping the rules for `rank`. Raises ConfigError naming the rule and what is wrong."""
        parsed = [_parse(text, f"faults[{index}]") for index, text in enumerate(rules)]
        return cls([rule for rule in parsed if rule.rank in (None, rank)])

    def fire(self, point: str, **match: object) -> Fault | None:
        """The fault to commit at `point` now, or None. Call it once for each thing that could go wrong."""
        rules = self._rules.get(point)
        if rules is None:
            assert point in POINTS, f"{point} is not a documented fault point"
            return None
        said = {key: str(value) for key, value in match.items()}
        with self._lock:
            return next((rule.fault for rule in rules if rule.take(said)), None)

    def fired(self) -> dict[str, int]:
        """How often each `point:kind` has fired."""
        counts: dict[str, int] = {}
        with self._lock:
            for rule in (rule for rules in self._rules.values() for rule in rules):
                name = f"{rule.fault.point}:{rule.fault.kind}"
                counts[name] = counts.get(name, 0) + rule.fired
        return counts


def _matches(key: str, said: str | None, wanted: str) -> bool:
    if said is None or key != "request_id":
        return said == wanted
    client_id = said.rsplit("~", 1)[0]  # what follows makes a client's id unique among all routers
    return client_id.startswith(wanted[:-1]) if wanted.endswith("*") else client_id == wanted


def _parse(text: str, path: str) -> _Rule:
    head, *pairs = text.split() or [""]
    point, _, kind = head.partition(":")
    if point not in POINTS:
        raise ConfigError(f"{path}: no fault point {point!r}; there are {', '.join(POINTS)}", field=path)
    if kind not in POINTS[point]:
        known = ", ".join(sorted(POINTS[point]))
        raise ConfigError(f"{path}: {point} has no fault {kind!r}; it has {known}", field=path)
    values = dict(_pair(pair, path) for pair in pairs)
    seconds = _number(float, values.pop("seconds", "0"), f"{path} seconds")
    if (kind in _TIMED) != (seconds > 0):
        raise ConfigError(f"{path}: {kind} {'needs' if kind in _TIMED else 'takes no'} seconds", field=path)
    counts = {key: _number(int, values.pop(key), f"{path} {key}") for key in _COUNTS & set(values)}
    return _Rule(Fault(point, kind, seconds), match=values, **counts)


def _pair(text: str, path: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or key not in _MATCHED | _COUNTS | {"seconds"}:
        known = ", ".join(sorted(_MATCHED | _COUNTS | {"seconds"}))
        raise ConfigError(f"{path}: {text!r} is not key=value with one of {known}", field=path)
    return key, value


def _number(kind: type, text: str, path: str):
    try:
        value = kind(text)
    except ValueError as error:
        raise ConfigError(f"{path} = {text!r} is not a number", field=path.split()[0]) from error
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{path} = {text!r} is out of range", field=path.split()[0])
    return value
