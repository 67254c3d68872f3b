"""Runs, bounds, and the two transfers that need no engine."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError, TransferError
from headrace.protocol.common import TransferBackend
from headrace.transfer import is_drained, open_source, open_target, plan_runs
from headrace.transfer.base import RowRun, TargetDescriptor, geometry_of
from headrace.transfer.grpc import CHUNK_BYTES, RowChunk

LAYERS, BLOCKS, BLOCK_SIZE, ROW_DIM = 3, 12, 4, 6


def pool(fill: float | None = None, dtype: torch.dtype = torch.float32, blocks: int = BLOCKS) -> torch.Tensor:
    shape = (LAYERS, blocks, BLOCK_SIZE, ROW_DIM)
    return torch.randn(shape).to(dtype) if fill is None else torch.full(shape, fill, dtype=dtype)


class DirectWire:
    """Carries chunks straight into targets by address, as the gRPC client and servicer would."""

    def __init__(self, targets: dict):
        self.targets = targets
        self.chunks: list[RowChunk] = []

    def __call__(self, address, chunks):
        written = 0
        for chunk in chunks:
            self.chunks.append(chunk)
            written += self.targets[address].write(chunk.session, chunk.layer, chunk.target_row, chunk.payload)
        return written


def pair(backend: str, source_pool: torch.Tensor, target_pool: torch.Tensor):
    target = open_target(backend, target_pool, "decode:7")
    source = open_source(backend, source_pool, "prefill", send=DirectWire({"decode:7": target}))
    return source, target


# --- plan_runs -------------------------------------------------------------------------------------------------------


@st.composite
def sequences(draw):
    num_blocks = draw(st.integers(1, 12))
    tables = [draw(st.permutations(range(16)))[:num_blocks] for _ in range(2)]
    if draw(st.booleans()):  # neighbours are common in a fresh pool, rare in permutations
        tables = [sorted(table) for table in tables]
    block_size = draw(st.integers(1, 5))
    first = draw(st.integers(0, num_blocks * block_size))
    return *tables, first, draw(st.integers(0, num_blocks * block_size - first)), block_size


@given(sequences())
def test_runs_carry_each_position_to_its_own_row_once_and_in_order(case):
    source_blocks, target_blocks, first, num_rows, block_size = case
    carried = [
        (run.source_row + i, run.target_row + i)
        for run in plan_runs(source_blocks, target_blocks, first, num_rows, block_size)
        for i in range(run.num_rows)
    ]
    assert carried == [
        (
            source_blocks[p // block_size] * block_size + p % block_size,
            target_blocks[p // block_size] * block_size + p % block_size,
        )
        for p in range(first, first + num_rows)
    ]


@given(sequences())
def test_no_two_neighbouring_runs_could_be_one(case):
    runs = plan_runs(*case)
    for one, two in zip(runs, runs[1:], strict=False):
        joins = one.source_row + one.num_rows == two.source_row and one.target_row + one.num_rows == two.target_row
        assert not joins


def test_blocks_that_are_neighbours_on_one_side_only_are_not_merged():
    assert plan_runs([3, 4], [7, 9], 2, 6, 4) == [RowRun(14, 30, 2), RowRun(16, 36, 4)]
    assert plan_runs([3, 4], [7, 8], 2, 5, 4) == [RowRun(14, 30, 5)]


def test_a_block_table_that_is_too_short_is_refused():
    with pytest.raises(TransferError, match="the target 1") as caught:
        plan_runs([0, 1], [5], 0, 5, 4)
    assert is_drained(caught.value)


# --- what every back end does ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["local", "grpc"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_push_writes_exactly_its_rows(backend, dtype):
    source_pool, target_pool = pool(dtype=dtype), pool(7.0, dtype)
    source, target = pair(backend, source_pool, target_pool)
    runs = plan_runs([2, 3, 8], [9, 10, 0], 1, 9, BLOCK_SIZE)
    expected = target_pool.clone()
    for run in runs:
        for i in range(run.num_rows):
            expected.flatten(1, 2)[1, run.target_row + i] = source_pool.flatten(1, 2)[1, run.source_row + i]
    assert source.push(target.descriptor(), 1, runs, tag=b"request 1") == 9 * ROW_DIM * source_pool.element_size()
    assert torch.equal(target_pool, expected)


@pytest.mark.parametrize("backend", ["local", "grpc"])
def test_a_push_without_runs_writes_nothing(backend):
    target_pool = pool(7.0)
    source, target = pair(backend, pool(), target_pool)
    assert source.push(target.descriptor(), 0, []) == 0
    assert (target_pool == 7.0).all()


@pytest.mark.parametrize("backend", ["local", "grpc"])
def test_an_old_session_is_refused_after_a_fence_and_the_new_one_works(backend):
    target_pool = pool(7.0)
    source, target = pair(backend, pool(), target_pool)
    old = target.descriptor()
    new = target.fence()
    assert new.session != old.session and target.descriptor() == new
    with pytest.raises(TransferError):
        source.push(old, 0, [RowRun(0, 0, 4)])
    assert (target_pool == 7.0).all()
    assert source.push(new, 0, [RowRun(0, 0, 4)]) == 4 * ROW_DIM * 4


@pytest.mark.parametrize("backend", ["local", "grpc"])
def test_a_closed_end_takes_part_in_nothing(backend):
    source, target = pair(backend, pool(), pool())
    descriptor = target.descriptor()
    target.close()
    target.close()
    with pytest.raises(TransferError):
        source.push(descriptor, 0, [RowRun(0, 0, 1)])
    with pytest.raises(TransferError):
        target.descriptor()
    source.close()
    with pytest.raises(TransferError, match="closed"):
        source.push(descriptor, 0, [RowRun(0, 0, 1)])


NEVER_ASKED = [
    (0, RowRun(0, BLOCKS * BLOCK_SIZE - 1, 2), {}, "leaves the target"),
    (0, RowRun(BLOCKS * BLOCK_SIZE - 1, 0, 2), {}, "leaves the source"),
    (0, RowRun(-1, 0, 1), {}, "leaves the source"),
    (0, RowRun(0, -1, 1), {}, "leaves the target"),
    (0, RowRun(0, 0, 0), {}, "empty"),
    (LAYERS, RowRun(0, 0, 1), {}, "layer 3 of 3"),
    (-1, RowRun(0, 0, 1), {}, "layer -1"),
    (0, RowRun(0, 0, 1), {"row_bytes": 2 * ROW_DIM}, "row_bytes"),
    (0, RowRun(0, 0, 1), {"block_size": 8}, "block_size"),
    (0, RowRun(0, 0, 1), {"num_layers": 2}, "num_layers"),
    (0, RowRun(0, 0, 1), {"layer_stride_bytes": 8}, "layer stride"),
    (0, RowRun(0, 0, 1), {"block_stride_bytes": 8}, "block_stride_bytes"),
    (0, RowRun(0, 0, 1), {"session": ""}, "no session"),
    (0, RowRun(0, 0, 1), {"backend": TransferBackend.MOONCAKE}, "MOONCAKE"),
]


@pytest.mark.parametrize("backend", ["local", "grpc"])
@pytest.mark.parametrize(("layer", "run", "changes", "message"), NEVER_ASKED)
def test_what_a_correct_pair_never_asks_is_refused_before_any_byte(backend, layer, run, changes, message):
    target_pool = pool(7.0)
    source, target = pair(backend, pool(), target_pool)
    descriptor = TargetDescriptor(**(vars(target.descriptor()) | changes))
    with pytest.raises(TransferError, match=message) as caught:
        source.push(descriptor, layer, [RowRun(0, 0, 1), run])
    assert is_drained(caught.value)
    assert (target_pool == 7.0).all()


@pytest.mark.parametrize("shape", [(3, 4, 5), (0, 4, 4, 4)])
def test_a_pool_is_four_dimensional_and_not_empty(shape):
    with pytest.raises(TransferError, match="contiguous"):
        geometry_of(torch.zeros(shape))


def test_a_pool_is_one_dense_region():
    with pytest.raises(TransferError, match="contiguous"):
        geometry_of(pool()[:, :, :, ::2])


@pytest.mark.parametrize("backend", ["", "rdma"])
def test_an_unknown_back_end_names_those_that_exist(backend):
    for open_end in (open_source, open_target):
        with pytest.raises(ConfigError, match="mooncake, local, grpc"):
            open_end(backend, pool(), "here")


# --- local -----------------------------------------------------------------------------------------------------------


def test_a_local_fence_waits_for_the_copy_in_progress():
    source_pool, target_pool = pool(), pool(7.0)
    source, target = pair("local", source_pool, target_pool)
    old = target.descriptor()
    started, fenced, order = threading.Event(), threading.Event(), []

    class SlowRuns(list):
        """Runs whose second is handed out only when the fence has had every chance to return."""

        def __iter__(self):
            yield self[0]
            if started.is_set():  # the copy itself, not the check before it
                order.append("copy goes on" if not fenced.wait(0.2) else "fence came first")
            started.set()
            yield self[1]

    runs = SlowRuns([RowRun(0, 0, 4), RowRun(4, 4, 4)])
    list(runs)
    writer = threading.Thread(target=target.write, args=(old.session, 0, source_pool.flatten(1, 2)[0], runs))
    writer.start()
    while not (target_pool[0, 0] != 7.0).all():
        pass
    target.fence()
    fenced.set()
    writer.join()
    assert order == ["copy goes on"]
    assert torch.equal(target_pool[0, :2], source_pool[0, :2])
    with pytest.raises(TransferError):
        source.push(old, 0, [RowRun(8, 8, 1)])


def test_local_targets_of_one_process_do_not_meet():
    first, second = pool(1.0), pool(2.0)
    one, two = open_target("local", first, ""), open_target("local", second, "")
    source = open_source("local", pool(5.0), "")
    one.fence()
    source.push(two.descriptor(), 2, [RowRun(0, 0, 48)])
    assert (first == 1.0).all() and (second[2] == 5.0).all() and (second[:2] == 2.0).all()


def test_rows_of_another_type_but_equal_size_are_refused_by_a_local_target():
    target_pool = pool(7.0)
    target = open_target("local", target_pool, "")
    source = open_source("local", torch.zeros(LAYERS, BLOCKS, BLOCK_SIZE, ROW_DIM * 2, dtype=torch.bfloat16), "")
    with pytest.raises(TransferError, match="bfloat16") as caught:
        source.push(target.descriptor(), 0, [RowRun(0, 0, 1)])
    assert is_drained(caught.value) and (target_pool == 7.0).all()


# --- grpc ------------------------------------------------------------------------------------------------------------


def test_messages_are_whole_rows_and_stay_below_the_limit():
    row_dim = CHUNK_BYTES // 4 // 3  # three rows fill a message and leave a little
    source_pool = torch.randn(1, 2, 4, row_dim)
    target_pool = torch.zeros_like(source_pool)
    target = open_target("grpc", target_pool, "[::1]:7")
    wire = DirectWire({"[::1]:7": target})
    source = open_source("grpc", source_pool, "", send=wire)
    source.push(target.descriptor(), 0, [RowRun(0, 1, 7)])
    assert [len(chunk.payload) // (row_dim * 4) for chunk in wire.chunks] == [3, 3, 1]
    assert all(len(chunk.payload) <= CHUNK_BYTES for chunk in wire.chunks)
    assert torch.equal(target_pool.flatten(1, 2)[0, 1:], source_pool.flatten(1, 2)[0, :7])


@pytest.mark.parametrize(
    ("layer", "row", "num_bytes", "message"),
    [
        (0, 0, ROW_DIM * 4 - 1, "not whole rows"),
        (0, 0, 0, "not whole rows"),
        (LAYERS, 0, ROW_DIM * 4, "layer 3"),
        (-1, 0, ROW_DIM * 4, "layer -1"),
        (0, BLOCKS * BLOCK_SIZE, ROW_DIM * 4, "rows"),
        (0, -1, ROW_DIM * 4, "rows"),
    ],
)
def test_a_grpc_target_trusts_no_message(layer, row, num_bytes, message):
    target_pool = pool(7.0)
    target = open_target("grpc", target_pool, "decode:7")
    with pytest.raises(TransferError, match=message):
        target.write(target.descriptor().session, layer, row, bytes(num_bytes))
    assert (target_pool == 7.0).all()


def test_a_grpc_push_that_breaks_midway_is_not_drained():
    target = open_target("grpc", pool(7.0), "decode:7")

    def send(address, chunks):
        next(iter(chunks))
        raise ConnectionError("reset")

    with pytest.raises(TransferError, match=r"request 9.*reset") as caught:
        open_source("grpc", pool(), "", send=send).push(target.descriptor(), 0, [RowRun(0, 0, 4)], tag=b"request 9")
    assert not is_drained(caught.value)


def test_a_grpc_push_that_wrote_less_than_it_sent_is_an_error():
    target = open_target("grpc", pool(7.0), "decode:7")
    source = open_source("grpc", pool(), "", send=lambda address, chunks: sum(len(c.payload) for c in chunks) - 24)
    with pytest.raises(TransferError, match="72 of 96"):
        source.push(target.descriptor(), 0, [RowRun(0, 0, 4)])
