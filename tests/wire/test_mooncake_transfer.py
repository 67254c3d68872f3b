"""Mooncake between real processes: what lands, what cannot land any more, and what failure costs.

The pytest process is the decode rank (the target); writers are processes of their own, so that they can be frozen and killed.
"""

from __future__ import annotations

import collections
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from headrace.errors import ConfigError, TransferError
from headrace.transfer import (
    RowRun,
    TargetDescriptor,
    is_drained,
    mooncake,
    mooncake_environment,
    open_source,
    open_target,
    plan_runs,
    why_not_mooncake,
)

os.environ.update(mooncake_environment())  # before anything in this process loads the library
pytestmark = pytest.mark.skipif(why_not_mooncake() is not None, reason=str(why_not_mooncake()))

sys.path.insert(0, str(Path(__file__).parent))
from transfer_peer import ROOT, Peer, pattern  # noqa: E402

SMALL = [3, 32, 16, 160]
SENTINEL = -1.0


@pytest.fixture
def start_peer():
    peers: list[Peer] = []

    def start(*args, **kwargs) -> Peer:
        peers.append(Peer(*args, **kwargs))
        return peers[-1]

    yield start
    for peer in peers:
        peer.end()


@pytest.fixture(scope="module")
def small_writer():
    """One writer with a small pool for all tests that leave it whole."""
    peer = Peer(SMALL)
    yield peer
    peer.end()


@pytest.fixture
def decode():
    """The decode rank's pool, zeros, and its target."""
    rows = torch.zeros(SMALL)
    target = open_target("mooncake", rows, "127.0.0.1")
    yield rows, target
    target.close()


def other_tcp_sockets() -> int:
    """TCP sockets of this host's network namespace in any state but LISTEN."""
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    return sum(1 for fields in lines if len(fields) > 3 and fields[3] not in ("st", "0A"))


# --- what lands ------------------------------------------------------------------------------------------------------


def test_rows_from_another_process_land_in_their_rows_and_nowhere_else(decode, small_writer):
    rows, target = decode
    theirs = pattern(SMALL, seed=1)
    runs = plan_runs([4, 5, 9, 2], [30, 31, 1, 8], 5, 50, 16)
    expected = torch.zeros(SMALL)
    for layer in range(SMALL[0]):
        assert small_writer.push(target.descriptor(), layer, runs)["written"] == 50 * 640
        for run in runs:
            here = expected.flatten(1, 2)[layer, run.target_row : run.target_row + run.num_rows]
            here.copy_(theirs.flatten(1, 2)[layer, run.source_row : run.source_row + run.num_rows])
    assert torch.equal(rows, expected)


def test_a_push_of_more_runs_than_the_window_lands_whole():
    source_rows, rows = pattern([1, 600, 1, 160], seed=3), torch.zeros(1, 600, 1, 160)
    source, target = open_source("mooncake", source_rows, "127.0.0.1"), open_target("mooncake", rows, "127.0.0.1")
    runs = plan_runs(range(600), list(reversed(range(600))), 0, 600, 1)
    assert len(runs) == 600
    assert source.push(target.descriptor(), 0, runs) == 600 * 640
    assert torch.equal(rows, source_rows.flip(1))
    source.close()
    target.close()


def test_bfloat16_rows_land_bit_for_bit(decode):
    source_rows = torch.randn(2, 4, 16, 160).to(torch.bfloat16)
    rows = torch.zeros_like(source_rows)
    source, target = open_source("mooncake", source_rows, "127.0.0.1"), open_target("mooncake", rows, "127.0.0.1")
    source.push(target.descriptor(), 1, [RowRun(0, 0, 64)])
    assert torch.equal(rows[1].view(torch.int16), source_rows[1].view(torch.int16)) and not rows[0].any()
    source.close()
    target.close()


def test_several_engines_share_a_process_and_push_to_one_another():
    pools = [pattern(SMALL, seed) for seed in range(3)]
    sources = [open_source("mooncake", rows, "127.0.0.1") for rows in pools]
    received = [torch.zeros(SMALL) for _ in pools]
    targets = [open_target("mooncake", rows, "127.0.0.1") for rows in received]
    assert len({target.descriptor().session for target in targets}) == 3
    everything = [RowRun(0, 0, 512)]
    writers = [
        threading.Thread(target=lambda i=i: [sources[i].push(targets[i].descriptor(), n, everything) for n in range(3)])
        for i in range(3)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert all(torch.equal(a, b) for a, b in zip(pools, received, strict=True))
    for end in (*sources, *targets):
        end.close()


def test_thousands_of_small_pushes_reuse_their_connections(decode, small_writer, full):
    """C8: the pool holds; without it each push would leave a socket in TIME_WAIT."""
    rows, target = decode
    before = other_tcp_sockets()
    count = 5000 if full else 1000
    answer = small_writer.push(target.descriptor(), 0, [RowRun(0, 16, 16)], repeat=count)
    assert answer["written"] == count * 16 * 640
    assert torch.equal(rows[0, 1], pattern(SMALL, 1)[0, 0])
    assert other_tcp_sockets() - before < 100


# --- what must not land ----------------------------------------------------------------------------------------------

LARGE = [1, 1024, 16, 1024]  # 64 MiB, one run: long enough to be caught in the middle


def catch_in_the_middle(writer: Peer, rows: torch.Tensor, target: TargetDescriptor) -> None:
    """Start a push of the whole pool and freeze the writer while rows are landing; on a busy host that takes some tries."""
    first, last = rows.flatten()[0], rows.flatten()[-1]
    for _ in range(10):
        rows.zero_()
        writer.ask_push(target, 0, [RowRun(0, 0, LARGE[1] * LARGE[2])])
        give_up = time.monotonic() + 20
        while not first.item():
            assert time.monotonic() < give_up
        writer.freeze()
        if not last.item():
            return
        writer.resume()
        assert "written" in writer.answer()
    pytest.fail("every push was over before the writer could be frozen")


def wait_until_still(rows: torch.Tensor) -> None:
    """What was in the sockets when the writer froze still lands; wait until nothing has for 0.2 s."""
    seen = -1
    while (now := int(rows[..., 0].count_nonzero())) != seen:
        seen = now
        time.sleep(0.2)


@pytest.fixture
def large_pool():
    return torch.zeros(LARGE)


def test_unregistering_memory_does_not_stop_a_frozen_writer(large_pool, start_peer):
    """The reason for the fence. If this fails, Mooncake has learned to revoke memory and the fence can be simpler."""
    target = open_target("mooncake", large_pool, "127.0.0.1")
    writer = start_peer(LARGE)
    catch_in_the_middle(writer, large_pool, target.descriptor())
    assert target._engine._vendor.unregister_memory(large_pool.data_ptr()) == 0
    wait_until_still(large_pool)
    large_pool.fill_(SENTINEL)
    writer.resume()
    assert writer.answer()["written"] == large_pool.numel() * 4
    assert (large_pool != SENTINEL).sum() > LARGE[3] * LARGE[2]
    target.close()


def test_after_a_fence_not_one_byte_of_a_frozen_writer_lands(large_pool, start_peer):
    target = open_target("mooncake", large_pool, "127.0.0.1")
    writer, other = start_peer(LARGE), start_peer(LARGE, seed=2)
    old = target.descriptor()
    catch_in_the_middle(writer, large_pool, old)
    began = time.perf_counter()
    new = target.fence()
    assert time.perf_counter() - began < 1.0
    large_pool.fill_(SENTINEL)

    assert other.push(new, 0, [RowRun(0, 8, 8)])["written"] == 8 * 4096  # others go on while it is still frozen
    assert torch.equal(large_pool[0, 0, 8:], pattern(LARGE, 2)[0, 0, :8])
    large_pool.fill_(SENTINEL)

    writer.resume()
    answer = writer.answer()
    assert answer["reason"] == "TRANSFER_FAILED" and not answer["drained"]
    time.sleep(0.3)
    assert (large_pool == SENTINEL).all()

    again = writer.push(old, 0, [RowRun(0, 0, 8)])
    assert again["reason"] == "TRANSFER_FAILED" and again["took_s"] < 1.5
    assert (large_pool == SENTINEL).all()
    assert writer.push(target.descriptor(), 0, [RowRun(0, 0, 8)])["written"] == 8 * 4096
    target.close()


def test_a_fence_does_not_hold_up_the_other_threads_of_the_process(decode):
    """The vendor's destructor keeps Python's lock; without the knock it keeps it for a second."""
    _, target = decode
    longest, ended = [0.0], threading.Event()

    def watch():
        last = time.perf_counter()
        while not ended.wait(0.001):
            now = time.perf_counter()
            longest[0], last = max(longest[0], now - last), now

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(3):
        target.fence()
    ended.set()
    watcher.join()
    assert longest[0] < 0.4


def test_a_fence_that_can_open_nothing_still_ends_the_old_session_and_may_be_repeated(decode, monkeypatch):
    rows, target = decode
    source, old = open_source("mooncake", pattern(SMALL, 1), "127.0.0.1"), target.descriptor()
    source.push(old, 0, [RowRun(0, 0, 1)])

    def no_ports(host):
        raise TransferError("no ports")

    with monkeypatch.context() as broken:
        broken.setattr(mooncake, "_start", no_ports)
        with pytest.raises(TransferError, match="no ports"):
            target.fence()
    rows.fill_(SENTINEL)
    with pytest.raises(TransferError):
        source.push(old, 0, [RowRun(0, 0, 1)])
    with pytest.raises(TransferError, match="no session"):
        target.descriptor()
    assert (rows == SENTINEL).all()
    assert source.push(target.fence(), 0, [RowRun(0, 0, 1)]) == 640
    source.close()


def test_no_later_engine_of_a_process_gets_the_ports_of_an_earlier_one(decode, monkeypatch):
    _, target = decode
    taken = collections.deque(range(21000, 23000, 2))  # as if earlier engines had had every even port
    monkeypatch.setattr(mooncake, "_used_ports", taken)
    monkeypatch.setattr(mooncake, "OPEN_TRIES", 300)
    seen: set[int] = set()
    for _ in range(6):
        target.fence()
        ports = target._engine._ports
        assert len(ports) == 2 and all(port % 2 for port in ports) and seen.isdisjoint(ports)
        seen |= ports


def test_a_run_outside_the_targets_pool_is_refused_before_any_call(decode, start_peer):
    rows, target = decode
    writer = start_peer([3, 64, 16, 160])  # its own pool is larger, so only the target's bounds can object
    answer = writer.push(target.descriptor(), 2, [RowRun(0, 0, 1), RowRun(0, 511, 2)])
    assert answer["drained"] and "leaves the target" in answer["error"]
    assert not rows.any()


def test_a_pool_with_other_rows_is_refused(decode, start_peer):
    rows, target = decode
    answer = start_peer([3, 32, 16, 80]).push(target.descriptor(), 0, [RowRun(0, 0, 1)])
    assert answer["drained"] and "row_bytes" in answer["error"]
    assert not rows.any()


# --- who is gone -----------------------------------------------------------------------------------------------------


def test_a_session_nobody_has_fails_fast(decode):
    _, target = decode
    source = open_source("mooncake", pattern(SMALL, 1), "127.0.0.1")
    wrong = TargetDescriptor(**(vars(target.descriptor()) | {"session": "127.0.0.1:9"}))
    began = time.perf_counter()
    with pytest.raises(TransferError):
        source.push(wrong, 0, [RowRun(0, 0, 1)])
    assert time.perf_counter() - began < 1.5
    assert source.push(target.descriptor(), 0, [RowRun(0, 0, 1)]) == 640
    source.close()


def test_a_killed_writer_leaves_the_target_in_order(large_pool, start_peer):
    target = open_target("mooncake", large_pool, "127.0.0.1")
    writer = start_peer(LARGE)
    catch_in_the_middle(writer, large_pool, target.descriptor())
    writer.end()
    assert start_peer(LARGE, seed=2).push(target.descriptor(), 0, [RowRun(0, 0, 16384)])["written"] == 64 << 20
    assert torch.equal(large_pool, pattern(LARGE, 2))
    target.close()


def test_a_killed_target_fails_at_once_and_its_successor_works(start_peer):
    source = open_source("mooncake", pattern(SMALL, 1), "127.0.0.1")
    first = start_peer(SMALL, role="target")
    first.ask(do="descriptor")
    old = TargetDescriptor(**first.answer())
    assert source.push(old, 0, [RowRun(0, 0, 16)]) == 16 * 640
    first.end()
    began = time.perf_counter()
    for _ in range(2):
        with pytest.raises(TransferError) as caught:
            source.push(old, 0, [RowRun(0, 0, 16)])
        assert not is_drained(caught.value)
    assert time.perf_counter() - began < 3
    second = start_peer(SMALL, role="target")
    second.ask(do="descriptor")
    assert source.push(TargetDescriptor(**second.answer()), 0, [RowRun(0, 0, 16)]) == 16 * 640
    source.close()


def test_a_frozen_target_costs_one_time_out_and_then_nothing(decode, start_peer):
    rows, healthy = decode
    frozen = start_peer(SMALL, role="target")
    frozen.ask(do="descriptor")
    silent = TargetDescriptor(**frozen.answer())
    source = open_source("mooncake", pattern(SMALL, 1), "127.0.0.1", timeout_s=0.5)
    source.push(silent, 0, [RowRun(0, 0, 1)])
    frozen.freeze()
    began = time.perf_counter()
    with pytest.raises(TransferError) as caught:
        source.push(silent, 0, [RowRun(0, 0, 16)])
    assert caught.value.reason == "TRANSFER_TIMEOUT" and time.perf_counter() - began < 2
    began = time.perf_counter()
    with pytest.raises(TransferError, match="a moment ago"):
        source.push(silent, 1, [RowRun(0, 0, 16)])
    assert time.perf_counter() - began < 0.1
    assert source.push(healthy.descriptor(), 0, [RowRun(0, 0, 16)]) == 16 * 640
    frozen.resume()
    time.sleep(0.6)
    assert source.push(silent, 1, [RowRun(0, 0, 16)]) == 16 * 640
    source.close()


def test_closing_a_source_ends_its_push(start_peer):
    frozen = start_peer(LARGE, role="target")
    frozen.ask(do="descriptor")
    target = TargetDescriptor(**frozen.answer())
    source = open_source("mooncake", torch.zeros(LARGE), "127.0.0.1")
    source.push(target, 0, [RowRun(0, 0, 1)])
    frozen.freeze()
    caught: list[TransferError] = []

    def push():
        try:
            source.push(target, 0, [RowRun(0, 0, 16384)])
        except TransferError as error:
            caught.append(error)

    pusher = threading.Thread(target=push)
    pusher.start()
    time.sleep(0.1)
    began = time.perf_counter()
    source.close()
    pusher.join()
    assert time.perf_counter() - began < 3 and "closing" in str(caught[0])
    with pytest.raises(TransferError, match="closed"):
        source.push(target, 0, [RowRun(0, 0, 1)])


# --- settings --------------------------------------------------------------------------------------------------------


def test_the_environment_never_names_a_log_directory_and_keeps_the_pool_on():
    values = mooncake_environment(min_port=5000, max_port=5100, timeout_s=7)
    assert "MC_LOG_DIR" not in values and values["MC_TCP_ENABLE_CONNECTION_POOL"] == "1"
    assert (values["MC_MIN_RPC_PORT"], values["MC_MAX_RPC_PORT"], values["MC_TRANSFER_TIMEOUT"]) == (
        "5000",
        "5100",
        "7",
    )
    assert values["MC_FORCE_TCP"] == "1" and "MC_INTRANODE_NVLINK" not in values


def test_one_link_is_named_and_no_other():
    values = mooncake_environment(link="nvlink_intra")
    assert values["MC_INTRANODE_NVLINK"] == "1" and "MC_FORCE_TCP" not in values
    with pytest.raises(ConfigError, match="transfer.link"):
        mooncake_environment(link="carrier pigeon")


def test_a_link_for_gpu_memory_is_refused_for_a_pool_on_the_cpu(monkeypatch):
    monkeypatch.delenv("MC_FORCE_TCP")
    monkeypatch.setenv("MC_INTRANODE_NVLINK", "1")
    with pytest.raises(ConfigError, match="engine.device"):
        open_target("mooncake", torch.zeros(SMALL), "127.0.0.1")


@pytest.mark.parametrize("present", [(), ("MC_FORCE_TCP", "MC_INTRANODE_NVLINK")])
def test_an_environment_that_leaves_the_link_to_mooncake_is_refused(monkeypatch, present):
    monkeypatch.delenv("MC_FORCE_TCP")
    for name in present:
        monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match="exactly one"):
        open_source("mooncake", torch.zeros(SMALL), "127.0.0.1")


def test_without_its_settings_in_the_environment_no_engine_opens(monkeypatch):
    monkeypatch.delenv("MC_TRANSFER_TIMEOUT")
    with pytest.raises(ConfigError, match="MC_TRANSFER_TIMEOUT"):
        open_target("mooncake", torch.zeros(SMALL), "127.0.0.1")


def test_an_engine_without_its_connection_pool_is_refused(monkeypatch):
    monkeypatch.setenv("MC_TCP_ENABLE_CONNECTION_POOL", "0")
    with pytest.raises(ConfigError, match="can hang"):
        open_source("mooncake", torch.zeros(SMALL), "127.0.0.1")


def test_a_destructor_that_hangs_ends_the_process():
    hang = (
        "from headrace.transfer import mooncake as m, mooncake_environment; import time; m.DESTRUCTOR_LIMIT_S = 0.2\n"
    )
    hang += "with m._alive_or_dead(): time.sleep(20)"
    began = time.perf_counter()
    ended = subprocess.run([sys.executable, "-c", hang], cwd=ROOT, capture_output=True, text=True, timeout=15)
    assert ended.returncode == 1 and "Timeout" in ended.stderr and time.perf_counter() - began < 12


def test_a_target_whose_link_knows_no_fence_ends_its_process_instead():
    code = (
        "import torch; from headrace import config; from headrace.transfer import mooncake, mooncake_environment, open_target\n"
        "config.apply_environment(mooncake_environment())\n"
        "target = open_target('mooncake', torch.zeros(1, 4, 4, 4), '127.0.0.1'); target._link = 'nvlink_intra'\n"
        "try: target.fence()\n"
        "finally: print('still here')"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == mooncake.UNFENCED_EXIT_CODE and "still here" not in ended.stdout, ended.stderr


def test_fences_amid_the_pushes_of_two_writers_leave_no_one_stuck(start_peer, full):
    rows = torch.zeros(SMALL)
    target = open_target("mooncake", rows, "127.0.0.1")
    writers, ended, answers = [start_peer(SMALL, seed) for seed in (1, 2)], threading.Event(), []

    def drive(writer: Peer):
        while not ended.is_set():
            runs = [RowRun(32 * i, 32 * i, 16) for i in range(16)]
            answers.append(writer.push(target.descriptor(), 0, runs, repeat=4))

    drivers = [threading.Thread(target=drive, args=(writer,)) for writer in writers]
    for driver in drivers:
        driver.start()
    for _ in range(300 if full else 20):
        time.sleep(0.02)
        target.fence()
    ended.set()
    for driver in drivers:
        driver.join(timeout=20)
        assert not driver.is_alive()
    assert all(answer.get("reason", "TRANSFER_FAILED") == "TRANSFER_FAILED" for answer in answers)
    for writer in writers:
        assert writer.push(target.descriptor(), 0, [RowRun(0, 0, 16)])["written"] == 16 * 640
    target.close()


def test_a_pool_in_gpu_memory_needs_a_build_with_cuda():
    import mooncake.engine as vendor

    if vendor.SUPPORT_CUDA:
        pytest.skip("this Mooncake has CUDA")
    with pytest.raises(ConfigError, match="without CUDA"):
        mooncake._check_build(on_gpu=True)


def test_a_descriptor_is_there_at_any_moment_of_a_fence(decode):
    _, target = decode
    sessions, ended = set(), threading.Event()

    def read():
        while not ended.is_set():
            sessions.add(target.descriptor().session)

    reader = threading.Thread(target=read)
    reader.start()
    expected = {target.descriptor().session} | {target.fence().session for _ in range(5)}
    ended.set()
    reader.join()
    assert sessions <= expected


def test_ports_lie_in_the_range_that_was_set(decode):
    _, target = decode
    assert all(21000 <= port <= 22999 for port in target._engine._ports)
