"""What the scenarios of this folder share: requests that can be watched and cancelled, and the comparison with the oracle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from headrace.client import Answer, AsyncClient
from headrace.errors import HeadraceError

GREEDY = {"temperature": 0.0, "repetition_penalty": 1.0, "ignore_eos": True, "logprobs": 0}
"""With log-probabilities: in exact mode they tell of a row that is wrong even where the likeliest token stays the same."""


def ids(length: int, salt: int = 0) -> list[int]:
    """A prompt of exactly `length` tokens, none of them special; two salts share no first block."""
    return [100 + (salt * 7919 + position * 31) % 7000 for position in range(length)]


def assert_equal(ours: Answer, oracle: Answer) -> None:
    """Two answers to the same request agree in tokens, log-probabilities, text and ends."""
    mine = [(x.token_ids, x.text, x.finish_reason, x.matched_stop, x.logprobs) for x in ours.samples]
    theirs = [(x.token_ids, x.text, x.finish_reason, x.matched_stop, x.logprobs) for x in oracle.samples]
    assert mine == theirs, f"\nours    {mine}\noracle's {theirs}"


async def until(holds: Callable[[], Awaitable[bool]], what: str, timeout_s: float = 20.0) -> None:
    """Waits for a condition; fails with `what` after `timeout_s`."""
    end = time.monotonic() + timeout_s
    while not await holds():
        assert time.monotonic() < end, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.01)


class Asked:
    """A request in flight, in a task of its own. `answer` grows while it runs."""

    def __init__(self, client: AsyncClient, prompt: str | Sequence[int], **options: object):
        self.answer = Answer()
        self.error: HeadraceError | None = None
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._read(client.stream(prompt, **options)))

    @property
    def num_tokens(self) -> int:
        """Tokens that have come, of all samples."""
        return sum(len(sample.token_ids) for sample in self.answer.samples)

    @property
    def done(self) -> bool:
        """Whether the stream has ended."""
        return self._task.done()

    async def wait_tokens(self, count: int, timeout_s: float = 30.0) -> None:
        """Until `count` tokens are here; fails when the stream ends before."""
        async with asyncio.timeout(timeout_s):
            while self.num_tokens < count:
                assert not self.done, f"ended after {self.num_tokens} of {count} tokens: {self.error!r}"
                self._news.clear()
                await self._news.wait()

    async def cancel(self) -> None:
        """The client leaves."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def result(self) -> Answer:
        """The whole answer, or the error it ended with."""
        await asyncio.wait([self._task])
        if self.error is not None:
            raise self.error
        return self.answer

    async def _read(self, events) -> None:
        try:
            async for event in events:
                self.answer.add(event)
                self._news.set()
        except HeadraceError as error:
            self.error = error
        finally:
            self._news.set()
            await events.aclose()
