"""Ports that were promised are promised once."""

from __future__ import annotations

import socket

import pytest

from headrace.errors import ConfigError
from headrace.launch.sockets import PortClaims


def test_two_plans_of_one_host_never_share_a_port_and_closing_gives_it_back(tmp_path):
    first, second = PortClaims(tmp_path), PortClaims(tmp_path)
    mine = [first.take("127.0.0.1", 23100) for _ in range(3)]
    theirs = [second.take("127.0.0.1", 23100) for _ in range(3)]
    assert not set(mine) & set(theirs) and len({*mine, *theirs}) == 6
    first.close()
    assert second.take("127.0.0.1", mine[0]) == mine[0]
    second.close()


def test_a_port_somebody_listens_on_is_never_given_out(tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError):
            PortClaims(tmp_path).take("127.0.0.1", port, port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_a_host_that_is_not_ours_is_said_to_be_so(tmp_path, host):
    with pytest.raises(ConfigError, match="mesh.host"):
        PortClaims(tmp_path).take(host, 23100)
