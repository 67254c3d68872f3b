"""Products with NVFP4 weights: one matrix, experts by starts, experts by counts; and that they compile for both chips."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch

from kernels.formats import fp8, nvfp4
from kernels.linear import grouped_nvfp4, nvfp4_hopper, nvfp4_linear
from kernels.toolchain.triton_support import triton

BF16_STEPS = 2.0**-7  # operands and result rounded to bf16, sums of up to 512 products in fp32


def _weight(*shape, device):
    return nvfp4.quantise(torch.randn(*shape, device=device) / shape[-1] ** 0.5)


def _expected(rows, weight):
    x = fp8.dequantise_rows(rows) if isinstance(rows, fp8.Fp8Rows) else rows
    return x.double() @ nvfp4.dequantise(weight).double().T


def _usable(backends, device):
    """References and kernels that run on this device; interpreted Triton counts."""
    interpreted = device.type == "cpu"
    return [b for b in backends if b.why_not(device) is None or (interpreted and b.name == "triton")]


def _rows(count, width, device, kind):
    x = torch.randn(count, width, device=device).bfloat16()
    return fp8.reference(x) if kind == "fp8" else x


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("tokens, n, width", [(1, 8, 128), (5, 144, 256), (18, 130, 128), (0, 8, 128)])
def test_every_linear_back_end_equals_the_dequantised_product(triton_device, kind, tokens, n, width):
    torch.manual_seed(tokens)
    weight, rows = _weight(n, width, device=triton_device), _rows(tokens, width, triton_device, kind)
    for backend in _usable(nvfp4_linear.LINEAR_BACKENDS, triton_device):
        out = torch.full((tokens, n), float("nan"), device=triton_device, dtype=torch.bfloat16)
        made = backend.run.run(rows, backend.run.prepare(weight), out)
        assert made.data_ptr() == out.data_ptr(), backend.name
        torch.testing.assert_close(out.double(), _expected(rows, weight), rtol=BF16_STEPS, atol=BF16_STEPS)


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_contiguous_experts_read_their_own_rows_and_touch_no_padding_beyond(triton_device, kind):
    torch.manual_seed(3)
    starts = torch.tensor([0, 16, 16, 48], dtype=torch.int32, device=triton_device)
    weight, rows = _weight(3, 136, 128, device=triton_device), _rows(64, 128, triton_device, kind)
    for backend in _usable(grouped_nvfp4.CONTIGUOUS_BACKENDS, triton_device):
        made = backend.run.run(rows, backend.run.prepare(weight), starts)
        assert made.shape == (64, 136)
        x = fp8.dequantise_rows(rows) if kind == "fp8" else rows
        for expert, (first, end) in enumerate([(0, 16), (16, 16), (16, 48)]):
            expected = _expected(x[first:end], _one(weight, expert))
            torch.testing.assert_close(made[first:end].double(), expected, rtol=BF16_STEPS, atol=BF16_STEPS)


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_masked_experts_compute_the_first_counts_rows(triton_device, kind):
    torch.manual_seed(4)
    counts = [3, 0, 16]
    weight, flat = _weight(3, 72, 256, device=triton_device), torch.randn(48, 256, device=triton_device).bfloat16()
    flat[4:16] = float("nan")  # rows nobody may let into the others
    rows = flat.view(3, 16, 256)
    if kind == "fp8":
        data, scale = fp8.reference(flat)
        rows = fp8.Fp8Rows(data.view(3, 16, 256), scale.view(3, 16, 2).transpose(1, 2).contiguous().transpose(1, 2))
    on_device = torch.tensor(counts, dtype=torch.int32, device=triton_device)
    for backend in _usable(grouped_nvfp4.MASKED_BACKENDS, triton_device):
        made = backend.run.run(rows, backend.run.prepare(weight), on_device)
        assert made.shape == (3, 16, 72)
        for expert, count in enumerate(counts):
            x = flat.view(3, 16, 256)[expert, :count]
            x = fp8.dequantise_rows(fp8.reference(x)) if kind == "fp8" else x
            expected = _expected(x, _one(weight, expert))
            torch.testing.assert_close(made[expert, :count].double(), expected, rtol=BF16_STEPS, atol=BF16_STEPS)


def _one(weight, expert):
    return nvfp4.Nvfp4Weight(weight.packed[expert], weight.block_scale[expert], weight.global_scale[expert])


def test_a_weight_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="k % 128"):
        grouped_nvfp4.TritonGrouped.prepare(nvfp4.quantise(torch.randn(2, 8, 64)))
    with pytest.raises(ValueError, match="k % 128"):
        nvfp4_linear.TritonLinear.prepare(nvfp4.quantise(torch.randn(8, 64)))


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("tile, split", [(32, (4, 1)), (64, (4, 1)), (64, (3, 1)), (128, (2, 1)), (128, (5, 1))])
def test_every_way_to_cut_the_hopper_product_gives_the_same(gpu, kind, tile, split):
    """Counts around the tiles' sizes, k of an odd number of steps, and rows nobody asked for stay unwritten."""
    if reason := nvfp4_hopper.why_not(gpu):
        pytest.skip(reason)
    torch.manual_seed(6)
    counts = [0, 1, 16, 17, 33, 64, 100, 150]
    weight, flat = _weight(8, 512, 384, device=gpu), torch.randn(8 * 150, 384, device=gpu).bfloat16()
    rows, x = flat.view(8, 150, 384), flat
    if kind == "fp8":
        data, scale = fp8.reference(flat)
        rows = fp8.Fp8Rows(data.view(8, 150, -1), scale.T.reshape(-1, 8, 150).permute(1, 2, 0))
        x = fp8.dequantise_rows(fp8.Fp8Rows(data, scale))
    out = torch.full((8, 150, 512), float("nan"), device=gpu, dtype=torch.bfloat16)
    bounds = torch.tensor(counts, dtype=torch.int32, device=gpu)
    prepared = nvfp4_hopper.prepare(weight)
    nvfp4_hopper.multiply(rows, prepared, bounds, nvfp4_hopper.MASKED, out, tile=tile, split=split)
    for expert, count in enumerate(counts):
        expected = _expected(x.view(8, 150, 384)[expert, :count], _one(weight, expert))
        torch.testing.assert_close(out[expert, :count].double(), expected, rtol=BF16_STEPS, atol=BF16_STEPS)
        assert out[expert, count:].isnan().all()


@pytest.mark.parametrize("parts", [2, 3])
def test_a_hopper_product_cut_along_k_adds_its_parts(gpu, parts):
    if reason := nvfp4_hopper.why_not(gpu):
        pytest.skip(reason)
    torch.manual_seed(7)
    weight, x = _weight(1, 200, 768, device=gpu), torch.randn(70, 768, device=gpu).bfloat16()
    prepared = nvfp4_hopper.prepare(weight)
    for rows in (x, fp8.reference(x)):
        out = torch.empty(70, 200, device=gpu, dtype=torch.bfloat16)
        nvfp4_hopper.multiply(rows, prepared, None, nvfp4_hopper.DENSE, out, split=(2, parts))
        expected = _expected(rows, _one(weight, 0))
        torch.testing.assert_close(out.double(), expected, rtol=BF16_STEPS, atol=BF16_STEPS)


@pytest.mark.skipif(triton is None, reason="needs triton")
@pytest.mark.parametrize("capability", [90, 100])
def test_the_triton_kernels_compile_for_hopper_and_blackwell(capability, tmp_path):
    """No GPU is needed, and nothing runs. In a process of its own: here kernels may be interpreted."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.getcwd()}
    script = [sys.executable, "-c", COMPILE, str(capability)]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 10_000  # bytes of machine code


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernels.formats import nvfp4
from kernels.linear import nvfp4_triton

def cubin(kernel, ints, pointers, constants):
    signature = dict.fromkeys(ints.split(), "i32") | pointers
    source = ASTSource(kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32), options={"num_warps": 8}).asm["cubin"]

multiply = cubin(
    nvfp4_triton.multiply_kernel, "rows n width x_stride rows_each",
    {"x": "*fp8e4nv", "x_scale": "*fp32", "packed": "*u8", "block_scale": "*u8", "global_scale": "*fp32",
     "starts": "*i32", "counts": "*i32", "out": "*bf16"},
    {"FP8": True, "HAS_STARTS": True, "HAS_COUNTS": False, "TILE_N": 128, "TILE_ROWS": 64, "TILE_K": 128,
     "WIDE": False},
)
quantise = cubin(
    nvfp4._quantise_kernel, "rows width row_stride",
    {"x": "*bf16", "global_scale": "*fp32", "packed": "*u8", "block_scale": "*u8"}, {"ROWS": 2, "BLOCKS": 64, "FUSED": True},
)
print(len(multiply) + len(quantise))
"""


def test_the_hopper_layout_holds_each_code_and_scale_where_its_thread_looks():
    """Reads prepared weights as nvfp4_hopper.cu says its threads do, and finds the disk form's values."""
    torch.manual_seed(5)
    weight = nvfp4.quantise(torch.randn(2, 100, 256))
    prepared = nvfp4_hopper.prepare(weight)
    assert prepared.data.shape == (2, 2, 2, 4608)
    codes, scales = prepared.data[..., :4096], prepared.data[..., 4096:]
    thread = torch.arange(128)
    rows = 16 * (thread // 32) + thread % 32 // 4
    words = codes.reshape(2, 2, 2, 2, 128, 4, 4).contiguous().view(torch.int32)[..., 0]  # half of k, thread, word
    found = torch.zeros(2, 128, 256)
    for word in range(4):
        row, block = rows + 8 * (word % 2), thread % 4 + 4 * (word // 2)
        scale = scales.reshape(2, 2, 2, 128, 4)[..., word].contiguous().view(torch.float8_e4m3fn).float()
        for half in range(2):
            for j, pair in enumerate(_widened(words[..., half, :, word])):
                for side in range(2):
                    value = (pair >> 8 * side).to(torch.uint8).view(torch.float8_e4m3fn).float() * 2.0**6 * scale
                    for strip in range(2):
                        for chunk in range(2):
                            column = 128 * chunk + 16 * block + 2 * (4 * half + j) + side
                            found[:, 64 * strip + row, column] = value[:, strip, chunk]
    assert not found[:, 100:].any()
    expected = nvfp4.dequantise(weight) / weight.global_scale[:, None, None]
    torch.testing.assert_close(found[:, :100], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("rows", [1, 64, 128])
@pytest.mark.parametrize("n, k", [(64, 128), (4096, 7168), (7168, 2048), (36864, 7168), (2112, 1536)])
def test_a_product_is_cut_into_at_most_one_block_for_each_multiprocessor(rows, n, k):
    strips, chunks = -(-n // 64), k // 128
    each, parts = nvfp4_hopper.split_for(strips, chunks, rows, chunks, 132)
    assert -(-strips // each) * parts <= 132 and 1 <= parts <= chunks
    assert nvfp4_hopper.split_for(strips, chunks, rows, 1, 132)[1] == 1  # where k may not be cut


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.timeout(300)
def test_the_hopper_kernel_builds_where_there_is_nvcc():
    loaded = nvfp4_hopper.library()
    assert loaded.hr_nvfp4_rows and loaded.hr_nvfp4_multiply


def _widened(word):
    """`widen` of nvfp4_hopper.cu before scaling: four pairs of e4m3, the first in the low byte."""
    mask = 0x9C9C9C9C - (1 << 32)
    first, second = word & mask, ((word << 2) ^ (word >> 2 & 0x3FFFFFFF)) & mask
    return first & 0xFFFF, first >> 16 & 0xFFFF, second & 0xFFFF, second >> 16 & 0xFFFF
