"""The `mooncake` transfer: one Mooncake Transfer Engine a rank, its whole pool registered as one region.

What shaped this file, seen with 0.3.13.post1 over TCP:

- The synchronous calls spin on a core until the last byte is acknowledged. Submitting and looking with short naps moves
  the same bytes for a third to a half of the CPU, so a push never calls them.
- Destroying the engine is the only thing that stops a late write, and its destructor holds Python's lock while it waits
  up to 1 s for a thread that sleeps in `accept`. `_hang_up` wakes that thread, and the whole fence takes milliseconds.
- The data port is not authenticated: a writer that remembers an old session's port could reach a later engine of the same
  process, whose pool has the same addresses, if that engine were given the same port. So ports are not used twice.
- Without its connection pool every write takes a new connection, and timers armed outside the engine's own thread get
  corrupted: an engine then spun for ever in its destructor. So the pool is not a choice. With it, 459 fences under the
  pushes of two writers, 683 of which failed and replaced their engine, ended as they should.
- Over nvlink_intra (CUDA IPC) a writer maps the target's memory once and then asks nobody: with the target's engine destroyed its
  writes land and succeed. So a target on that link has no fence but the end of its process.
- An engine never forgets what it learned about a peer. A source whose push failed therefore takes a new engine.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import functools
import importlib
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from headrace.config import apply_environment, environment_value
from headrace.errors import ConfigError, TransferError
from headrace.protocol.common import TransferBackend
from headrace.transfer.base import (
    FAILED,
    TIMEOUT,
    RowRun,
    TargetDescriptor,
    check_push,
    geometry_of,
    refused,
)

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

BACKEND = TransferBackend.MOONCAKE
WINDOW = 128
"""Runs of one push that are under way at once; the engine refuses more than 1,024 queued for a peer."""
MAPPED_BATCH = 4096
"""Runs of one push over nvlink_intra that are handed to the device in one call."""
CHUNK_VARIABLE, GPU_CHUNK_BYTES = "MC_TCP_SLICE_SIZE", 1 << 20
"""What one socket call and one copy to or from a GPU carry at most; Mooncake's own 64 KiB cut every block in two."""
SHORTEST_NAP_S, LONGEST_NAP_S = 20e-6, 200e-6
OPEN_TRIES = 32
DESTRUCTOR_LIMIT_S = 15.0
UNFENCED_EXIT_CODE = 71
"""Of a decode process that had to end because its link knows no fence."""

_opening = threading.Lock()
"""Held while an engine opens, so that the sockets that appear are known to be its own."""
_used_ports: collections.deque[int] = collections.deque(maxlen=512)
"""Ports of engines that this process has closed, the last 256 engines of them."""


LINKS = {"tcp": "MC_FORCE_TCP", "nvlink_intra": "MC_INTRANODE_NVLINK"}
"""What bytes may move over, and the variable that makes Mooncake use it; it looks for presence only, so one is set."""


def mooncake_environment(
    *, min_port: int = 21000, max_port: int = 22999, timeout_s: int = 5, link: str = "tcp"
) -> dict[str, str]:
    """What must be in the environment before Mooncake's library is loaded; it reads most of this once.

    min_port, max_port  listening ports, two an engine, picked at random; keep them below the ephemeral range
    timeout_s           silence of a peer, seconds; Mooncake's minimum is 5
    link                one of LINKS; Mooncake's own choice would be RDMA wherever it sees a NIC, and nobody has tried our fence there
    MC_LOG_DIR is never set: with it 0.3.13.post1 aborts the process while it loads.
    """
    if link not in LINKS:
        raise ConfigError(f"transfer.link is one of {', '.join(LINKS)}, not {link!r}", field="transfer.link")
    values = {
        "MC_TRANSFER_TIMEOUT": str(timeout_s),
        "MC_TCP_PROGRESS_TIMEOUT_SEC": str(timeout_s),
        "MC_TCP_STATUS_TIMEOUT_SEC": str(timeout_s),
        "MC_TCP_ENABLE_CONNECTION_POOL": "1",
        "MC_LOG_LEVEL": "ERROR",
        "MC_MIN_RPC_PORT": str(min_port),
        "MC_MAX_RPC_PORT": str(max_port),
    }
    return values | {LINKS[link]: "1"}


@functools.cache
def why_not_mooncake() -> str | None:
    """None when Mooncake's library loads on this host, else one sentence."""
    try:
        _load()
    except ImportError as error:
        if "libibverbs" in str(error):
            return (
                f"Mooncake needs libibverbs even for TCP ({error}); on Debian and Ubuntu: apt-get install libibverbs1"
            )
        return f"Mooncake does not load: {error}"
    return None


def _load() -> Any:
    """The vendor's module. Its CUDA build needs libcudart, which torch brings along in a place where only torch finds it."""
    try:
        import mooncake.engine
    except ImportError as error:
        if "libcudart" not in str(error):
            raise
        importlib.import_module("torch")
        return importlib.import_module("mooncake.engine")
    return mooncake.engine


class MooncakeTarget:
    """A pool that Mooncake sources may write."""

    def __init__(self, pool: torch.Tensor, host: str):
        self._pool, self._host = pool, host
        self._geometry = geometry_of(pool)
        _check_environment()
        _check_build(pool.is_cuda)
        self._link = _check_link(pool)
        self._lock = threading.Lock()
        self._closed = False
        self._ending: list[_Engine] = []
        self._engine: _Engine | None = _Engine(pool, host)

    def descriptor(self) -> TargetDescriptor:
        """As TransferTarget. Raises TransferError without an engine: closed, or a fence could not open one."""
        engine = self._engine
        if engine is None:
            raise TransferError("this transfer target has no session", reason=FAILED)
        return self._geometry.describe(BACKEND, engine.session)

    def fence(self) -> TargetDescriptor:
        """As TransferTarget. The old session ends even when no new one can be opened; call again to try for one.

        Over nvlink_intra it ends this process, because nothing less ends a writer's mapping of our memory.
        """
        if self._link == "nvlink_intra":
            _end_with_our_memory()
        with self._lock:
            if self._closed:
                raise TransferError("this transfer target is closed", reason=FAILED)
            if self._engine is not None:
                self._ending.append(self._engine)
            try:
                self._engine = _Engine(self._pool, self._host)
            except BaseException:
                self._engine = None
                raise
            finally:
                self._end_old()
            return self.descriptor()

    def close(self) -> None:
        """As TransferTarget."""
        with self._lock:
            self._closed = True
            if self._engine is not None:
                self._ending.append(self._engine)
            self._engine = None
            self._end_old()

    def _end_old(self) -> None:
        """Close engines whose sessions are over. One that resists raises, and stays for the next fence."""
        while self._ending:
            self._ending[-1].close()
            self._ending.pop()


class MooncakeSource:
    """Writes rows of a pool into Mooncake targets, one push at a time."""

    def __init__(
        self, pool: torch.Tensor, host: str, *, timeout_s: float = 5.0, now: Callable[[], float] = time.monotonic
    ):
        """`timeout_s`: one push at most, plus a second for each GB."""
        self._pool, self._host, self._timeout_s, self._now = pool, host, timeout_s, now
        self._geometry = geometry_of(pool)
        _check_environment()
        _check_build(pool.is_cuda)
        _check_link(pool)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._silent_until: dict[str, float] = {}
        self._engine: _Engine | None = _Engine(pool, host)

    def push(self, target: TargetDescriptor, layer: int, runs: Sequence[RowRun], *, tag: bytes = b"") -> int:
        """As TransferSource. A session that timed out is refused for `timeout_s`: others need not wait for it again."""
        num_bytes = check_push(BACKEND, self._geometry, target, layer, runs)
        pieces = [self._piece(target, layer, run) for run in runs]
        with self._lock:
            if self._closing.is_set():
                raise refused("this transfer source is closed")
            if self._now() < self._silent_until.get(target.session, 0.0):
                raise refused(f"{target.session} did not answer a moment ago")
            engine = self._engine or self._reopen()
            try:
                engine.write(target.session, pieces, self._timeout_s + num_bytes * 1e-9, self._closing)
            except TransferError as error:
                self._after_failure(target.session, error)
                raise TransferError(f"{_label(tag)}layer {layer}: {error}", reason=error.reason) from error
        return num_bytes

    def close(self) -> None:
        """As TransferSource."""
        self._closing.set()
        with self._lock:
            engine, self._engine = self._engine, None
            if engine is not None:
                engine.close()

    def _piece(self, target: TargetDescriptor, layer: int, run: RowRun) -> tuple[int, int, int]:
        there = target.base_address + layer * target.layer_stride_bytes + run.target_row * target.row_bytes
        return self._geometry.address(layer, run.source_row), there, run.num_rows * target.row_bytes

    def _after_failure(self, session: str, error: TransferError) -> None:
        """Drop the engine with all it remembers and has queued; the next push opens another."""
        now = self._now()
        self._silent_until = {name: until for name, until in self._silent_until.items() if until > now}
        if error.reason == TIMEOUT:
            self._silent_until[session] = now + self._timeout_s
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _reopen(self) -> _Engine:
        self._engine = _Engine(self._pool, self._host)
        return self._engine


class _Engine:
    """One Mooncake engine and the pool registered with it."""

    def __init__(self, pool: torch.Tensor, host: str):
        self._vendor, self.session, self._ports = _open(pool, f"[{host}]" if ":" in host else host)

    def write(
        self, session: str, pieces: Sequence[tuple[int, int, int]], limit_s: float, closing: threading.Event
    ) -> None:
        """Write (source address, target address, bytes) pieces; returns when all are applied. Raises TransferError."""
        if link_in_use() == "nvlink_intra":
            self._write_mapped(session, pieces)
            return
        deadline = time.monotonic() + limit_s
        under_way: collections.deque[int] = collections.deque()
        for source, there, num_bytes in pieces:
            if len(under_way) == WINDOW:
                self._settle(under_way.popleft(), session, deadline, closing)
            ticket = self._vendor.transfer_submit_write(session, source, there, num_bytes)
            if ticket == 0:
                raise TransferError(f"no answer from session {session}", reason=FAILED)
            under_way.append(ticket)
        while under_way:
            self._settle(under_way.popleft(), session, deadline, closing)

    def _write_mapped(self, session: str, pieces: Sequence[tuple[int, int, int]]) -> None:
        """Over nvlink_intra, where a call a run would cost 60 us each: copies of the device, which the call waits for. It spins,
        and has ended within a millisecond or so; the vendor's own time-out ends it should the device hang."""
        for start in range(0, len(pieces), MAPPED_BATCH):
            sources, there, sizes = zip(*pieces[start : start + MAPPED_BATCH], strict=True)
            if self._vendor.batch_transfer_sync_write(session, list(sources), list(there), list(sizes)) != 0:
                raise TransferError(f"session {session} is gone or its memory cannot be mapped", reason=FAILED)

    def _settle(self, ticket: int, session: str, deadline: float, closing: threading.Event) -> None:
        nap = SHORTEST_NAP_S
        while (state := self._vendor.transfer_check_status(ticket)) == 0:
            if closing.is_set():
                raise TransferError("this transfer source is closing", reason=FAILED)
            if time.monotonic() > deadline:
                raise TransferError(f"session {session} did not answer in time", reason=TIMEOUT)
            time.sleep(nap)
            nap = min(nap * 2, LONGEST_NAP_S)
        if state != 1:
            raise TransferError(f"session {session} is gone or refused the write", reason=FAILED)

    def close(self) -> None:
        """End it: when this returns nothing listens and no connection is left. Raises TransferError if something does."""
        _hang_up(self._ports)
        with _alive_or_dead():
            self._vendor = None  # the last reference: the destructor runs here, and joins the engine's threads
        _used_ports.extend(self._ports)
        left = [port for port, _ in _own_listeners() if port in self._ports]
        if left:
            raise TransferError(f"the engine of session {self.session} still listens on {left}", reason=FAILED)


def _open(pool: torch.Tensor, host: str) -> tuple[Any, str, frozenset[int]]:
    """An engine with the pool registered, its session, and its listening ports."""
    geometry = geometry_of(pool)
    with _opening:
        vendor, ports = _start(host)
    if pool.is_cuda:
        _prepare_device(pool.device)
    code = vendor.register_memory(geometry.base_address, geometry.total_bytes)
    if code != 0:
        raise TransferError(f"Mooncake cannot register {geometry.total_bytes} bytes: code {code}", reason=FAILED)
    return vendor, f"{host}:{vendor.get_rpc_port()}", ports


def _prepare_device(device: torch.device) -> None:
    """Makes the device's context the calling thread's: registering asks the driver, which knows memory by context, and a thread
    that has not used the device has none. And cuts what TCP carries more coarsely, for each piece is a `cudaMemcpy`."""
    import torch

    torch.cuda.synchronize(device)
    if environment_value(CHUNK_VARIABLE) is None:
        apply_environment({CHUNK_VARIABLE: str(GPU_CHUNK_BYTES)})


def _start(host: str) -> tuple[Any, frozenset[int]]:
    """An engine on ports that no closed engine of this process had, and those ports. `_opening` is held."""
    TransferEngine = _load().TransferEngine
    for _ in range(OPEN_TRIES):
        before = {port for port, _ in _own_listeners()}
        vendor = TransferEngine()
        if vendor.initialize(host, "P2PHANDSHAKE", "tcp", "") != 0:
            raise TransferError(f"Mooncake cannot start an engine for host {host}", reason=FAILED)
        ports = frozenset({port for port, _ in _own_listeners()} - before | {vendor.get_rpc_port()})
        if ports.isdisjoint(_used_ports):
            return vendor, ports
        _hang_up(ports)
        del vendor
    raise TransferError("no unused port for a transfer engine; widen transfer.min_port..max_port", reason=FAILED)


def _end_with_our_memory() -> NoReturn:
    """Ends the process at once. Its requests go on elsewhere, as after any death of a decode rank."""
    logger.critical("nvlink_intra: a late write cannot be kept out of this process's memory, so the process ends")
    os._exit(UNFENCED_EXIT_CODE)


@contextlib.contextmanager
def _alive_or_dead() -> Iterator[None]:
    """End the process, with every thread's traceback, if the block takes `DESTRUCTOR_LIMIT_S`.

    A destructor that hangs holds Python's lock: nothing in this process could notice, and its peers would see a worker
    that is connected and silent. A dead one is found at once. faulthandler's own thread needs no lock.
    """
    faulthandler.dump_traceback_later(DESTRUCTOR_LIMIT_S, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _hang_up(ports: frozenset[int]) -> None:
    """Break every connection to these ports of ours, and make the thread that accepts on them look around at once.

    That thread polls a flag between `accept` calls of 1 s each, and the engine's destructor waits for it. A shorter
    time-out for the calls to come, and one connection to end the present one, make that wait about a millisecond.
    """
    for port, connection in _own_sockets():
        if port not in ports:
            continue
        with contextlib.suppress(OSError):
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 1000))
            else:
                connection.shutdown(socket.SHUT_RDWR)
    for port in ports:
        for family, loopback in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as knock:
                knock.settimeout(0.1)
                knock.connect((loopback, port))


def _own_sockets() -> Iterator[tuple[int, socket.socket]]:
    """(local port, socket) of every TCP socket of this process; each socket is a duplicate, closed after its turn."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        yield connection.getsockname()[1], connection


def _own_listeners() -> Iterator[tuple[int, int]]:
    """(port, file number) of every listening TCP socket of this process."""
    for port, connection in _own_sockets():
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            yield port, connection.fileno()


def _check_build(on_gpu: bool) -> None:
    """Raise ConfigError when Mooncake does not load, or would take device addresses for host memory and crash."""
    reason = why_not_mooncake()
    if reason is None and on_gpu and not _load().SUPPORT_CUDA:
        reason = "the pool is in GPU memory and this Mooncake is built without CUDA; install extra `gpu`, not `cpu`"
    if reason:
        raise ConfigError(reason, field="transfer.backend")


def link_in_use() -> str:
    """The link that this process's environment makes Mooncake use. Raises ConfigError when it does not say one."""
    named = [link for link, variable in LINKS.items() if environment_value(variable) is not None]
    if len(named) != 1:
        told = (
            f"exactly one of {', '.join(LINKS.values())} must be in the environment, where transfer.link puts it; "
            f"Mooncake would find {len(named)}"
        )
        raise ConfigError(told, field="transfer.link")
    return named[0]


def _check_link(pool: torch.Tensor) -> str:
    """The link in use. Raises ConfigError when rows of this pool cannot move over it."""
    if (link := link_in_use()) != "nvlink_intra":
        return link
    reason: str | None
    if not pool.is_cuda:
        reason = "it moves GPU memory only, and this pool is on the CPU (engine.device)"
    elif _is_expandable(pool):
        reason = "it shares cudaMalloc blocks; take expandable_segments:True out of PYTORCH_CUDA_ALLOC_CONF"
    else:
        reason = why_not_link(link)
    if reason:
        raise ConfigError(f"transfer.link = {link!r} cannot work here: {reason}", field="transfer.link")
    return link


def why_not_link(link: str) -> str | None:
    """None when this host's Mooncake, which loads, has what `link` needs; else one sentence."""
    if link == "nvlink_intra" and not getattr(_load(), "SUPPORT_INTRA_NVLINK", False):
        return "this Mooncake is built without it; extra `gpu` pins a build that has it"
    return None


def _is_expandable(pool: torch.Tensor) -> bool:
    """Whether torch mapped the pool page by page: no other process can open such memory."""
    import torch

    at = pool.data_ptr()
    return any(
        segment.get("is_expandable", False)
        for segment in torch.cuda.memory_snapshot()
        if segment["address"] <= at < segment["address"] + segment["total_size"]
    )


def _check_environment() -> None:
    """Raise ConfigError unless `mooncake_environment` was applied: Mooncake's own defaults would be in force."""
    missing = [name for name in mooncake_environment() if name not in LINKS.values() and not environment_value(name)]
    if (environment_value("MC_TCP_ENABLE_CONNECTION_POOL") or "").lower() in ("0", "false", "no"):
        raise ConfigError(
            "MC_TCP_ENABLE_CONNECTION_POOL must be on: without it Mooncake can hang for ever", field="transfer"
        )
    if missing:
        told = "Mooncake's settings must be in the environment before it loads (mooncake_environment); missing: "
        raise ConfigError(told + ", ".join(missing), field="transfer")


def _label(tag: bytes) -> str:
    return f"{tag.decode(errors='replace')}: " if tag else ""
