"""The registry over a real Redis server that is flushed, frozen, killed and late."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.clock import SystemClock
from headrace.config import RegistryConfig
from headrace.errors import ConfigError, Unavailable
from headrace.launch import sockets
from headrace.launch.redis_server import BundledRedis, answers
from headrace.process import registry
from headrace.protocol.common import WorkerIdentity
from headrace.rpc.server import start_server
from headrace.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
QUICK = RegistryConfig(heartbeat_s=0.1, lease_s=0.6)
A, A2, B = WorkerIdentity("a:1", "e1"), WorkerIdentity("a:1", "e2"), WorkerIdentity("b:1", "e1")


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch):
    """Looks ten times a second, so that a test need not wait."""
    monkeypatch.setattr(registry, "POLL_S", 0.1)


@pytest.fixture
def server():
    """A Redis server of our own."""
    with BundledRedis() as running:
        yield running


class Probe:
    """Answers for members whose key is missing; remembers who was asked about."""

    def __init__(self, *alive: WorkerIdentity):
        self.alive, self.asked = set(alive), []

    async def __call__(self, member: registry.Member) -> bool:
        self.asked.append(member.identity)
        return member.identity in self.alive


def opened(url: str, mesh: str = "test", probe=None, config: RegistryConfig = QUICK):
    return registry.Registry.open(url, mesh, config, SystemClock(), probe=probe or Probe())


def identities(view: registry.Registry, role: str = "decode") -> list[WorkerIdentity]:
    return [member.identity for member in view.members(role)]


async def until(condition, timeout_s: float = 5.0) -> float:
    """Waits for a condition; seconds it took."""
    begin = time.monotonic()
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)
    return time.monotonic() - begin


def test_a_newcomer_is_seen_at_once(server, monkeypatch):
    monkeypatch.setattr(registry, "POLL_S", 30.0)  # so that only the hint can bring it

    async def main():
        async with opened(server.url) as watcher, opened(server.url) as worker:
            await until(lambda: watcher._reachable and watcher.version == 0)
            await asyncio.sleep(0.2)
            version = watcher.version
            await worker.announce("decode", A, {"model": "tiny"})
            assert await watcher.wait_change(2.0, since=version)
            member = watcher.members("decode")[0]
            assert (member.identity, member.details) == (A, {"model": "tiny"})
            assert watcher.members("prefill") == ()

    asyncio.run(main())


def test_the_next_heartbeat_carries_new_details(server):
    async def main():
        async with opened(server.url) as watcher, opened(server.url) as worker:
            await worker.announce("decode", A, {"load": 0})
            await until(lambda: identities(watcher) == [A])
            worker.update({"load": 7})
            await until(lambda: watcher.members("decode")[0].details == {"load": 7})

    asyncio.run(main())


def test_who_leaves_is_gone_at_once(server):
    async def main():
        long_lease = RegistryConfig(lease_s=60.0)
        async with opened(server.url) as watcher:
            async with opened(server.url, config=long_lease) as worker:
                await worker.announce("decode", A, {})
                await worker.announce("prefill", A, {})
                await until(lambda: identities(watcher) == identities(watcher, "prefill") == [A])
            await until(lambda: identities(watcher) == identities(watcher, "prefill") == [])

    asyncio.run(main())


def test_a_new_epoch_at_an_address_replaces_the_old_one_at_once(server):
    async def main():
        probe = Probe(A)
        async with opened(server.url, probe=probe) as watcher, opened(server.url) as old, opened(server.url) as new:
            await old.announce("decode", A, {})
            await until(lambda: identities(watcher) == [A])
            old._own.clear()  # the process was killed
            await new.announce("decode", A2, {})
            await until(lambda: identities(watcher) == [A2])
            await asyncio.sleep(2 * QUICK.lease_s)
            assert identities(watcher) == [A2]

    asyncio.run(main())


@pytest.mark.parametrize("answering", [True, False])
def test_a_member_whose_key_lapsed_stays_only_while_it_answers(server, answering):
    async def main():
        probe = Probe(A) if answering else Probe()
        async with opened(server.url, probe=probe) as watcher, opened(server.url) as worker:
            await worker.announce("decode", A, {})
            await until(lambda: identities(watcher) == [A])
            worker._own.clear()  # no more heartbeats
            await until(lambda: len(probe.asked) >= registry.PROBES + 1 or identities(watcher) == [])
            assert identities(watcher) == ([A] if answering else [])
            assert len(probe.asked) >= registry.PROBES

    asyncio.run(main())


def test_a_flush_removes_nobody_and_changes_nothing(server):
    async def main():
        async with (
            opened(server.url, probe=Probe(A, B)) as watcher,
            opened(server.url) as one,
            opened(server.url) as two,
        ):
            await one.announce("decode", A, {})
            await two.announce("decode", B, {})
            await until(lambda: identities(watcher) == [A, B])
            version = watcher.version
            await watcher._redis.flushall()
            for _ in range(50):
                assert identities(watcher) == [A, B]
                await asyncio.sleep(0.01)
            assert len(await watcher._redis.smembers("headrace:{test}:members")) == 2
            assert watcher.version == version

    asyncio.run(main())


def test_a_killed_redis_costs_nothing_and_one_restarted_empty_learns_everybody_again():
    async def main(port: int, first: BundledRedis):
        url = first.url
        async with opened(url, probe=Probe(A)) as watcher, opened(url) as worker, opened(url) as late:
            await worker.announce("decode", A, {})
            await until(lambda: identities(watcher) == [A])
            os.kill(first.pid, signal.SIGKILL)
            await until(lambda: not watcher.reachable)
            await late.announce("decode", B, {})  # returns though nobody hears it
            await asyncio.sleep(2 * QUICK.lease_s)
            assert identities(watcher) == [A]
            first.stop()
            with BundledRedis(port):
                await until(lambda: identities(watcher) == [A, B])
                assert watcher.reachable

    with BundledRedis() as first:
        asyncio.run(main(first.port, first))


def test_a_frozen_redis_blocks_nobody(server, full):
    frozen_s = 30.0 if full else 3.0

    async def main():
        async with (
            opened(server.url, probe=Probe(A)) as watcher,
            opened(server.url) as worker,
            opened(server.url) as late,
        ):
            await worker.announce("decode", A, {})
            await until(lambda: identities(watcher) == [A])
            os.kill(server.pid, signal.SIGSTOP)
            try:
                begin = time.monotonic()
                await late.announce("decode", B, {})
                assert await late.claim("r-1", 10.0)
                assert time.monotonic() - begin < 3 * registry.CALL_S
                longest = 0.0
                while time.monotonic() < begin + frozen_s:
                    before = time.monotonic()
                    await asyncio.sleep(0.01)
                    longest = max(longest, time.monotonic() - before)
                    assert identities(watcher) == [A]
                assert longest < frozen_s / 2, f"the event loop stood still for {longest:.2f} s"
            finally:
                os.kill(server.pid, signal.SIGCONT)
            await until(lambda: identities(watcher) == [A, B])

    asyncio.run(main())


def test_a_redis_that_comes_late_is_joined():
    with contextlib.closing(BundledRedisLater()) as later:

        async def main():
            async with opened(later.url, probe=Probe()) as watcher, opened(later.url) as worker:
                await worker.announce("decode", A, {})
                assert identities(watcher) == [] and not await watcher.wait_change(0.1)
                later.start()
                await until(lambda: identities(watcher) == [A])

        asyncio.run(main())


class BundledRedisLater:
    """A server whose port is known before it runs."""

    def __init__(self):
        self._server = BundledRedis(sockets.free_port("127.0.0.1", 23000 + os.getpid() % 5000))
        self.url, self.start = self._server.url, self._server.start

    def close(self) -> None:
        self._server.stop()


def test_two_meshes_on_one_redis_never_meet(server):
    async def main():
        async with opened(server.url, "blue") as blue, opened(server.url, "green") as green:
            await blue.announce("decode", A, {})
            await until(lambda: identities(blue) == [A])
            assert await blue.claim("r-1", 10.0) and await green.claim("r-1", 10.0)
            await asyncio.sleep(0.3)
            assert identities(green) == []

    asyncio.run(main())


def test_processes_that_share_a_port_do_not_replace_one_another(server):
    async def main():
        async with opened(server.url) as one, opened(server.url) as two:
            await one.announce("router", A, {}, shares_address=True)
            await two.announce("router", A2, {}, shares_address=True)
            await until(lambda: identities(one, "router") == [A, A2])

    asyncio.run(main())


def test_a_name_is_claimed_by_one_and_given_back_by_its_owner_only(server):
    async def main():
        async with opened(server.url) as one, opened(server.url) as two:
            assert await one.claim("r-1", 10.0)
            assert not await two.claim("r-1", 10.0)
            await two.unclaim("r-1")
            assert not await two.claim("r-1", 10.0)
            await one.unclaim("r-1")
            assert await two.claim("r-1", 10.0)

    asyncio.run(main())


def test_every_key_has_a_time_to_live(server):
    async def main():
        async with opened(server.url) as one:
            await one.announce("decode", A, {})
            await one.claim("r-1", 10.0)
            keys = await one._redis.keys("*")
            assert len(keys) == 3 and all([await one._redis.pttl(key) > 0 for key in keys])

    asyncio.run(main())


def test_an_entry_that_cannot_be_read_harms_nobody(server):
    async def main():
        async with opened(server.url) as one:
            await one._redis.sadd("headrace:{test}:members", "decode x:1", "nonsense")
            await one._redis.set("headrace:{test}:member:decode x:1", "{not json")
            await one._redis.set("headrace:{test}:member:nonsense", "{}")
            await one.announce("decode", A, {})
            await until(lambda: identities(one) == [A])

    asyncio.run(main())


def test_a_cancellation_is_never_lost_in_a_call_to_redis(server):
    """Wherever it arrives: while connecting, while sending, while reading."""

    async def main():
        lost = []
        for connected in (False, True):
            for turns in range(40):
                view = registry.Registry(server.url, "test", QUICK, SystemClock())
                if connected:
                    await view.claim("first", 1.0)

                async def work(view=view):
                    await view.claim("second", 1.0)
                    await asyncio.Event().wait()

                task = asyncio.ensure_future(work())
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                done, _ = await asyncio.wait([task], timeout=0.5)
                lost += [] if done else [(connected, turns)]
                task.cancel()
                await view._redis.aclose()
        return lost

    assert asyncio.run(main()) == []


@pytest.mark.parametrize("url", ["", "carrier-pigeon://x"])
def test_an_unusable_url_stops_the_start(url):
    async def main():
        async with opened(url):
            pass

    with pytest.raises(ConfigError) as caught:
        asyncio.run(main())
    assert caught.value.field == "registry.url"


class Prefill(prefill_pb2_grpc.PrefillServiceServicer):
    """A prefill rank of epoch e1."""

    async def GetPrefillInfo(self, request, context):
        identity = common_pb2.WorkerIdentity(address="x", epoch="e1")
        return prefill_pb2.GetPrefillInfoResponse(info=common_pb2.WorkerInfo(identity=identity))


def test_a_probe_asks_for_health_and_epoch():
    async def main():
        register = prefill_pb2_grpc.add_PrefillServiceServicer_to_server
        server = await start_server("127.0.0.1", 0, lambda inner: register(Prefill(), inner), [])

        async def probed(role: str, epoch: str) -> bool:
            return await registry.answers_as(registry.Member(role, WorkerIdentity(server.address, epoch)))

        starting = await probed("prefill", "e1")
        await server.set_serving(True)
        answers_now = [await probed("prefill", "e1"), await probed("prefill", "e0"), await probed("router", "any")]
        await server.stop(None)
        return starting, answers_now, await probed("prefill", "e1")

    assert asyncio.run(main()) == (False, [True, False, True], False)


# --- the bundled server ----------------------------------------------------------------------------------------------


def test_the_bundled_server_refuses_a_taken_port_and_leaves_nothing_behind(server):
    with pytest.raises(ConfigError, match=str(server.port)):
        BundledRedis(server.port).start()
    other = BundledRedis().start()
    directory = Path(other._directory.name)
    assert directory.exists() and answers("127.0.0.1", other.port, 1.0)
    other.stop()
    other.stop()
    assert not directory.exists() and not answers("127.0.0.1", other.port, 1.0)
    with pytest.raises(Unavailable):
        _ = other.pid


def test_the_bundled_server_ends_with_its_owner():
    program = (
        "import time; from headrace.launch.redis_server import BundledRedis; server = BundledRedis().start();"
        "print(server.pid, server.port, flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        port = int(owner.stdout.readline().split()[1])
        assert answers("127.0.0.1", port, 1.0)
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    end = time.monotonic() + 5.0
    while answers("127.0.0.1", port, 0.2) and time.monotonic() < end:
        time.sleep(0.02)
    assert not answers("127.0.0.1", port, 0.2)
