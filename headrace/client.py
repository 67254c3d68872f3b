"""Clients of a router: `AsyncClient` and `Client`, which people use. Services and operators' tools use `headrace.rpc`.

Every method takes seconds, returns plain values and raises headrace.errors.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field

import grpc

from headrace.errors import HeadraceError, Unavailable
from headrace.protocol import inference as p
from headrace.protocol.common import FinishReason
from headrace.rpc.channel import call_metadata, call_stream, call_unary, open_blocking_channel, open_channel
from headrace.rpc.status import error_from_rpc
from headrace.v1 import inference_pb2, inference_pb2_grpc
from headrace.wire.inference import generate_event_from_pb, generate_to_pb, model_from_pb


@dataclass
class Sample:
    """One sample of a whole answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[p.TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.NONE
    matched_stop: str = ""

    def add(self, delta: p.SampleDelta) -> None:
        """Appends what a message brought."""
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        if delta.finish_reason is not FinishReason.NONE:
            self.finish_reason = delta.finish_reason
            self.matched_stop = delta.matched_stop


@dataclass
class Answer:
    """A whole answer: its samples in order and the final summary."""

    request_id: str = ""
    samples: list[Sample] = field(default_factory=list)
    final: p.FinalSummary | None = None

    @property
    def text(self) -> str:
        """Text of the first sample."""
        return self.samples[0].text if self.samples else ""

    def add(self, event: p.GenerateEvent) -> None:
        """Appends what a message brought."""
        self.request_id = event.request_id
        for delta in event.deltas:
            while len(self.samples) <= delta.sample_index:
                self.samples.append(Sample())
            self.samples[delta.sample_index].add(delta)
        self.final = event.final or self.final


def _command(prompt: str | Sequence[int] | Sequence[p.ChatMessage], options: dict[str, object]) -> p.GenerateCommand:
    own = {
        name: options.pop(name)
        for name in ("request_id", "stream_interval", "final_only", "cache_salt", "priority")
        if name in options
    }
    if isinstance(prompt, str):
        form: dict[str, object] = {"text": prompt}
    elif prompt and isinstance(prompt[0], p.ChatMessage):
        form = {"chat": tuple(prompt)}
    else:
        form = {"token_ids": tuple(prompt)}
    return p.GenerateCommand(**form, **own, sampling=options)  # type: ignore[arg-type]


class AsyncClient:
    """An asyncio client of a router.

        async with AsyncClient("127.0.0.1:20600") as client:
            async for event in client.stream("Once upon a time", max_tokens=64):
                print(event.deltas[0].text if event.deltas else "", end="")

    Options are the fields of SamplingParams plus request_id, stream_interval, final_only, cache_salt, priority.
    """

    def __init__(self, address: str, *, timeout_s: float = 120.0):
        self._address = address
        self._timeout_s = timeout_s
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> AsyncClient:
        self._channel = open_channel(self._address, own_connection=True)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the channel; open streams end with an error, never a hang."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    @property
    def _stub(self) -> inference_pb2_grpc.InferenceServiceStub:
        if self._channel is None:
            raise Unavailable("the client is closed: use it inside `async with`")
        return inference_pb2_grpc.InferenceServiceStub(self._channel)

    async def stream(
        self,
        prompt: str | Sequence[int] | Sequence[p.ChatMessage],
        *,
        timeout_s: float | None = None,
        **options: object,
    ) -> AsyncIterator[p.GenerateEvent]:
        """Messages of the answer as they come. Raises headrace.errors; closing the iterator cancels the request."""
        request = generate_to_pb(_command(prompt, options))
        stream = call_stream(self._stub.Generate, request, timeout_s or self._timeout_s)
        async with contextlib.aclosing(stream) as messages:
            async for message in messages:
                yield generate_event_from_pb(message)

    async def generate(
        self,
        prompt: str | Sequence[int] | Sequence[p.ChatMessage],
        *,
        timeout_s: float | None = None,
        **options: object,
    ) -> Answer:
        """The whole answer."""
        answer = Answer()
        async with contextlib.aclosing(self.stream(prompt, timeout_s=timeout_s, **options)) as events:
            async for event in events:
                answer.add(event)
        return answer

    async def model(self) -> p.ModelInfo:
        """What is served and its limits."""
        answer = await call_unary(self._stub.GetModel, inference_pb2.GetModelRequest(), self._timeout_s)
        return model_from_pb(answer)


class Client:
    """The same for synchronous code: `with Client(address) as client: print(client.generate("Hello").text)`."""

    def __init__(self, address: str, *, timeout_s: float = 120.0):
        self._timeout_s = timeout_s
        self._channel = open_blocking_channel(address)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the channel."""
        self._channel.close()

    def stream(
        self,
        prompt: str | Sequence[int] | Sequence[p.ChatMessage],
        *,
        timeout_s: float | None = None,
        **options: object,
    ) -> Iterator[p.GenerateEvent]:
        """Messages of the answer as they come; leaving the loop cancels the request."""
        request = generate_to_pb(_command(prompt, options))
        call = self._stub.Generate(request, timeout=timeout_s or self._timeout_s, metadata=call_metadata())
        try:
            for message in call:
                yield generate_event_from_pb(message)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
        finally:
            call.cancel()

    def generate(
        self,
        prompt: str | Sequence[int] | Sequence[p.ChatMessage],
        *,
        timeout_s: float | None = None,
        **options: object,
    ) -> Answer:
        """The whole answer."""
        answer = Answer()
        for event in self.stream(prompt, timeout_s=timeout_s, **options):
            answer.add(event)
        return answer

    def model(self) -> p.ModelInfo:
        """What is served and its limits."""
        try:
            return model_from_pb(self._stub.GetModel(inference_pb2.GetModelRequest(), timeout=self._timeout_s))
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error


__all__ = [
    "Answer",
    "AsyncClient",
    "Client",
    "HeadraceError",
    "Sample",
]
