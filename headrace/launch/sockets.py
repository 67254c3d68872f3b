"""Ports for processes we start: free now, and promised to nobody else who plans on this host at the same moment.

A port that nothing listens on yet may still be in somebody's plan. So a plan holds a lock on `<temp>/headrace-ports/<port>` for as long as
its mesh lives; locks end with the process that took them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

from headrace.errors import ConfigError

LAST_PORT = 32767
"""Ports stay below the ephemeral range."""


class PortClaims:
    """Ports this process has promised to its children. `close` gives them all back."""

    def __init__(self, directory: Path | None = None):
        self._directory = directory or Path(tempfile.gettempdir()) / "headrace-ports"
        self._locks: dict[int, int] = {}

    def take(self, host: str, first: int, last: int = LAST_PORT) -> int:
        """The first port in [first, last] that is free on `host` and claimed by nobody. Raises ConfigError."""
        for port in range(first, last + 1):
            if port not in self._locks and self._claim(port):
                if is_free(host, port):
                    return port
                self._give_back(port)
        raise ConfigError(f"no free port between {first} and {last} on {host}", field="mesh.base_port")

    def close(self) -> None:
        """Gives every port back. Safe to repeat."""
        for port in list(self._locks):
            self._give_back(port)

    def _claim(self, port: int) -> bool:
        with contextlib.suppress(OSError):
            self._directory.mkdir(exist_ok=True)
            self._directory.chmod(0o777)
        try:
            lock = os.open(self._directory / str(port), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return False
        self._locks[port] = lock
        return True

    def _give_back(self, port: int) -> None:
        os.close(self._locks.pop(port))


def is_free(host: str, port: int) -> bool:
    """Whether nothing listens on `host:port` now. Raises ConfigError for an address that is not ours."""
    with contextlib.closing(socket.socket(_family(host))) as probe:
        try:
            probe.bind((host, port))
        except OSError as error:
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                raise ConfigError(f"mesh.host = {host!r} is not an address of this host", field="mesh.host") from error
            return False
    return True


def unused_port(host: str) -> int:
    """A port the kernel says is free now, for a process that must know its address before it listens."""
    with contextlib.closing(socket.socket(_family(host))) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def free_port(host: str, first: int, last: int = LAST_PORT, taken: Sequence[int] = ()) -> int:
    """The first port in [first, last] that nothing listens on and that is not in `taken`; no promise. Raises ConfigError."""
    for port in range(first, last + 1):
        if port not in taken and is_free(host, port):
            return port
    raise ConfigError(f"no free port between {first} and {last} on {host}", field="mesh.base_port")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
