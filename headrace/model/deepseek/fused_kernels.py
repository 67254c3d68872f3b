"""The back end of each op of the GPU model on one device, chosen once.

On a device without a vendor's library Triton serves, on a CPU the references: slow, but the same code path, so that the
model is tested where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from headrace.model.deepseek.fused_linear import (
    FP8,
    PLAIN,
    ByRows,
    Linear,
    PlainGroups,
    PlainLinear,
    PreparedGroups,
    PreparedLinear,
    Rows,
    needs,
)
from headrace.model.weights.precision import Weight, format_of
from kernels.attention import concat_mla_k, latent_store, mla_decode, mla_prefill, rope_quantize
from kernels.experts import expert_dispatch, gate
from kernels.formats import fp8
from kernels.formats.fp8 import Fp8Weight
from kernels.linear import fp8_linear, grouped_linear, grouped_nvfp4, nvfp4_linear
from kernels.rows import rms_norm, silu_mul
from kernels.select import Backend, BackendUnavailable, choose

OPS: Mapping[str, Sequence[Backend]] = {
    "quantise": fp8.QUANTISE_BACKENDS,
    "add_norm": rms_norm.ADD_NORM_BACKENDS,
    "silu_mul": silu_mul.BACKENDS,
    "silu_mul_quantise": silu_mul.QUANTISE_BACKENDS,
    "gate": gate.BACKENDS,
    "expert_plan": expert_dispatch.DEVICE_PLAN_BACKENDS,
    "permute": expert_dispatch.PERMUTE_BACKENDS,
    "combine": expert_dispatch.COMBINE_BACKENDS,
    "latent_store": latent_store.BACKENDS,
    "latent_store_decode": latent_store.DECODE_BACKENDS,
    "rope_quantize_store": rope_quantize.STORE_BACKENDS,
    "concat_mla_k": concat_mla_k.BACKENDS,
    "fp8_linear": fp8_linear.LINEAR_BACKENDS,
    "nvfp4_linear": nvfp4_linear.LINEAR_BACKENDS,
    "grouped_fp8": grouped_linear.CONTIGUOUS_BACKENDS,
    "grouped_nvfp4": grouped_nvfp4.CONTIGUOUS_BACKENDS,
}
"""What configuration and benches call each op -> its back ends, best first; attention besides, chosen by its sizes."""

CUBLAS_ROWS = 192
"""Dense FP8 products of so many rows go to cuBLASLt where it needs no padding: on an H200, o_proj of R1 takes it 47 us at
64 rows and 53 at 256, our own kernel 37 and 74."""


class FusedKernels:
    """One callable or object an op, as attributes named by OPS. `chosen`: op -> name of its back end."""

    def __init__(self, device: torch.device, wanted: Mapping[str, str] | None = None):
        """`wanted`: op -> back end to use instead of the first that runs. Raises BackendUnavailable, KeyError."""
        wanted = dict(wanted or {})
        self.device, self.chosen = device, {}
        self._wanted_decode, self._wanted_prefill = wanted.pop("mla_decode", None), wanted.pop("mla_prefill", None)
        wanted_fp8, self._wanted_groups = wanted.get("fp8_linear"), wanted.get("grouped_fp8")
        for op, backends in OPS.items():
            usable = [backend for backend in backends if backend.name != "c"]  # fp32 on the CPU only
            found = choose(usable, device, wanted.pop(op, None), op=op)
            self.chosen[op] = found.name
            setattr(self, op, found.run)
        self._cublas = self._open_cublas(wanted_fp8)
        if wanted:
            raise KeyError(
                f"no such op: {', '.join(sorted(wanted))}; there are mla_decode, mla_prefill, {', '.join(OPS)}"
            )

    def open_prefill(self, qk_dim: int, value_dim: int) -> Any:
        """The prefill attention for these head widths. Raises BackendUnavailable."""
        found = mla_prefill.open_varlen(
            self.device, self._wanted_prefill, qk_dim=qk_dim, value_dim=value_dim, dtype=torch.bfloat16
        )
        self.chosen["mla_prefill"] = type(found).__name__
        return found

    @property
    def decode_graph_safe(self) -> bool:
        """Whether decode attention plans on the device: always, unless a back end that cannot was asked for."""
        kinds = {backend.name: backend.run.kind for backend in mla_decode.DEVICE_BACKENDS}
        return self._wanted_decode is None or kinds[self._wanted_decode].graph_safe

    def open_decode(self, pool_dtype: torch.dtype, **sizes: Any) -> tuple[Any, torch.dtype]:
        """The decode attention for a pool, and the dtype its queries have: the rows' own where a back end takes that.

        `sizes` as in `kernels.attention.mla_decode.open_device`, without device and dtypes. Raises BackendUnavailable.
        """
        error: BackendUnavailable | None = None
        for q_dtype in dict.fromkeys((pool_dtype, torch.bfloat16)):
            try:
                attention = mla_decode.open_device(
                    self.device,
                    self._wanted_decode,
                    graph_safe=self.decode_graph_safe,
                    q_dtype=q_dtype,
                    pool_dtype=pool_dtype,
                    **sizes,
                )
            except BackendUnavailable as refused:
                error = error or refused
                continue
            self.chosen["mla_decode"] = f"{type(attention).__name__}, queries {str(q_dtype).removeprefix('torch.')}"
            return attention, q_dtype
        assert error is not None
        raise error

    def rows(self, x: torch.Tensor, wants: str) -> Rows:
        """[t, width] bf16 in the format its reader wants."""
        return Rows(fp8=self.quantise(x)) if wants == FP8 else Rows(x)

    def norm(self, x: torch.Tensor, delta: torch.Tensor | None, gain: torch.Tensor, eps: float, *wants: str) -> Rows:
        """x += delta in place, then the norm of x in every wanted format."""
        return Rows(*self.add_norm(x, delta, gain, eps, **needs(*wants)))

    def linear(self, weight: Weight) -> Linear:
        """The product of this weight's format."""
        name = format_of(weight)
        if name == "bf16":
            return PlainLinear(weight)
        if name == "fp8":
            return self._fp8_linear(weight)
        four_bits = self.chosen["nvfp4_linear"] == "flashinfer"  # quantises bf16 to NVFP4 itself
        return PreparedLinear(self.nvfp4_linear, weight, PLAIN if four_bits else FP8)

    def _fp8_linear(self, weight: Fp8Weight) -> Linear:
        few = PreparedLinear(self.fp8_linear, weight, FP8)
        out, width = weight.data.shape
        if self._cublas is None or out % fp8_linear.CUBLAS_N or width % fp8_linear.CUBLAS_K:
            return few
        return ByRows(few, PreparedLinear(self._cublas, weight, FP8), CUBLAS_ROWS)

    def _open_cublas(self, wanted: str | None) -> Any:
        """cuBLASLt beside our own FP8 product, or None where it cannot run or another back end was asked for."""
        cublas = next(backend for backend in fp8_linear.LINEAR_BACKENDS if backend.name == "cublas")
        if wanted is not None or self.chosen["fp8_linear"] != "cuda" or cublas.why_not(self.device):
            return None
        self.chosen["fp8_linear"] += f", cublas from {CUBLAS_ROWS} rows"
        return cublas.run

    def groups(self, weight: Weight) -> Any:
        """The same for weights [e, out, in] over rows in expert order. Raises BackendUnavailable where the back end that was
        asked for does not take these sizes."""
        name = format_of(weight)
        if name == "bf16":
            return PlainGroups(weight)
        if name == "fp8":
            return PreparedGroups(self._grouped_fp8(weight), weight, FP8)
        backend = self.grouped_nvfp4
        return PreparedGroups(backend.run, backend.prepare(weight), grouped_nvfp4.ROWS)

    def _grouped_fp8(self, weight: Fp8Weight) -> Callable[..., torch.Tensor]:
        """The chosen back end, or the next one for sizes that Hopper's kernel does not take."""
        misfit = grouped_linear.cuda_misfit(*weight.data.shape)
        if misfit is None or not self.chosen["grouped_fp8"].startswith("cuda"):
            return self.grouped_fp8
        if self._wanted_groups is not None:
            raise BackendUnavailable(f"grouped_fp8: back end 'cuda' was asked for and {misfit}")
        others = [backend for backend in grouped_linear.CONTIGUOUS_BACKENDS if backend.name != "cuda"]
        found = choose(others, self.device, op="grouped_fp8")
        self.chosen["grouped_fp8"] = f"cuda, {found.name} where it {misfit}"
        return found.run

    @staticmethod
    def room_for_experts(choices: int, num_experts: int, num_local: int) -> tuple[int, int]:
        """Rows that hold `choices` (token, expert) pairs however they fall on the local experts, and what each expert's
        first row is a multiple of."""
        multiple = grouped_linear.row_multiple_for(-(-choices // num_experts))
        return expert_dispatch.capacity_for(choices, num_local, multiple), multiple

    @staticmethod
    def wide_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """bf16 [t, in] x [out, in] -> fp32 [t, out], accumulated and kept in fp32: router and head."""
        if weight.dtype != x.dtype:
            return x.to(weight.dtype) @ weight.T
        if x.device.type == "cuda":
            return torch.mm(x, weight.T, out_dtype=torch.float32)
        return x.float() @ weight.float().T
