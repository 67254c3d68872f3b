"""Rotate queries and rows and turn them into e4m3 for FP8 attention: one op instead of a rotation and four casts.

q     [num_tokens, num_heads, width + rope_dim]  bf16; width is nope (128 in R1) or, absorbed, the latent (512)
rows  [num_tokens, row_dim]                      bf16 latent ++ rope, as they leave the projection or already normed
cos   [num_tokens, rope_dim // 2] fp32           sin alike
BACKENDS        return (q, rows) in out_dtype, dense, the last rope_dim columns of both rotated; inputs stay

STORE_BACKENDS  are the decode form: queries come in two parts, and rows go to the pool
q_latent, q_rope  [num_tokens, num_heads, c | rope_dim] bf16, strided views
gain, eps         of the latent's RMS norm; gain None when rows are normed already
pool              [num_blocks, block_size, row_dim]  e4m3 or bf16, written in place
slots             [num_tokens] int64                 as in latent_store; -1 is padding, not stored
out               [num_tokens, num_heads, c + rope_dim] e4m3 or bf16, written

The scale is 1: a value is rounded to the nearest e4m3 number, ties to even, and beyond +-448 becomes +-448; NaN stays.
FP8 attention takes it so (FlashInfer's and FlashMLA's are called with scales of 1), and rows keep one meaning in the
mesh. A normed and a rotated part are rounded to bf16 first, as in the pool's bf16 form. rope_dim is a power of two, last
dimensions are dense. No tokens: nothing happens.
Source: FlashInfer's mla_rope_quantize_fp8 and rope_quantize_fp8_append_paged_kv_cache do the same without the norm.
"""

from __future__ import annotations

import torch

from kernels.attention import latent_store, rope
from kernels.attention.latent_store import finished_latent, rotated, rounded
from kernels.select import Backend
from kernels.toolchain.triton_support import jit, needs_triton, tl, triton
from kernels.toolchain.vendors import needs_flashinfer_modules


def reference(
    q: torch.Tensor, rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    q, rows, rope_dim = q.clone(), rows.clone(), 2 * cos.shape[1]
    rope.reference(q[..., -rope_dim:], cos, sin)
    rope.reference(rows[:, None, -rope_dim:], cos, sin)
    return rounded(q, out_dtype), rounded(rows, out_dtype)


def store_reference(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    rows: torch.Tensor,
    gain: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """On a GPU it waits for the device (it looks at the padding)."""
    part, rows, latent = q_rope.clone(), rows.clone(), rows.shape[1] - q_rope.shape[-1]
    if gain is None:
        rope.reference(part, cos, sin)
        rope.reference(rows[:, None, latent:], cos, sin)
        real = slots >= 0
        made = rounded(rows[real], pool.dtype).view(torch.uint8)
        pool.view(torch.uint8).view(-1, made.shape[1]).index_copy_(0, slots[real], made)
    else:
        latent_store._torch(part, rows, gain, eps, cos, sin, pool, latent_store._look(slots))
    out.copy_(rounded(torch.cat((q_latent, part), -1), out.dtype))


@jit
def _quantise(
    q, q_token, q_head, q_rope, rope_token, rope_head, out, rows, row_stride, gain, eps, cos, sin, made_rows, slots,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr, LATENT: tl.constexpr,
    LATENT_BLOCK: tl.constexpr, ROPE: tl.constexpr, NORM: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """One program for each token and group of heads; group 0 also makes the row. Strides are in elements."""
    groups: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    token = (tl.program_id(0) // groups).to(tl.int64)
    group = tl.program_id(0) % groups
    head = (group * GROUP + tl.arange(0, GROUP))[:, None]
    of_rope, of_width = tl.arange(0, ROPE), tl.arange(0, WIDTH_BLOCK)[None, :]
    here, inside = head < HEADS, (head < HEADS) & (of_width < WIDTH)
    plain = tl.load(q + token * q_token + head * q_head + of_width, inside, 0.0)
    turned = tl.load(q_rope + token * rope_token + head * rope_head + of_rope[None, :], here, 0.0)
    angle = token * (ROPE // 2) + tl.arange(0, ROPE // 2)[None, :]
    turn, lift = tl.load(cos + angle), tl.load(sin + angle)
    turned = rotated(turned.to(tl.float32), turn, lift).to(q.dtype.element_ty).to(tl.float32)
    place = out + token * (HEADS * (WIDTH + ROPE)) + head * (WIDTH + ROPE)
    tl.store(place + of_width, plain.to(tl.float32).to(out.dtype.element_ty), inside)
    tl.store(place + WIDTH + of_rope[None, :], turned.to(out.dtype.element_ty), here)
    if group == 0:
        row, column = rows + token * row_stride, tl.arange(0, LATENT_BLOCK)
        slot = tl.load(slots + token) if PAGED else token
        key = rotated(tl.load(row + LATENT + of_rope)[None, :].to(tl.float32), turn, lift)
        key = tl.reshape(key, (ROPE,)).to(rows.dtype.element_ty).to(tl.float32)
        if NORM:
            latent = finished_latent(row, gain, eps, LATENT, LATENT_BLOCK)
        else:
            latent = tl.load(row + column, column < LATENT, 0.0).to(tl.float32)
        if slot >= 0:
            target = made_rows + slot * (LATENT + ROPE)
            tl.store(target + column, latent.to(made_rows.dtype.element_ty), column < LATENT)
            tl.store(target + LATENT + of_rope, key.to(made_rows.dtype.element_ty))


def _launch(q, q_rope, out, rows, gain, eps, cos, sin, made_rows, slots, *, group: int, warps: int) -> None:
    """gain None: no norm. slots None: made_rows are rows, not a pool."""
    tokens, heads, width = q.shape
    rope_dim = q_rope.shape[-1]
    latent = rows.shape[1] - rope_dim
    if not tokens:
        return
    if (
        rope_dim & (rope_dim - 1)
        or rope_dim != 2 * cos.shape[1]
        or not (out.is_contiguous() and made_rows.is_contiguous())
    ):
        raise ValueError(
            f"q {tuple(q.shape)}, rope {rope_dim} (a power of two), cos {tuple(cos.shape)} must fit, outputs dense"
        )
    group = min(group, triton.next_power_of_2(heads))
    _quantise[(tokens * triton.cdiv(heads, group),)](
        q, q.stride(0), q.stride(1), q_rope, q_rope.stride(0), q_rope.stride(1), out,
        rows, rows.stride(0), rows if gain is None else gain, eps, cos, sin, made_rows, rows if slots is None else slots,
        HEADS=heads, GROUP=group, WIDTH=width, WIDTH_BLOCK=triton.next_power_of_2(width), LATENT=latent,
        LATENT_BLOCK=triton.next_power_of_2(latent), ROPE=rope_dim, NORM=gain is not None, PAGED=slots is not None,
        num_warps=warps,
    )  # fmt: skip


GROUP_VALUES = 8192
"""Of q's unrotated part, one program: 16 loads of 16 bytes a thread."""


def _group(width: int) -> int:
    return max(1, GROUP_VALUES // triton.next_power_of_2(width))


def _triton(
    q: torch.Tensor, rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    width = q.shape[-1] - 2 * cos.shape[1]
    made = torch.empty(q.shape, dtype=out_dtype, device=q.device)
    made_rows = torch.empty(rows.shape, dtype=out_dtype, device=q.device)
    _launch(
        q[..., :width], q[..., width:], made, rows, None, 0.0, cos, sin, made_rows, None, group=_group(width), warps=4
    )
    return made, made_rows


def _store_triton(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    rows: torch.Tensor,
    gain: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
) -> None:
    group = _group(q_latent.shape[-1])
    _launch(q_latent, q_rope, out, rows, gain, eps, cos, sin, pool, slots, group=group, warps=4)


def _flashinfer(
    q: torch.Tensor, rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Needs cosines and sines side by side and positions, which are made here: two more launches. e4m3 only."""
    from flashinfer.rope import mla_rope_quantize_fp8

    if out_dtype != torch.float8_e4m3fn:
        raise ValueError(f"FlashInfer's quantises; {out_dtype} was asked for")
    width, latent = (x.shape[-1] - 2 * cos.shape[1] for x in (q, rows))
    made, made_rows = (torch.empty(x.shape, dtype=out_dtype, device=x.device) for x in (q, rows))
    mla_rope_quantize_fp8(
        q[..., width:], rows[:, latent:], q[..., :width], rows[:, :latent], torch.cat((cos, sin), 1),
        torch.arange(len(q), device=q.device, dtype=torch.int32), is_neox=False, quantize_dtype=out_dtype,
        q_rope_out=made[..., width:], k_rope_out=made_rows[:, latent:], q_nope_out=made[..., :width],
        k_nope_out=made_rows[:, :latent],
    )  # fmt: skip
    return made, made_rows


BACKENDS = (
    Backend("triton", _triton, why_not=needs_triton),
    Backend("flashinfer", _flashinfer, why_not=needs_flashinfer_modules("rope")),
    Backend("reference", reference),
)
STORE_BACKENDS = (
    Backend("triton", _store_triton, why_not=needs_triton),
    Backend("reference", store_reference),
)
