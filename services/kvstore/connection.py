"""The way to the catalogue's Redis: names of keys, bounded calls, and one error for a server that does not answer."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from headrace.errors import Unavailable
from headrace.process.registry import REDIS_ERRORS, bounded, connect, key

Call = tuple[Any, ...]
"""A command and its arguments."""


class Connection:
    """Connections to one Redis. Every method raises Unavailable when it does not answer."""

    def __init__(self, url: str, mesh: str, reachable: Callable[[], bool]):
        """`reachable()` says whether Redis answered lately; while it did not, calls fail at once instead of waiting."""
        self.client = connect(url)
        self.reachable = reachable
        self._mesh = mesh

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, url: str, mesh: str, reachable: Callable[[], bool]) -> AsyncIterator[Connection]:
        """Closed on leaving."""
        connection = cls(url, mesh, reachable)
        try:
            yield connection
        finally:
            with contextlib.suppress(*REDIS_ERRORS):
                await connection.client.aclose()

    def key(self, *parts: str) -> str:
        """A key or channel of this mesh."""
        return key(self._mesh, *parts)

    def check_reachable(self) -> None:
        """Raises Unavailable at once while Redis is known to be away."""
        if not self.reachable():
            raise Unavailable("the catalogue's Redis is away", reason="REDIS_AWAY")

    async def call(self, *call: Any) -> Any:
        """One command's answer."""
        self.check_reachable()
        with _unavailable():
            return await bounded(self.client.execute_command(*call))

    async def calls(self, calls: Sequence[Call]) -> list[Any]:
        """Answers of commands that travel together; an exception in place of the answer of one that Redis refused."""
        self.check_reachable()
        if not calls:
            return []
        with _unavailable():
            async with self.client.pipeline(transaction=False) as pipeline:
                for call in calls:
                    pipeline.execute_command(*call)
                return await bounded(pipeline.execute(raise_on_error=False))


def script(text: str, keys: Sequence[str], arguments: Sequence[object]) -> Call:
    """The call that runs a script."""
    return ("EVAL", text, len(keys), *keys, *arguments)


@contextlib.contextmanager
def _unavailable() -> Iterator[None]:
    try:
        yield
    except REDIS_ERRORS as error:
        raise Unavailable("the catalogue's Redis does not answer", reason="REDIS_AWAY") from error
