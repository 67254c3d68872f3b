"""One rank's share of a published model on one GPU, inside the engine's own batchers; `headrace bench rank`.

Weights are drawn, distinct for every layer, in the checkpoint's format; experts are those of one rank of an
expert-parallel group, and what the other ranks would send is drawn too (`drawn.py`). Decode runs the engine's
DecodeBatcher (CUDA graphs, a step in flight, sampling on the device) over a pool filled with random rows; prefill its
PrefillBatcher. The roofline (`roofline.py`) uses ceilings measured in the same run. Communication is not included.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import op_times
from bench.drawn import DrawnExchange
from bench.kernels.harness import measure_ceilings
from bench.kernels.suite import host
from headrace.config import EngineConfig
from headrace.engine.decode import DecodeBatcher
from headrace.engine.offline import EngineParts
from headrace.engine.prefill import PrefillBatcher
from headrace.engine.request import DecodeSequence, PrefillJob, PrefillSequence
from headrace.errors import ConfigError
from headrace.model.base import DecodeInputs
from headrace.model.deepseek.fused_kernels import FusedKernels
from headrace.model.weights.random_weights import PUBLISHED, published_config, random_transformer
from headrace.planning import roofline
from headrace.planning.ceilings import Ceilings
from headrace.protocol.common import SamplingParams

BLOCK_SIZE = 64
LARGE = 65536  # tokens a prefill step from which one timed run, after the profiled one, is enough
CHUNK = 8192  # tokens that go through a MoE layer at a time in the chunked rows
WARM_STEPS, STEPS = 4, 24
SPREAD = 0.1  # contexts are uniform within this share of the asked one
KV_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
NOT_INCLUDED = "not included"

Progress = Callable[[str], None]


def run(
    model: str = "deepseek-r1",
    ep: int = 32,
    *,
    weight_dtype: str = "fp8",
    decode_batches: Sequence[int] = (64, 128, 256, 512),
    context: int = 3072,
    kv_dtypes: Sequence[str] = ("bf16", "fp8"),
    prefill_tokens: Sequence[int] = (4096, 8192, 16384, 32768, 65536, 131072),
    chunked: Sequence[int] = (65536,),
    prompt_tokens: int = 4096,
    num_layers: int | None = None,
    repeats: int = 2,
    progress: Progress = print,
    keep: Path | None = None,
) -> dict[str, Any]:
    """{model, ep, ceilings, rows, per_op, precision, host}; a row that does not fit says so in `skipped`.

    keep: a file that is written after every row, so that a run that is cut short leaves what it had.

    rows    [{phase, batch, context, kv_dtype, attention, tokens_per_step, step_ms, tokens_per_s, roofline_tokens_per_s, fraction,
            communication}]; context: rows a token attends to, on average (decode); tokens a prompt (prefill). Prefill rows
            also have moe_chunk_tokens (0: whole), and mla_tflops and moe_tflops, which their kernels reached
    per_op  [{phase, tokens_per_step, kv_dtype, op, roofline_us, measured_us}], whole steps
    Raises ConfigError without a CUDA device or for an unknown model or dtype.
    """
    if not torch.cuda.is_available():
        raise ConfigError("the rank bench needs a CUDA device", field="engine.device")
    if model not in PUBLISHED:
        raise ConfigError(f"{model!r} is unknown; there are {', '.join(PUBLISHED)}", field="model")
    if unknown := set(kv_dtypes) - set(KV_DTYPES):
        raise ConfigError(f"kv dtype {', '.join(sorted(unknown))} is unknown", field="kv_dtypes")
    bench = RankBench(model, ep, weight_dtype, num_layers, progress)
    rows: list[dict[str, Any]] = []
    per_op: list[dict[str, Any]] = []
    for made in _measured(bench, decode_batches, context, kv_dtypes, prefill_tokens, chunked, prompt_tokens, repeats):
        per_op += made.pop("per_op", [])
        rows.append(made)
        told = (f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in made.items())
        progress(", ".join(told))
        if keep is not None:
            keep.write_text(json.dumps({**bench.about(), "rows": rows, "per_op": per_op}))
    return {**bench.about(), "rows": rows, "per_op": per_op}


def _measured(
    bench: RankBench,
    decode_batches: Sequence[int],
    context: int,
    kv_dtypes: Sequence[str],
    prefill_tokens: Sequence[int],
    chunked: Sequence[int],
    prompt_tokens: int,
    repeats: int,
) -> Iterator[dict[str, Any]]:
    for kv_dtype in kv_dtypes:
        for batch in decode_batches:
            yield bench.decode(batch, context, kv_dtype)
    for tokens, chunk in [*((tokens, 0) for tokens in prefill_tokens), *((tokens, CHUNK) for tokens in chunked)]:
        yield bench.prefill(tokens, prompt_tokens, kv_dtypes[0], repeats, chunk)


class RankBench:
    """The loaded share and the ceilings of this run."""

    def __init__(self, model: str, ep: int, weight_dtype: str, num_layers: int | None, progress: Progress):
        self.device = torch.device("cuda")
        self.model, self.ep, self.progress = model, ep, progress
        self.ceilings: Ceilings = measure_ceilings(self.device)
        progress(f"ceilings: {self.ceilings}")
        torch.cuda.empty_cache()
        self.config = published_config(model, num_layers=num_layers)
        kernels = FusedKernels(self.device)
        self.exchange = DrawnExchange(
            kernels,
            self.device,
            num_experts=self.config.n_routed_experts,
            ranks=ep,
            top_k=self.config.num_experts_per_tok,
        )
        start = time.perf_counter()
        self.transformer = random_transformer(
            self.config, self.device, weight_dtype=weight_dtype, kernels=kernels, exchange=self.exchange
        )
        torch.cuda.synchronize()
        self.weight_dtype = weight_dtype
        progress(f"{torch.cuda.memory_allocated() / 1e9:.1f} GB of weights in {time.perf_counter() - start:.0f} s")

    def about(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "ep": self.ep,
            "num_layers": self.config.num_hidden_layers,
            "local_experts": self.exchange.num_local,
            "ceilings": asdict(self.ceilings),
            "precision": self.transformer.precision_table(),
            "host": host(self.device),
        }

    def open(self, kv_dtype: str, num_blocks: int, max_batch_size: int, max_context: int) -> EngineParts:
        """A pool of this dtype and the engine's runner over it."""
        gc.collect()
        torch.cuda.empty_cache()
        self.transformer = self.transformer.with_pool_dtype(KV_DTYPES[kv_dtype])
        config = EngineConfig(
            device="cuda",
            exact=False,
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            max_batch_size=max_batch_size,
            decode_graph_sizes=(max_batch_size,),
        )
        return EngineParts.over(self.transformer, config, max_context_tokens=max_context)

    # --- decode ---

    def decode(self, batch: int, context: int, kv_dtype: str) -> dict[str, Any]:
        """Median time of a step of `batch` samples whose contexts are about `context` rows while it is measured."""
        steps = WARM_STEPS + STEPS
        draws = np.random.default_rng(batch)
        lens = draws.integers(int(context * (1 - SPREAD)), int(context * (1 + SPREAD)) + 1, batch) - steps // 2
        per_sample = [-(-(int(length) + steps + 4) // BLOCK_SIZE) for length in lens]
        row = {
            "phase": "decode",
            "batch": batch,
            "context": context,
            "kv_dtype": kv_dtype,
            "tokens_per_step": batch,
            "communication": NOT_INCLUDED,
        }
        num_blocks = sum(per_sample) + 1
        needed = num_blocks * BLOCK_SIZE * self.config.row_dim * self.config.num_hidden_layers
        needed *= KV_DTYPES[kv_dtype].itemsize
        gc.collect()
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        if needed + (6 << 30) > free:
            return {**row, "skipped": f"its rows take {needed / 1e9:.0f} GB, {free / 1e9:.0f} GB are free"}
        parts = self.open(kv_dtype, num_blocks, batch, int(context * (1 + SPREAD)) + steps + BLOCK_SIZE)
        _fill(parts.pool.rows)
        step_s, profile = self._time_steps(parts, batch, lens, per_sample, steps)
        attended = float(lens.sum()) + batch * (WARM_STEPS + STEPS / 2)
        share = roofline.Share(
            tokens=batch,
            expert_rows=self.exchange.arrived(batch),
            local_experts=self.exchange.num_local,
            attended=attended,
            context_rows=int(attended),
            logits=batch,
            kv_bytes=KV_DTYPES[kv_dtype].itemsize,
            expert_weight_bytes=self._expert_weight_bytes(),
            query_dtype="fp8" if "float8" in self.transformer.kernels.chosen["mla_decode"] else "bf16",
        )
        row["context"] = attended / batch
        row["attention"] = self.transformer.kernels.chosen["mla_decode"]
        return self._row(row, share, step_s, profile)

    def _time_steps(
        self, parts: EngineParts, batch: int, lens: np.ndarray, per_sample: list[int], steps: int
    ) -> tuple[float, dict[str, float]]:
        times: list[float] = []
        batcher = DecodeBatcher(parts.runner, batch, lambda tokens: times.append(time.perf_counter()))
        parts.runner.warm()
        batcher.add(list(self._sequences(lens, per_sample, steps + 3)))
        while len(times) < steps:
            batcher.run_once()
        torch.cuda.synchronize()
        gaps = np.diff(times[WARM_STEPS:])
        for handle in range(batch):
            batcher.remove(handle)
        inputs = self._inputs(lens + steps // 2, per_sample)
        self.transformer.plan_decode(inputs, parts.pool, (lens + steps // 2).astype(np.int32))
        self.transformer.decode(inputs, parts.pool)
        profile = op_times.kernel_times(self.transformer, lambda: self.transformer.decode(inputs, parts.pool))
        return float(np.median(gaps)), profile

    def _inputs(self, lens: np.ndarray, per_sample: list[int]) -> DecodeInputs:
        """The same samples as tensors, for the one eager step that is profiled."""
        tables = np.zeros((len(lens), max(per_sample)), np.int32)
        first = 1
        for row, blocks in zip(tables, per_sample, strict=True):
            row[:blocks] = np.arange(first, first + blocks)
            first += blocks
        at = lens.astype(np.int64) - 1
        slots = tables[np.arange(len(lens)), at // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + at % BLOCK_SIZE
        there = (
            torch.from_numpy(one).to(self.device) for one in (at * 0 + 17, at, slots, tables, lens.astype(np.int32))
        )
        return DecodeInputs(*there)

    def _sequences(self, lens: np.ndarray, per_sample: list[int], steps: int) -> Iterator[DecodeSequence]:
        draws = np.random.default_rng(1)
        first = 1
        sampling = SamplingParams(max_tokens=steps + 1, ignore_eos=True)
        for handle, (length, blocks) in enumerate(zip(lens.tolist(), per_sample, strict=True)):
            prompt = tuple(draws.integers(16, self.config.vocab_size, length - 1).tolist())
            yield DecodeSequence(handle, 0, sampling, prompt, [17], list(range(first, first + blocks)))
            first += blocks

    # --- prefill ---

    def prefill(self, tokens: int, prompt_tokens: int, kv_dtype: str, repeats: int, chunk: int) -> dict[str, Any]:
        """Median time of a prefill step of whole prompts that together have `tokens` tokens."""
        count = max(1, tokens // prompt_tokens)
        length = tokens // count
        blocks = -(-(length + 1) // BLOCK_SIZE)
        row = {
            "phase": "prefill",
            "batch": count,
            "context": length,
            "kv_dtype": kv_dtype,
            "tokens_per_step": tokens,
            "moe_chunk_tokens": chunk,
            "communication": NOT_INCLUDED,
        }
        whole, self.transformer = self.transformer, self.transformer.with_chunks(dp_tokens=chunk)
        parts = self.open(kv_dtype, count * blocks, 1, length + 1)
        self.exchange.prepare(min(chunk or tokens, tokens))
        batcher = PrefillBatcher(parts.runner, tokens)
        try:
            profile = op_times.kernel_times(
                self.transformer, lambda: self._prefill_once(batcher, count, length, blocks, 0)
            )
            turns = repeats if tokens < LARGE else 1
            seconds = [self._prefill_once(batcher, count, length, blocks, 1 + turn) for turn in range(turns)]
        except torch.OutOfMemoryError as error:
            return {**row, "skipped": str(error).partition(".")[0]}
        finally:
            self.transformer = whole
        share = roofline.Share(
            tokens=tokens,
            expert_rows=self.exchange.arrived(tokens),
            local_experts=self.exchange.num_local,
            attended=count * length * (length + 1) / 2,
            context_rows=tokens,
            logits=count,
            kv_bytes=KV_DTYPES[kv_dtype].itemsize,
            expert_weight_bytes=self._expert_weight_bytes(),
        )
        ops = self._as_run(roofline.step_ops(self.config, share, "prefill"))
        return self._row(row, share, statistics.median(seconds), profile) | {
            "mla_tflops": op_times.tflops_of("mla_prefill", ops, profile),
            "moe_tflops": op_times.tflops_of("experts", ops, profile),
        }

    def _prefill_once(self, batcher: PrefillBatcher, count: int, length: int, blocks: int, seed: int) -> float:
        draws = np.random.default_rng(seed)
        failures: list[Exception] = []
        for key in range(count):
            sequence = PrefillSequence(
                0,
                draws.integers(16, self.config.vocab_size, length).tolist(),
                list(range(key * blocks, (key + 1) * blocks)),
            )
            sampling = SamplingParams(max_tokens=2, ignore_eos=True)
            batcher.add(PrefillJob(str(key), [sequence], sampling, on_error=failures.append))
        torch.cuda.synchronize()
        start = time.perf_counter()
        while batcher.has_work():
            batcher.run_once()
        torch.cuda.synchronize()
        if failures:
            raise failures[0]
        return time.perf_counter() - start

    # --- both ---

    def _expert_weight_bytes(self) -> float:
        return roofline.NVFP4_WEIGHT if self.weight_dtype == "nvfp4" else roofline.FP8_WEIGHT

    def _as_run(self, ops: list[roofline.Op]) -> list[roofline.Op]:
        """The shared expert's ops under the name of the experts', where its rows go through the same products."""
        if not any(getattr(block.ffn, "own_rows", False) for block in self.transformer.blocks):
            return ops
        return [replace(op, name=op.name.replace("shared_", "experts_")) for op in ops]

    def _row(
        self, row: dict[str, Any], share: roofline.Share, step_s: float, profile: dict[str, float]
    ) -> dict[str, Any]:
        ops = roofline.step_ops(self.config, share, row["phase"])
        limit_us = roofline.total_us(ops, self.ceilings)
        fast = replace(self.ceilings, fp8_tflops=self.ceilings.fp8_fast_accum_tflops)
        tokens = row["tokens_per_step"]
        return {
            **row,
            "step_ms": step_s * 1e3,
            "tokens_per_s": tokens / step_s,
            "roofline_tokens_per_s": tokens / limit_us * 1e6,
            "fraction": limit_us / (step_s * 1e6),
            "fraction_by_fast_accum_ceiling": roofline.total_us(ops, fast) / (step_s * 1e6),
            "per_op": [
                {key: row[key] for key in ("phase", "tokens_per_step", "kv_dtype")} | entry
                for entry in op_times.beside_the_roofline(self._as_run(ops), self.ceilings, profile)
            ],
        }


def _fill(rows: torch.Tensor) -> None:
    """Normal values, a layer at a time."""
    for layer in rows:
        layer.copy_(torch.randn(layer.shape, device=layer.device, dtype=torch.bfloat16))
