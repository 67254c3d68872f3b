"""mla_decode and mla_prefill: paged, bucketed and naive attention against one query at a time."""

from __future__ import annotations

import pytest
import torch

from kernels.attention import mla_decode, mla_prefill
from kernels.attention.mla_decode import KEY_CHUNK
from kernels.toolchain import cpu_library

CPU = torch.device("cpu")
SCALE = 0.21
TOLERANCE = 3e-6  # fp32 sums over up to 300 weights that add up to 1


def backends(module, names=None, attribute="BACKENDS"):
    return [
        pytest.param(
            backend.run,
            id=backend.name,
            marks=[pytest.mark.skip(reason=f"needs: {backend.why_not(CPU)}")] if backend.why_not(CPU) else [],
        )
        for backend in getattr(module, attribute)
        if backend.name != "reference"
    ]


class Case:
    """Sequences of the given lengths over shuffled blocks; every row nobody may read is NaN."""

    def __init__(self, query_lens, context_lens, *, heads=5, latent=16, rope=8, block_size=4, dtype=torch.float32):
        self.query_lens, self.context_lens, self.latent, self.block_size = query_lens, context_lens, latent, block_size
        draw = torch.Generator().manual_seed(len(query_lens))
        needed = [-(-length // block_size) for length in context_lens]
        order = torch.randperm(sum(needed) + 3, generator=draw).tolist()
        self.pool = torch.full((len(order), block_size, latent + rope), float("nan"), dtype=dtype)
        self.tables = torch.zeros(len(query_lens), max(needed) + 1, dtype=torch.int32)
        for seq, (count, length) in enumerate(zip(needed, context_lens, strict=True)):
            blocks = [order.pop() for _ in range(count)]
            self.tables[seq, :count] = torch.tensor(blocks)
            rows = torch.randn(length, latent + rope, generator=draw).to(dtype)
            for place in range(length):
                self.pool[blocks[place // block_size], place % block_size] = rows[place]
        self.q = torch.randn(sum(query_lens), heads, latent + rope, generator=draw)

    def run(self, op):
        plan = op.plan(self.tables, self.query_lens, self.context_lens, self.block_size)
        return op.run(self.q, self.pool, plan, SCALE, self.latent)

    def reference(self):
        lens = self.query_lens, self.context_lens
        return mla_decode.reference(self.q, self.pool, self.tables, *lens, SCALE, self.latent)


UNIFORM = [
    ([1], [1]),
    ([1, 1, 1], [3, 4, 5]),
    ([1] * 4, [KEY_CHUNK - 1, KEY_CHUNK, KEY_CHUNK + 1, 2 * KEY_CHUNK + 30]),
    ([3, 3], [3, 50]),
    ([1] * 12, [300, 2, 2, 1, 9, 2, 2, 130, 2, 2, 257, 2]),
]
RAGGED = [*UNIFORM, ([5, 1, 70], [5, 9, 200]), ([1, 64, 65, 4], [300, 64, 65, 130]), ([2], [17])]


@pytest.mark.parametrize("op", backends(mla_decode))
@pytest.mark.parametrize("lens", UNIFORM)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_attention_equals_one_query_at_a_time(op, lens, dtype):
    case = Case(*lens, dtype=dtype)
    got, want = case.run(op), case.reference()
    assert torch.isfinite(got).all(), "read a row that is not its own"
    assert (got - want).abs().max() < TOLERANCE


@pytest.mark.parametrize("op", backends(mla_prefill))
@pytest.mark.parametrize("lens", RAGGED)
def test_absorbed_prefill_equals_one_query_at_a_time(op, lens):
    case = Case(*lens)
    got, want = case.run(op), case.reference()
    assert torch.isfinite(got).all()
    assert (got - want).abs().max() < TOLERANCE


@pytest.mark.parametrize("op", backends(mla_decode))
@pytest.mark.parametrize(
    "heads, latent, rope, block_size", [(1, 8, 8, 1), (8, 32, 16, 16), (9, 24, 8, 3), (16, 16, 8, 64)]
)
def test_odd_head_counts_and_block_sizes(op, heads, latent, rope, block_size):
    case = Case([1, 1, 1], [7, 64, 65], heads=heads, latent=latent, rope=rope, block_size=block_size)
    assert (case.run(op) - case.reference()).abs().max() < TOLERANCE


@pytest.mark.parametrize("op", backends(mla_decode))
def test_no_sequences_give_no_rows(op):
    if isinstance(op, mla_decode.Bucketed):
        assert op.run(torch.empty(0, 2, 16), torch.zeros(1, 4, 16), [], SCALE, 8).shape == (0, 2, 8)
        return
    plan = op.plan(torch.empty(0, 1, dtype=torch.int32), [], [], 4)
    assert op.run(torch.empty(0, 2, 16), torch.zeros(1, 4, 16), plan, SCALE, 8).shape == (0, 2, 8)


@pytest.mark.parametrize("op", backends(mla_decode))
def test_large_scores_do_not_overflow(op):
    case = Case([1, 1], [40, 3])
    case.q *= 300
    got, want = case.run(op), case.reference()
    assert torch.isfinite(got).all() and (got - want).abs().max() < 1e-4


def exact_pairs():
    pairs = [(mla_decode.Bucketed(mla_decode.folded), mla_prefill.FoldedPrefill(), "folded")]
    if not cpu_library.why_not():
        pairs.append((mla_decode.Paged(), mla_decode.Paged(), "c"))
    return [pytest.param(decode, prefill, name == "folded", id=name) for decode, prefill, name in pairs]


@pytest.mark.parametrize("decode, prefill, by_torch", exact_pairs())
def test_a_query_has_the_same_bits_in_prefill_in_decode_and_among_others(decode, prefill, by_torch):
    """8 heads: `folded` leans on torch's products, which promise nothing (a start's self-test looks at them)."""
    if by_torch and not products_keep_their_bits():
        pytest.skip("needs a host on which torch's products do not depend on the number of rows")
    whole = Case([270], [270], heads=8)
    everything = whole.run(prefill)
    for place in (0, 1, 15, 16, KEY_CHUNK - 1, KEY_CHUNK, 269):
        length = place + 1
        crowd = Case([1] * 5, [9, 33, 1, 140, 2], heads=8)
        rows = whole.pool.view(-1, 24)[_slots(whole, length)]
        pool = torch.cat([crowd.pool.view(-1, 24), rows, rows.new_full((-length % 4, 24), float("nan"))]).view(
            -1, 4, 24
        )
        table = torch.zeros(6, max(crowd.tables.shape[1], -(-length // 4)), dtype=torch.int32)
        table[1:, : crowd.tables.shape[1]] = crowd.tables
        table[0, : -(-length // 4)] = len(crowd.pool) + torch.arange(-(-length // 4))
        lens = [1] * 6, [length, *crowd.context_lens]
        q = torch.cat([whole.q[place : place + 1], crowd.q])
        got = decode.run(q, pool, decode.plan(table, *lens, 4), SCALE, 16)
        assert torch.equal(got[0], everything[place]), place


def products_keep_their_bits() -> bool:
    """Whether a row of torch's batched products is the same among 8, 128 and 2,160 rows, in both shapes that `folded` has."""
    draw = torch.Generator().manual_seed(3)
    for inner, outer in ((24, KEY_CHUNK), (KEY_CHUNK, 16)):
        x, w = torch.randn(1, 2160, inner, generator=draw), torch.randn(1, inner, outer, generator=draw)
        whole = torch.bmm(x, w)
        for rows in (8, 16, 24, 128):
            for batch in (1, 5):
                got = torch.bmm(x[:, :rows].expand(batch, -1, -1).contiguous(), w.expand(batch, -1, -1).contiguous())
                if not all(torch.equal(one, whole[0, :rows]) for one in got):
                    return False
    return True


def _slots(case: Case, length: int) -> torch.Tensor:
    place = torch.arange(length)
    return case.tables[0, place // case.block_size].long() * case.block_size + place % case.block_size


@pytest.mark.parametrize("op", backends(mla_prefill, attribute="NAIVE_BACKENDS"))
@pytest.mark.parametrize("lens", RAGGED)
@pytest.mark.parametrize("value_dim", [16, 24, 40])
def test_naive_attention_equals_one_query_and_head_at_a_time(op, lens, value_dim):
    query_lens, context_lens = lens
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(sum(query_lens), 3, 24, generator=draw)
    k = torch.randn(sum(context_lens), 3, 24, generator=draw)
    v = torch.randn(sum(context_lens), 3, value_dim + 8, generator=draw)[..., 8:]
    got = op(q, k, v, query_lens, context_lens, SCALE)
    want = mla_prefill.reference(q, k, v, query_lens, context_lens, SCALE)
    assert (got - want).abs().max() < TOLERANCE


def test_a_long_neighbour_gets_a_bucket_of_its_own():
    lens = [4000, *[20] * 60]
    groups = mla_decode._group_by_length(lens)
    assert sorted(i for group in groups for i in group) == list(range(61))
    assert [0] in groups and len(groups) == 2
