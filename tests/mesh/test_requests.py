"""Requests of every shape, through the mesh and through the oracle: nothing a user sees may differ."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from headrace.errors import AlreadyExists, InvalidRequest
from headrace.protocol.common import FinishReason
from headrace.protocol.inference import ChatMessage
from headrace.rpc.channel import open_channel
from headrace.v1 import inference_pb2, inference_pb2_grpc

BLOCK, CONTEXT = 16, 4096


def ids(length: int, salt: int = 0) -> list[int]:
    """A prompt of exactly `length` tokens, none of them special."""
    return [100 + (salt * 7919 + position * 31) % 7000 for position in range(length)]


@pytest.mark.parametrize(
    ("prompt", "field"), [("", "text"), ([], "tokens"), ([ChatMessage("user", "")], "chat"), ([9_000_000], "tokens")]
)
def test_an_empty_or_impossible_prompt_is_refused_by_its_field_and_the_next_request_is_fine(mesh, prompt, field):
    async def scenario():
        async with mesh.client() as client:
            with pytest.raises(InvalidRequest) as caught:
                await client.generate(prompt, max_tokens=1)
            assert field in caught.value.field
            assert len((await client.generate("fine", max_tokens=2)).samples[0].token_ids) == 2
        await mesh.wait_idle()

    asyncio.run(scenario())


def test_whitespace_is_a_prompt(same):
    assert same(" \n\t ", max_tokens=3, temperature=0.0).final.usage.prompt_tokens >= 2


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 3])
def test_exactly_max_tokens_are_generated_and_prefills_token_counts(same, max_tokens):
    answer = same("Once upon a time", max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    assert answer.final.usage.generated_tokens == max_tokens
    assert sum(len(sample.token_ids) for sample in answer.samples) == max_tokens
    assert answer.final.usage.prompt_tokens == answer.final.usage.cached_tokens + answer.final.usage.computed_tokens


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
def test_lengths_around_a_block_border_equal_the_oracle(same, length):
    answer = same(ids(length), max_tokens=20, temperature=0.0, ignore_eos=True)
    assert answer.final.usage.prompt_tokens == length


def test_the_context_limit_holds_to_the_token(mesh, same):
    same(ids(CONTEXT - 1), max_tokens=1, temperature=0.0)
    same(ids(CONTEXT - 6), max_tokens=6, temperature=0.0, ignore_eos=True)
    for length, max_tokens in ((CONTEXT + 1, 1), (CONTEXT - 1, 2), (CONTEXT, 1)):
        with pytest.raises(InvalidRequest):
            mesh.ask(ids(length), max_tokens=max_tokens)
    same(ids(CONTEXT), max_tokens=0)


def test_an_end_token_that_comes_first_ends_both_paths_alike(same):
    forced = {"logit_bias": ((1, 100.0),), "temperature": 0.0}
    answer = same("The end", max_tokens=8, **forced)
    assert answer.samples[0].token_ids == [1] and answer.samples[0].text == ""
    assert answer.samples[0].finish_reason is FinishReason.EOS
    ignored = same("The end", max_tokens=5, ignore_eos=True, **forced)
    assert ignored.samples[0].token_ids == [1] * 5 and ignored.samples[0].finish_reason is FinishReason.LENGTH
    later = same("The end", max_tokens=8, min_tokens=3, **forced)
    assert len(later.samples[0].token_ids) == 4 and later.samples[0].token_ids[-1] == 1


@pytest.mark.parametrize("interval", [1, 3, 8, 100])
def test_a_stop_string_never_leaks_whatever_the_interval(mesh, same, interval):
    whole = mesh.ask("Once upon a time", max_tokens=24, temperature=0.0, ignore_eos=True)
    text = whole.text
    for stop in (text[4:10], text[:3], text[5:7], text[8:20]):
        answer = same(
            "Once upon a time",
            max_tokens=24,
            temperature=0.0,
            ignore_eos=True,
            stop=(stop, stop + "!"),
            stream_interval=interval,
        )
        sample = answer.samples[0]
        assert sample.text == text[: text.index(stop)]
        assert sample.finish_reason is FinishReason.STOP and sample.matched_stop == stop
        assert sample.token_ids == whole.samples[0].token_ids[: len(sample.token_ids)]
        assert answer.final.usage.generated_tokens == len(sample.token_ids)


def test_a_stop_token_is_in_the_ids_and_not_in_the_text(mesh, same):
    whole = mesh.ask("Once upon a time", max_tokens=12, temperature=0.0, ignore_eos=True).samples[0]
    stop = whole.token_ids[6]
    cut = whole.token_ids.index(stop)
    answer = same("Once upon a time", max_tokens=12, temperature=0.0, ignore_eos=True, stop_token_ids=(stop,))
    assert answer.samples[0].token_ids == whole.token_ids[: cut + 1]
    assert answer.samples[0].finish_reason is FinishReason.STOP
    assert whole.text.startswith(answer.text)


async def _messages(mesh, prompt, **options):
    async with mesh.client() as client:
        return [event async for event in client.stream(prompt, **options)]


@pytest.mark.parametrize("interval", [1, 2, 3, 4, 5])
def test_characters_split_over_tokens_arrive_whole(mesh, interval):
    """Each byte of the word is forced by one logit bias per position's byte token: emoji, accents, CJK."""
    wanted = "é漢👩‍👩‍👧ß"
    from headrace.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(mesh.config.model.directory)
    prompt = [*ids(4), *tokenizer.encode(wanted * 3, add_bos=False)]
    options = dict(max_tokens=40, temperature=0.0, ignore_eos=True, stream_interval=interval)
    events = asyncio.run(_messages(mesh, prompt, **options))
    text = "".join(delta.text for event in events for delta in event.deltas)
    whole = mesh.ask(prompt, **(options | {"stream_interval": 1}))
    assert text == whole.text
    token_ids = [token for event in events for delta in event.deltas for token in delta.token_ids]
    assert text == tokenizer.decode(token_ids)


def test_an_interval_changes_only_how_tokens_are_grouped(mesh, same):
    for count in range(1, 14):
        answer = same(
            "Once upon a time", max_tokens=count, temperature=0.0, ignore_eos=True, logprobs=2, stream_interval=4
        )
        sample = answer.samples[0]
        assert len(sample.logprobs) == len(sample.token_ids) == count
        assert [entry.token_id for entry in sample.logprobs] == sample.token_ids
        assert all(len(entry.top) == 2 and entry.top[0][1] >= entry.top[1][1] for entry in sample.logprobs)
        options = dict(max_tokens=count, temperature=0.0, ignore_eos=True, logprobs=2, stream_interval=4)
        events = asyncio.run(_messages(mesh, "Once upon a time", **options))
        sizes = [len(delta.token_ids) for event in events for delta in event.deltas if delta.token_ids]
        assert sizes[0] == 1, "the first token is never delayed"
        assert all(size == 4 for size in sizes[1:-1]) and sum(sizes) == count
        assert sum(event.final is not None for event in events) == 1 and events[-1].final is not None
        whole = mesh.ask("Once upon a time", final_only=True, **(options | {"stream_interval": 1}))
        assert whole.samples[0].token_ids == sample.token_ids and whole.text == answer.text


@pytest.mark.parametrize("n", [2, 4])
def test_samples_share_one_prefill_and_are_distinct_and_reproducible(mesh, same, n):
    before = asyncio.run(mesh.ledgers()).prefill.batches
    answer = mesh.ask(ids(21), n=n, seed=7, temperature=1.0, max_tokens=12, ignore_eos=True)
    assert asyncio.run(mesh.ledgers()).prefill.batches == before + 1
    assert len({tuple(sample.token_ids) for sample in answer.samples}) == n
    again = same(ids(21), n=n, seed=7, temperature=1.0, max_tokens=12, ignore_eos=True)
    assert [sample.token_ids for sample in again.samples] == [sample.token_ids for sample in answer.samples]
    whole = mesh.ask(ids(21), n=n, seed=7, temperature=1.0, max_tokens=12, ignore_eos=True, final_only=True)
    assert [sample.token_ids for sample in whole.samples] == [sample.token_ids for sample in answer.samples]


def test_a_request_id_is_known_before_the_first_token_and_belongs_to_one_request(mesh):
    async def scenario():
        async with open_channel(mesh.router_address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            request = inference_pb2.GenerateRequest(text="Once", request_id="mine")
            request.sampling.max_tokens = 60
            call = stub.Generate(request, timeout=30)
            metadata = dict(await call.initial_metadata())
            assert metadata["headrace-request-id"] == "mine"
            async with mesh.client() as client:
                with pytest.raises(AlreadyExists):
                    await client.generate("Once", request_id="mine", max_tokens=2)
            assert [message async for message in call][-1].HasField("final")
            async with mesh.client() as client:
                answer = await client.generate("Once", request_id="mine", max_tokens=2)
                assert answer.request_id == "mine"
                minted = await client.generate("Once", max_tokens=2)
                assert minted.request_id not in ("", "mine")
        await mesh.wait_idle()

    asyncio.run(scenario())


def test_penalties_reach_over_the_border_between_prefill_and_decode(same):
    for options in (
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.5, "frequency_penalty": 0.7},
        {"repetition_penalty": 1.1, "temperature": 0.8, "seed": 11},
    ):
        same(ids(19), max_tokens=16, ignore_eos=True, **({"temperature": 0.0} | options))


def test_a_seed_that_was_drawn_is_reported_and_repeats_the_answer(mesh):
    first = mesh.ask("Once upon a time", max_tokens=10, temperature=1.0)
    again = mesh.ask("Once upon a time", max_tokens=10, temperature=1.0, seed=first.final.seed)
    assert first.samples[0].token_ids == again.samples[0].token_ids


def test_twenty_malformed_requests_then_a_good_one(mesh):
    bad = [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -3},
        {"min_p": 1.0},
        {"n": 99},
        {"n": -1},
        {"max_tokens": -1},
        {"max_tokens": 10**6},
        {"repetition_penalty": 0.0},
        {"presence_penalty": 9.0},
        {"frequency_penalty": -9.0},
        {"logprobs": 21},
        {"logprobs": -1},
        {"min_tokens": 10, "max_tokens": 5},
        {"stop": ("",)},
        {"logit_bias": ((99999, 1.0),)},
        {"stop_token_ids": (99999,)},
        {"stream_interval": 5000},
    ]

    async def scenario():
        async with mesh.client() as client:
            for options in bad:
                with pytest.raises(InvalidRequest) as caught:
                    await client.generate("Once", **options)
                assert next(iter(options)) in caught.value.field, (options, caught.value.field)
            assert (await client.generate("Once", max_tokens=2)).samples[0].token_ids
        await mesh.wait_idle()

    asyncio.run(scenario())


def test_a_client_that_knows_only_reflection_can_find_and_call_the_service(mesh):
    """What grpcurl does: list services, fetch descriptors, build the request, read the stream."""
    from google.protobuf import descriptor_pool, json_format, message_factory
    from google.protobuf.descriptor_pb2 import FileDescriptorProto
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    with grpc.insecure_channel(mesh.router_address) as channel:
        reflect = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo

        def fetch(**fields):
            return next(reflect(iter([reflection_pb2.ServerReflectionRequest(**fields)])))

        names = {service.name for service in fetch(list_services="").list_services_response.service}
        assert {"headrace.v1.InferenceService", "headrace.v1.RouterService"} <= names
        pool, files = descriptor_pool.DescriptorPool(), {}
        todo = [fetch(file_containing_symbol="headrace.v1.InferenceService").file_descriptor_response]
        while todo:
            for data in todo.pop().file_descriptor_proto:
                file = FileDescriptorProto.FromString(data)
                if file.name not in files:
                    files[file.name] = file
                    todo += [fetch(file_by_filename=name).file_descriptor_response for name in file.dependency]
        added: set[str] = set()

        def add(name: str) -> None:
            if name not in added:
                added.add(name)
                for dependency in files[name].dependency:
                    add(dependency)
                pool.Add(files[name])

        for name in files:
            add(name)
        method = pool.FindServiceByName("headrace.v1.InferenceService").FindMethodByName("Generate")
        request_type = message_factory.GetMessageClass(method.input_type)
        response_type = message_factory.GetMessageClass(method.output_type)
        request = json_format.ParseDict({"text": "Once", "sampling": {"maxTokens": 3}}, request_type())
        call = channel.unary_stream(
            "/headrace.v1.InferenceService/Generate",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=response_type.FromString,
        )
        messages = [json_format.MessageToDict(message) for message in call(request, timeout=30)]
        assert "final" in messages[-1] and messages[0]["deltas"][0]["tokenIds"]
