"""Requests that would be huge in memory are refused by their bytes, and every other request passes."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.protobuf import descriptor_pb2
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InvalidRequest
from headrace.rpc.server import start_server
from headrace.rpc.status import error_from_rpc
from headrace.v1 import inference_pb2, inference_pb2_grpc
from headrace.wire.elements import MAX_ELEMENTS, SMALL_BYTES, check_elements

REQUEST = inference_pb2.GenerateRequest.DESCRIPTOR
EMPTY_TURNS = inference_pb2.GenerateRequest(
    chat=inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage()] * 100_000)
)


def test_many_small_elements_are_refused():
    data = EMPTY_TURNS.SerializeToString()
    assert SMALL_BYTES < len(data) < 300_000
    with pytest.raises(InvalidRequest) as caught:
        check_elements(REQUEST, data)
    assert (caught.value.reason, caught.value.field) == ("REQUEST_SIZE", "request")


@pytest.mark.parametrize(
    "request_",
    [
        inference_pb2.GenerateRequest(text="x" * 10_000_000),
        inference_pb2.GenerateRequest(tokens=inference_pb2.TokenPrompt(token_ids=range(1_000_000))),
        inference_pb2.GenerateRequest(
            chat=inference_pb2.ChatPrompt(
                messages=[inference_pb2.ChatMessage(role="user", content="y" * 1000) for _ in range(1000)]
            )
        ),
    ],
    ids=["text", "ids", "chat"],
)
def test_long_prompts_are_few_elements(request_):
    check_elements(REQUEST, request_.SerializeToString())


def test_deep_nesting_is_refused():
    data = b""
    for _ in range(100):  # field 3 of DescriptorProto is a DescriptorProto
        data = b"\x1a" + bytes([len(data) & 0x7F | 0x80, len(data) >> 7]) + data
    with pytest.raises(InvalidRequest):
        check_elements(descriptor_pb2.DescriptorProto.DESCRIPTOR, data + b"\x0a\x80\x80\x04" + b"n" * SMALL_BYTES)


def test_the_limit_is_exact():
    entry = inference_pb2.GenerateRequest(tokens=inference_pb2.TokenPrompt(token_ids=[1])).SerializeToString()
    padding = inference_pb2.GenerateRequest(text="x" * SMALL_BYTES).SerializeToString()  # one element
    check_elements(REQUEST, padding + entry * 10, limit=1 + 2 * 10)  # tokens, and in it the packed ids
    with pytest.raises(InvalidRequest):
        check_elements(REQUEST, padding + entry * 10, limit=2 * 10)


@given(st.binary(max_size=400), st.binary(max_size=400))
def test_bytes_of_any_kind_pass_or_are_refused_and_nothing_else(head, tail):
    try:
        check_elements(REQUEST, head + bytes(SMALL_BYTES) + tail, limit=MAX_ELEMENTS)
    except InvalidRequest as error:
        assert error.reason == "REQUEST_SIZE"


def test_a_server_refuses_such_a_request_with_its_reason():
    class Never(inference_pb2_grpc.InferenceServiceServicer):
        async def Generate(self, request, context):
            raise AssertionError("the request was parsed")
            yield

    async def call() -> None:
        server = await start_server(
            "127.0.0.1", 0, lambda to: inference_pb2_grpc.add_InferenceServiceServicer_to_server(Never(), to), ()
        )
        async with grpc.aio.insecure_channel(server.address) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                async for _ in inference_pb2_grpc.InferenceServiceStub(channel).Generate(EMPTY_TURNS, timeout=5):
                    pass
        await server.stop(None)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error_from_rpc(caught.value).reason == "REQUEST_SIZE"

    asyncio.run(call())
