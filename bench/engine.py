"""How fast the engine alone is on this host, beside other engines on the same weights; `headrace bench engine`.

Prompts are random token ids, greedy, end tokens ignored, so that every run does the same work. Each figure is the
median of several runs after a warm-up. How rivals are run is in `against.py`.
"""

from __future__ import annotations

import contextlib
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from bench import against, step_profile
from bench.against import Progress, Timing
from headrace.config import EngineConfig
from headrace.engine.offline import Engine
from headrace.engine.request import SampledToken
from headrace.errors import ConfigError
from headrace.protocol.common import SamplingParams

PROMPT_TOKENS = 64
OUTPUT_TOKENS = 64
RATIO_STREAMS = 32
MODES = ("exact", "fast")


def run(
    directory: str | Path,
    *,
    streams: Sequence[int] = (1, 8, 32, 64),
    modes: Sequence[str] = MODES,
    repeats: int = 3,
    num_threads: int = 0,
    rivals: Mapping[str, Path] = MappingProxyType({}),
    agreement_prompts: int = 200,
    progress: Progress = lambda message: None,
) -> dict[str, Any]:
    """All figures as one JSON-ready object.

    rows                   [{streams, mode, prefill_tokens_per_s, decode_tokens_per_s, total_tokens_per_s}]; total: output
                           tokens over the whole time, prefill included
    ratios                 for each of `rivals` (name -> its interpreter): fast mode's total over the rival's, by the clock
                           (`ratio`) and by CPU time (`cpu_ratio`); `skipped` says why there is none
    one_stream             where a one-stream step's time goes, in the last of `modes`: step_profile.run
    agreement              share of greedy tokens that exact and fast mode agree on; `skipped` likewise
    host                   what it ran on
    `num_threads` 0: torch's own choice. Raises ConfigError for an unknown mode or rival.
    """
    if unknown := set(modes) - set(MODES):
        raise ConfigError(f"mode {', '.join(sorted(unknown))} is unknown; there are {', '.join(MODES)}", field="modes")
    if unknown := set(rivals) - set(against.RIVALS):
        raise ConfigError(
            f"{', '.join(sorted(unknown))} is unknown; there are {', '.join(against.RIVALS)}", field="against"
        )
    threads = num_threads or torch.get_num_threads()
    engines = {mode: open_engine(directory, mode, max(streams), threads) for mode in modes}
    rows = []
    for mode, engine in engines.items():
        for count in streams:
            progress(f"{mode} mode, {count} streams")
            rows.append(_row(engine, mode, count, repeats))
    return {
        "rows": rows,
        "ratios": _ratios(directory, engines, rivals, threads, repeats, progress),
        "one_stream": _one_stream(engines[modes[-1]], modes[-1], repeats, progress),
        "agreement": _agreement(engines, agreement_prompts, progress),
        "host": _host(threads),
        "workload": {"prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS, "repeats": repeats},
    }


def prompts(count: int, vocab_size: int, seed: int = 0, length: int = PROMPT_TOKENS) -> list[list[int]]:
    """`count` prompts of random ids; the first few ids of a vocabulary are left out, they are special."""
    return np.random.default_rng(seed).integers(16, vocab_size, (count, length)).tolist()


def open_engine(directory: str | Path, mode: str, max_streams: int, threads: int) -> Engine:
    """`num_blocks`: room for the widest run and for the agreement prompts, which are as many as fit."""
    config = EngineConfig(
        exact=mode == "exact",
        num_threads=threads,
        max_batch_size=max(64, max_streams),
        num_blocks=max(1024, 16 * max_streams),
    )
    return Engine.load(directory, config)


def _sampling(output_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=output_tokens, ignore_eos=True)


def measure(
    engine: Engine,
    batch: list[list[int]],
    output_tokens: int = OUTPUT_TOKENS,
    first_tokens: list[int] | None = None,
) -> Timing:
    """One run of all prompts at once; each prompt's first token is put into `first_tokens` when given."""
    cpu = time.process_time()
    first = last = start = time.perf_counter()

    def on_token(index: int, token: SampledToken) -> None:
        nonlocal first, last
        last = time.perf_counter()
        if token.position == 0:
            first = last
            if first_tokens is not None:
                first_tokens[index] = token.token_id

    engine.generate(batch, _sampling(output_tokens), on_token)
    return Timing(first - start, last - first, time.process_time() - cpu)


def _row(engine: Engine, mode: str, count: int, repeats: int) -> dict[str, Any]:
    vocab_size = engine.parts.transformer.vocab_size
    measure(engine, prompts(count, vocab_size), 4)
    timings = [measure(engine, prompts(count, vocab_size, seed)) for seed in range(repeats)]
    return {
        "streams": count,
        "mode": mode,
        "prefill_tokens_per_s": count * PROMPT_TOKENS / statistics.median(one.prefill_s for one in timings),
        "decode_tokens_per_s": count * (OUTPUT_TOKENS - 1) / statistics.median(one.decode_s for one in timings),
        "total_tokens_per_s": count * OUTPUT_TOKENS / statistics.median(one.total_s for one in timings),
    }


def _ratios(
    directory: str | Path,
    engines: dict[str, Engine],
    rivals: Mapping[str, Path],
    threads: int,
    repeats: int,
    progress: Progress,
) -> list[dict[str, Any]]:
    """One comparison a rival at 32 streams, and for llama.cpp, whose home is one user, at one stream as well."""
    if rivals and "fast" not in engines:
        return [{"against": name, "skipped": "fast mode is not measured"} for name in rivals]
    made = []
    for name, python in rivals.items():
        for count in (RATIO_STREAMS, 1) if name == "llama.cpp" else (RATIO_STREAMS,):
            engine = engines["fast"]
            vocab_size = engine.parts.transformer.vocab_size
            batches = [prompts(count, vocab_size, 100 + turn) for turn in range(repeats)]
            measured = against.compare(
                against.RIVALS[name],
                python,
                directory,
                threads,
                lambda batch, engine=engine: _measure_with_firsts(engine, batch),
                batches,
                OUTPUT_TOKENS,
                progress,
            )
            made.append({"streams": count, **measured})
    return made


def _measure_with_firsts(engine: Engine, batch: list[list[int]]) -> tuple[Timing, list[int]]:
    firsts = [0] * len(batch)
    timing = measure(engine, batch, first_tokens=firsts)
    return timing, firsts


def _one_stream(engine: Engine, mode: str, repeats: int, progress: Progress) -> dict[str, Any]:
    progress(f"where a one-stream step's time goes, {mode} mode")
    batch = prompts(1, engine.parts.transformer.vocab_size)
    return {"mode": mode, **step_profile.run(engine, batch, repeats=repeats)}


def _agreement(engines: dict[str, Engine], count: int, progress: Progress) -> dict[str, Any]:
    """Teacher-free: each mode continues on its own, so one early difference costs the rest of that prompt."""
    if count < 1 or set(MODES) - set(engines):
        return {"skipped": "needs both modes and at least one prompt"}
    progress(f"agreement of exact and fast mode over {count} prompts")
    draws = np.random.default_rng(7)
    vocab_size = engines["exact"].parts.transformer.vocab_size
    batch = [draws.integers(16, vocab_size, length).tolist() for length in draws.integers(16, 129, count)]
    made = [
        [outputs[0].token_ids for outputs in engines[mode].generate(batch, _sampling(OUTPUT_TOKENS))] for mode in MODES
    ]
    pairs = list(zip(*made, strict=True))
    equal = sum(a == b for one, other in pairs for a, b in zip(one, other, strict=True))
    prefix = sum(_common_prefix(one, other) for one, other in pairs)
    total = count * OUTPUT_TOKENS
    return {
        "prompts": count,
        "tokens": total,
        "equal_tokens": equal / total,
        "equal_until_first_difference": prefix / total,
        "identical_answers": sum(one == other for one, other in pairs) / count,
    }


def _common_prefix(one: list[int], other: list[int]) -> int:
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def _host(threads: int) -> dict[str, Any]:
    model = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return {
        "cpu": model,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
