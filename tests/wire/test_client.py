"""The public clients, synchronous and asynchronous, against a scripted inference server."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time

import pytest

from headrace import errors
from headrace.client import AsyncClient, Client
from headrace.errors import HeadraceError
from headrace.protocol.common import FinishReason, Usage
from headrace.protocol.inference import (
    ChatMessage,
    FinalSummary,
    GenerateCommand,
    GenerateEvent,
    ModelInfo,
    SampleDelta,
)
from headrace.rpc.server import start_server
from headrace.v1 import inference_pb2_grpc
from headrace.wire.inference import generate_event_to_pb, generate_from_pb, model_to_pb
from headrace.wire.link import CODES


def _every_class() -> list[type[HeadraceError]]:
    found = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, HeadraceError)]
    assert len(found) >= 18
    return found


class Inference(inference_pb2_grpc.InferenceServiceServicer):
    """Says one letter a message, `max_tokens` of them; an id that begins with `raise:` raises that class."""

    def __init__(self):
        self.commands: list[GenerateCommand] = []
        self.left = asyncio.Event()
        self.metadata: list[dict] = []

    async def Generate(self, request, context):
        command = generate_from_pb(request)
        self.commands.append(command)
        self.metadata.append(dict(context.invocation_metadata()))
        if command.request_id.startswith("raise:"):
            kind = getattr(errors, command.request_id.removeprefix("raise:"))
            raise kind("what went wrong", field="some.field", retry_after_s=1.5)
        try:
            for position in range(int(command.sampling.get("max_tokens", 3))):
                await asyncio.sleep(0.001)
                delta = SampleDelta(0, position, (97 + position % 26,), chr(97 + position % 26))
                yield generate_event_to_pb(GenerateEvent("id", (delta,)))
            end = SampleDelta(0, position + 1, (), "", (), FinishReason.LENGTH)
            final = FinalSummary(Usage(1, 0, 1, position + 1), (), 42, "t" * 32, 0.1, 0.2)
            yield generate_event_to_pb(GenerateEvent("id", (end,), final))
        except (asyncio.CancelledError, GeneratorExit):
            self.left.set()
            raise

    async def GetModel(self, request, context):
        return model_to_pb(ModelInfo("toy", 512, 300, {"temperature": 0.7, "logit_bias": ((3, 0.5),)}, True))


@contextlib.asynccontextmanager
async def serving():
    servicer = Inference()
    server = await start_server(
        "127.0.0.1", 0, lambda s: inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, s), ()
    )
    try:
        yield servicer, server.address
    finally:
        await server.stop(None)


def run(scenario) -> None:
    async def bounded():
        async with asyncio.timeout(30), serving() as (servicer, address):
            await scenario(servicer, address)

    asyncio.run(bounded())


def test_every_class_of_error_has_a_status_and_comes_back_as_itself():
    assert set(_every_class()) == set(CODES), "a class without a row in CODES"

    async def scenario(servicer, address):
        async with AsyncClient(address) as client:
            for kind in _every_class():
                with pytest.raises(HeadraceError) as caught:
                    await client.generate("hi", request_id=f"raise:{kind.__name__}")
                _is_the_same(caught.value, kind)

        def synchronous():
            with Client(address) as client:
                for kind in _every_class():
                    with pytest.raises(HeadraceError) as caught:
                        client.generate("hi", request_id=f"raise:{kind.__name__}")
                    _is_the_same(caught.value, kind)

        await asyncio.to_thread(synchronous)

    run(scenario)


def _is_the_same(error: HeadraceError, kind: type[HeadraceError]) -> None:
    if "reason" in vars(kind):  # classes that only group others have no reason of their own and come back by status
        assert type(error) is kind
    assert error.reason == kind.reason
    assert (error.message, error.field, error.retry_after_s) == ("what went wrong", "some.field", 1.5)


def test_both_clients_give_the_same_answer_and_the_same_messages():
    async def scenario(servicer, address):
        async with AsyncClient(address) as client:
            answer = await client.generate("hi", max_tokens=5)
            events = [event async for event in client.stream("hi", max_tokens=5)]
            model = await client.model()

        def synchronous():
            with Client(address) as blocking:
                return (
                    blocking.generate("hi", max_tokens=5),
                    list(blocking.stream("hi", max_tokens=5)),
                    blocking.model(),
                )

        assert await asyncio.to_thread(synchronous) == (answer, events, model)
        assert answer.text == "abcde" and answer.samples[0].token_ids == [97, 98, 99, 100, 101]
        assert answer.samples[0].finish_reason is FinishReason.LENGTH
        assert answer.final.seed == 42 and answer.final.usage.generated_tokens == 5
        assert sum(event.final is not None for event in events) == 1
        assert model.default_sampling == {"temperature": 0.7, "logit_bias": ((3, 0.5),)}

    run(scenario)


def test_options_reach_the_server_in_their_fields():
    async def scenario(servicer, address):
        async with AsyncClient(address) as client:
            await client.generate(
                "hi", temperature=0.0, top_k=4, stop=("a", "b"), logit_bias=((1, 2.0),), n=2, logprobs=0,
                max_tokens=1, seed=-3, ignore_eos=True, request_id="mine", stream_interval=7, final_only=True,
                cache_salt="s", priority=-5,
            )  # fmt: skip
            await client.generate([1, 2], max_tokens=1)
            await client.generate([ChatMessage("user", "hi")], max_tokens=1)
        first, second, third = servicer.commands
        assert first.text == "hi" and (first.request_id, first.stream_interval, first.final_only) == ("mine", 7, True)
        assert (first.cache_salt, first.priority) == ("s", -5)
        assert first.sampling == {
            "temperature": 0.0, "top_k": 4, "stop": ("a", "b"), "logit_bias": ((1, 2.0),), "n": 2, "logprobs": 0,
            "max_tokens": 1, "seed": -3, "ignore_eos": True,
        }  # fmt: skip
        assert second.token_ids == (1, 2) and second.sampling == {"max_tokens": 1}
        assert third.chat == (ChatMessage("user", "hi"),)

    run(scenario)


def test_leaving_a_stream_cancels_the_request():
    async def scenario(servicer, address):
        async with AsyncClient(address) as client:
            async with contextlib.aclosing(client.stream("hi", max_tokens=100_000)) as events:
                async for _ in events:
                    break
            async with asyncio.timeout(2):
                await servicer.left.wait()
        servicer.left.clear()

        def synchronous():
            with Client(address) as client:
                for _ in client.stream("hi", max_tokens=100_000):
                    break

        await asyncio.to_thread(synchronous)
        async with asyncio.timeout(2):
            await servicer.left.wait()

    run(scenario)


def test_closing_a_client_with_an_open_stream_ends_that_stream():
    async def scenario(servicer, address):
        client = AsyncClient(address)
        async with client:
            stream = client.stream("hi", max_tokens=100_000)
            await anext(stream)
            reading = asyncio.ensure_future(_drain(stream))
            await asyncio.sleep(0)
            async with asyncio.timeout(2):
                await client.close()
                with pytest.raises((HeadraceError, asyncio.CancelledError)):
                    await reading
        async with asyncio.timeout(2):
            await servicer.left.wait()

    run(scenario)


async def _drain(stream) -> None:
    async for _ in stream:
        pass


def test_closing_a_blocking_client_from_another_thread_ends_its_stream():
    async def scenario(servicer, address):
        client, ended = Client(address), []

        def read():
            try:
                for _ in client.stream("hi", max_tokens=100_000):
                    started.set()
            except HeadraceError as error:
                ended.append(error)

        started = threading.Event()
        reader = threading.Thread(target=read)
        reader.start()
        assert await asyncio.to_thread(started.wait, 5)
        began = time.monotonic()
        await asyncio.to_thread(client.close)
        await asyncio.to_thread(reader.join, 5)
        assert not reader.is_alive() and time.monotonic() - began < 5
        assert len(ended) == 1

    run(scenario)


def test_a_closed_client_says_so_and_nobody_listening_is_unavailable():
    async def scenario(servicer, address):
        client = AsyncClient(address)
        with pytest.raises(errors.Unavailable, match="closed"):
            await client.generate("hi")
        async with AsyncClient("127.0.0.1:1") as nowhere:
            with pytest.raises(errors.Unavailable):
                await nowhere.generate("hi", timeout_s=2.0)

    run(scenario)


def test_a_deadline_passes_on_the_client_as_well():
    async def scenario(servicer, address):
        async with AsyncClient(address) as client:
            with pytest.raises(errors.DeadlineExceeded):
                await client.generate("hi", max_tokens=100_000, timeout_s=0.1)
        await asyncio.wait_for(servicer.left.wait(), 2)

    run(scenario)
