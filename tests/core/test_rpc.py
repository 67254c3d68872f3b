"""Errors, deadlines, cancellation, context, health and drain over a real loopback connection."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from headrace import client, errors
from headrace.launch.sockets import free_port
from headrace.observe.context import request_id_var, traceparent_var
from headrace.protocol.common import FinishReason
from headrace.rpc.channel import (
    MAX_MESSAGE_BYTES,
    call_stream,
    call_unary,
    check_health,
    is_serving,
    open_channel,
)
from headrace.rpc.server import serve_until_signal, start_server
from headrace.rpc.status import DETAILS_KEY, status_of, time_left_s
from headrace.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from headrace.wire.common import DEFAULT_TIME_LEFT_S
from headrace.wire.link import CODES

SERVICE = "headrace.test.Echo"


def all_errors() -> list[type[errors.HeadraceError]]:
    """Every class of errors.py."""
    found, todo = [], [errors.HeadraceError]
    while todo:
        kind = todo.pop()
        found.append(kind)
        todo += [sub for sub in kind.__subclasses__() if sub.__module__ == "headrace.errors"]
    return found


def handlers(unary=None, stream=None, upload=None, decode=None):
    """`register` for a service with the given methods, of raw bytes unless `decode` makes messages of them."""
    methods = {}
    if unary is not None:
        methods["Unary"] = grpc.unary_unary_rpc_method_handler(unary, decode)
    if stream is not None:
        methods["Stream"] = grpc.unary_stream_rpc_method_handler(stream, decode)
    if upload is not None:
        methods["Upload"] = grpc.stream_unary_rpc_method_handler(upload)
    return lambda server: server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))


@contextlib.asynccontextmanager
async def serving(**methods):
    """A server with these methods and a channel to it."""
    server = await start_server("127.0.0.1", 0, handlers(**methods), [SERVICE])
    await server.set_serving(True)
    channel = open_channel(server.address, own_connection=True)
    try:
        yield server, channel
    finally:
        await channel.close()
        await server.stop(None)


def unary(channel):
    return channel.unary_unary(f"/{SERVICE}/Unary")


def stream(channel):
    return channel.unary_stream(f"/{SERVICE}/Stream")


def upload(channel):
    return channel.stream_unary(f"/{SERVICE}/Upload")


async def caught(awaitable) -> errors.HeadraceError:
    """The typed error an await ends with."""
    with pytest.raises(errors.HeadraceError) as info:
        await awaitable
    return info.value


async def drained(messages) -> list[bytes]:
    return [message async for message in messages]


# --- errors ----------------------------------------------------------------------------------------------------------


def test_every_error_class_has_a_status():
    assert [kind.__name__ for kind in all_errors() if kind not in CODES] == []


def test_the_tree_in_the_docstring_is_the_table():
    drawn = dict(re.findall(r"── (\w+) +([A-Z_]{2,})", errors.__doc__ or ""))
    assert drawn and {name: status_of(getattr(errors, name)()).name for name in drawn} == drawn


def test_reasons_are_upper_snake_and_name_one_class_each():
    reasons = [kind.reason for kind in all_errors() if "reason" in vars(kind)]
    assert len(reasons) == len(set(reasons))
    assert all(re.fullmatch(r"[A-Z][A-Z0-9_]*", reason) for reason in reasons)


@pytest.mark.parametrize(
    "kind", [kind for kind in all_errors() if "reason" in vars(kind)], ids=lambda kind: kind.__name__
)
def test_an_error_arrives_as_itself_from_every_kind_of_call(kind):
    async def fail(request, context):
        raise kind("why it went wrong: ü", field="sampling.top_p", retry_after_s=0.25)

    async def fail_late(request, context):
        yield b"1"
        raise kind("why it went wrong: ü", field="sampling.top_p", retry_after_s=0.25)

    async def main():
        async with serving(unary=fail, stream=fail_late, upload=fail) as (_, channel):
            return [
                await caught(call_unary(unary(channel), b"", 5)),
                await caught(drained(call_stream(stream(channel), b"", 5))),
                await caught(call_unary(upload(channel), iter([b""]), 5)),
            ]

    for error in asyncio.run(main()):
        assert type(error) is kind
        assert (error.message, error.field, error.retry_after_s) == ("why it went wrong: ü", "sampling.top_p", 0.25)
        assert error.retryable == kind.retryable


def test_a_status_holds_its_details_as_google_rpc_messages():
    async def fail(request, context):
        raise errors.Overloaded("full", reason="PREFILL_QUEUE_FULL", field="tokens", retry_after_s=1.5)

    async def main():
        async with serving(unary=fail) as (_, channel):
            with pytest.raises(grpc.RpcError) as info:
                await unary(channel)(b"")
            return dict(info.value.trailing_metadata())[DETAILS_KEY]

    status = status_pb2.Status.FromString(asyncio.run(main()))
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    assert [detail.Unpack(kind) for detail, kind in zip(status.details, (info, bad, retry), strict=True)] == [True] * 3
    assert (status.code, status.message) == (grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], "full")
    assert (info.reason, info.domain, info.metadata["retryable"]) == ("PREFILL_QUEUE_FULL", "headrace", "true")
    assert bad.field_violations[0].field == "tokens" and retry.retry_delay.ToMilliseconds() == 1500


def test_an_error_says_for_itself_whether_a_new_attempt_may_succeed():
    async def fail(request, context):
        raise errors.InternalError("a step failed", retryable=True)

    async def main():
        async with serving(unary=fail) as (_, channel):
            return await caught(call_unary(unary(channel), b"", 5))

    assert asyncio.run(main()).retryable


def test_a_reason_of_its_own_survives_beside_the_status():
    async def fail(request, context):
        raise errors.Overloaded("full", reason="PREFILL_QUEUE_FULL")

    async def main():
        async with serving(unary=fail) as (_, channel):
            return await caught(call_unary(unary(channel), b"", 5))

    error = asyncio.run(main())
    assert (type(error), error.reason) == (errors.Overloaded, "PREFILL_QUEUE_FULL")


def test_a_typed_error_out_of_a_task_group_stays_typed():
    async def fail(request, context):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.sleep(10))
            raise errors.NotFound("no such thing")

    async def main():
        async with serving(unary=fail) as (_, channel):
            return await caught(call_unary(unary(channel), b"", 5))

    assert type(asyncio.run(main())) is errors.NotFound


def test_bytes_that_are_no_message_are_the_callers_mistake():
    async def never(request, context):
        raise AssertionError("the handler must not see this request")

    async def never_a_stream(request, context):
        raise AssertionError("the handler must not see this request")
        yield b""

    async def main():
        async with serving(unary=never, stream=never_a_stream, decode=common_pb2.Stage.FromString) as (_, channel):
            return [
                await caught(call_unary(unary(channel), b"\xff\xff", 5)),
                await caught(drained(call_stream(stream(channel), b"\xff\xff", 5))),
            ]

    for error in asyncio.run(main()):
        assert (type(error), error.field) == (errors.InvalidRequest, "request")


def test_what_nobody_expected_is_internal_and_tells_nothing():
    async def fail(request, context):
        raise ValueError("the secret prompt")

    async def main():
        async with serving(unary=fail) as (_, channel):
            return await caught(call_unary(unary(channel), b"", 5))

    error = asyncio.run(main())
    assert type(error) is errors.InternalError and "secret" not in error.message


def test_a_time_out_inside_a_handler_is_the_deadline():
    async def fail(request, context):
        async with asyncio.timeout(0.01):
            await asyncio.sleep(5)

    async def main():
        async with serving(unary=fail) as (_, channel):
            return await caught(call_unary(unary(channel), b"", 5))

    assert type(asyncio.run(main())) is errors.DeadlineExceeded


def test_nobody_listening_is_unavailable_at_once():
    async def main():
        async with asyncio.timeout(3):
            channel = open_channel("127.0.0.1:9", own_connection=True)
            try:
                return await caught(call_unary(unary(channel), b"", 10))
            finally:
                await channel.close()

    assert type(asyncio.run(main())) is errors.Unavailable


def test_a_long_message_is_cut_and_still_typed():
    async def fail(request, context):
        raise errors.CheckpointError("missing tensor; " * 2000)

    async def main():
        async with serving(unary=fail) as (_, channel):
            return await caught(call_unary(unary(channel), b"", 5))

    error = asyncio.run(main())
    assert type(error) is errors.CheckpointError and error.message.startswith("missing tensor; missing")


def test_a_message_over_the_limit_is_refused_and_the_server_lives():
    async def echo(request, context):
        return request

    async def main():
        async with serving(unary=echo) as (_, channel):
            error = await caught(call_unary(unary(channel), b"x" * (MAX_MESSAGE_BYTES + 1), 10))
            return error, len(await call_unary(unary(channel), b"x" * (5 * 1024 * 1024), 10))

    error, length = asyncio.run(main())
    assert type(error) is errors.Overloaded and length == 5 * 1024 * 1024


# --- deadlines, cancellation, context --------------------------------------------------------------------------------


class Seen:
    """What happened to a handler that waits for ever."""

    def __init__(self):
        self.started, self.cancelled = asyncio.Event(), asyncio.Event()

    async def wait(self):
        self.started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


def test_leaving_a_stream_in_any_way_cancels_the_handler():
    async def main():
        seen = Seen()

        async def endless(request, context):
            yield b"1"
            await seen.wait()

        async with serving(stream=endless) as (_, channel):
            async with contextlib.aclosing(call_stream(stream(channel), b"", 30)) as messages:
                async for _ in messages:
                    break
            async with asyncio.timeout(2):
                await seen.cancelled.wait()

    asyncio.run(main())


def test_the_callers_deadline_ends_the_handler_too():
    async def main():
        seen = Seen()

        async def slow(request, context):
            assert 0 < time_left_s(context) < 0.6, "the clock of the deadline is rounded to milliseconds"
            await seen.wait()

        async with serving(unary=slow) as (_, channel):
            async with asyncio.timeout(5):
                await channel.channel_ready()  # on a busy host a connection alone takes longer than the deadline below
            error = await caught(call_unary(unary(channel), b"", 0.5))
            async with asyncio.timeout(5):
                await seen.cancelled.wait()
            return error

    assert type(asyncio.run(main())) is errors.DeadlineExceeded


def test_a_caller_without_a_deadline_gets_the_default():
    async def left(request, context):
        return str(time_left_s(context)).encode()

    async def main():
        async with serving(unary=left) as (_, channel):
            return float(await unary(channel)(b""))

    assert asyncio.run(main()) == DEFAULT_TIME_LEFT_S


def test_request_id_and_traceparent_travel_with_every_kind_of_call():
    async def show(request, context):
        return f"{request_id_var.get()} {traceparent_var.get()}".encode()

    async def show_twice(request, context):
        yield await show(request, context)
        await asyncio.sleep(0)
        yield await show(request, context)

    async def main():
        async with serving(unary=show, stream=show_twice, upload=show) as (_, channel):
            request_id_var.set("r-1")
            traceparent_var.set("00-ab")
            answers = [
                await call_unary(unary(channel), b"", 5),
                await call_unary(upload(channel), iter([b""]), 5),
            ]
            answers += await drained(call_stream(stream(channel), b"", 5))
            request_id_var.set("")
            traceparent_var.set("")
            return answers, await call_unary(unary(channel), b"", 5)

    answers, bare = asyncio.run(main())
    assert answers == [b"r-1 00-ab"] * 4 and bare == b" "


# --- serving ---------------------------------------------------------------------------------------------------------


def test_health_follows_the_state_and_reflection_names_the_service():
    async def echo(request, context):
        return request

    async def main():
        server = await start_server("127.0.0.1", 0, handlers(unary=echo), [SERVICE])
        before = [await is_serving(server.address, name) for name in ("", SERVICE)]
        await server.set_serving(True)
        after = [await is_serving(server.address, name) for name in ("", SERVICE, "headrace.test.Other")]
        async with open_channel(server.address) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            answer = await anext(aiter(stub.ServerReflectionInfo(iter([request]))))
        await server.stop(None)
        return before, after, {service.name for service in answer.list_services_response.service}

    before, after, names = asyncio.run(main())
    assert before == [False, False] and after == [True, True, False]
    assert {SERVICE, "grpc.health.v1.Health"} <= names


def test_a_taken_port_stops_the_start_and_a_shared_one_does_not():
    async def main():
        first = await start_server("127.0.0.1", 0, handlers(), [], share_port=True)
        port = int(first.address.rpartition(":")[2])
        second = await start_server("127.0.0.1", port, handlers(), [], share_port=True)
        try:
            with pytest.raises(errors.ConfigError, match=str(port)):
                await start_server("127.0.0.1", port, handlers(), [])
        finally:
            await first.stop(None)
            await second.stop(None)

    asyncio.run(main())


def test_a_free_port_is_one_that_nobody_listens_on():
    with contextlib.closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        taken = listener.getsockname()[1]
        found = free_port("127.0.0.1", taken, 65535, taken=(taken + 1,))
        assert found > taken + 1
        with pytest.raises(errors.ConfigError):
            free_port("127.0.0.1", taken, taken)


def test_after_a_signal_running_streams_finish_and_new_calls_are_refused():
    async def main():
        finish = asyncio.Event()

        async def ten(request, context):
            yield b"0"
            await finish.wait()
            for number in range(1, 10):
                yield str(number).encode()

        async def drain(grace_s: float) -> None:
            drained_with.append((grace_s, await check_health(channel)))
            finish.set()
            while len(received) < 10:
                await asyncio.sleep(0.01)

        drained_with: list[tuple[float, bool]] = []
        received: list[bytes] = []
        async with serving(stream=ten) as (server, channel), asyncio.TaskGroup() as tasks:
            serving_task = tasks.create_task(serve_until_signal(server, drain, 5.0))
            async for message in call_stream(stream(channel), b"", 10):
                received.append(message)
                if len(received) == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
            await serving_task
            refused = await caught(call_unary(unary(channel), b"", 2))
        return received, drained_with, refused

    received, drained_with, refused = asyncio.run(main())
    assert received == [str(number).encode() for number in range(10)]
    assert drained_with == [(5.0, False)]
    assert type(refused) is errors.Unavailable


@pytest.mark.parametrize("second_signal", [True, False])
def test_a_drain_ends_at_the_second_signal_or_with_the_grace(second_signal):
    async def main() -> float:
        async def drain(grace_s: float) -> None:
            if second_signal:
                os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)

        async with serving() as (server, _), asyncio.TaskGroup() as tasks:
            task = tasks.create_task(serve_until_signal(server, drain, 30.0 if second_signal else 0.1))
            await asyncio.sleep(0)
            os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(5):
                await task

    asyncio.run(main())


# --- the public clients ----------------------------------------------------------------------------------------------


class Inference(inference_pb2_grpc.InferenceServiceServicer):
    """Two samples of two tokens, or a stream that never ends."""

    async def Generate(self, request, context):
        if request.text == "endless":
            yield inference_pb2.GenerateResponse(request_id="r-1")
            await asyncio.sleep(60)
        if not request.text:
            raise errors.InvalidRequest("text: is empty", field="text")
        for sample in (0, 1):
            for position, text in enumerate(("a", "b")):
                delta = inference_pb2.SampleDelta(
                    sample_index=sample,
                    first_position=position,
                    token_ids=[10 + position],
                    text=text,
                    finish_reason=common_pb2.FINISH_REASON_LENGTH if position else 0,
                )
                yield inference_pb2.GenerateResponse(request_id="r-1", deltas=[delta])
        yield inference_pb2.GenerateResponse(
            request_id="r-1", final=inference_pb2.FinalSummary(seed=request.sampling.seed)
        )


@contextlib.asynccontextmanager
async def inference():
    """The address of a router that answers like Inference."""
    register = inference_pb2_grpc.add_InferenceServiceServicer_to_server
    server = await start_server("127.0.0.1", 0, lambda inner: register(Inference(), inner), [])
    try:
        yield server.address
    finally:
        await server.stop(None)


def check(answer: client.Answer) -> None:
    assert [sample.text for sample in answer.samples] == ["ab", "ab"]
    assert answer.samples[1].token_ids == [10, 11]
    assert answer.samples[1].finish_reason is FinishReason.LENGTH
    assert (answer.request_id, answer.final.seed) == ("r-1", 7)


def test_both_public_clients_give_the_whole_answer_and_typed_errors():
    def blocking(address: str) -> errors.HeadraceError:
        with client.Client(address) as blocking_client:
            check(blocking_client.generate("story", seed=7, n=2, timeout_s=5))
            with pytest.raises(errors.InvalidRequest) as info:
                blocking_client.generate("")
            return info.value

    async def main():
        async with inference() as address, client.AsyncClient(address) as async_client:
            check(await async_client.generate("story", seed=7, n=2, timeout_s=5))
            return await caught(async_client.generate("")), await asyncio.to_thread(blocking, address)

    assert [error.field for error in asyncio.run(main())] == ["text", "text"]


def test_closing_a_client_with_an_open_stream_ends_it():
    async def main():
        async with inference() as address:
            open_client = client.AsyncClient(address)
            await open_client.__aenter__()
            stream_of_events = open_client.stream("endless")
            await anext(stream_of_events)
            await open_client.close()
            async with asyncio.timeout(3):
                with pytest.raises((errors.HeadraceError, asyncio.CancelledError)):
                    await anext(stream_of_events)
            with pytest.raises(errors.Unavailable):
                await open_client.generate("after")

    asyncio.run(main())


# --- connecting ------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def slow_to_greet(address: str, delay_s: float):
    """A way to `address` on which nothing moves for the first `delay_s`, as on a host whose cores are busy."""

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(delay_s)
        there_reader, there_writer = await asyncio.open_connection(*address.split(":"))
        await asyncio.gather(pass_on(reader, there_writer), pass_on(there_reader, writer))

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as way:
        yield f"127.0.0.1:{way.sockets[0].getsockname()[1]}"


def test_a_server_that_is_slow_to_greet_a_connection_is_not_unavailable():
    async def main():
        async with serving() as (server, _), slow_to_greet(server.address, 0.5) as address:
            async with open_channel(address, own_connection=True) as channel:
                return await check_health(channel, timeout_s=3.0)

    assert asyncio.run(main())
