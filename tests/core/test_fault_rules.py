"""Fault rules: grammar, matching, counting."""

from __future__ import annotations

import threading

import pytest

from headrace.errors import ConfigError
from headrace.process.faults import POINTS, Faults


def test_no_rules_break_nothing():
    faults = Faults.parse(())
    assert all(faults.fire(point, layer=0) is None for point in POINTS)


def test_a_rule_fires_once_unless_told_otherwise():
    faults = Faults.parse(["prefill.commit:fail"])
    assert [faults.fire("prefill.commit") is not None for _ in range(3)] == [True, False, False]


def test_times_bounds_a_rule_and_zero_means_always():
    faults = Faults.parse(["prefill.push:drop times=2", "decode.step:slow seconds=0.05 times=0"])
    assert [faults.fire("prefill.push", layer=n) is not None for n in range(4)] == [True, True, False, False]
    steps = [faults.fire("decode.step") for _ in range(50)]
    assert all(fault is not None and fault.seconds == 0.05 for fault in steps)
    assert faults.fired() == {"prefill.push:drop": 2, "decode.step:slow": 50}


def test_only_calls_that_match_are_counted():
    faults = Faults.parse(["prefill.push:flip layer=2 times=1"])
    fired = [(layer, faults.fire("prefill.push", layer=layer)) for layer in (0, 1, 2, 2)]
    assert [fault and fault.kind for _, fault in fired] == [None, None, "flip", None]


def test_a_request_is_named_by_the_id_its_client_sees():
    faults = Faults.parse(["prefill.push:drop request_id=mine times=0", "prefill.commit:fail request_id=my-* times=0"])
    pushed = [faults.fire("prefill.push", request_id=name) for name in ("mine", "mine~0a1b", "mine-too", "other~mine")]
    assert [fault is not None for fault in pushed] == [True, True, False, False]
    committed = [faults.fire("prefill.commit", request_id=name) for name in ("my-1~0a1b", "my-", "mine~0a1b")]
    assert [fault is not None for fault in committed] == [True, True, False]
    assert faults.fire("prefill.push") is None, "a place that names no request is not that request's"


def test_after_lets_matches_pass_first():
    faults = Faults.parse(["prefill.forward:hang seconds=5 after=2"])
    assert [faults.fire("prefill.forward") is not None for _ in range(4)] == [False, False, True, False]


def test_the_first_rule_that_is_left_fires():
    faults = Faults.parse(["prefill.push:drop layer=1", "prefill.push:repeat layer=1"])
    kinds = [fault and fault.kind for fault in (faults.fire("prefill.push", layer=1) for _ in range(3))]
    assert kinds == ["drop", "repeat", None]


def test_a_rule_for_another_rank_is_not_kept():
    rules = ["decode.commit:fail rank=1"]
    assert Faults.parse(rules, rank=0).fire("decode.commit") is None
    assert Faults.parse(rules, rank=1).fire("decode.commit") is not None


def test_a_rule_fires_the_right_number_of_times_from_many_threads():
    faults = Faults.parse(["decode.step:fail times=100"])
    fired: list[int] = []

    def work() -> None:
        fired.append(sum(faults.fire("decode.step") is not None for _ in range(200)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(fired) == 100


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("", "no fault point"),
        ("prefill.psuh:drop", "no fault point 'prefill.psuh'"),
        ("prefill.push", "no fault ''"),
        ("prefill.push:explode", "no fault 'explode'"),
        ("prefill.push:drop layer", "not key=value"),
        ("prefill.push:drop colour=red", "not key=value"),
        ("prefill.push:drop times=two", "not a number"),
        ("prefill.push:drop times=-1", "out of range"),
        ("prefill.push:delay", "needs seconds"),
        ("prefill.push:delay seconds=nan", "out of range"),
        ("prefill.push:drop seconds=1", "takes no seconds"),
    ],
)
def test_a_wrong_rule_stops_the_start_and_is_named(rule, said):
    with pytest.raises(ConfigError) as caught:
        Faults.parse(["decode.step:fail", rule])
    assert caught.value.field == "faults[1]"
    assert said in caught.value.message


def test_every_rule_of_the_documentation_table_is_accepted():
    for point, kinds in POINTS.items():
        for kind in kinds:
            timed = " seconds=0.5" if kind in ("hang", "slow", "delay") else ""
            fault = Faults.parse([f"{point}:{kind}{timed}"]).fire(point)
            assert fault is not None and (fault.point, fault.kind) == (point, kind)
