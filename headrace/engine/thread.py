"""The one thread that owns torch and the device. Everyone else asks it, by a source of work or by `call`.

Sources take turns, one forward each; calls run between two forwards. With nothing to do the thread waits on a condition
variable and costs no CPU.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from headrace.errors import Unavailable
from headrace.observe import logs

log = logs.get(__name__)


class WorkSource(Protocol):
    """Something that has forwards to run. All but `has_work` is called in the engine thread only."""

    on_work: Callable[[], None]
    """Set by `EngineThread.add_source`; the source calls it, from any thread, when it has got something to do."""

    def has_work(self) -> bool:
        """Whether `run_once` would do something. Cheap; called with the thread's lock held."""

    def run_once(self) -> None:
        """One forward."""

    def on_error(self, error: Exception) -> None:
        """`run_once` raised: whoever waits for its results must hear of it here."""


class EngineThread:
    """`start`, `add_source`, then `wake` whenever a source has work. `stop` ends it.

    `prepare()` runs first, in the thread: what torch keeps for each thread is set there. If it raises, the thread ends and
    every call gets Unavailable with the reason.
    """

    def __init__(self, name: str = "engine", prepare: Callable[[], None] = lambda: None):
        self._prepare = prepare
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._changed = threading.Condition()
        self._calls: deque[tuple[Callable[..., Any], tuple[Any, ...], Future[Any]]] = deque()
        self._sources: list[WorkSource] = []
        self._stopping, self._why = False, "the engine has stopped"

    def start(self) -> None:
        """Starts the thread; once."""
        self._thread.start()

    def add_source(self, source: WorkSource) -> None:
        """Lets `source` take its turns from now on."""
        source.on_work = self.wake
        with self._changed:
            self._sources = [*self._sources, source]
            self._changed.notify()

    def wake(self) -> None:
        """A source has work. From any thread; never blocks for longer than a look at the sources."""
        with self._changed:
            self._changed.notify()

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs `function(*args)` in the thread between two forwards. Raises what it raises, Unavailable after `stop`
        or when the thread could not start.

        A cancelled caller does not stop a function that has begun.
        """
        return await asyncio.wrap_future(self._submit(function, args))

    def call_blocking(self, function: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> Any:
        """As `call`, for callers that are not on a loop. Never from the engine thread itself."""
        return self._submit(function, args).result(timeout_s)

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Ends after the forward that runs now; queued calls get Unavailable. False: still busy after `timeout_s`."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.error("engine thread did not stop", timeout_s=timeout_s)
        return not self._thread.is_alive()

    def _submit(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Future[Any]:
        future: Future[Any] = Future()
        with self._changed:
            if self._stopping:
                raise Unavailable(self._why)
            self._calls.append((function, args, future))
            self._changed.notify()
        return future

    def _run(self) -> None:
        try:
            self._prepare()
        except Exception as error:
            log.error("the engine thread cannot be prepared", error=error)
            with self._changed:
                self._stopping, self._why = True, f"the engine could not start: {error}"
            self._refuse_calls()
            return
        while self._wait():
            for source in self._sources:
                self._run_calls()
                if source.has_work():
                    self._run_source(source)
            self._run_calls()
        self._refuse_calls()

    def _wait(self) -> bool:
        """Until there is something to do; False when it is time to end."""
        with self._changed:
            while not self._stopping and not self._calls and not any(source.has_work() for source in self._sources):
                self._changed.wait()
            return not self._stopping

    def _run_calls(self) -> None:
        while self._calls:
            function, args, future = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)

    def _run_source(self, source: WorkSource) -> None:
        try:
            source.run_once()
        except Exception as error:
            log.error("a forward failed", error=error)
            try:
                source.on_error(error)
            except Exception as silent:
                log.error("a source could not report its failure", error=silent)

    def _refuse_calls(self) -> None:
        while self._calls:
            _, _, future = self._calls.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(Unavailable(self._why))
