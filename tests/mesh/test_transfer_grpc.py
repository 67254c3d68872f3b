"""The mesh on the `grpc` transfer, for hosts without Mooncake's libraries: the same answers, the same bytes, the same clean-up."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from scenario import GREEDY, Asked, assert_equal, ids, until

from headrace.protocol.common import TransferBackend
from headrace.rpc.channel import open_channel
from headrace.rpc.clients import DecodeClient

RULES = ("prefill.push:flip layer=2 request_id=flip times=1", "prefill.push:hang seconds=3 layer=1 request_id=hang")


@pytest.fixture(scope="module")
def over_grpc(start_mesh):
    """A mesh whose rows travel in messages."""
    with start_mesh("transfer.backend=grpc", f"faults={';'.join(RULES)}", "decode.quarantine_max_s=1.5") as mesh:
        yield mesh


def test_rows_in_messages_give_the_oracles_tokens(over_grpc, aggregated):
    requests = [
        (ids(length, length), options)
        for length in (1, 15, 16, 17, 48, 500)
        for options in (GREEDY | {"max_tokens": 10}, {"max_tokens": 8, "temperature": 0.9, "seed": length, "n": 2})
    ]

    async def ask_all():
        async with over_grpc.client() as client:
            answers = await asyncio.gather(*(client.generate(prompt, **options) for prompt, options in requests))
        await over_grpc.wait_idle()
        return answers

    for (prompt, options), answer in zip(requests, asyncio.run(ask_all()), strict=True):
        assert_equal(answer, aggregated.ask(prompt, **options))
        assert answer.final.usage.attempts == 1


def test_both_ends_say_how_rows_travel_and_mooncake_is_not_loaded(over_grpc):
    async def transfer() -> str:
        async with open_channel(over_grpc.address("decode-0")) as channel:
            return (await DecodeClient(channel).info()).transfer

    assert asyncio.run(transfer()) == TransferBackend.GRPC
    for name in ("prefill-0", "decode-0"):
        maps = Path(f"/proc/{over_grpc.running[name].child.pid}/maps").read_text()
        assert "torch" in maps and "mooncake" not in maps


def test_a_flipped_byte_is_found_and_pushed_again(over_grpc, aggregated):
    answer = over_grpc.ask(ids(37), request_id="flip", max_tokens=8, **GREEDY)
    assert_equal(answer, aggregated.ask(ids(37), max_tokens=8, **GREEDY))
    assert answer.final.usage.attempts == 1
    once = over_grpc.ask(ids(37), max_tokens=8, cache_salt="other", **GREEDY)
    pushed, owed = (next(x.bytes for x in y.final.stages if x.name == "prefill.push") for y in (answer, once))
    assert pushed == 2 * owed > 0


def test_a_write_that_hangs_past_its_request_is_fenced_and_never_lands(over_grpc, aggregated):
    async def scenario():
        before = (await over_grpc.ledgers()).decode.fences
        async with over_grpc.client() as client:
            hung = Asked(client, ids(60, 1), request_id="hang", max_tokens=100, **GREEDY)
            await hung.wait_tokens(1)
            await hung.cancel()

            async def fenced() -> bool:
                return (await over_grpc.ledgers()).decode.fences == before + 1

            await until(fenced, "decode has replaced its target", timeout_s=5.0)
            answer = await client.generate(ids(70, 2), max_tokens=8, **GREEDY)
        await over_grpc.wait_idle(5.0)
        return answer

    assert_equal(asyncio.run(scenario()), aggregated.ask(ids(70, 2), max_tokens=8, **GREEDY))
