"""Where a step's time goes: the device time of each op's kernels, beside the roofline of the same ops.

One eager step runs under torch's profiler with every op of the model labelled; a kernel belongs to the label in which it
was launched. Device times of kernels do not depend on how they were launched, so they hold for the captured step as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from bench.kernels.harness import Ceilings
from bench.roofline import Op
from headrace.model.deepseek_gpu import GpuTransformer
from headrace.model.gpu_linear import ExpertSwiglu, PlainLinear, PreparedLinear, Swiglu

PREFIX = "op:"
LABELS: dict[str, tuple[str, ...]] = {
    "norm_quantise": ("norm_quantise", "ffn_norm_quantise", "q_norm_quantise"),
    "quantise": ("quantise_o", "latent_quantise"),
    "silu_mul": ("experts_silu_mul", "shared_silu_mul", "dense_silu_mul"),
    "router, head": ("router", "head"),
    "absorb": ("absorb_q", "absorb_o"),
    "experts": ("experts_gate_up", "experts_down"),
    "shared": ("shared_gate_up", "shared_down"),
    "dense": ("dense_gate_up", "dense_down"),
    "embedding, sampling": ("embedding", "sampling"),
}
"""Label -> the roofline's ops it stands for; other labels stand for the op of their own name."""
KERNEL_LABELS = {
    "add_norm": "norm_quantise",
    "quantise": "quantise",
    "silu_mul_quantise": "silu_mul",
    "silu_mul": "silu_mul",
    "gate": "gate",
    "permute": "permute",
    "combine": "combine",
    "latent_store": "latent_store",
    "latent_store_decode": "latent_store",
    "rope_quantize_store": "latent_store",
    "concat_mla_k": "concat_mla_k",
    "wide_product": "router, head",
}
UNLABELLED = "other: "


def _labelled(function: Callable[..., Any], label: str | None) -> Callable[..., Any]:
    """`label` None: what `bench_label` of the first argument says."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with record_function(PREFIX + (label or getattr(args[0], "bench_label", "linear"))):
            return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def labels_on(transformer: GpuTransformer) -> Iterator[None]:
    """While it is open, every op of this model runs inside a profiler range of its own."""
    with contextlib.ExitStack() as stack:
        for name, label in KERNEL_LABELS.items():
            if hasattr(transformer.kernels, name):
                _patch(stack, transformer.kernels, name, label)
        for product in (PlainLinear, PreparedLinear):
            _patch(stack, product, "__call__", None)
        _patch(stack, ExpertSwiglu, "__call__", "experts")
        for attention, _ in transformer._opened.values():
            _patch(stack, attention, "run", "mla_decode")
            _patch(stack, attention, "plan", "mla_decode")
        _patch(stack, transformer.prefill_attention, "run", "mla_prefill")
        _name_products(transformer)
        yield


def _patch(stack: contextlib.ExitStack, owner: Any, name: str, label: str | None) -> None:
    own = vars(owner).get(name)
    setattr(owner, name, _labelled(getattr(owner, name), label))
    stack.callback(lambda: setattr(owner, name, own) if own is not None else delattr(owner, name))


def _name_products(transformer: GpuTransformer) -> None:
    for block in transformer.blocks:
        attention, ffn = block.attention, block.ffn
        named = {"qkv_a": attention.qkv_a, "q_b": attention.q_b, "kv_b": attention.kv_b, "o_proj": attention.out}
        for part, label in (("ffn", "dense"), ("shared", "shared")):
            swiglu = getattr(ffn, part, None)
            if isinstance(swiglu, Swiglu):
                named |= {f"{label}_gate_up": swiglu.gate_up, f"{label}_down": swiglu.down}
        for label, product in named.items():
            if product is not None:
                product.bench_label = label if label.split("_")[0] not in ("dense", "shared") else label.split("_")[0]


def kernel_times(transformer: GpuTransformer, call: Callable[[], Any]) -> dict[str, float]:
    """Label, or `other: ` and the kernel's name -> microseconds on the device in one call."""
    torch.cuda.synchronize()
    with labels_on(transformer), torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as p:
        call()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    claimed: dict[str, float] = {}
    for event in p.events():
        if event.name.startswith(PREFIX) and event.device_type == torch.autograd.DeviceType.CPU:
            for kernel in _kernels_below(event):
                label = event.name.removeprefix(PREFIX)
                found[label] = found.get(label, 0.0) + kernel.duration
                claimed[kernel.name] = claimed.get(kernel.name, 0.0) + kernel.duration
    for event in p.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(PREFIX):
            us = event.time_range.elapsed_us()
            label = UNLABELLED + event.name[:70]
            found[label] = found.get(label, 0.0) + us
    for name, us in claimed.items():
        label = UNLABELLED + name[:70]
        found[label] = found.get(label, us) - us
    return {label: us for label, us in found.items() if us > 0.5}


def _kernels_below(event: Any) -> Iterator[Any]:
    yield from event.kernels
    for child in event.cpu_children:
        if not child.name.startswith(PREFIX):
            yield from _kernels_below(child)


def beside_the_roofline(ops: Sequence[Op], ceilings: Ceilings, measured: dict[str, float]) -> list[dict[str, Any]]:
    """[{op, roofline_us, measured_us}] of a whole step: the roofline's ops first, then kernels outside of any label."""
    label_of = {op: label for label, members in LABELS.items() for op in members}
    limits: dict[str, float] = {}
    for op in ops:
        label = label_of.get(op.name, op.name)
        limits[label] = limits.get(label, 0.0) + op.limit_us(ceilings)
    rest = sorted(set(measured) - set(limits), key=lambda label: -measured[label])
    return [
        {"op": label, "roofline_us": limits.get(label, 0.0), "measured_us": measured.get(label)}
        for label in (*limits, *rest)
    ]


def tflops_of(label: str, ops: Sequence[Op], measured: dict[str, float]) -> float | None:
    """What an op's kernels reached; None where it was not seen."""
    flops = sum(op.count * op.flops for op in ops if op.name in LABELS.get(label, (label,)))
    return flops / measured[label] * 1e-6 if measured.get(label) else None
