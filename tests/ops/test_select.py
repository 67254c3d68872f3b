"""Back ends are chosen once, in order, and never silently."""

from __future__ import annotations

import io
import json
import logging

import pytest

from headrace.observe import logs
from kernels.select import Backend, BackendUnavailable, choose

FAST = Backend("fast", run=lambda: "fast", why_not=lambda device: "needs a GPU" if device == "cpu" else None)
PLAIN = Backend("plain", run=lambda: "plain")


def test_the_first_back_end_that_can_run_is_chosen():
    assert choose((FAST, PLAIN), "cuda") is FAST
    assert choose((FAST, PLAIN), "cpu") is PLAIN


def test_a_wanted_back_end_is_never_silently_replaced():
    assert choose((FAST, PLAIN), "cuda", "plain") is PLAIN
    with pytest.raises(BackendUnavailable, match="fast: needs a GPU; plain: available"):
        choose((FAST, PLAIN), "cpu", "fast", op="demo")


def test_an_unknown_name_and_an_empty_list_say_what_there_is():
    with pytest.raises(BackendUnavailable, match="'faster' can run on cpu .*plain: available"):
        choose((FAST, PLAIN), "cpu", "faster")
    with pytest.raises(BackendUnavailable, match="needs a GPU"):
        choose((FAST,), "cpu")


def test_the_log_line_of_a_choice_names_op_back_end_and_device():
    lines, root = io.StringIO(), logging.getLogger()
    before = root.handlers[:], root.level
    try:
        logs.setup("decode", "0123", "INFO", lines)
        choose((FAST, PLAIN), "cpu", op="demo")
    finally:
        root.handlers[:] = before[0]
        root.setLevel(before[1])
    (line,) = [json.loads(text) for text in lines.getvalue().splitlines()]
    assert (line["event"], line["op"], line["backend"], line["device"]) == ("kernel chosen", "demo", "plain", "cpu")
