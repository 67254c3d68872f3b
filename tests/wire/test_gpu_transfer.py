"""Mooncake with rows in GPU memory, between processes that share one card. Needs a GPU and Mooncake's CUDA build."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from headrace.cache.latent import LatentPool
from headrace.cache.rows import Rows
from headrace.transfer import RowRun, TargetDescriptor, mooncake, mooncake_environment, open_target, plan_runs
from headrace.transfer import why_not_mooncake as why_not_mooncake_at_all

os.environ.update(mooncake_environment())  # before anything in this process loads the library
sys.path.insert(0, str(Path(__file__).parent))
from transfer_peer import Peer, pattern


def why_not() -> str | None:
    if not torch.cuda.is_available():
        return "needs a GPU"
    if (reason := why_not_mooncake_at_all()) is not None:
        return reason
    return None if mooncake._load().SUPPORT_CUDA else "needs Mooncake's CUDA build"


pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
SMALL = [3, 32, 16, 160]
LARGE = [1, 4096, 16, 1024]  # 256 MiB: long enough over TCP to be caught in the middle
SENTINEL = -1.0


@pytest.fixture
def start_peer():
    peers: list[Peer] = []

    def start(*args, **kwargs) -> Peer:
        peers.append(Peer(*args, device="cuda", **kwargs))
        return peers[-1]

    yield start
    for peer in peers:
        peer.end()


@pytest.fixture(params=["tcp", "nvlink_intra"])
def link(request, monkeypatch):
    for variable in mooncake.LINKS.values():
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(mooncake.LINKS[request.param], "1")
    return request.param


def test_rows_of_another_process_land_in_their_rows_of_gpu_memory_and_nowhere_else(link, start_peer):
    rows, theirs = torch.zeros(SMALL, device="cuda"), pattern(SMALL, seed=1)
    target = open_target("mooncake", rows, "127.0.0.1")
    writer = start_peer(SMALL)
    runs = plan_runs([4, 5, 9, 2], [30, 31, 1, 8], 5, 50, 16)
    expected = torch.zeros(SMALL)
    for layer in range(SMALL[0]):
        assert writer.push(target.descriptor(), layer, runs) | {"took_s": 0, "cpu_s": 0} == {
            "written": 50 * 640,
            "took_s": 0,
            "cpu_s": 0,
        }
        for run in runs:
            here = expected.flatten(1, 2)[layer, run.target_row : run.target_row + run.num_rows]
            here.copy_(theirs.flatten(1, 2)[layer, run.source_row : run.source_row + run.num_rows])
    torch.cuda.synchronize()
    assert torch.equal(rows.cpu(), expected)
    target.close()


def test_an_engine_opens_in_a_thread_that_has_not_used_the_device(link):
    rows, opened = torch.zeros(SMALL, device="cuda"), []
    opener = threading.Thread(target=lambda: opened.append(open_target("mooncake", rows, "127.0.0.1")))
    opener.start()
    opener.join()
    assert opened and opened[0].descriptor().session
    opened[0].close()


def test_a_push_of_many_scattered_runs_lands_whole(link, start_peer):
    shape = [1, 5000, 1, 160]  # a run a row, more than one batch of them
    rows, theirs = torch.zeros(shape, device="cuda"), pattern(shape, seed=1)
    target, writer = open_target("mooncake", rows, "127.0.0.1"), start_peer(shape)
    runs = plan_runs(range(5000), list(reversed(range(5000))), 0, 5000, 1)
    assert writer.push(target.descriptor(), 0, runs)["written"] == 5000 * 640
    torch.cuda.synchronize()
    assert torch.equal(rows.cpu(), theirs.flip(1))
    target.close()


def test_a_checksum_right_after_the_push_sees_the_rows_while_the_device_is_busy(link, start_peer):
    latent = LatentPool(*SMALL, torch.float32, torch.device("cuda"))
    target, rows = open_target("mooncake", latent.rows, "127.0.0.1"), Rows(latent)
    theirs = LatentPool(*SMALL, torch.float32, torch.device("cpu"))
    theirs.rows.copy_(pattern(SMALL, seed=1))
    expected = Rows(theirs).layer_checksums(range(32), 0, 512)
    writer, busy = start_peer(SMALL), torch.cuda.Stream()
    weight = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(20):
        latent.rows.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(busy):
            for _ in range(30):
                weight @ weight
        for layer in range(SMALL[0]):
            assert "written" in writer.push(target.descriptor(), layer, [RowRun(0, 0, 512)])
        assert rows.layer_checksums(range(32), 0, 512) == expected
        busy.synchronize()
    target.close()


def test_after_a_fence_not_one_byte_of_a_frozen_writer_lands_in_gpu_memory(start_peer):
    rows = torch.zeros(LARGE, device="cuda")
    target = open_target("mooncake", rows, "127.0.0.1")
    writer, whole = start_peer(LARGE), [RowRun(0, 0, LARGE[1] * LARGE[2])]
    old = target.descriptor()
    for _ in range(10):
        rows.zero_()
        torch.cuda.synchronize()
        writer.ask_push(old, 0, whole)
        give_up = time.monotonic() + 20
        while not rows.flatten()[0].item():
            assert time.monotonic() < give_up
        writer.freeze()
        if not rows.flatten()[-1].item():
            break
        writer.resume()
        assert "written" in writer.answer()
    else:
        pytest.fail("every push was over before the writer could be frozen")
    began = time.perf_counter()
    new = target.fence()
    assert time.perf_counter() - began < 1.0
    torch.cuda.synchronize()
    rows.fill_(SENTINEL)
    torch.cuda.synchronize()
    writer.resume()
    answer = writer.answer()
    assert answer["reason"] == "TRANSFER_FAILED" and not answer["drained"]
    time.sleep(0.3)
    assert (rows == SENTINEL).all().item()
    assert writer.push(new, 0, [RowRun(0, 0, 8)])["written"] == 8 * 4096
    target.close()


def test_over_cuda_ipc_a_writer_keeps_its_mapping_after_the_targets_engine_has_gone(monkeypatch, start_peer):
    """Why a target on this link has no fence. If this fails, Mooncake or CUDA has learned to take a mapping back."""
    monkeypatch.delenv("MC_FORCE_TCP")
    monkeypatch.setenv("MC_INTRANODE_NVLINK", "1")
    rows = torch.zeros(LARGE, device="cuda")
    target = open_target("mooncake", rows, "127.0.0.1")
    writer, old = start_peer(LARGE), target.descriptor()
    assert "written" in writer.push(old, 0, [RowRun(0, 0, 8)])
    target.close()
    rows.fill_(SENTINEL)
    torch.cuda.synchronize()
    answer = writer.push(old, 0, [RowRun(0, 0, 8)])
    landed = int((rows != SENTINEL).sum())
    print("after the engine has gone:", answer, "values landed:", landed)
    assert "written" in answer and landed == 8 * LARGE[3]


def test_a_target_that_ended_and_its_successor_are_out_of_a_writers_reach(link, start_peer):
    writer, first = start_peer(SMALL), start_peer(SMALL, role="target")
    first.ask(do="descriptor")
    old = TargetDescriptor(**first.answer())
    assert "written" in writer.push(old, 0, [RowRun(0, 0, 16)])
    first.end()
    second = start_peer(SMALL, role="target")
    answer = writer.push(old, 0, [RowRun(0, 0, 16)])
    print(link, "after the target's process has gone:", answer)
    second.ask(do="nonzero")
    assert second.answer() == {"nonzero": 0}


def test_pages_that_no_other_process_can_open_are_refused(monkeypatch):
    import subprocess

    code = (
        "import torch; from headrace.transfer import open_target\n"
        "from headrace.errors import ConfigError\n"
        "try: open_target('mooncake', torch.zeros(3, 32, 16, 160, device='cuda'), '127.0.0.1')\n"
        "except ConfigError as error: print(error.field, error.message)"
    )
    monkeypatch.delenv("MC_FORCE_TCP")
    monkeypatch.setenv("MC_INTRANODE_NVLINK", "1")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=Path.cwd())
    assert "transfer.link" in said.stdout and "expandable_segments" in said.stdout, said
