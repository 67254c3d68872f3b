"""Finish a step's queries and rows, and put each new row into its slot of the paged pool: one op.

q      [num_tokens, num_heads, nope + rope_dim]  the last rope_dim values of each head are rotated in place
rows   [num_tokens, row_dim]                     latent ++ rope, 512 + 64 in R1; the latent is normed and the rope part
                                                 rotated in place, then the row is stored
gain, eps                                        of the latent's RMS norm
cos    [num_tokens, rope_dim // 2] fp32          sin alike
pool   [num_blocks, block_size, row_dim]         fp32, bf16 or e4m3 (GPU), written in place, one pool a layer; rows are
                                                 cast to it, beyond +-448 to e4m3's largest
slots  [num_tokens] int64                        block_id * block_size + offset; -1 is padding, skipped

DECODE_BACKENDS leave q and rows as they are and add
absorbed  [num_tokens, num_heads, row_dim] bf16 or e4m3   gets the rotated part of q in its last rope_dim columns

Two tokens never share a slot. No tokens, or only padding: nothing is stored. `plan(slots)` looks at the padding once for
all layers of a step; on a GPU it looks at nothing, so that the host never waits, and Triton skips padding by itself.
Triton wants rope_dim a power of two, last dimensions dense, and cos, sin dense.
Source: DeepSeek-V3 report 2.1.1 for the row; the slot rule is ours.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.attention import rope
from kernels.rows import rms_norm
from kernels.select import Backend
from kernels.toolchain import cpu_library
from kernels.toolchain.triton_support import jit, needs_triton, tl, triton

E4M3_MAX = 448.0


class Plan(NamedTuple):
    """all_slots, as given; tokens: which rows are real (None when all are); slots: where those go.

    On a GPU nobody has looked: tokens is None, and slots are all_slots with their padding.
    """

    all_slots: torch.Tensor
    tokens: torch.Tensor | None
    slots: torch.Tensor


def plan(slots: torch.Tensor) -> Plan:
    if slots.device.type == "cuda":
        return Plan(slots, None, slots)
    return _look(slots)


def _look(slots: torch.Tensor) -> Plan:
    real = slots >= 0
    if bool(real.all()):
        return Plan(slots, None, slots)
    tokens = real.nonzero().squeeze(1)
    return Plan(slots, tokens, slots[tokens])


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in another format; what e4m3 cannot hold becomes its largest, as the GPU's own conversion does. NaN stays."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(dtype) if dtype == torch.float8_e4m3fn else x.to(dtype)


def reference(
    q: torch.Tensor,
    rows: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: torch.Tensor,
    store: Plan,
) -> None:
    latent, rope_dim = len(gain), 2 * cos.shape[1]
    rope.reference(q[..., -rope_dim:], cos, sin)
    rope.reference(rows[:, None, latent:], cos, sin)
    rows[:, :latent] = rms_norm.reference(rows[:, :latent], gain, eps)
    for token, slot in enumerate(store.all_slots.tolist()):
        if slot >= 0:
            pool[slot // pool.shape[1], slot % pool.shape[1]] = rounded(rows[token], pool.dtype)


def _torch(
    q: torch.Tensor,
    rows: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: torch.Tensor,
    store: Plan,
) -> None:
    latent, rope_dim = rows[:, : len(gain)], 2 * cos.shape[1]
    latent.copy_(torch.nn.functional.rms_norm(latent, gain.shape, gain.to(latent.dtype), eps))
    rope.rotate(rows[:, None, len(gain) :], cos, sin)
    rope.rotate(q[..., -rope_dim:], cos, sin)
    if store.all_slots.device.type == "cuda":
        store = _look(store.all_slots)
    if store.tokens is not None:
        rows = rows.index_select(0, store.tokens)
    made = rounded(rows, pool.dtype)
    if pool.dtype == torch.float8_e4m3fn:  # torch copies bytes by index, not e4m3
        pool, made = pool.view(torch.uint8), made.view(torch.uint8)
    pool.view(-1, pool.shape[-1]).index_copy_(0, store.slots, made)


def _c(
    q: torch.Tensor,
    rows: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: torch.Tensor,
    store: Plan,
) -> None:
    tokens, heads, head_dim = q.shape
    cpu_library.library().hr_store_rows(
        q.data_ptr(), q.stride(0), heads, head_dim, rows.data_ptr(), rows.stride(0), tokens, len(gain),
        2 * cos.shape[1], gain.data_ptr(), eps, cos.data_ptr(), sin.data_ptr(), pool.data_ptr(),
        pool.dtype == torch.bfloat16, store.all_slots.data_ptr(),
    )  # fmt: skip


# --- Triton: one program for each token and group of heads; group 0 also finishes the row ---


@jit
def rotated(x, cos, sin):
    """x [a, r] fp32 turned by pairs; cos, sin [1, r // 2] or [a, r // 2] fp32. Also for other kernels."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), x.shape)


@jit
def finished_latent(row, gain, eps, LATENT: tl.constexpr, BLOCK: tl.constexpr):
    """The normed latent of one row, fp32 values already rounded to the row's format. Also for other kernels."""
    at = tl.arange(0, BLOCK)
    x = tl.load(row + at, at < LATENT, 0.0)
    wide = x.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide) / LATENT + eps)).to(x.dtype).to(tl.float32)
    weight = tl.load(gain + at, at < LATENT, 0.0).to(x.dtype).to(tl.float32)
    return (normed * weight).to(x.dtype).to(tl.float32)


@jit
def _finish(
    q, q_token, q_head, target, target_token, target_head, rows, row_stride, gain, eps, cos, sin, pool, slots,
    HEADS: tl.constexpr, GROUP: tl.constexpr, LATENT: tl.constexpr, LATENT_BLOCK: tl.constexpr, ROPE: tl.constexpr,
    IN_PLACE: tl.constexpr,
):  # fmt: skip
    """q and target point at the rope part of token 0, head 0; strides are in elements."""
    groups: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    token = (tl.program_id(0) // groups).to(tl.int64)
    group = tl.program_id(0) % groups
    head = group * GROUP + tl.arange(0, GROUP)
    at = tl.arange(0, ROPE)
    inside = head[:, None] < HEADS
    x = tl.load(q + token * q_token + head[:, None] * q_head + at[None, :], inside, 0.0).to(tl.float32)
    angle = token * (ROPE // 2) + tl.arange(0, ROPE // 2)[None, :]
    turn, lift = tl.load(cos + angle), tl.load(sin + angle)
    made = rotated(x, turn, lift).to(target.dtype.element_ty)
    tl.store(target + token * target_token + head[:, None] * target_head + at[None, :], made, inside)
    if group == 0:
        row, slot = rows + token * row_stride, tl.load(slots + token)
        raw = tl.load(row + LATENT + at)  # before the sum below: its barrier keeps the store in place behind every load
        latent = finished_latent(row, gain, eps, LATENT, LATENT_BLOCK)
        key = rotated(raw[None, :].to(tl.float32), turn, lift)
        key = tl.reshape(key, (ROPE,)).to(rows.dtype.element_ty)
        column = tl.arange(0, LATENT_BLOCK)
        if IN_PLACE:
            tl.store(row + column, latent.to(rows.dtype.element_ty), column < LATENT)
            tl.store(row + LATENT + at, key)
        if slot >= 0:
            place = pool + slot * (LATENT + ROPE)
            tl.store(place + column, latent.to(pool.dtype.element_ty), column < LATENT)
            tl.store(place + LATENT + at, key.to(tl.float32).to(pool.dtype.element_ty))


def _launch(q_rope, target, rows, gain, eps, cos, sin, pool, slots, *, in_place: bool, group: int, warps: int) -> None:
    """q_rope, target [t, h, r]: views whose last dimension is dense."""
    tokens, heads, rope_dim = q_rope.shape
    if not tokens:
        return
    latent = rows.shape[1] - rope_dim
    if rope_dim & (rope_dim - 1) or len(gain) != latent or not pool.is_contiguous():
        raise ValueError(
            f"rope_dim {rope_dim} (a power of two), latent {len(gain)} and rows {tuple(rows.shape)} must fit"
        )
    group = min(group, triton.next_power_of_2(heads))
    _finish[(tokens * triton.cdiv(heads, group),)](
        q_rope, q_rope.stride(0), q_rope.stride(1), target, target.stride(0), target.stride(1),
        rows, rows.stride(0), gain, eps, cos, sin, pool, slots,
        HEADS=heads, GROUP=group, LATENT=latent, LATENT_BLOCK=triton.next_power_of_2(latent), ROPE=rope_dim,
        IN_PLACE=in_place, num_warps=warps,
    )  # fmt: skip


def _triton(
    q: torch.Tensor,
    rows: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: torch.Tensor,
    store: Plan,
) -> None:
    part = q[..., -2 * cos.shape[1] :]
    _launch(part, part, rows, gain, eps, cos, sin, pool, store.all_slots, in_place=True, group=16, warps=4)


# --- the decode form ---


def decode_reference(
    q: torch.Tensor,
    rows: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    absorbed: torch.Tensor,
) -> None:
    """By the prefill form, on copies. On a GPU it waits for the device (it looks at the padding)."""
    part = q[..., -2 * cos.shape[1] :].clone()
    _torch(part, rows.clone(), gain, eps, cos, sin, pool, _look(slots))
    absorbed[..., len(gain) :] = rounded(part, absorbed.dtype)


def _decode_triton(
    q: torch.Tensor,
    rows: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    absorbed: torch.Tensor,
) -> None:
    part, target = q[..., -2 * cos.shape[1] :], absorbed[..., len(gain) :]
    _launch(part, target, rows, gain, eps, cos, sin, pool, slots, in_place=False, group=16, warps=4)


BACKENDS = (
    Backend("triton", _triton, why_not=needs_triton),
    Backend("c", _c, why_not=cpu_library.why_not),
    Backend("torch", _torch),
    Backend("reference", reference),
)
DECODE_BACKENDS = (
    Backend("triton", _decode_triton, why_not=needs_triton),
    Backend("reference", decode_reference),
)
