"""Tasks that live as long as the core's TaskGroup and do not take one another down."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from headrace.observe import logs

log = logs.get(__name__)

Work = Callable[..., Coroutine[Any, Any, Any]]


class Background:
    """Starts tasks in a group. An unexpected error is logged where it happens and ends that task only."""

    def __init__(self, tasks: asyncio.TaskGroup):
        self._group = tasks
        self._running: set[asyncio.Task] = set()

    def spawn(self, work: Work, *arguments: Any) -> asyncio.Task:
        """Runs `work(*arguments)`."""
        task = self._group.create_task(_guarded(work, *arguments))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def cancel(self) -> None:
        """Ends them all."""
        for task in list(self._running):
            task.cancel()


async def _guarded(work: Work, *arguments: Any) -> None:
    try:
        await work(*arguments)
    except Exception as error:
        log.error("a background task failed", error=error)
