"""Absorbed decode attention by FlashMLA and FlashInfer (Hopper). Contract: DEVICE_BACKENDS in mla_decode.

FlashMLA    sgl-flash-mla 1.0.0, its Hopper kernels (`use_legacy`). bf16 queries with bf16 rows, or e4m3 queries with e4m3
            rows (scale 1). Rows 512 + 64, blocks of 64. Its schedule is made on the device from the lengths, so plan and
            run can both be captured.
FlashInfer  0.6.18, `BatchMLAPagedAttentionWrapper` on fa3. bf16 queries with bf16 or e4m3 rows (scale 1). Rows 512 + 64,
            any block size. The pool is read in place through two views. Its schedule is made on the host.

How a runner with CUDA graphs calls FlashInfer's (`graph_safe` is False): keep one op object for all graphs; before each
replay, and before capture, call plan(block_tables, context_lens, context_lens_host) on the stream that replays, with
the very block_tables tensor that the graph was captured with (dense, entries refreshed in place) and its batch size.
`plan` fills the op's own device buffers by one asynchronous copy; `run` reads only those, the tables and its arguments.
A plan waits for the copy of the plan before it (pinned memory is shared), never for an attention call of its own step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from kernels.toolchain.vendors import needs_flashinfer_modules

LATENT, ROPE = 512, 64
WORKSPACE_BYTES = 128 << 20


MLA_MODULES = tuple(
    f"batch_mla_attention_dtype_q_bf16_dtype_kv_{rows}_dtype_o_bf16_dtype_idx_i32_head_dim_ckv_512_head_dim_kpe_64_"
    "profiler_False_sm90"
    for rows in ("bf16", "e4m3")
)


needs_flashinfer_mla = needs_flashinfer_modules(*MLA_MODULES)


def _wrong_row(row_dim: int, latent_dim: int) -> str | None:
    return None if (row_dim, latent_dim) == (LATENT + ROPE, LATENT) else f"takes rows of {LATENT} + {ROPE} values only"


class FlashMlaPlan(NamedTuple):
    """tables [b, w], lens [b] int32; schedule, splits: what FlashMLA's scheduler kernel wrote."""

    tables: torch.Tensor
    lens: torch.Tensor
    schedule: torch.Tensor
    splits: torch.Tensor


class FlashMlaDecode:
    """The op of one model and device."""

    graph_safe = True

    @staticmethod
    def misfit(
        heads: int, row_dim: int, latent_dim: int, block_size: int, q_dtype: torch.dtype, pool_dtype: torch.dtype
    ) -> str | None:
        if block_size != 64:
            return "takes blocks of 64 rows only"
        if q_dtype != pool_dtype or q_dtype not in (torch.bfloat16, torch.float8_e4m3fn):
            return f"takes bf16 or e4m3 queries and rows of the same dtype, not {q_dtype} and {pool_dtype}"
        return _wrong_row(row_dim, latent_dim)

    def __init__(
        self, heads: int, row_dim: int, latent_dim: int, block_size: int, q_dtype: torch.dtype,
        pool_dtype: torch.dtype, max_batch: int, scale: float, device: torch.device,
    ):  # fmt: skip
        import flash_mla

        self._ops = flash_mla.flash_mla_interface.get_ops(True)
        self.q_dtype = q_dtype
        self.heads, self.scale, self.fp8 = heads, scale, q_dtype == torch.float8_e4m3fn
        self._one = torch.ones(1, dtype=torch.float32, device=device)

    def plan(
        self, block_tables: torch.Tensor, context_lens: torch.Tensor, context_lens_host: Any = None
    ) -> FlashMlaPlan:
        if self.fp8:
            schedule, splits = self._ops.get_mla_decoding_metadata_dense_fp8(context_lens, self.heads, 1)
        else:
            schedule, splits = self._ops.get_mla_decoding_metadata(context_lens, self.heads, 1, None, False, None)
        return FlashMlaPlan(block_tables, context_lens, schedule, splits)

    def run(self, q: torch.Tensor, pool: torch.Tensor, plan: FlashMlaPlan) -> torch.Tensor:
        common = q[:, None], pool[:, :, None], LATENT, plan.lens, plan.tables, self.scale, False
        if self.fp8:
            made = self._ops.fwd_kvcache_mla_fp8(*common, plan.schedule, plan.splits, self._one, self._one)
        else:
            made = self._ops.dense_decode_fwd(*common, plan.schedule, plan.splits)
        return made[0][:, 0]


class FlashInferDecode:
    """The op of one model and device; one plan at a time."""

    graph_safe = False

    @staticmethod
    def misfit(
        heads: int, row_dim: int, latent_dim: int, block_size: int, q_dtype: torch.dtype, pool_dtype: torch.dtype
    ) -> str | None:
        if q_dtype != torch.bfloat16 or pool_dtype not in (torch.bfloat16, torch.float8_e4m3fn):
            return f"takes bf16 queries with bf16 or e4m3 rows, not {q_dtype} and {pool_dtype}"
        return _wrong_row(row_dim, latent_dim)

    def __init__(
        self, heads: int, row_dim: int, latent_dim: int, block_size: int, q_dtype: torch.dtype,
        pool_dtype: torch.dtype, max_batch: int, scale: float, device: torch.device,
    ):  # fmt: skip
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        def room(size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.int32, device=device)

        self._wrapper = BatchMLAPagedAttentionWrapper(
            torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device), backend="fa3"
        )
        self.q_dtype = q_dtype
        self.heads, self.block_size, self.pool_dtype, self.scale = heads, block_size, pool_dtype, scale
        self._starts = torch.arange(max_batch + 1, dtype=torch.int32, pin_memory=True)
        self._copied = torch.cuda.Event()
        self._scales = dict(ckv_scale=1.0, kpe_scale=1.0) if pool_dtype == torch.float8_e4m3fn else {}

    def plan(
        self, block_tables: torch.Tensor, context_lens: torch.Tensor, context_lens_host: np.ndarray | None = None
    ) -> torch.Tensor:
        """Reads context_lens back from the device (and so waits) when context_lens_host is None."""
        assert block_tables.is_contiguous(), "its blocks are found by one start a sequence"
        batch, width = block_tables.shape
        lens = context_lens.cpu() if context_lens_host is None else torch.from_numpy(np.asarray(context_lens_host))
        lens, blocks = lens.to(torch.int32).pin_memory(), (self._starts[: batch + 1] * width).pin_memory()
        self._copied.synchronize()
        starts = self._starts[: batch + 1]
        self._wrapper.plan(
            starts, blocks, block_tables.view(-1), lens, self.heads, LATENT, ROPE,
            self.block_size, False, self.scale, torch.bfloat16, self.pool_dtype,
        )  # fmt: skip
        self._copied.record()
        return block_tables

    def run(self, q: torch.Tensor, pool: torch.Tensor, plan: torch.Tensor) -> torch.Tensor:
        self._wrapper._kv_indices_buf = plan.view(-1)
        out = q.new_empty(*q.shape[:2], LATENT)
        return self._wrapper.run(
            q[..., :LATENT], q[..., LATENT:], pool[..., :LATENT], pool[..., LATENT:], out=out, **self._scales
        )
