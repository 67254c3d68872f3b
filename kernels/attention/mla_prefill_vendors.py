"""Causal attention of packed prompts by FlashInfer on Hopper (fa3), head widths 192 and 128. Contract: mla_prefill."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from kernels.toolchain.vendors import needs_flashinfer_modules

__all__ = ["FlashInferVarlen", "needs_flashinfer"]

QK_DIM, VALUE_DIM = 192, 128
WORKSPACE_BYTES = 128 << 20
PLANS = 4  # that may be alive at a time
MODULE = (
    "batch_prefill_with_kv_cache_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32_head_dim_qk_192_head_dim_vo_128_"
    "posenc_0_use_swa_False_use_logits_cap_False_f16qk_False_sm90"
)
needs_flashinfer = needs_flashinfer_modules(MODULE)


class FlashInferVarlen:
    """A plan lives until PLANS more were made on its device; all run on one stream."""

    def __init__(self) -> None:
        self._plans: dict[torch.device, list[_Planned]] = {}
        self._made = 0

    @staticmethod
    def misfit(qk_dim: int, value_dim: int, dtype: torch.dtype) -> str | None:
        if dtype != torch.bfloat16:
            return f"takes bf16, not {dtype}"
        return None if (qk_dim, value_dim) == (QK_DIM, VALUE_DIM) else f"takes widths {QK_DIM} and {VALUE_DIM} only"

    def plan(
        self, query_lens: Sequence[int], context_lens: Sequence[int], heads: int, qk_dim: int, value_dim: int,
        scale: float, device: torch.device, dtype: torch.dtype = torch.bfloat16,
    ) -> _Planned:  # fmt: skip
        """Host work, then asynchronous copies."""
        reason = self.misfit(qk_dim, value_dim, dtype)
        assert reason is None, f"FlashInfer's ragged prefill {reason}"
        planned = self._next(torch.device(device))
        planned.replace(query_lens, context_lens, heads, scale)
        return planned

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: _Planned) -> torch.Tensor:
        return plan.wrapper.run(q, k, v)

    def _next(self, device: torch.device) -> _Planned:
        if device not in self._plans:
            workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            self._plans[device] = [_Planned(workspace) for _ in range(PLANS)]
        self._made += 1
        return self._plans[device][self._made % PLANS]


class _Planned:
    """FlashInfer's wrapper keeps one plan, in device and pinned memory of its own."""

    def __init__(self, workspace: torch.Tensor):
        from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

        self.wrapper: Any = BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="fa3")
        self._copied = torch.cuda.Event()

    def replace(self, query_lens: Sequence[int], context_lens: Sequence[int], heads: int, scale: float) -> None:
        self._copied.synchronize()  # the copy of the plan before it read the same pinned memory
        starts = [
            torch.tensor([0, *accumulate(lens)], dtype=torch.int32, pin_memory=True)
            for lens in (query_lens, context_lens)
        ]
        self.wrapper.plan(
            *starts, heads, heads, QK_DIM, VALUE_DIM, causal=True, sm_scale=scale, q_data_type=torch.bfloat16
        )
        self._copied.record()
