"""Where a step's time goes: the device time of its kernels, by op, beside the roofline of the same ops.

Kernels are told apart by name. A library's matrix product does not say which of our ops called it, so ops are reported in
groups; what no pattern knows is reported under its own name, never dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.kernels.harness import Ceilings
from bench.roofline import Op

GROUPS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("attention", ("mla_decode", "mla_prefill"), r"flash|mla_|BatchPrefill|PrefillWith|splitkv|fmha|_attend|_merge"),
    ("grouped experts", ("experts_gate_up", "experts_down"), r"grouped"),
    (
        "fp8 projections",
        (
            *("qkv_a", "q_b", "kv_b", "o_proj", "dense_gate_up", "dense_down"),
            *("shared_gate_up", "shared_down"),
        ),
        r"e4m3|fp8|qmma|blockscale|deep_gemm|nvjet_.*qq|scaled",
    ),
    ("bf16 products", ("absorb_q", "absorb_o", "router", "head"), r"nvjet|gemm|cutlass|bmm|splitK|cublas"),
    (
        "norm, quantise",
        ("norm_quantise", "ffn_norm_quantise", "q_norm_quantise", "quantise_o", "latent_quantise"),
        r"norm|quantis",
    ),
    ("activation", ("experts_silu_mul", "shared_silu_mul", "dense_silu_mul"), r"silu"),
    ("rope, store", ("latent_store",), r"rope|store"),
    ("concat", ("concat_mla_k",), r"concat"),
    ("gate, permute, combine", ("gate", "permute", "combine"), r"gate|permute|combine|plan"),
    ("embedding, sampling", ("embedding", "sampling"), r"sampl|index_select|gather|embedding|argmax"),
)
"""(group, ops of `roofline.step_ops`, what its kernels' names match), first match wins."""


def kernel_times(call: Callable[[], Any], calls: int) -> dict[str, float]:
    """Kernel name -> microseconds on the device for one of `calls` calls."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in profile.key_averages():
        if event.self_device_time_total > 0:
            found[event.key] = found.get(event.key, 0.0) + event.self_device_time_total / calls
    return found


def group_of(kernel: str) -> str:
    """The group whose pattern knows the kernel, else its own name."""
    return next((name for name, _, pattern in GROUPS if re.search(pattern, kernel, re.IGNORECASE)), kernel[:80])


def flops_of(group: str, ops: Sequence[Op]) -> float:
    """FLOP of a group's ops in one step."""
    members = next(members for name, members, _ in GROUPS if name == group)
    return sum(op.count * op.flops for op in ops if op.name in members)


def beside_the_roofline(ops: Sequence[Op], ceilings: Ceilings, kernels: dict[str, float]) -> list[dict[str, Any]]:
    """[{op, roofline_us, measured_us}], groups first, then kernels nobody knows; whole steps."""
    measured: dict[str, float] = {}
    for kernel, us in kernels.items():
        measured[group_of(kernel)] = measured.get(group_of(kernel), 0.0) + us
    entries = []
    for name, members, _ in GROUPS:
        limit = sum(op.limit_us(ceilings) for op in ops if op.name in members)
        if limit or name in measured:
            entries.append({"op": name, "roofline_us": limit, "measured_us": measured.pop(name, 0.0)})
    rest = sorted(measured.items(), key=lambda item: -item[1])
    return entries + [{"op": name, "roofline_us": 0.0, "measured_us": us} for name, us in rest]
