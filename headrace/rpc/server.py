"""What every service does around its own calls: serve, health, reflection, signals, drain."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from headrace import errors
from headrace.clock import first_of
from headrace.rpc.channel import COMMON_OPTIONS
from headrace.rpc.status import StatusInterceptor

SERVER_OPTIONS = (
    *COMMON_OPTIONS,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
)


def new_epoch() -> str:
    """16 random hexadecimal digits: the identity of one life of a process."""
    return secrets.token_hex(8)


@dataclass
class Server:
    """A running gRPC server with health and reflection. `address` is what others dial."""

    grpc_server: grpc.aio.Server
    health: health_aio.HealthServicer
    address: str
    service_names: tuple[str, ...]

    async def set_serving(self, serving: bool) -> None:
        """Says SERVING or NOT_SERVING for every service here and for the server as a whole."""
        state = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self.service_names):
            await self.health.set(name, state)

    async def stop(self, grace_s: float | None) -> None:
        """Refuses new calls and waits at most `grace_s` for running ones; None cancels them."""
        await self.grpc_server.stop(grace_s)


async def start_server(
    host: str,
    port: int,
    register: Callable[[grpc.aio.Server], None],
    service_names: Sequence[str],
    *,
    share_port: bool = False,
) -> Server:
    """Starts a server on `host:port` (0 picks a free port), NOT_SERVING until `set_serving(True)`.

    `register(server)` adds the servicers. Raises ConfigError when the port is taken.
    """
    options = (*SERVER_OPTIONS, ("grpc.so_reuseport", 1 if share_port else 0))
    server = grpc.aio.server(interceptors=[StatusInterceptor()], options=options)
    register(server)
    health = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    names = (*service_names, "grpc.health.v1.Health", reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise errors.ConfigError(f"cannot listen on {host}:{port}: the port is taken", field="port") from error
    result = Server(server, health, f"{host}:{bound}", tuple(service_names))
    await result.set_serving(False)
    await server.start()
    return result


async def serve_until_signal(
    server: Server,
    drain: Callable[[float], Awaitable[None]],
    grace_s: float,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Serves until SIGTERM or SIGINT, then NOT_SERVING, `drain(grace_s)`, stop. A second signal stops at once.

    `on_ready` is called when signals are heard: whoever is told then may send one at once.
    """
    stop = asyncio.Event()
    hurry = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        on_ready()
        await stop.wait()
        await server.set_serving(False)
        await first_of(_bounded(drain, grace_s), hurry.wait())
        await server.stop(None if hurry.is_set() else 1.0)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _bounded(drain: Callable[[float], Awaitable[None]], grace_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace_s):
            await drain(grace_s)
