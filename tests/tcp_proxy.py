"""A TCP proxy that a test can cut, freeze and close: what lies between two processes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

PIECE_BYTES = 64 * 1024


class TcpProxy:
    """Forwards connections to `target` (host:port). `address` is what clients dial."""

    def __init__(self, target: str):
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self._server: asyncio.Server
        self.address = ""
        self.connections = 0
        """Made so far."""

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, target: str) -> AsyncIterator[TcpProxy]:
        """A proxy that lives as long as the block."""
        proxy = cls(target)
        await proxy.listen(0)
        try:
            yield proxy
        finally:
            proxy.close()

    async def listen(self, port: int) -> None:
        """Takes connections at `port` (0: a free one)."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Resets every connection of now; new ones are taken."""
        for writer in list(self._writers):
            writer.transport.abort()

    def freeze(self) -> None:
        """Bytes stop in both directions, also on new connections, and nobody is told."""
        self._flows.clear()

    def thaw(self) -> None:
        """Bytes go on."""
        self._flows.set()

    def close(self) -> None:
        """Refuses new connections and resets those of now."""
        self._server.close()
        self.cut()
        self._flows.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            with contextlib.suppress(OSError):
                there_reader, there = await asyncio.open_connection(self._host, self._port)
                self._writers.add(there)
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._forward(reader, there))
                    tasks.create_task(self._forward(there_reader, writer))
        finally:
            writer.transport.abort()
            self._writers.discard(writer)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError):
                while piece := await reader.read(PIECE_BYTES):
                    await self._flows.wait()
                    writer.write(piece)
                    await writer.drain()
        finally:
            writer.transport.abort()
            self._writers.discard(writer)
