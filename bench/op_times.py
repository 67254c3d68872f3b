"""Where a step's time goes: the device time of each op's kernels, beside the roofline of the same ops.

One eager step runs under torch's profiler with a tiny marker kernel before and after every op of the model. Kernels of a
stream run in the order of their launch, so what runs between two markers belongs to that op, whoever launched it (torch,
Triton and our own libraries leave different traces on the host). Device times of kernels do not depend on how they were
launched, so they hold for the captured step as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from headrace.model.deepseek.fused import FusedTransformer
from headrace.model.deepseek.fused_linear import ByRows, ExpertSwiglu, PlainLinear, PreparedLinear, Swiglu
from headrace.planning.ceilings import Ceilings
from headrace.planning.roofline import Op

MARKER = "spin_kernel"  # what torch.cuda._sleep launches
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


class _Markers:
    """Which op begins (its label) or ends (None) at each marker, in the order of launch."""

    def __init__(self) -> None:
        self.log: list[str | None] = []

    def put(self, label: str | None) -> None:
        self.log.append(label)
        torch.cuda._sleep(1)

    def around(self, function: Callable[..., Any], label: str | None) -> Callable[..., Any]:
        """`label` None: what `bench_label` of the first argument says."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.put(label or getattr(args[0], "bench_label", "linear"))
            try:
                return function(*args, **kwargs)
            finally:
                self.put(None)

        return call


@contextlib.contextmanager
def labels_on(transformer: FusedTransformer) -> Iterator[_Markers]:
    """While it is open, every op of this model runs between markers."""
    markers = _Markers()
    with contextlib.ExitStack() as stack:

        def patch(owner: Any, name: str, label: str | None) -> None:
            own = vars(owner).get(name)
            setattr(owner, name, markers.around(getattr(owner, name), label))
            stack.callback(lambda: setattr(owner, name, own) if own is not None else delattr(owner, name))

        for name, label in KERNEL_LABELS.items():
            if hasattr(transformer.kernels, name):
                patch(transformer.kernels, name, label)
        for product in (PlainLinear, PreparedLinear):
            patch(product, "__call__", None)
        patch(ExpertSwiglu, "__call__", "experts")
        for attention, _ in transformer._opened.values():
            patch(attention, "run", "mla_decode")
            patch(attention, "plan", "mla_decode")
        patch(transformer.prefill_attention, "run", "mla_prefill")
        _name_products(transformer)
        yield markers


def _name_products(transformer: FusedTransformer) -> None:
    for block in transformer.blocks:
        attention = block.attention
        named = [
            ("qkv_a", attention.qkv_a),
            ("q_b", attention.q_b),
            ("kv_b", attention.kv_b),
            ("o_proj", attention.out),
        ]
        for part, label in (("ffn", "dense"), ("shared", "shared")):
            swiglu = getattr(block.ffn, part, None)
            if isinstance(swiglu, Swiglu):
                named += [(label, swiglu.gate_up), (label, swiglu.down)]
        for label, product in named:
            if product is not None:
                for one in (product.few, product.many) if isinstance(product, ByRows) else (product,):
                    one.bench_label = label


def kernel_times(transformer: FusedTransformer, call: Callable[[], Any]) -> dict[str, float]:
    """Label, or `other: ` and the kernel's name -> microseconds on the device in one call."""
    torch.cuda.synchronize()
    with labels_on(transformer) as markers, torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    device = torch.autograd.DeviceType.CUDA
    kernels = [event for event in profile.events() if event.device_type == device]
    kernels.sort(key=lambda event: event.time_range.start)
    return attribute([(event.name, event.time_range.elapsed_us()) for event in kernels], markers.log)


def attribute(kernels: Sequence[tuple[str, float]], log: Sequence[str | None]) -> dict[str, float]:
    """Adds up (name, microseconds) of kernels in the order they ran by the innermost op whose markers they lie between.

    Raises ValueError when the markers that ran are not those that were put.
    """
    found: dict[str, float] = {}
    within: list[str] = []
    place = 0
    for name, us in kernels:
        if MARKER in name:
            if place == len(log):
                raise ValueError(f"more markers ran than the {len(log)} that were put")
            if log[place] is None:
                within.pop()
            else:
                within.append(log[place])
            place += 1
            continue
        label = within[-1] if within else UNLABELLED + name[:70]
        found[label] = found.get(label, 0.0) + us
    if place != len(log):
        raise ValueError(f"{place} markers ran, {len(log)} were put")
    return found


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
