"""What an engine needs of a model, whatever its family.

A family is a package beside this file. It says which checkpoints it serves, loads one with `ModelOptions` that hold for the model's
life, and offers a way of stepping; the engine puts the steps together (`headrace/engine/steps/`). Nothing is set on a loaded model.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch

from headrace.cache.latent import LatentPool

Phase = Literal["prefill", "decode"]


class Stepping(enum.Enum):
    """How decode steps of a model may be run, beyond a plain forward."""

    PLAIN = "plain"
    """Op by op through `Model.forward`."""
    REPLAYED = "replayed"
    """The model is a ReplayableModel: its kernel calls are recorded once for each batch size and then made from C."""
    GRAPHS = "graphs"
    """The model is a GraphModel: static shapes, no wait for the device, may be captured."""


@dataclass(frozen=True)
class KvRegion:
    """Rows of one kind: `num_layers` layers store `row_width` values a token; `window` > 0 when only the last so many are read."""

    name: str
    num_layers: int
    row_width: int
    window: int = 0


@dataclass(frozen=True)
class ModelOptions:
    """How a checkpoint is loaded.

    exact         a request's numbers depend on the request alone; fp32 throughout
    dtype         of the matrix products; None leaves it to the family
    kernels       `c` or `torch` on a CPU; None leaves it to the family
    weight_dtype  a precision recipe for weights on an accelerator; empty keeps what is on disk
    kv_dtype      `fp32`, `bf16`, `fp8` rows; empty: what the mode uses by itself
    moe_dp_chunk_tokens, moe_activation_chunk_tokens   bounds of memory in prefill, 0 is off; they never change a result
    timed         what dtype and kernels were chosen by, in words for the start-up table; empty where nobody chose
    """

    exact: bool
    dtype: torch.dtype | None = None
    kernels: str | None = None
    weight_dtype: str = ""
    kv_dtype: str = ""
    moe_dp_chunk_tokens: int = 0
    moe_activation_chunk_tokens: int = 0
    timed: str = ""


@dataclass
class ForwardBatch:
    """Sequences packed one after another, on the model's device.

    token_ids      [num_tokens] int64
    positions      [num_tokens] int64              0-based place in its sequence
    slots          [num_tokens] int64              block_id * block_size + offset; -1 is padding, skipped
    block_tables   [num_seqs, max_blocks] int32    0-padded
    query_starts   num_seqs + 1 integers           sequence i owns tokens query_starts[i] : query_starts[i + 1];
                                                   tokens past the last start are padding
    context_lens   num_seqs integers               rows a sequence attends to, its new tokens (the last ones) included;
                                                   earlier rows are in the pool already
    logit_indices  [num_logits] int64              tokens whose hidden state goes through the head
    last_token_logits                              the host's word that these are each sequence's last token, in order:
                                                   then a GPU's last layer computes no others
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    block_tables: torch.Tensor
    query_starts: Sequence[int]
    context_lens: Sequence[int]
    logit_indices: torch.Tensor
    last_token_logits: bool = False

    @property
    def query_lens(self) -> list[int]:
        return [end - start for start, end in zip(self.query_starts, self.query_starts[1:], strict=False)]


@dataclass
class DecodeInputs:
    """One new token of each sequence; everything on the device, shapes static.

    token_ids, positions  [b] int64
    slots                 [b] int64, where the new rows go; -1 is a padding sequence
    block_tables          [b, max_blocks] int32; entries past a context may be 0
    context_lens          [b] int32, rows to attend to, the new one included; at least 1, also for padding
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor


class Model(Protocol):
    """A loaded model. One engine thread calls it.

    vocab_size          token ids are below this
    max_context_tokens  longest prompt plus output that the checkpoint was made for
    kv_regions          what a pool for it stores; today every family has one region
    pool_dtype          of those rows
    dtype, exact        of the matrix products; whether exact mode is on
    stepping            the best way of running its decode steps
    """

    device: torch.device
    dtype: torch.dtype
    exact: bool
    pool_dtype: torch.dtype
    vocab_size: int
    max_context_tokens: int
    kv_regions: tuple[KvRegion, ...]
    stepping: Stepping

    def forward(
        self, batch: ForwardBatch, pool: LatentPool, *, phase: Phase, on_layer: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """[num_logits, vocab] fp32. Writes each layer's rows into `pool`, then attends. `on_layer(l)` is called as soon as the work
        that puts all rows of layer l into the pool is done or queued."""
        ...

    def precision_table(self) -> list[tuple[str, str]]:
        """(part, format) and (op, back end) as decided at load: the start prints it."""
        ...


class ReplayableModel(Model, Protocol):
    """A model whose decode step is calls of cpu.c alone, layer after layer: what recording one needs.

    embedding  [vocab, hidden] fp32        rope_tables  cos, sin [max_position, r / 2]
    blocks     layers with `store(x, rows, step)` and `finish(x, q, rows, pool, step)`
    kernels    whose attributes decide what is recorded: other ones, and it is recorded anew
    """

    embedding: torch.Tensor
    blocks: Sequence[Any]
    kernels: Any

    @property
    def rope_tables(self) -> tuple[torch.Tensor, torch.Tensor]: ...

    def uniform_step(self, cos: torch.Tensor, sin: torch.Tensor, store: Any, plan: Any) -> Any:
        """A decode step of one token a sequence, over a plan of the decode kernel."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] after the last layer -> [n, vocab] fp32."""
        ...


class GraphModel(Model, Protocol):
    """A model whose decode step has static shapes and never waits for the device."""

    @property
    def graph_safe(self) -> bool:
        """Whether `decode` plans on the device, so that a captured graph needs no `plan_decode`."""
        ...

    def plan_decode(self, inputs: DecodeInputs, pool: LatentPool, context_lens_host: np.ndarray | None) -> None:
        """Host planning of one step, before `decode` or the replay of its graph."""
        ...

    def decode(self, inputs: DecodeInputs, pool: LatentPool) -> torch.Tensor:
        """[b, vocab] fp32."""
        ...


@dataclass(frozen=True)
class Candidate:
    """dtype of the matrix products, and the kernels: `c` (cpu.c) or `torch`."""

    dtype: torch.dtype
    kernels: str

    def __str__(self) -> str:
        name = {torch.float32: "fp32", torch.bfloat16: "bf16"}.get(self.dtype, str(self.dtype))
        return f"{name} {self.kernels}"


class Family(Protocol):
    """One kind of architecture: how its checkpoints are recognised and loaded."""

    name: str

    def serves(self, config: Mapping[str, Any]) -> bool:
        """Whether a checkpoint with this config.json is of this family."""
        ...

    def load(self, directory: Path, device: torch.device, options: ModelOptions) -> Model:
        """Raises CheckpointError for what cannot be served, ConfigError for formats that the device or mode does not have."""
        ...

    def candidates(self, directory: Path, device: torch.device, options: ModelOptions) -> list[Candidate]:
        """What fast mode on a CPU could compute with; first what exact mode computes with."""
        ...

    def trial(self, directory: Path, device: torch.device, options: ModelOptions) -> Model:
        """A model of few layers, one of each kind, over the checkpoint's own weights: for timing a step."""
        ...
