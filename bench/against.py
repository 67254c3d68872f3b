"""Another engine on the same weights, run by run in turn with ours, so that a noisy host troubles both.

The other engine lives in a process of its own, under an interpreter of its own, and answers lines of JSON. It gets the
better of the dtypes it offers: a short probe drops one that is more than `HOPELESS` times slower than the best.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError

HOPELESS = 2.0
PROBE_TOKENS = 8


@dataclass(frozen=True)
class Timing:
    """One run: seconds to the last prompt's first token, from there to the last token, and CPU seconds of all threads."""

    prefill_s: float
    decode_s: float
    cpu_s: float

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s


@dataclass(frozen=True)
class Rival:
    """name; the script that serves it and the environment `make ...` builds for it; the dtypes it offers."""

    name: str
    script: str
    environment: str
    dtypes: tuple[str, ...]

    def interpreter(self) -> Path | None:
        """The environment's Python, when it has been made."""
        python = Path(__file__).resolve().parents[1] / self.environment / "bin" / "python"
        return python if python.exists() else None


RIVALS = {
    rival.name: rival
    for rival in (
        Rival("transformers", "transformers_generate.py", ".venv-golden", ("fp32", "bf16")),
        Rival("llama.cpp", "llama_cpp_generate.py", ".venv-llama", ("f32", "f16")),
    )
}

Progress = Callable[[str], None]
Batch = list[list[int]]


def compare(
    rival: Rival,
    python: Path,
    directory: str | Path,
    threads: int,
    ours: Callable[[Batch], tuple[Timing, list[int]]],
    batches: Sequence[Batch],
    output_tokens: int,
    progress: Progress,
) -> dict[str, Any]:
    """Both sides' medians over `batches`, taken in turn.

    ratio        the rival's seconds over ours (above 1: ours is faster); `cpu_ratio` the same by CPU seconds, which a busy
                 host disturbs less
    first_tokens_alike  share of prompts whose first token both sides chose alike: a check that the weights are the same
    """
    with _serving(rival, python, directory, threads, len(batches[0])) as other:
        progress(f"{rival.name}: warm-up")
        probes = {dtype: _probe(other, dtype, batches[0]) for dtype in rival.dtypes}
        worth = [dtype for dtype in probes if probes[dtype] <= HOPELESS * min(probes.values())]
        own: list[tuple[Timing, list[int]]] = []
        theirs: dict[str, list[dict[str, Any]]] = {dtype: [] for dtype in worth}
        for turn, batch in enumerate(batches):
            progress(f"turn {turn + 1} of {len(batches)}: ours, then {rival.name} in {', '.join(worth)}")
            own.append(ours(batch))
            for dtype, answers in theirs.items():
                answers.append(other.generate(dtype, batch, output_tokens))
    answers = next(iter(theirs.values()))
    pairs = [
        (a, b)
        for (_, firsts), one in zip(own, answers, strict=True)
        for a, b in zip(firsts, one["first_tokens"], strict=True)
    ]
    return {
        **_medians(rival, [timing for timing, _ in own], theirs, len(batches[0]) * output_tokens),
        "first_tokens_alike": sum(a == b for a, b in pairs) / len(pairs),
        "probe_seconds": probes,
        **other.about,
    }


def _medians(rival: Rival, own: list[Timing], theirs: dict[str, list[dict[str, Any]]], tokens: int) -> dict[str, Any]:
    seconds = {dtype: [one["seconds"] for one in answers] for dtype, answers in theirs.items()}
    best = min(seconds, key=lambda dtype: statistics.median(seconds[dtype]))
    own_s = statistics.median(one.total_s for one in own)
    cpu_s = statistics.median(one["cpu_seconds"] for one in theirs[best])
    return {
        "against": rival.name,
        "ratio": statistics.median(seconds[best]) / own_s,
        "cpu_ratio": cpu_s / statistics.median(one.cpu_s for one in own),
        "headrace_tokens_per_s": tokens / own_s,
        "other_tokens_per_s": {dtype: tokens / statistics.median(times) for dtype, times in seconds.items()},
        "other_dtype": best,
        "seconds": {"headrace": [one.total_s for one in own], "other": seconds},
        "cpu_seconds": {
            "headrace": [one.cpu_s for one in own],
            "other": [one["cpu_seconds"] for one in theirs[best]],
        },
    }


def _probe(other: _Other, dtype: str, batch: Batch) -> float:
    """Seconds for the prompts and a few tokens, warm: a dtype that this host emulates is not worth minutes."""
    other.generate(dtype, batch[:2], 2)
    return other.generate(dtype, batch, PROBE_TOKENS)["seconds"]


class _Other:
    """A running script; it sleeps while it is not asked."""

    def __init__(self, process: subprocess.Popen[str], rival: Rival):
        self._process, self._rival = process, rival
        self.about = self._read()

    def generate(self, dtype: str, batch: Batch, output_tokens: int) -> dict[str, Any]:
        """`seconds`, `cpu_seconds` and `first_tokens` of one call with all prompts at once."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"dtype": dtype, "prompts": batch, "output_tokens": output_tokens}) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        made = answer.pop("token_ids")
        if any(len(ids) != output_tokens for ids in made):
            raise ConfigError(f"{self._rival.name} stopped before {output_tokens} tokens", field="against")
        return {**answer, "first_tokens": [ids[0] for ids in made]}

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise ConfigError(f"{self._rival.script} ended with code {code}; its own words are above", field="against")
        return json.loads(line)


@contextlib.contextmanager
def _serving(rival: Rival, python: Path, directory: str | Path, threads: int, slots: int) -> Iterator[_Other]:
    script = Path(__file__).with_name(rival.script)
    command = [str(python), str(script), str(directory), "--threads", str(threads)]
    if rival.name == "llama.cpp":
        command += ["--slots", str(slots)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield _Other(process, rival)
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.communicate(timeout=None if process.poll() is not None else 60)
