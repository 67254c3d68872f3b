"""What the command line makes of an address before it dials."""

from __future__ import annotations

import pytest

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
