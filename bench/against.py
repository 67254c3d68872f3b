"""Another engine on the same weights, run by run in turn with ours, so that a noisy host troubles both.

The other engine lives in a process of its own, under an interpreter of its own, and answers lines of JSON. It gets the
better of the dtypes it offers: a short probe drops one that is more than `HOPELESS` times slower than the best.
Whatever is waited for has a deadline; when it passes, the other engine is ended and a ConfigError says what was late.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import statistics
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from headrace.errors import ConfigError

HOPELESS = 2.0
PROBE_TOKENS = 8
END_S = 10.0  # for a rival to end by itself when it is asked no more


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
    """name; the script that serves it and the environment `make ...` builds for it; the dtypes it offers.

    variables    added to the environment of its process
    start_s      longest wait for its first line, everything imported
    answer_s     longest wait for one answer; a dtype is loaded within its first one
    """

    name: str
    script: str
    environment: str
    dtypes: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()
    start_s: float = 120.0
    answer_s: float = 180.0

    def interpreter(self) -> Path | None:
        """The environment's Python, when it has been made."""
        python = Path(__file__).resolve().parents[1] / self.environment / "bin" / "python"
        return python if python.exists() else None


RIVALS = {
    rival.name: rival
    for rival in (
        Rival("transformers", "transformers_generate.py", ".venv-golden", ("fp32", "bf16")),
        # Its threads meet at a barrier several times a layer and spin there, 300,000 rounds by default: when one of them
        # has lost its core, that is minutes. A tenth of it is as fast on a quiet host. OMP_WAIT_POLICY=PASSIVE is not: it
        # cost llama.cpp 1.25x at 32 streams and 6x at one (two cores of Zen 3, xllamacpp 2026.10.11549).
        Rival(
            "llama.cpp",
            "llama_cpp_generate.py",
            ".venv-llama",
            ("f32", "f16"),
            variables=(("GOMP_SPINCOUNT", "30000"),),
        ),
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
        probes = {}
        for dtype in rival.dtypes:
            progress(f"{rival.name}: warm-up in {dtype}")
            probes[dtype] = _probe(other, dtype, batches[0])
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
        assert process.stdin is not None and process.stdout is not None
        self._process, self._rival, self._asking = process, rival, process.stdin
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=_read_lines, args=(process.stdout, self._lines), daemon=True).start()
        self.about = self._read(rival.start_s, "did not start")

    def generate(self, dtype: str, batch: Batch, output_tokens: int) -> dict[str, Any]:
        """`seconds`, `cpu_seconds` and `first_tokens` of one call with all prompts at once."""
        asked = {"dtype": dtype, "prompts": batch, "output_tokens": output_tokens}
        with contextlib.suppress(BrokenPipeError):  # it has ended; what is read next says so
            self._asking.write(json.dumps(asked) + "\n")
            self._asking.flush()
        late = f"did not finish {len(batch)} prompts and {output_tokens} tokens of each in {dtype}"
        answer = self._read(self._rival.answer_s, late)
        made = answer.pop("token_ids")
        if any(len(ids) != output_tokens for ids in made):
            raise ConfigError(f"{self._rival.name} stopped before {output_tokens} tokens", field="against")
        return {**answer, "first_tokens": [ids[0] for ids in made]}

    def _read(self, limit_s: float, late: str) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=limit_s)
        except queue.Empty:
            self._process.kill()
            raise ConfigError(
                f"{self._rival.name} {late} within {limit_s:g} s; is this host busy with something else?",
                field="against",
            ) from None
        if not line:
            code = self._process.wait(END_S)
            raise ConfigError(f"{self._rival.script} ended with code {code}; its own words are above", field="against")
        return json.loads(line)


def _read_lines(stream: IO[str], lines: queue.SimpleQueue[str]) -> None:
    """Passes lines on until the stream ends, and then an empty one."""
    with stream:
        for line in stream:
            lines.put(line)
    lines.put("")


@contextlib.contextmanager
def _serving(rival: Rival, python: Path, directory: str | Path, threads: int, slots: int) -> Iterator[_Other]:
    script = Path(__file__).parent / rival.script
    command = [str(python), str(script), str(directory), "--threads", str(threads)]
    if rival.name == "llama.cpp":
        command += ["--slots", str(slots)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **dict(rival.variables)}
    )
    try:
        yield _Other(process, rival)
    finally:
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """The process is gone afterwards: it ends when its input does, or is ended."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
