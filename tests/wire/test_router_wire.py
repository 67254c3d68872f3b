"""The router over real gRPC: clients on one side, scripted worker servers on the other."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field, replace

import grpc
import pytest
from router_fakes import EOS, FakeDecode, FakeMesh, FakePrefill, checkpoint, saying, wait_until

from headrace.client import AsyncClient
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
from headrace.launch.sockets import unused_port
from headrace.protocol.common import FinishReason, WorkerIdentity, WorkerRole
from headrace.rpc.channel import check_health, open_channel
from headrace.rpc.clients import RouterClient
from headrace.rpc.links import DECODE_LINK, PREFILL_LINK, TOKEN_LINK, Link, LinkServer, LinkSettings
from headrace.rpc.server import Server, start_server
from headrace.v1 import (
    decode_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    prefill_pb2_grpc,
)
from services.router.__main__ import tell_health
from services.router.core import Router
from services.router.dialer import LinkDialer
from services.router.server import SERVICES, register

SETTINGS = LinkSettings.from_beat(0.1)
KINDS = {"prefill": PREFILL_LINK, "decode": DECODE_LINK, "tokens": TOKEN_LINK}


class ServedLink:
    """A rank's end of a real link: what `router_ranks.FakeLink` is in memory."""

    def __init__(self, fake: FakePrefill | FakeDecode, kind: str, link: Link):
        self.fake, self.kind, self.link, self.router = fake, kind, link, link.peer.epoch
        self._was_open = False

    @property
    def is_open(self) -> bool:
        return self.link.is_open

    def reply(self, number: int, body: object) -> None:
        if not self.link.is_lost:
            self.link.answer(number, body)

    def push(self, body: object) -> None:
        if not self.link.is_lost:
            self.link.send(body)

    def beat(self, progress) -> None:
        """The link's own beats tell it."""

    def lose(self, error: HeadraceError) -> None:
        self.link.lose(error)

    # --- LinkHandler ---

    def on_item(self, link: Link, number: int, body) -> None:
        self.fake.on_command(self, number, body, getattr(body, "time_left_s", None))

    def on_open(self, link: Link) -> None:
        if not self._was_open:
            self._was_open = True
            self.fake.links.append(self)
            self.fake.on_link(self)

    def on_broken(self, link: Link) -> None: ...

    def on_progress(self, link: Link) -> None: ...

    def on_lost(self, link: Link, error: HeadraceError) -> None:
        if self in self.fake.links:
            self.fake.links.remove(self)
            self.fake.on_link_lost(self)


@dataclass
class ServedRank:
    """A fake rank behind a gRPC server, with the link servers of its kinds."""

    fake: FakePrefill | FakeDecode
    server: Server
    links: dict[str, LinkServer]
    running: list[asyncio.Task] = field(default_factory=list)

    async def kill(self) -> None:
        """SIGKILL: nobody is told, connections are reset."""
        self.fake.alive = False
        await self.server.stop(None)
        for task in self.running:
            task.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)


def servicer(links: dict[str, LinkServer]):
    """Both services with as many calls as the rank has links."""

    class Rank(decode_pb2_grpc.DecodeServiceServicer, prefill_pb2_grpc.PrefillServiceServicer):
        async def OpenPrefillLink(self, requests, context):
            async for message in links["prefill"].serve(requests, context):
                yield message

        async def OpenDecodeLink(self, requests, context):
            async for message in links["decode"].serve(requests, context):
                yield message

        async def OpenTokenLink(self, requests, context):
            async for message in links["tokens"].serve(requests, context):
                yield message

    return Rank()


async def serve(fake: FakePrefill | FakeDecode, port: int = 0) -> ServedRank:
    """Puts a fake behind a server and gives it that server's address."""
    port = port or unused_port("127.0.0.1")
    fake.identity = WorkerIdentity(f"127.0.0.1:{port}", fake.identity.epoch)
    fake.info = replace(fake.info, identity=fake.identity)
    kinds = ("prefill",) if isinstance(fake, FakePrefill) else ("decode", "tokens")
    links = {
        kind: LinkServer(
            KINDS[kind],
            fake.identity,
            lambda link, kind=kind: ServedLink(fake, kind, link),
            SystemClock(),
            SETTINGS,
            info=fake.info,
            progress=lambda: fake.progress,
        )
        for kind in kinds
    }

    def add(server) -> None:
        rank = servicer(links)
        if isinstance(fake, FakePrefill):
            prefill_pb2_grpc.add_PrefillServiceServicer_to_server(rank, server)
        else:
            decode_pb2_grpc.add_DecodeServiceServicer_to_server(rank, server)

    running = [asyncio.ensure_future(x.run()) for x in links.values()]
    await asyncio.sleep(0)
    return ServedRank(fake, await start_server("127.0.0.1", port, add, ()), links, running)


@dataclass
class Wired:
    """A mesh of servers, a router server in front of it, and a client."""

    mesh: FakeMesh
    served: dict[object, ServedRank]
    router: Router
    address: str
    client: AsyncClient
    operator: RouterClient

    async def replace_decode(self, index: int, epoch: str) -> FakeDecode:
        """SIGKILL and a new process at the same port."""
        old = self.mesh.decodes[index]
        served = self.served.pop(old)
        await served.kill()
        new = FakeDecode(self.mesh, "", epoch)
        self.mesh.decodes[index] = new
        self.served[new] = await serve(new, int(served.server.address.rsplit(":", 1)[1]))
        self.mesh.relist()
        return new


@contextlib.asynccontextmanager
async def open_router_server(mesh: FakeMesh, epoch: str = "router-1", **settings):
    """A router process as `__main__` puts it together."""
    async with contextlib.AsyncExitStack() as stack:
        config = RouterConfig(**settings)
        port = unused_port("127.0.0.1")
        router = await stack.enter_async_context(
            Router.open(
                config,
                checkpoint(max_context_tokens=512),
                membership=mesh,
                dialer=LinkDialer(WorkerIdentity(f"127.0.0.1:{port}", epoch), SystemClock(), SETTINGS),
                clock=SystemClock(),
                claims=mesh,
            )
        )
        server = await start_server("127.0.0.1", port, register(router, config.default_deadline_s), SERVICES)
        stack.push_async_callback(server.stop, None)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        telling = tasks.create_task(tell_health(router, server))
        stack.callback(telling.cancel)
        yield router, server.address


@contextlib.asynccontextmanager
async def wired(prefills: int = 1, decodes: int = 1, script=None, ready: bool = True, **settings):
    mesh = FakeMesh(prefills, decodes, **({"script": script} if script else {}))
    served = {fake: await serve(fake) for fake in (*mesh.prefills, *mesh.decodes)}
    mesh.relist()
    try:
        async with (
            open_router_server(mesh, **settings) as (router, address),
            AsyncClient(address) as client,
            open_channel(address) as channel,
        ):
            if ready:
                await wait_until(lambda: sum(view.ready for view in router.workers()) == prefills + decodes)
            yield Wired(mesh, served, router, address, client, RouterClient(channel))
    finally:
        for rank in served.values():
            await rank.kill()


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
            async with open_channel(w.address) as channel:
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
        async with wired() as w, open_router_server(w.mesh, "router-2") as (other, address):
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
            await w.served.pop(victim).kill()
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
            async with open_channel(w.address) as channel:
                await wait_until(lambda: w.router.is_ready)
                await _wait_health(channel, True)
                await w.served.pop(w.mesh.prefills[0]).kill()
                with pytest.raises(HeadraceError):
                    await w.client.generate("hi", max_tokens=2, timeout_s=0.5)
                await _wait_health(channel, False)
                with pytest.raises(Unavailable) as caught:
                    await w.client.generate("hi", max_tokens=2, timeout_s=1.0)
                assert caught.value.reason == "NO_WORKERS" and caught.value.retry_after_s > 0

    run(scenario)


async def _wait_health(channel: grpc.aio.Channel, serving: bool) -> None:
    async with asyncio.timeout(5):
        while await check_health(channel, SERVICES[0]) is not serving:
            await asyncio.sleep(0.01)


def test_the_model_and_the_workers_are_shown():
    async def scenario():
        async with wired() as w:
            model = await w.client.model()
            assert (model.model, model.max_context_tokens, model.vocabulary_size) == ("toy", 512, 300)
            assert model.default_sampling == {"temperature": 0.7, "top_p": 0.9} and model.has_chat_template
            views = await w.operator.workers()
            assert sorted(view.info.role for view in views) == [WorkerRole.PREFILL, WorkerRole.DECODE]
            assert all(view.progress is not None and view.progress.available_blocks == 64 for view in views)
            assert all(view.ready and not view.why_not_ready for view in views)

    run(scenario)
