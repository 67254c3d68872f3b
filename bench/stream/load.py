"""The load: one process, one job, `python -m bench.stream.load '{...}'`; a line when it begins, a line with what it saw.

It speaks to the public service through a raw stub, so that it costs little beside what it measures, and compares every token with
the one that the mock engines give at that position.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

import aiohttp
import grpc
import numpy as np

from bench.stream.engines import token_at
from headrace.rpc import channel as channels
from headrace.text.tokenizer import Tokenizer
from headrace.v1 import common_pb2, inference_pb2, inference_pb2_grpc

PROMPT_TOKENS = 64
PROMPTS = 2048
"""More than a prefill rank's pool holds: when a prompt comes again, its prefix is gone."""
TIMEOUT_S = 300.0
MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny"


@dataclass(frozen=True)
class Job:
    """What to send. `in_flight` requests at all times, or `rate` a second at random moments, whatever is under way.

    target     `mesh` for the public service, `http` for a rival, else the name of a stream of bench/stream/bare.py
    pace_us    microseconds between two tokens; 1 is as fast as they can be handed on
    """

    target: str
    address: str
    requests: int
    in_flight: int = 0
    rate: float = 0.0
    output: int = 16
    interval: int = 1
    pace_us: int = 1

    def command(self) -> list[str]:
        """How the process is started."""
        return [sys.executable, "-m", "bench.stream.load", json.dumps(asdict(self))]


@dataclass
class Seen:
    """What came back, over all requests; times in seconds."""

    tokens: int = 0
    messages: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)

    def failed(self, why: str) -> None:
        """One request ended so."""
        self.failures[why] = self.failures.get(why, 0) + 1

    def report(self, job: Job, seconds: float) -> dict:
        """JSON of it; percentiles in milliseconds."""
        return {
            "requests": job.requests,
            "failures": self.failures,
            "tokens": self.tokens,
            "messages": self.messages,
            "seconds": round(seconds, 4),
            "first_token_ms": percentiles_ms(self.first_s),
            "gap_ms": percentiles_ms(self.gaps_s),
            "load_cpu_s": round(time.process_time(), 3),
        }


def percentiles_ms(seconds: list[float]) -> dict[str, float]:
    """{p50, p99, mean}; empty for nothing."""
    if not seconds:
        return {}
    p50, p99 = np.quantile(seconds, (0.5, 0.99)) * 1e3
    return {"p50": round(float(p50), 3), "p99": round(float(p99), 3), "mean": round(1e3 * float(np.mean(seconds)), 3)}


def prompts(count: int, seed: int = 7) -> list[str]:
    """Texts that are exactly PROMPT_TOKENS tokens, the first token of all texts included."""
    tokenizer, draws = Tokenizer.load(MODEL), random.Random(seed)
    pieces = [tokenizer.decode([token]) for token in range(304, 420)]
    words = [piece for piece in pieces if piece[0] == " " and piece[1:].isalpha()]
    made: list[str] = []
    while len(made) < count:
        text = "".join(draws.choices(words, k=PROMPT_TOKENS - 1))
        if len(tokenizer.encode(text)) == PROMPT_TOKENS:
            made.append(text)
    return made


class MeshStream:
    """The public service."""

    def __init__(self, channel: grpc.aio.Channel, job: Job):
        self._job, self._generate = job, inference_pb2_grpc.InferenceServiceStub(channel).Generate
        self._prompts = itertools.cycle(prompts(min(job.requests, PROMPTS)))

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, job: Job) -> AsyncIterator[Self]:
        """Over a connection of its own."""
        async with channels.open_channel(job.address, own_connection=True) as channel:
            await asyncio.wait_for(channel.channel_ready(), TIMEOUT_S)
            yield cls(channel, job)

    async def tokens(self) -> AsyncIterator[int]:
        """Tokens in each message; raises AssertionError for a token that is not the engine's."""
        position = 0
        async for message in self._generate(self._request(), timeout=TIMEOUT_S):
            ids = [token for delta in message.deltas for token in delta.token_ids]
            _compare(ids, position)
            position += len(ids)
            yield len(ids)
        assert position == self._job.output, "tokens are missing"

    def _request(self) -> inference_pb2.GenerateRequest:
        job = self._job
        sampling = common_pb2.SamplingParams(max_tokens=job.output, seed=job.pace_us, ignore_eos=True)
        return inference_pb2.GenerateRequest(text=next(self._prompts), sampling=sampling, stream_interval=job.interval)


class BareStream(MeshStream):
    """A stream of bench/stream/bare.py: as many messages as the mesh sends, each said to hold one token."""

    def __init__(self, channel: grpc.aio.Channel, job: Job):
        self._call = channel.unary_stream(f"/bench.Bare/{job.target}")
        self._messages = str(1 + -(-(job.output - 1) // job.interval)).encode()

    async def tokens(self) -> AsyncIterator[int]:
        """1 for each message."""
        async for _ in self._call(self._messages, timeout=TIMEOUT_S):
            yield 1


class HttpStream:
    """`/generate` of an HTTP router, as server-sent events over kept connections."""

    def __init__(self, session: aiohttp.ClientSession, job: Job):
        self._session, self._job = session, job
        self._prompts = itertools.cycle(prompts(min(job.requests, PROMPTS)))

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, job: Job) -> AsyncIterator[Self]:
        """With as many connections as requests are in flight."""
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            yield cls(session, job)

    async def tokens(self) -> AsyncIterator[int]:
        """Tokens in each event; raises AssertionError for a token that is not the engine's."""
        sampling = {"max_new_tokens": self._job.output}
        body = {"text": next(self._prompts), "stream": True, "sampling_params": sampling}
        position = 0
        async with self._session.post(f"http://{self._job.address}/generate", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    ids = json.loads(line[6:])["output_ids"]
                    _compare(ids, position)
                    position += len(ids)
                    yield len(ids)
        assert position == self._job.output, "tokens are missing"


def _compare(ids: list[int], position: int) -> None:
    expected = [token_at(place) for place in range(position, position + len(ids))]
    assert ids == expected, "other tokens than the engine's"


STREAMS = {"mesh": MeshStream, "http": HttpStream}
"""What a job's target means; every other name is a BareStream."""


async def _one(stream: MeshStream | HttpStream, seen: Seen) -> None:
    last = time.perf_counter()
    is_first = True
    try:
        async for count in stream.tokens():
            now = time.perf_counter()
            seen.messages += 1
            seen.tokens += count
            if count:
                (seen.first_s if is_first else seen.gaps_s).append(now - last)
                last, is_first = now, False
    except grpc.RpcError as error:
        seen.failed(f"{error.code().name}: {error.details()}")
    except (aiohttp.ClientError, TimeoutError, AssertionError) as error:
        seen.failed(f"{type(error).__name__}: {error}")


def _arrivals(job: Job) -> Iterator[float]:
    """Seconds from the begin on at which requests are sent: a Poisson process, the same in every run."""
    draws, at = random.Random(job.requests), 0.0
    for _ in range(job.requests):
        at += draws.expovariate(job.rate)
        yield at


async def run(job: Job) -> dict:
    """Sends the job; {requests, failures, tokens, messages, seconds, first_token_ms, gap_ms, load_cpu_s}."""
    seen, left = Seen(), iter(range(job.requests))
    async with STREAMS.get(job.target, BareStream).open(job) as stream:
        print(json.dumps({"begins": True}), flush=True)
        began = time.perf_counter()

        async def in_turn() -> None:
            for _ in left:
                await _one(stream, seen)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(job.in_flight):
                tasks.create_task(in_turn())
            for at in _arrivals(job) if job.rate else ():
                await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
                tasks.create_task(_one(stream, seen))
        return seen.report(job, time.perf_counter() - began)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(Job(**json.loads(sys.argv[1]))))), flush=True)
