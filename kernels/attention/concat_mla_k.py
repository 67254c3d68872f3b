"""Keys of the naive form: each head's own part, then the one rotated part that all heads share.

k_nope   [num_tokens, num_heads, nope]  any dtype; a strided view (of kv_b's [t, h, nope + value]), last dimension dense
k_rope   [num_tokens, rope]             same dtype; rows may be strided, last dimension dense
returns  [num_tokens, num_heads, nope + rope], dense

Any number of heads and any widths; no tokens gives no keys. Values are copied, never changed, NaN included.
A program takes one token and a few heads, reads the shared part once and keeps it in registers for all of them.
FlashInfer's writes into `out`, and takes 128 heads of 128 + 64 only. Source: DeepSeek-V3 report 2.1.1.
"""

from __future__ import annotations

import torch

from kernels.select import Backend
from kernels.toolchain.triton_support import jit, needs_triton, tl, triton
from kernels.toolchain.vendors import needs_flashinfer_modules


def reference(k_nope: torch.Tensor, k_rope: torch.Tensor) -> torch.Tensor:
    return torch.cat((k_nope, k_rope[:, None].expand(-1, k_nope.shape[1], -1)), -1)


@jit
def _concat(
    k_nope, nope_token, nope_head, k_rope, rope_token, out,
    HEADS: tl.constexpr, GROUP: tl.constexpr, NOPE: tl.constexpr, NOPE_BLOCK: tl.constexpr, ROPE: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Strides are in elements."""
    groups: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    token = (tl.program_id(0) // groups).to(tl.int64)
    head = (tl.program_id(0) % groups) * GROUP + tl.arange(0, GROUP)[:, None]
    of_nope, of_rope = tl.arange(0, NOPE_BLOCK)[None, :], tl.arange(0, ROPE_BLOCK)[None, :]
    nope_inside, rope_inside = (head < HEADS) & (of_nope < NOPE), (head < HEADS) & (of_rope < ROPE)
    shared = tl.load(k_rope + token * rope_token + of_rope, of_rope < ROPE)
    own = tl.load(k_nope + token * nope_token + head * nope_head + of_nope, nope_inside)
    place = out + token * (HEADS * (NOPE + ROPE)) + head * (NOPE + ROPE)
    tl.store(place + of_nope, own, nope_inside)
    tl.store(place + NOPE + of_rope, tl.broadcast_to(shared, (GROUP, ROPE_BLOCK)), rope_inside)


def _launch(k_nope: torch.Tensor, k_rope: torch.Tensor, out: torch.Tensor, group: int, warps: int) -> torch.Tensor:
    tokens, heads, nope = k_nope.shape
    rope = k_rope.shape[-1]
    if k_rope.dtype != k_nope.dtype or len(k_rope) != tokens or k_nope.stride(2) != 1 or k_rope.stride(1) != 1:
        raise ValueError(f"{k_nope.dtype} {tuple(k_nope.shape)} and {k_rope.dtype} {tuple(k_rope.shape)} must fit")
    if tokens:
        group = min(group, triton.next_power_of_2(heads))
        _concat[(tokens * triton.cdiv(heads, group),)](
            k_nope, k_nope.stride(0), k_nope.stride(1), k_rope, k_rope.stride(0), out,
            HEADS=heads, GROUP=group, NOPE=nope, NOPE_BLOCK=triton.next_power_of_2(nope), ROPE=rope,
            ROPE_BLOCK=triton.next_power_of_2(rope), num_warps=warps,
        )  # fmt: skip
    return out


def _empty(k_nope: torch.Tensor, k_rope: torch.Tensor) -> torch.Tensor:
    return k_nope.new_empty(*k_nope.shape[:2], k_nope.shape[2] + k_rope.shape[1])


def _triton(k_nope: torch.Tensor, k_rope: torch.Tensor) -> torch.Tensor:
    return _launch(k_nope, k_rope, _empty(k_nope, k_rope), group=16, warps=1)


def _flashinfer(k_nope: torch.Tensor, k_rope: torch.Tensor) -> torch.Tensor:
    """128 heads of 128 + 64; others raise ValueError."""
    from flashinfer.concat_ops import concat_mla_k

    if k_nope.shape[1:] != (128, 128) or k_rope.shape[1] != 64:
        raise ValueError(f"FlashInfer's takes 128 heads of 128 + 64, not {tuple(k_nope.shape[1:])} + {k_rope.shape[1]}")
    out = _empty(k_nope, k_rope)
    concat_mla_k(out, k_nope, k_rope[:, None])
    return out


BACKENDS = (
    Backend("triton", _triton, why_not=needs_triton),
    Backend("flashinfer", _flashinfer, why_not=needs_flashinfer_modules("concat_mla")),
    Backend("reference", reference),
)
