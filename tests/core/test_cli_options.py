"""What the command line makes of an address before it dials."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from headrace.cli.options import router_address
from headrace.config import Config
from headrace.errors import ConfigError


@pytest.mark.parametrize("address", ["127.0.0.1:20600", "[::1]:1", "router.example:65535"])
def test_an_address_is_host_and_port(address):
    assert router_address(address, Config()) == address


@pytest.mark.parametrize(
    "address", ["nonsense", "127.0.0.1", ":20600", "host:", "host:0", "host:65536", "host:http", "host:-1"]
)
def test_what_is_no_address_is_refused_before_it_is_dialled(address):
    with pytest.raises(ConfigError, match="host:port") as caught:
        router_address(address, Config())
    assert caught.value.field == "address"


def refused(*words: str) -> str:
    """What a command says that ends with status 2, the status of a caller's mistake."""
    run = subprocess.run(
        [sys.executable, "-m", "headrace.cli.main", *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 2 and "Traceback" not in run.stderr, run.stderr
    return run.stderr


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("eval", "--cases", "256:-1"), "--cases"),
        (("eval", "--cases", "8:1"), "--cases"),
        (("eval", "--value-kind", "runes"), "--value-kind"),
        (("up", "--set", "transfer.backend=local"), "transfer.backend"),
        (("up", "--set", "mesh.run_directory=/proc/none"), "mesh.run_directory"),
        (("trace", "nothing", "--set", "mesh.run_directory=/proc/none"), "no trace nothing"),
        (("eval", "--cases", "96:1", "--set", "engine.device=pigeon"), "engine.device"),
        (("bench", "engine", "--against", "pigeon"), "--against"),
        (("bench", "engine", "--streams", "1,many"), "whole numbers"),
        (("bench", "transfer", "--links", "pigeon"), "--links"),
        (("bench", "kernels", "--groups", "pigeon"), "groups"),
        (("bench", "rank", "--model", "pigeon"), "pigeon" if torch.cuda.is_available() else "engine.device"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_sentence(words, named):
    assert named in refused(*words)
