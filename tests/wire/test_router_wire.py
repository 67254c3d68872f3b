"""The router over real gRPC: clients on one side, scripted worker servers on the other."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, replace

import grpc
import pytest
from router_fakes import EOS, FakeDecode, FakeMesh, FakePrefill, checkpoint, saying, wait_until

from headrace import rpc, wire
from headrace.client import AsyncClient, Peers, RouterClient
from headrace.clock import SystemClock
from headrace.config import RouterConfig
from headrace.errors import (
    AlreadyExists,
    DeadlineExceeded,
    HeadraceError,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from headrace.launch import sockets
from headrace.protocol.common import FinishReason, WorkerIdentity
from headrace.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)
from services.router.__main__ import tell_health
from services.router.core import Router
from services.router.interfaces import PeerDialer
from services.router.server import SERVICES, register


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """A fake decode rank behind gRPC."""

    def __init__(self, fake: FakeDecode):
        self.fake = fake

    async def Reserve(self, request, context):
        promise = await self.fake.reserve(wire.reserve_from_pb(request), rpc.time_left_s(context))
        return decode_pb2.ReserveResponse(reservation=wire.reservation_to_pb(promise))

    async def Release(self, request, context):
        await self.fake.release(
            request.request_id, request.attempt, request.decode_epoch, tuple(request.sample_indices), 1.0
        )
        return decode_pb2.ReleaseResponse()

    async def StreamTokens(self, request, context):
        router = wire.identity_from_pb(request.router)
        frames = self.fake.stream_tokens(router, request.decode_epoch, request.resume_after_frame)
        async with contextlib.aclosing(frames) as stream:
            async for frame in stream:
                yield wire.frame_to_pb(frame)

    async def GetDecodeInfo(self, request, context):
        return decode_pb2.GetDecodeInfoResponse(info=wire.worker_info_to_pb(self.fake.info))


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """A fake prefill rank behind gRPC."""

    def __init__(self, fake: FakePrefill):
        self.fake = fake

    async def Prefill(self, request, context):
        events = self.fake.prefill(wire.prefill_from_pb(request), rpc.time_left_s(context))
        async with contextlib.aclosing(events) as stream:
            async for event in stream:
                yield wire.prefill_event_to_pb(event)

    async def GetPrefillInfo(self, request, context):
        return prefill_pb2.GetPrefillInfoResponse(info=wire.worker_info_to_pb(self.fake.info))


async def serve(fake: FakePrefill | FakeDecode, port: int = 0) -> rpc.Server:
    """Puts a fake behind a server and gives it that server's address."""
    if isinstance(fake, FakePrefill):
        server = await rpc.start_server(
            "127.0.0.1",
            port,
            lambda s: prefill_pb2_grpc.add_PrefillServiceServicer_to_server(PrefillServicer(fake), s),
            (),
        )
    else:
        server = await rpc.start_server(
            "127.0.0.1",
            port,
            lambda s: decode_pb2_grpc.add_DecodeServiceServicer_to_server(DecodeServicer(fake), s),
            (),
        )
    fake.identity = WorkerIdentity(server.address, fake.identity.epoch)
    fake.info = replace(fake.info, identity=fake.identity)
    await server.set_serving(True)
    return server


@dataclass
class Wired:
    """A mesh of servers, a router server in front of it, and a client."""

    mesh: FakeMesh
    servers: dict[object, rpc.Server]
    router: Router
    address: str
    client: AsyncClient
    operator: RouterClient
    peers: Peers

    async def replace_decode(self, index: int, epoch: str) -> FakeDecode:
        """SIGKILL and a new process at the same port."""
        old = self.mesh.decodes[index]
        server = self.servers.pop(old)
        old.die()
        await server.stop(None)
        new = FakeDecode(self.mesh, "", epoch)
        self.mesh.decodes[index] = new
        self.servers[new] = await serve(new, int(server.address.rsplit(":", 1)[1]))
        self.mesh.relist()
        return new


@contextlib.asynccontextmanager
async def open_router_server(mesh: FakeMesh, epoch: str = "router-1", **settings):
    """A router process as `__main__` puts it together."""
    async with contextlib.AsyncExitStack() as stack:
        peers = Peers()
        stack.push_async_callback(peers.close)
        config = RouterConfig(**settings)
        port = sockets.unused_port("127.0.0.1")
        router = await stack.enter_async_context(
            Router.open(
                config,
                checkpoint(max_context_tokens=512),
                WorkerIdentity(f"127.0.0.1:{port}", epoch),
                membership=mesh,
                dialer=PeerDialer(peers, rpc.check_health),
                clock=SystemClock(),
                claims=mesh,
            )
        )
        server = await rpc.start_server("127.0.0.1", port, register(router, config.default_deadline_s), SERVICES)
        stack.push_async_callback(server.stop, None)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        telling = tasks.create_task(tell_health(router, server))
        stack.callback(telling.cancel)
        yield router, server.address, peers


@contextlib.asynccontextmanager
async def wired(prefills: int = 1, decodes: int = 1, script=None, ready: bool = True, **settings):
    mesh = FakeMesh(prefills, decodes, **({"script": script} if script else {}))
    servers = {fake: await serve(fake) for fake in (*mesh.prefills, *mesh.decodes)}
    mesh.relist()
    try:
        async with open_router_server(mesh, **settings) as (router, address, peers), AsyncClient(address) as client:
            if ready:
                await wait_until(lambda: sum(view.ready for view in router.workers()) == prefills + decodes)
            operator = RouterClient(peers.channel(address))
            yield Wired(mesh, servers, router, address, client, operator, peers)
    finally:
        for server in servers.values():
            await server.stop(None)


def run(scenario) -> None:
    async def bounded():
        async with asyncio.timeout(30):
            await scenario()

    asyncio.run(bounded())


async def assert_all_is_free(w: Wired) -> None:
    """Within 2 s nothing is held anywhere, and the router says so itself."""
    await wait_until(lambda: w.mesh.held == 0, "legs to end", 2.0)
    for _ in range(200):
        ledger = await w.operator.ledger()
        if ledger.running_requests == ledger.open_handles == ledger.queued_requests == 0:
            break
        await asyncio.sleep(0.01)
    else:
        raise AssertionError(f"the router still holds {ledger}")
    assert all(view.in_flight == 0 and view.queued_tokens == 0 for view in await w.operator.workers())


@pytest.mark.parametrize("interval", [1, 3, 8, 100])
def test_an_answer_is_the_same_for_every_interval(interval):
    async def scenario():
        text = "the \U0001f4a7 flows, \u00e9t\u00e9 comme hiver"
        async with wired(script=saying(text)) as w:
            answer = await w.client.generate("go", max_tokens=100, stream_interval=interval, logprobs=0)
            (sample,) = answer.samples
            assert sample.text == text and sample.token_ids == [*text.encode(), EOS]
            assert len(sample.logprobs) == len(sample.token_ids)
            assert sample.finish_reason is FinishReason.EOS
            assert answer.final.usage.generated_tokens == len(sample.token_ids)
            await assert_all_is_free(w)

    run(scenario)


def test_the_request_id_is_in_the_initial_metadata_before_any_token():
    async def scenario():
        async with wired() as w:
            w.mesh.prefills[0].gate.clear()
            async with rpc.open_channel(w.address) as channel:
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                call = stub.Generate(inference_pb2.GenerateRequest(text="hi", request_id="mine"), timeout=10)
                metadata = dict(await call.initial_metadata())
                assert metadata["headrace-request-id"] == "mine"
                w.mesh.prefills[0].gate.set()
                messages = [message async for message in call]
                assert sum(message.HasField("final") for message in messages) == 1
                trailers = dict(await call.trailing_metadata())
                assert "prefill.forward=" in trailers["headrace-stages"]

    run(scenario)


def test_errors_name_their_field_and_twenty_of_them_hurt_nobody():
    async def scenario():
        async with wired() as w:
            bad = [
                ("", {}, "text"),
                ([], {}, "tokens.token_ids"),
                ([1] * 600_000, {}, "tokens.token_ids"),
                ("hi", {"top_p": 2.0}, "sampling.top_p"),
                ("hi", {"max_tokens": 512}, "sampling.max_tokens"),
            ]
            for prompt, options, field in bad * 4:
                with pytest.raises(InvalidRequest) as caught:
                    await w.client.generate(prompt, **options)
                assert caught.value.field == field
            with pytest.raises(Overloaded):
                await w.client.generate("x" * (17 * 1024 * 1024))
            answer = await w.client.generate("hi", max_tokens=3)
            assert answer.samples[0].token_ids == w.mesh.script(0)[:3]
            assert all(view.ready for view in await w.operator.workers())
            assert len(w.mesh.prefills[0].commands) == 1
            await assert_all_is_free(w)

    run(scenario)


def test_a_second_request_with_the_same_id_gets_already_exists_also_on_another_router():
    async def scenario():
        async with wired() as w, open_router_server(w.mesh, "router-2") as (other, address, _):
            await wait_until(lambda: other.is_ready)
            w.mesh.decodes[0].gate.clear()
            first = asyncio.ensure_future(w.client.generate("hi", request_id="mine", max_tokens=9))
            await wait_until(lambda: w.mesh.decodes[0].held)
            async with AsyncClient(address) as client:
                for asked in (w.client, client):
                    with pytest.raises(AlreadyExists):
                        await asked.generate("hi", request_id="mine")
                second = asyncio.ensure_future(client.generate("hi", max_tokens=9))
                await wait_until(lambda: len(w.mesh.decodes[0].held) == 2)
                w.mesh.decodes[0].gate.set()
                answers = await asyncio.gather(first, second)
            assert answers[0].samples[0].token_ids == answers[1].samples[0].token_ids == w.mesh.script(0)[:9]
            assert answers[1].request_id != "mine"

    run(scenario)


@pytest.mark.parametrize("state", ["reserving", "prefilling", "committing", "decoding"])
def test_a_client_that_leaves_in_any_state_leaves_nothing_behind(state, full):
    async def scenario():
        async with wired() as w:
            prefill, decode = w.mesh.prefills[0], w.mesh.decodes[0]
            gate, reached = {
                "reserving": (decode.reserve_gate, lambda k: len(decode.reserved) == k),
                "prefilling": (prefill.gate, lambda k: len(prefill.commands) == k),
                "committing": (prefill.commit_gate, lambda k: len(prefill.commands) == k and prefill.running),
                "decoding": (decode.gate, lambda k: any(held.outputs for held in decode.held.values())),
            }[state]
            for turn in range(1, (200 if full else 10) + 1):
                gate.clear()
                asking = asyncio.ensure_future(w.client.generate("hi", max_tokens=100))
                await wait_until(lambda turn=turn: reached(turn))
                asking.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asking
                await wait_until(lambda: w.mesh.held == 0, "legs to end", 2.0)
                gate.set()
            await assert_all_is_free(w)
            assert (await w.client.generate("hi", max_tokens=2)).samples[0].token_ids == w.mesh.script(0)[:2]

    run(scenario)


def test_a_deadline_of_200_ms_is_kept_and_frees_everything():
    async def scenario():
        async with wired() as w:
            w.mesh.decodes[0].gate.clear()
            began = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                await w.client.generate("hi", max_tokens=400, timeout_s=0.2)
            assert time.monotonic() - began < 1.0
            await assert_all_is_free(w)

    run(scenario)


def test_a_killed_and_restarted_decode_rank_costs_a_pause_and_no_token():
    async def scenario():
        async with wired() as w:
            w.mesh.decodes[0].stop_after = 20
            asking = asyncio.ensure_future(w.client.generate("hi", max_tokens=60, n=2, logprobs=0))
            await wait_until(lambda: not w.mesh.decodes[0].alive)
            new = await w.replace_decode(0, "d-epoch-2")
            began = time.monotonic()
            answer = await asking
            assert time.monotonic() - began < 5.0
            assert [sample.token_ids for sample in answer.samples] == [w.mesh.script(s)[:60] for s in range(2)]
            assert [len(sample.logprobs) for sample in answer.samples] == [60, 60]
            assert answer.final.usage.attempts >= 2 and new.reserved
            await assert_all_is_free(w)

    run(scenario)


def test_a_prefill_rank_killed_in_mid_prompt_is_replaced_by_another():
    async def scenario():
        async with wired(prefills=2) as w:
            for prefill in w.mesh.prefills:
                prefill.gate.clear()
            asking = asyncio.ensure_future(w.client.generate("hi", max_tokens=9))
            await wait_until(lambda: any(prefill.commands for prefill in w.mesh.prefills))
            victim = next(prefill for prefill in w.mesh.prefills if prefill.commands)
            victim.alive = False
            await w.servers.pop(victim).stop(None)
            for prefill in w.mesh.prefills:
                prefill.gate.set()
            answer = await asking
            assert answer.samples[0].token_ids == w.mesh.script(0)[:9]
            assert answer.final.usage.attempts == 2
            await assert_all_is_free(w)

    run(scenario)


def test_health_follows_the_canary():
    async def scenario():
        async with wired(ready=False) as w:
            async with rpc.open_channel(w.address) as channel:
                await wait_until(lambda: w.router.is_ready)
                await _wait_health(channel, True)
                w.mesh.prefills[0].alive = False
                await w.servers.pop(w.mesh.prefills[0]).stop(None)
                with pytest.raises(HeadraceError):
                    await w.client.generate("hi", max_tokens=2, timeout_s=0.5)
                await _wait_health(channel, False)
                with pytest.raises(Unavailable) as caught:
                    await w.client.generate("hi", max_tokens=2, timeout_s=1.0)
                assert caught.value.reason == "NO_WORKERS" and caught.value.retry_after_s > 0

    run(scenario)


async def _wait_health(channel: grpc.aio.Channel, serving: bool) -> None:
    async with asyncio.timeout(5):
        while await rpc.check_health(channel, SERVICES[0]) is not serving:
            await asyncio.sleep(0.01)


def test_the_model_and_the_workers_are_shown():
    async def scenario():
        async with wired() as w:
            model = await w.client.model()
            assert (model.model, model.max_context_tokens, model.vocabulary_size) == ("toy", 512, 300)
            assert model.default_sampling == {"temperature": 0.7, "top_p": 0.9} and model.has_chat_template
            views = await w.operator.workers()
            assert sorted(view.info.role for view in views) == ["decode", "prefill"]
            assert all(view.ready and not view.why_not_ready for view in views)

    run(scenario)
