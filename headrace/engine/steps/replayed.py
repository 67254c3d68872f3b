"""A decode step without its dispatch: the kernel calls of each batch size are recorded once and then made from C.

At a few tokens a step most of its time is Python and torch between our own kernels, not the kernels. What those are
called with depends on the number of sequences alone, once every buffer has a place for good: so the first step of a
size goes through the model's own code with the calls noted instead of made, and every step of it replays them. The
calls are the same ones, so the numbers are the same to the bit, in exact mode and in fast mode.

Recording refuses a step that computes anything outside of the C kernels; the model then keeps running it as before.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.cache.latent import LatentPool
from headrace.engine.sampler import Sampler
from headrace.engine.steps.plain import PlainSteps
from headrace.model.base import ForwardBatch, ReplayableModel
from kernels.attention import latent_store
from kernels.attention.mla_decode import PagedPlan
from kernels.toolchain import cpu_library

PROGRAMS = 256
"""Recorded sizes kept, a few dozen KB each; the one unused for longest goes."""
SMALLEST_BUFFER = 4096  # bytes


class NotRecordable(RuntimeError):
    """The step does something that replaying kernel calls would leave out; says what."""


class Arena:
    """Memory for what a layer computes on the way: the next layer, and every other step, gets the same again."""

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []
        self._next = 0

    def restart(self) -> None:
        """Nothing taken so far is needed any more."""
        self._next = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A dense tensor, values undefined."""
        count = math.prod(shape)
        size = max(SMALLEST_BUFFER, 1 << (count * dtype.itemsize - 1).bit_length()) if count else SMALLEST_BUFFER
        if self._next == len(self.buffers):
            self.buffers.append(torch.empty(size, dtype=torch.uint8))
        elif self.buffers[self._next].numel() < size:
            self.buffers[self._next] = torch.empty(size, dtype=torch.uint8)  # older programs hold the smaller one
        buffer = self.buffers[self._next]
        self._next += 1
        return buffer[: count * dtype.itemsize].view(dtype).view(tuple(shape))


class _NoTorch(TorchDispatchMode):
    """torch may look at tensors in another shape and ask for memory, which comes from the arena; else NotRecordable."""

    def __init__(self, arena: Arena):
        super().__init__()
        self._arena = arena

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, aten = kwargs or {}, torch.ops.aten
        if func is aten.empty.memory_format:
            return self._arena.take(args[0], kwargs.get("dtype") or torch.get_default_dtype())
        if func is aten.new_empty.default:
            return self._arena.take(args[1], kwargs.get("dtype") or args[0].dtype)
        dense = kwargs.get("memory_format") is torch.contiguous_format
        if func is aten.empty_like.default and (dense or args[0].is_contiguous()):
            return self._arena.take(args[0].shape, kwargs.get("dtype") or args[0].dtype)
        returns = func._schema.returns
        if not returns or any(made.alias_info is None or made.alias_info.is_write for made in returns):
            raise NotRecordable(f"{func} in a decode step")
        return func(*args, **kwargs)


class _Program:
    """The step of one batch size: its inputs' buffers, and its calls."""

    def __init__(self, model: ReplayableModel, pool: LatentPool, size: int, width: int, arena: Arena):
        half = model.rope_tables[0].shape[-1]
        self.x = torch.zeros(size, model.embedding.shape[-1])
        self.cos, self.sin = torch.zeros(size, half), torch.zeros(size, half)
        self.slots = torch.full((size,), -1, dtype=torch.int64)
        self.tables = torch.zeros(size, width, dtype=torch.int32)
        self.starts, self.contexts = torch.arange(size + 1), torch.ones(size, dtype=torch.int64)
        plan = PagedPlan(self.tables, self.starts, self.contexts)
        step = model.uniform_step(self.cos, self.sin, latent_store.Plan(self.slots, None, self.slots), plan)
        with cpu_library.recording() as calls, _NoTorch(arena):
            for layer, block in enumerate(model.blocks):
                arena.restart()
                rows = pool.layer(layer)
                made = block.finish(self.x, *block.store(self.x, rows, step), rows, step)
                if made.data_ptr() != self.x.data_ptr():
                    raise NotRecordable("a layer that does not add to its input in place")
        self.num_calls = len(calls)
        self.replay = cpu_library.Replay(calls)
        self._memory = tuple(arena.buffers)

    def load(self, model: ReplayableModel, batch: ForwardBatch) -> None:
        """Puts a batch where the calls look for it."""
        torch.index_select(model.embedding, 0, batch.token_ids, out=self.x)
        cos, sin = model.rope_tables
        torch.index_select(cos, 0, batch.positions, out=self.cos)
        torch.index_select(sin, 0, batch.positions, out=self.sin)
        self.slots.copy_(batch.slots)
        self.tables[:, : batch.block_tables.shape[1]] = batch.block_tables
        self.contexts.copy_(torch.tensor(batch.context_lens))


class RecordedSteps:
    """Decode steps of one model, one new token a sequence. One thread uses it."""

    def __init__(self, model: ReplayableModel):
        self._model = model
        self._arena = Arena()
        self._programs: OrderedDict[tuple, _Program] = OrderedDict()
        self._kernels: tuple[Any, ...] = ()
        self.refused: str | None = None  # why steps of this model are not recorded

    def run(self, batch: ForwardBatch, pool: LatentPool) -> torch.Tensor | None:
        """[num_tokens, hidden] after the last layer, until the next call; None for a batch that is not recorded."""
        size = len(batch.token_ids)
        self._forget_other_kernels()
        if self.refused is not None or not size or list(batch.query_starts) != list(range(size + 1)):
            return None
        with torch.inference_mode():
            program = self.program(size, batch.block_tables.shape[1], pool)
            if program is not None:
                program.load(self._model, batch)
                program.replay()
                return program.x
        return None

    def logits(self, batch: ForwardBatch, pool: LatentPool) -> torch.Tensor:
        """[num_logits, vocab] fp32 of a decode step; what cannot be replayed runs op by op. The bits are the same."""
        x = self.run(batch, pool)
        if x is None:
            return self._model.forward(batch, pool, phase="decode")
        return self._model.logits(x.index_select(0, batch.logit_indices))

    def _forget_other_kernels(self) -> None:
        """What was recorded holds for the kernels that it was recorded with."""
        kernels = tuple(vars(self._model.kernels).values())
        if len(kernels) != len(self._kernels) or any(a is not b for a, b in zip(kernels, self._kernels, strict=True)):
            self._kernels, self.refused = kernels, None
            self._programs.clear()

    def program(self, size: int, num_blocks: int, pool: LatentPool) -> _Program | None:
        """That of `size` sequences with tables of up to `num_blocks`; recorded now if it is not there yet."""
        model, rows = self._model, pool.rows
        width = max(8, 1 << (num_blocks - 1).bit_length())
        key = (size, width, torch.get_num_threads(), rows.data_ptr(), rows.shape, rows.dtype)
        if key in self._programs:
            self._programs.move_to_end(key)
            return self._programs[key]
        try:
            self._programs[key] = _Program(model, pool, size, width, self._arena)
        except NotRecordable as error:
            self.refused = str(error)
            return None
        if len(self._programs) > PROGRAMS:
            self._programs.popitem(last=False)
        return self._programs[key]


class ReplayedSteps(PlainSteps):
    """Decode steps through `RecordedSteps`."""

    def __init__(self, model: ReplayableModel, pool: LatentPool, sampler: Sampler):
        super().__init__(model, pool, sampler)
        self.recorded = RecordedSteps(model)

    def logits(self, batch: ForwardBatch) -> torch.Tensor:
        """As PlainSteps."""
        return self.recorded.logits(batch, self.pool)
