"""How fast the engine alone is on this host, beside transformers on the same weights; `headrace bench engine`.

Prompts are random token ids, greedy, end tokens ignored, so that every run does the same work. Each figure is the
median of several runs after a warm-up. Against transformers the two sides run in turn, run by run, with equal thread
counts, so that a noisy host troubles both; transformers gets the better of fp32 and bf16 (a short probe drops one that
is more than twice as slow, which happens where bf16 is emulated).
"""

from __future__ import annotations

import contextlib
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.request import SampledToken
from headrace.errors import ConfigError
from headrace.protocol import SamplingParams

PROMPT_TOKENS = 64
OUTPUT_TOKENS = 64
RATIO_STREAMS = 32
MODES = ("exact", "fast")
HOPELESS = 2.0  # a dtype so many times slower than the other in the probe is not run in full
TRANSFORMERS_SCRIPT = Path(__file__).with_name("transformers_generate.py")

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Timing:
    """One run: seconds to the last prompt's first token, from there to the last token, and CPU seconds of all threads."""

    prefill_s: float
    decode_s: float
    cpu_s: float

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s


def run(
    directory: str | Path,
    *,
    streams: Sequence[int] = (1, 8, 32, 64),
    modes: Sequence[str] = MODES,
    repeats: int = 3,
    num_threads: int = 0,
    transformers_python: str | Path | None = None,
    agreement_prompts: int = 200,
    progress: Progress = lambda message: None,
) -> dict[str, Any]:
    """All figures as one JSON-ready object.

    rows                   [{streams, mode, prefill_tokens_per_s, decode_tokens_per_s, total_tokens_per_s}]; total: output
                           tokens over the whole time, prefill included
    ratio_to_transformers  fast mode's total over transformers', at 32 streams, by the clock (`ratio`) and by CPU time
                           (`cpu_ratio`); `skipped` says why there is none
    agreement              share of greedy tokens that exact and fast mode agree on; `skipped` likewise
    host                   what it ran on
    `num_threads` 0: torch's own choice. Raises ConfigError for an unknown mode.
    """
    if unknown := set(modes) - set(MODES):
        raise ConfigError(f"mode {', '.join(sorted(unknown))} is unknown; there are {', '.join(MODES)}", field="modes")
    threads = num_threads or torch.get_num_threads()
    engines = {mode: open_engine(directory, mode, max(streams), threads) for mode in modes}
    rows = []
    for mode, engine in engines.items():
        for count in streams:
            progress(f"{mode} mode, {count} streams")
            rows.append(_row(engine, mode, count, repeats))
    return {
        "rows": rows,
        "ratio_to_transformers": _ratio(directory, engines, transformers_python, threads, repeats, progress),
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


def measure(engine: Engine, batch: list[list[int]], output_tokens: int = OUTPUT_TOKENS) -> Timing:
    """One run of all prompts at once."""
    cpu = time.process_time()
    first = last = start = time.perf_counter()

    def on_token(_: int, token: SampledToken) -> None:
        nonlocal first, last
        last = time.perf_counter()
        if token.position == 0:
            first = last

    engine.generate(batch, _sampling(output_tokens), on_token)
    return Timing(first - start, last - first, time.process_time() - cpu)


def _row(engine: Engine, mode: str, count: int, repeats: int) -> dict[str, Any]:
    vocab_size = engine.parts.transformer.config.vocab_size
    measure(engine, prompts(count, vocab_size), 4)
    timings = [measure(engine, prompts(count, vocab_size, seed)) for seed in range(repeats)]
    return {
        "streams": count,
        "mode": mode,
        "prefill_tokens_per_s": count * PROMPT_TOKENS / statistics.median(one.prefill_s for one in timings),
        "decode_tokens_per_s": count * (OUTPUT_TOKENS - 1) / statistics.median(one.decode_s for one in timings),
        "total_tokens_per_s": count * OUTPUT_TOKENS / statistics.median(one.total_s for one in timings),
    }


def _ratio(
    directory: str | Path,
    engines: dict[str, Engine],
    python: str | Path | None,
    threads: int,
    repeats: int,
    progress: Progress,
) -> dict[str, Any]:
    if "fast" not in engines:
        return {"skipped": "fast mode is not measured"}
    if python is None:
        return {"skipped": "no interpreter with transformers was given"}
    engine = engines["fast"]
    vocab_size = engine.parts.transformer.config.vocab_size
    with _transformers(directory, python, threads) as other:
        progress("transformers: warm-up")
        probes = {dtype: _probe(other, dtype, prompts(RATIO_STREAMS, vocab_size)) for dtype in ("fp32", "bf16")}
        worth = [dtype for dtype in probes if probes[dtype] <= HOPELESS * min(probes.values())]
        ours: list[Timing] = []
        theirs: dict[str, list[dict[str, float]]] = {dtype: [] for dtype in worth}
        for turn in range(repeats):
            batch = prompts(RATIO_STREAMS, vocab_size, 100 + turn)
            progress(f"turn {turn + 1} of {repeats}: ours, then transformers in {', '.join(worth)}")
            ours.append(measure(engine, batch))
            for dtype, answers in theirs.items():
                answers.append(other.generate(dtype, batch, OUTPUT_TOKENS))
    return {"streams": RATIO_STREAMS, **_compare(ours, theirs), "probe_seconds": probes, **other.about}


def _compare(ours: list[Timing], theirs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians of both sides; `cpu_ratio` compares CPU seconds, which a busy host disturbs less than the clock."""
    tokens = RATIO_STREAMS * OUTPUT_TOKENS
    seconds = {dtype: [one["seconds"] for one in answers] for dtype, answers in theirs.items()}
    best = min(seconds, key=lambda dtype: statistics.median(seconds[dtype]))
    own_s = statistics.median(one.total_s for one in ours)
    cpu_s = statistics.median(one["cpu_seconds"] for one in theirs[best])
    return {
        "ratio": statistics.median(seconds[best]) / own_s,
        "cpu_ratio": cpu_s / statistics.median(one.cpu_s for one in ours),
        "headrace_tokens_per_s": tokens / own_s,
        "transformers_tokens_per_s": {dtype: tokens / statistics.median(times) for dtype, times in seconds.items()},
        "transformers_dtype": best,
        "seconds": {"headrace": [one.total_s for one in ours], "transformers": seconds},
        "cpu_seconds": {
            "headrace": [one.cpu_s for one in ours],
            "transformers": [one["cpu_seconds"] for one in theirs[best]],
        },
    }


def _probe(other: _Transformers, dtype: str, batch: list[list[int]]) -> float:
    """Seconds for the prompts and a few tokens, warm: a dtype that this host emulates is not worth minutes."""
    other.generate(dtype, batch[:2], 2)
    return other.generate(dtype, batch, 8)["seconds"]


class _Transformers:
    """A running `transformers_generate.py`; it sleeps while it is not asked."""

    def __init__(self, process: subprocess.Popen[str]):
        self._process = process
        self.about = self._read()

    def generate(self, dtype: str, batch: list[list[int]], output_tokens: int) -> dict[str, float]:
        """`seconds` and `cpu_seconds` of one padded `generate`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"dtype": dtype, "prompts": batch, "output_tokens": output_tokens}) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        assert all(len(ids) == output_tokens for ids in answer.pop("token_ids")), "transformers stopped early"
        return answer

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ConfigError(
                f"{TRANSFORMERS_SCRIPT.name} ended with code {self._process.wait()}; its own words are above",
                field="transformers_python",
            )
        return json.loads(line)


@contextlib.contextmanager
def _transformers(directory: str | Path, python: str | Path, threads: int) -> Iterator[_Transformers]:
    command = [str(python), str(TRANSFORMERS_SCRIPT), str(directory), "--threads", str(threads)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield _Transformers(process)
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.communicate(timeout=None if process.poll() is not None else 30)


def _agreement(engines: dict[str, Engine], count: int, progress: Progress) -> dict[str, Any]:
    """Teacher-free: each mode continues on its own, so one early difference costs the rest of that prompt."""
    if count < 1 or set(MODES) - set(engines):
        return {"skipped": "needs both modes and at least one prompt"}
    progress(f"agreement of exact and fast mode over {count} prompts")
    draws = np.random.default_rng(7)
    vocab_size = engines["exact"].parts.transformer.config.vocab_size
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
