"""The absorbed decode attention of a GPU: which back ends there are, and which of them takes a given model.

Contract (one new token a sequence), see mla_decode for the arithmetic:
  open(heads, row_dim, latent_dim, block_size, q_dtype, pool_dtype, max_batch, max_blocks, scale, device) -> op
    scale: of the scores, never a default; max_batch, max_blocks: of the largest step (sequences, table width)
  op.q_dtype       what queries must be
  op.graph_safe    plan works on the device and may be captured; else the runner plans before each replay, as
                   mla_decode_vendors says
  op.plan(block_tables [b, w] int32, context_lens [b] int32, context_lens_host) -> plan, once a step for all layers;
                   table entries past a context may be anything valid, say 0; context_lens >= 1; the host copy (numpy
                   int32 [b]) serves those that plan on the host, the others take None
  op.run(q [b, h, row_dim], pool [blocks, block_size, row_dim], plan) -> [b, h, latent_dim] bf16 (fp32 for fp32 rows)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kernels.attention.mla_decode_gluon import GluonDecode, needs_gluon
from kernels.attention.mla_decode_triton import TritonDecode, out_dtype_for
from kernels.attention.mla_decode_vendors import FlashInferDecode, FlashMlaDecode, needs_flashinfer_mla
from kernels.select import Backend, BackendUnavailable, choose
from kernels.toolchain.triton_support import needs_triton
from kernels.toolchain.vendors import needs_flash_mla


class ReferenceDecode:
    """Plain torch in fp32 on any device; gathers whole tables."""

    graph_safe = True

    @staticmethod
    def misfit(**sizes: Any) -> str | None:
        return None

    def __init__(
        self, heads: int, row_dim: int, latent_dim: int, block_size: int, q_dtype: torch.dtype,
        pool_dtype: torch.dtype, max_batch: int, scale: float, device: torch.device,
    ):  # fmt: skip
        self.latent_dim, self.q_dtype, self.scale = latent_dim, q_dtype, scale
        self.out_dtype = out_dtype_for(pool_dtype)

    def plan(
        self, block_tables: torch.Tensor, context_lens: torch.Tensor, context_lens_host: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return block_tables, context_lens

    def run(self, q: torch.Tensor, pool: torch.Tensor, plan: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        tables, lens = plan
        rows = pool[tables.long()].flatten(1, 2).float()
        seen = (torch.arange(rows.shape[1], device=rows.device)[None] < lens[:, None])[..., None]
        rows = torch.where(seen, rows, 0.0)
        scores = torch.where(seen.mT, self.scale * q.float() @ rows.mT, float("-inf"))
        return (torch.softmax(scores, -1) @ rows[..., : self.latent_dim]).to(self.out_dtype)


@dataclass(frozen=True)
class Opener:
    """Called as the contract's `open`; raises BackendUnavailable when `misfit` has something to say."""

    kind: Any

    @property
    def graph_safe(self) -> bool:
        return self.kind.graph_safe

    def misfit(self, **sizes: Any) -> str | None:
        """Why the back end cannot take these sizes, or None."""
        kept = ("heads", "row_dim", "latent_dim", "block_size", "q_dtype", "pool_dtype")
        return self.kind.misfit(**{name: sizes[name] for name in kept})

    def __call__(
        self, heads: int, row_dim: int, latent_dim: int, block_size: int, q_dtype: torch.dtype,
        pool_dtype: torch.dtype, max_batch: int, max_blocks: int, scale: float, device: torch.device,
    ) -> Any:  # fmt: skip
        sizes = dict(heads=heads, row_dim=row_dim, latent_dim=latent_dim, block_size=block_size)
        reason = self.misfit(**sizes, q_dtype=q_dtype, pool_dtype=pool_dtype)
        if reason:
            raise BackendUnavailable(f"{self.kind.__name__} {reason}")
        return self.kind(
            **sizes, q_dtype=q_dtype, pool_dtype=pool_dtype, max_batch=max_batch, scale=scale,
            device=torch.device(device),
        )  # fmt: skip


DEVICE_BACKENDS = (
    Backend("flash_mla", Opener(FlashMlaDecode), needs_flash_mla),
    Backend("gluon", Opener(GluonDecode), needs_gluon),
    Backend("flashinfer", Opener(FlashInferDecode), needs_flashinfer_mla),
    Backend("triton", Opener(TritonDecode), needs_triton),
    Backend("reference", Opener(ReferenceDecode)),
)


def open_device(device: torch.device, wanted: str | None = None, *, graph_safe: bool = False, **sizes: Any) -> Any:
    """The op of the first back end (or of the one named `wanted`) that runs on `device` and takes these sizes.

    sizes       the other arguments of the contract's `open`
    graph_safe  leave out those that plan on the host
    Raises BackendUnavailable with the reason of each back end.
    """

    def fitting(backend: Backend) -> Backend:
        def why_not(where: Any) -> str | None:
            if graph_safe and not backend.run.graph_safe:
                return "plans on the host"
            return backend.why_not(where) or backend.run.misfit(**sizes)

        return Backend(backend.name, backend.run, why_not)

    found = choose([fitting(backend) for backend in DEVICE_BACKENDS], device, wanted, op="mla_decode")
    return found.run(**sizes, device=device)
