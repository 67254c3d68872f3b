"""The engine alone, on the calling thread: no process, no wire, no transfer. The oracle for everything above it.

`EngineParts` is what every process that computes opens; `Engine` runs a list of prompts through it with the same
batchers that the services use, prefill and decode taking turns over one pool.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from headrace.cache.blocks import BlockPool
from headrace.cache.latent import LatentPool
from headrace.config import EngineConfig
from headrace.engine import fast_choice
from headrace.engine.decode import DecodeBatcher
from headrace.engine.exact import exact_self_test
from headrace.engine.prefill import PrefillBatcher
from headrace.engine.request import DecodeSequence, PrefillJob, PrefillSequence, SampledToken
from headrace.engine.runner import Runner
from headrace.engine.sampler import Sampler
from headrace.engine.steps.plain import PlainSteps
from headrace.engine.steps.replayed import ReplayedSteps
from headrace.errors import ConfigError, InvalidRequest
from headrace.model.base import Model, ModelOptions, Stepping
from headrace.model.families import family_of
from headrace.protocol.common import FinishReason, SamplingParams
from headrace.protocol.prefill import FirstToken


@dataclass
class EngineParts:
    """A loaded model, the pool its rows live in, who owns which block, and the runner over them."""

    transformer: Model
    pool: LatentPool
    blocks: BlockPool
    runner: Runner
    max_context: int

    @classmethod
    def load(cls, directory: str | Path, config: EngineConfig, *, max_context_tokens: int = 0) -> EngineParts:
        """Opens a checkpoint; exact mode is proved on this host or refused. Raises CheckpointError, ConfigError.

        `max_context_tokens` 0: what the checkpoint says. Block size and exact mode follow the device when left open.
        """
        transformer = load_configured(directory, config)
        if transformer.exact and (reason := exact_self_test(transformer)) is not None:
            raise ConfigError(reason, field="engine.exact")
        return cls.over(transformer, config, max_context_tokens=max_context_tokens)

    @classmethod
    def over(cls, transformer: Model, config: EngineConfig, *, max_context_tokens: int = 0) -> EngineParts:
        """A pool, block owners and a runner for a model that is loaded already."""
        longest, (region, *others) = transformer.max_context_tokens, transformer.kv_regions
        assert not others, "a pool has rows of one region yet"
        if max_context_tokens > longest:
            raise ConfigError(
                f"model.max_context_tokens = {max_context_tokens}, the checkpoint ends at {longest}",
                field="model.max_context_tokens",
            )
        block_size = config.block_size or (16 if transformer.device.type == "cpu" else 64)
        pool = LatentPool(
            region.num_layers,
            config.num_blocks,
            block_size,
            region.row_width,
            transformer.pool_dtype,
            transformer.device,
        )
        max_context = max_context_tokens or longest
        runner = _runner(transformer, pool, config, max_context)
        return cls(transformer, pool, BlockPool(config.num_blocks, block_size), runner, max_context)


def _runner(transformer: Model, pool: LatentPool, config: EngineConfig, max_context: int) -> Runner:
    """Decode steps in the best way that the model offers; on an accelerator one step ahead of the host."""
    on_cpu = transformer.device.type == "cpu"
    if transformer.stepping is not Stepping.GRAPHS:
        sampler = Sampler(transformer.vocab_size, transformer.device)
        replays = transformer.stepping is Stepping.REPLAYED and config.decode_graphs is not False
        steps = (ReplayedSteps if replays else PlainSteps)(transformer, pool, sampler)
        ahead = int(config.async_scheduling or 0)
        return Runner(transformer, pool, sampler, max_context, steps=steps, steps_ahead=ahead)
    ahead = int(not on_cpu if config.async_scheduling is None else config.async_scheduling)
    from headrace.engine.device_sampler import DeviceSampler
    from headrace.engine.steps.graphs import DecodeGraphs, sizes_up_to

    sampler = DeviceSampler(transformer.vocab_size, transformer.device)
    steps = DecodeGraphs(
        transformer,
        pool,
        sampler,
        sizes=sizes_up_to(config.max_batch_size, config.decode_graph_sizes),
        max_blocks=-(-max_context // pool.block_size),
        capture=not on_cpu if config.decode_graphs is None else config.decode_graphs,
    )
    return Runner(transformer, pool, sampler, max_context, steps=steps, steps_ahead=ahead)


def load_configured(directory: str | Path, config: EngineConfig) -> Model:
    """The checkpoint on the device and in the mode of these settings; torch's thread count is set. Raises CheckpointError, and
    ConfigError for a device that this host does not have."""
    device = _usable_device(config.device)
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    options = ModelOptions(
        exact=device.type == "cpu" if config.exact is None else config.exact,
        weight_dtype=config.weight_dtype,
        kv_dtype=config.kv_dtype,
        moe_dp_chunk_tokens=config.moe_dp_chunk_tokens,
        moe_activation_chunk_tokens=config.moe_activation_chunk_tokens,
    )
    family, directory = family_of(directory), Path(directory)
    if device.type == "cpu" and not options.exact:
        options = fast_choice.chosen(family, directory, device, options)
    return family.load(directory, device, options)


def _usable_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        why = str(error).partition("\n")[0]
        raise ConfigError(
            f"engine.device = {name!r} cannot be used on this host: {why}", field="engine.device"
        ) from error
    return device


@dataclass
class Output:
    """One finished sample. `logprobs` and `top` run in parallel with `token_ids` and are empty when not asked for."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.NONE


OnToken = Callable[[int, SampledToken], None]
"""Hears of each token as it is drawn: (index of the prompt, token)."""


@dataclass
class _Request:
    """One prompt on its way: `tables[i]` is the block table of sample i."""

    index: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    outputs: list[Output]
    tables: list[list[int]] = field(default_factory=list)


class Engine:
    """Continuous batching over one pool. Not thread-safe; every call of `generate` ends with an empty pool."""

    def __init__(self, parts: EngineParts, config: EngineConfig):
        self.parts = parts
        self.prefill = PrefillBatcher(parts.runner, config.max_batch_tokens)
        self.decode = DecodeBatcher(parts.runner, config.max_batch_size, self._on_step, self._on_failure)
        self._on_token: OnToken | None = None
        self._requests: dict[int, _Request] = {}
        self._failure: Exception | None = None

    @classmethod
    def load(cls, directory: str | Path, config: EngineConfig | None = None) -> Engine:
        """Opens a checkpoint; see EngineParts.load."""
        config = config or EngineConfig()
        return cls(EngineParts.load(directory, config), config)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        on_token: OnToken | None = None,
    ) -> list[list[Output]]:
        """For each prompt its `n` samples, in order. Stop strings are text and not this engine's business.

        Raises InvalidRequest for a prompt that is empty, too long or could never find room; then nothing has run.
        """
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        waiting = deque(
            _Request(index, tuple(prompt), one, [Output() for _ in range(one.n)])
            for index, (prompt, one) in enumerate(zip(prompts, each, strict=True))
        )
        everyone = list(waiting)
        for request in everyone:
            self._check(request)
        self._on_token, self._failure = on_token, None
        try:
            while waiting or self._requests:
                self._admit(waiting)
                for source in (self.prefill, self.decode):
                    if source.has_work():
                        source.run_once()
                    if self._failure is not None:
                        raise self._failure
        except BaseException:
            self._abandon()
            raise
        return [request.outputs for request in everyone]

    def _check(self, request: _Request) -> None:
        limit = self.parts.max_context
        if not 1 <= len(request.prompt) <= limit:
            raise InvalidRequest(f"a prompt of {len(request.prompt)} tokens; 1 to {limit} are served", field="prompt")
        shared, own = self._seats(request)
        if shared + request.sampling.n * own > self.parts.blocks.num_blocks:
            raise InvalidRequest(
                f"{shared} + {request.sampling.n} x {own} blocks needed, the pool has {self.parts.blocks.num_blocks}",
                field="sampling.max_tokens",
            )

    def _seats(self, request: _Request) -> tuple[int, int]:
        """Full prompt blocks that all samples share, and blocks of each sample's own."""
        length = len(request.prompt)
        total = min(length + request.sampling.max_tokens, max(self.parts.max_context, length))
        shared = length // self.parts.blocks.block_size
        return shared, self.parts.blocks.blocks_for(total) - shared

    def _admit(self, waiting: deque[_Request]) -> None:
        while waiting:
            shared, own = self._seats(waiting[0])
            if not self.parts.blocks.can_allocate(shared + waiting[0].sampling.n * own):
                return
            request = waiting.popleft()
            self._place(request, shared, own)
            self._requests[request.index] = request
            self.prefill.add(self._job(request))

    def _place(self, request: _Request, shared: int, own: int) -> None:
        first = self.parts.blocks.allocate(shared + own)
        request.tables = [list(first)]
        for _ in range(1, request.sampling.n):
            self.parts.blocks.share(first[:shared])
            request.tables.append([*first[:shared], *self.parts.blocks.allocate(own)])

    def _job(self, request: _Request) -> PrefillJob:
        count = request.sampling.n
        return PrefillJob(
            key=str(request.index),
            sequences=[PrefillSequence(0, list(request.prompt), request.tables[0])],
            sampling=request.sampling,
            sample_indices=tuple(range(count)),
            delivered_counts=(0,) * count,
            prompt_length=len(request.prompt),
            on_tokens=lambda tokens: self._start(request, tokens),
            on_error=self._on_error,
        )

    def _start(self, request: _Request, tokens: list[FirstToken]) -> None:
        """The prompt's rows are there: gives every further sample its copy of the partial block, then steps them."""
        rest = len(request.prompt) % self.parts.blocks.block_size
        shared = len(request.prompt) // self.parts.blocks.block_size
        if rest:
            for table in request.tables[1:]:
                self.parts.pool.copy_rows(request.tables[0][shared], table[shared], rest)
        if not tokens:
            for sample_index, output in enumerate(request.outputs):
                output.finish_reason = FinishReason.LENGTH
                self._finish(request, sample_index)
            return
        for token in tokens:
            logprob = None if request.sampling.logprobs is None else token.logprob
            self._record(
                SampledToken(
                    request.index,
                    token.sample_index,
                    token.position,
                    token.token_id,
                    logprob,
                    token.top,
                    token.finish_reason,
                )
            )
        running = [token for token in tokens if token.finish_reason is FinishReason.NONE]
        self.decode.add([self._sequence(request, token) for token in running])

    def _sequence(self, request: _Request, token: FirstToken) -> DecodeSequence:
        table = request.tables[token.sample_index]
        return DecodeSequence(
            request.index, token.sample_index, request.sampling, request.prompt, [token.token_id], table
        )

    def _on_step(self, tokens: Sequence[SampledToken]) -> None:
        for token in tokens:
            if token.handle in self._requests:  # else it was abandoned while its step was in flight
                self._record(token)

    def _record(self, token: SampledToken) -> None:
        request = self._requests[token.handle]
        output = request.outputs[token.sample_index]
        output.token_ids.append(token.token_id)
        if token.logprob is not None:
            output.logprobs.append(token.logprob)
            output.top.append(token.top)
        output.finish_reason = token.finish_reason
        if self._on_token is not None:
            self._on_token(token.handle, token)
        if token.finish_reason is not FinishReason.NONE:
            self._finish(request, token.sample_index)

    def _finish(self, request: _Request, sample_index: int) -> None:
        self.parts.blocks.free(request.tables[sample_index])
        request.tables[sample_index] = []
        if not any(request.tables):
            del self._requests[request.index]

    def _on_failure(self, sequences: list[DecodeSequence], error: Exception) -> None:
        self._on_error(error)

    def _on_error(self, error: Exception) -> None:
        self._failure = self._failure or error

    def _abandon(self) -> None:
        abandoned = list(self._requests.values())
        self._requests.clear()
        for request in abandoned:
            self.prefill.cancel(str(request.index))
            self.decode.remove(request.index)
            for table in request.tables:
                self.parts.blocks.free(table)
