"""The engine thread: turns, calls, errors, idleness and its end."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from headrace.engine.thread import EngineThread
from headrace.errors import InvalidRequest, Unavailable


class Counted:
    """A source with so many forwards to run; `log` is shared by several."""

    def __init__(self, name: str, forwards: int, log: list[str]):
        self.name, self.left, self.log = name, forwards, log
        self.on_work = lambda: None
        self.errors: list[Exception] = []
        self.fail_at: int | None = None
        self.done = threading.Event()

    def has_work(self) -> bool:
        return self.left > 0

    def run_once(self) -> None:
        self.left -= 1
        self.log.append(self.name)
        if self.left == 0:
            self.done.set()
        if self.left == self.fail_at:
            raise RuntimeError("the device is unhappy")

    def on_error(self, error: Exception) -> None:
        self.errors.append(error)


@pytest.fixture
def thread():
    one = EngineThread()
    one.start()
    yield one
    assert one.stop(5)


def test_sources_take_turns(thread):
    log: list[str] = []
    first, second = Counted("a", 5, log), Counted("b", 5, log)
    begun, gate = threading.Event(), threading.Event()

    def hold():
        begun.set()
        gate.wait(5)

    async def main():
        blocked = asyncio.create_task(thread.call(hold))
        assert await asyncio.to_thread(begun.wait, 5)
        thread.add_source(first)
        thread.add_source(second)
        gate.set()
        await blocked

    asyncio.run(main())
    assert first.done.wait(5) and second.done.wait(5)
    assert sorted(log) == ["a"] * 5 + ["b"] * 5
    assert max(abs(log[:end].count("a") - log[:end].count("b")) for end in range(10)) <= 1


def test_a_source_that_gets_work_later_wakes_the_thread_by_itself(thread):
    source = Counted("a", 0, [])
    thread.add_source(source)
    for _ in range(50):
        source.done.clear()
        source.left = 1
        source.on_work()
        assert source.done.wait(5)


def test_call_returns_results_and_raises_errors(thread):
    def refuse():
        raise InvalidRequest("no", field="x")

    async def main():
        assert await thread.call(lambda a, b: a + b, 2, 3) == 5
        assert await thread.call(threading.current_thread) is not threading.current_thread()
        with pytest.raises(InvalidRequest):
            await thread.call(refuse)
        return await asyncio.gather(*(thread.call(pow, 2, power) for power in range(20)))

    assert asyncio.run(main()) == [2**power for power in range(20)]
    assert thread.call_blocking(pow, 2, 5, timeout_s=5) == 32


def test_calls_run_between_two_forwards_of_a_busy_source(thread):
    inside = threading.Lock()

    class Busy(Counted):
        def run_once(self):
            with inside:
                super().run_once()
                time.sleep(0.001)

    source = Busy("a", 200, [])
    thread.add_source(source)

    async def main():
        return [await thread.call(inside.locked) for _ in range(20)]

    assert asyncio.run(main()) == [False] * 20
    assert source.left > 0, "calls waited for all of the work"
    source.left = 0


def test_a_failing_forward_reaches_its_source_and_the_thread_lives_on(thread):
    bad, good = Counted("a", 3, []), Counted("b", 3, [])
    bad.fail_at = 1
    thread.add_source(bad)
    thread.add_source(good)
    assert bad.done.wait(5) and good.done.wait(5)
    assert thread.call_blocking(lambda: "alive", timeout_s=5) == "alive"
    assert [str(error) for error in bad.errors] == ["the device is unhappy"] and not good.errors


def test_an_idle_thread_costs_no_cpu_and_wakes_quickly(thread):
    thread.add_source(Counted("a", 0, []))
    used = thread.call_blocking(time.thread_time, timeout_s=5)
    time.sleep(0.3)  # the one thing here that has to be watched for a while is nothing happening
    assert thread.call_blocking(time.thread_time, timeout_s=5) - used < 0.01
    delays = []
    for _ in range(50):
        start = time.perf_counter()
        delays.append(thread.call_blocking(time.perf_counter, timeout_s=5) - start)
    assert sorted(delays)[25] < 0.005


def test_after_stop_calls_are_refused_and_a_hanging_forward_is_reported():
    thread, begun, release = EngineThread(), threading.Event(), threading.Event()
    thread.start()

    def hang():
        begun.set()
        return release.wait(5)

    async def main():
        running = asyncio.create_task(thread.call(hang))
        queued = asyncio.create_task(thread.call(pow, 2, 3))
        assert await asyncio.to_thread(begun.wait, 5)
        assert await asyncio.to_thread(thread.stop, 0.05) is False
        with pytest.raises(Unavailable):
            await thread.call(pow, 2, 3)
        release.set()
        assert await running is True
        return (await asyncio.gather(queued, return_exceptions=True))[0]

    outcome = asyncio.run(main())
    assert outcome == 8 or isinstance(outcome, Unavailable)
    assert thread.stop(5)


def test_a_thread_that_cannot_be_prepared_refuses_queued_and_later_calls():
    release = threading.Event()

    def prepare():
        release.wait(5)
        raise RuntimeError("no such device")

    thread = EngineThread(prepare=prepare)
    thread.start()

    async def main():
        queued = asyncio.create_task(thread.call(pow, 2, 3))
        await asyncio.sleep(0)
        release.set()
        with pytest.raises(Unavailable, match="no such device"):
            await asyncio.wait_for(queued, 5)
        with pytest.raises(Unavailable, match="no such device"):
            await asyncio.wait_for(thread.call(pow, 2, 3), 5)

    asyncio.run(main())
    assert thread.stop(5)
