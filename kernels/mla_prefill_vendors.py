"""Causal attention of packed prompts by FlashInfer on Hopper (fa3), head widths 192 and 128. Contract: mla_prefill."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from kernels.mla_decode_vendors import needs_flashinfer

__all__ = ["FlashInferVarlen", "needs_flashinfer"]

QK_DIM, VALUE_DIM = 192, 128
WORKSPACE_BYTES = 128 << 20


class FlashInferVarlen:
    """Holds one wrapper a device: a new plan replaces the one before it, so run all layers of a step before the next."""

    def __init__(self) -> None:
        self._wrappers: dict[torch.device, Any] = {}
        self._copied: dict[torch.device, Any] = {}

    @staticmethod
    def misfit(qk_dim: int, value_dim: int, dtype: torch.dtype) -> str | None:
        if dtype != torch.bfloat16:
            return f"takes bf16, not {dtype}"
        return None if (qk_dim, value_dim) == (QK_DIM, VALUE_DIM) else f"takes widths {QK_DIM} and {VALUE_DIM} only"

    def plan(
        self, query_lens: Sequence[int], context_lens: Sequence[int], heads: int, qk_dim: int, value_dim: int,
        scale: float, device: torch.device, dtype: torch.dtype = torch.bfloat16,
    ) -> Any:  # fmt: skip
        """Host work, then asynchronous copies; waits for the copies of the plan before (pinned memory is shared)."""
        reason = self.misfit(qk_dim, value_dim, dtype)
        assert reason is None, f"FlashInfer's ragged prefill {reason}"
        wrapper = self._wrapper(torch.device(device))
        copied = self._copied.setdefault(wrapper.device, torch.cuda.Event())
        copied.synchronize()
        starts = [torch.tensor([0, *accumulate(lens)], dtype=torch.int32) for lens in (query_lens, context_lens)]
        wrapper.plan(
            *starts, heads, heads, qk_dim, value_dim, causal=True, sm_scale=scale, q_data_type=dtype, kv_data_type=dtype
        )
        copied.record()
        return wrapper

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Any) -> torch.Tensor:
        return plan.run(q, k, v)

    def _wrapper(self, device: torch.device) -> Any:
        if device not in self._wrappers:
            from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

            workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            self._wrappers[device] = BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="fa3")
        return self._wrappers[device]
