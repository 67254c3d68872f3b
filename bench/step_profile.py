"""Where a decode step's time goes on a CPU, and what it takes when nothing but our C kernels is left of the model.

An eager step walks the model in Python: each op plans its call, asks torch for memory and calls one C function. A
replayed step (headrace/engine/steps/replayed.py) makes the same calls on the same shapes from one C function. The difference
is the dispatch, measured and not estimated: both make whole generations, and the same tokens.

C calls are timed around ctypes, torch ops by torch's profiler (time inside of them, without the way in), each in runs of
its own: a part is the median over runs of its mean over steps, in microseconds a step. `python` is the rest of a step.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from headrace.engine.offline import Engine
from headrace.engine.steps.plain import PlainSteps
from headrace.engine.steps.replayed import ReplayedSteps
from headrace.protocol.common import SamplingParams
from kernels.toolchain import cpu_library

STEPS = 63
PHASES = ("plan", "upload", "forward", "sample")


class _Clock:
    """Adds up what runs within decode steps; the steps themselves too."""

    def __init__(self, engine: Engine, outer: _Clock | None = None):
        """`outer`: whose steps count as steps; by itself, those that `step` makes."""
        self._batcher = engine.decode
        self._outer = outer or self
        self.steps = self.calls = 0
        self.step_s = self.part_s = 0.0
        self._in_step = False

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, its time and calls added up when a decode step runs it."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self._outer._in_step:
                return function(*args, **kwargs)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.part_s += time.perf_counter() - start
                self.calls += 1

        return timed

    def step(self) -> None:
        """One `run_once` of the batcher."""
        start, self._in_step = time.perf_counter(), True
        try:
            type(self._batcher).run_once(self._batcher)
        finally:
            self._in_step = False
            self.step_s += time.perf_counter() - start
            self.steps += 1


@contextlib.contextmanager
def _patched(owner: Any, clock: _Clock, *names: str) -> Iterator[None]:
    """These attributes are timed while it is open."""
    own = {name: (getattr(owner, name), name in vars(owner)) for name in names}
    try:
        for name, (function, _) in own.items():
            setattr(owner, name, clock.around(function))
        yield
    finally:
        for name, (function, was_own) in own.items():
            if was_own:
                setattr(owner, name, function)
            else:
                delattr(owner, name)


def run(engine: Engine, prompts: list[list[int]], *, repeats: int = 3) -> dict[str, Any]:
    """The step of as many streams as there are prompts, as one JSON-ready object; microseconds a step.

    eager        {step_us, c_kernels_us, torch_us, python_us, c_calls, torch_calls}
    replayed     {step_us, c_kernels_us, c_calls: one for all layers, and the head's; phases_us: {plan, upload, forward,
                 sample, output}, of which `forward` holds the C calls}
    dispatch_us  what replaying saves: eager step_us - replayed step_us; speedup: their quotient
    tokens_alike  whether both made the same tokens, which they must
    `skipped` says why there is none.
    """
    runner, steps = engine.parts.runner, engine.parts.runner.steps
    if not isinstance(steps, ReplayedSteps):
        return {
            "skipped": "decode steps are not replayed here: it needs the C kernels and engine.decode_graphs left open"
        }
    try:
        runner.steps = PlainSteps(steps.model, steps.pool, steps.sampler)
        eager_tokens = _generate(engine, prompts)
        eager = _eager(engine, prompts, repeats)
        runner.steps = steps
        tokens = _generate(engine, prompts)
        if steps.recorded.refused is not None:
            return {"skipped": f"decode steps of this model are not replayed: {steps.recorded.refused}"}
        replayed = _replayed(engine, prompts, repeats)
    finally:
        runner.steps = steps
    return {
        "streams": len(prompts),
        "eager": eager,
        "replayed": replayed,
        "dispatch_us": eager["step_us"] - replayed["step_us"],
        "speedup": eager["step_us"] / replayed["step_us"],
        "tokens_alike": tokens == eager_tokens,
    }


def _eager(engine: Engine, prompts: list[list[int]], repeats: int) -> dict[str, float]:
    step_us, _, _ = _part(engine, prompts, repeats, lambda clock: contextlib.nullcontext())
    library = cpu_library.library()
    timed_us, c_us, c_calls = _part(
        engine, prompts, repeats, lambda clock: _patched(library, clock, *cpu_library.RECORDED)
    )
    torch_us, torch_calls = _torch_ops(engine, prompts)
    return {
        "step_us": step_us,
        "c_kernels_us": c_us,
        "torch_us": torch_us,
        "python_us": timed_us - c_us - torch_us,
        "c_calls": c_calls,
        "torch_calls": torch_calls,
    }


def _torch_ops(engine: Engine, prompts: list[list[int]]) -> tuple[float, float]:
    """Microseconds inside of torch's ops, and how many of them, in a step."""
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    batcher, steps = engine.decode, 0

    def step() -> None:
        nonlocal steps
        if not steps:
            profiler.start()  # after the prefill
        steps += 1
        type(batcher).run_once(batcher)

    batcher.run_once = step
    try:
        _generate(engine, prompts)
    finally:
        del batcher.run_once
        if steps:
            profiler.stop()
    ops = [event for event in profiler.key_averages() if event.key.startswith("aten::")]
    return sum(event.self_cpu_time_total for event in ops) / steps, sum(event.count for event in ops) / steps


def _replayed(engine: Engine, prompts: list[list[int]], repeats: int) -> dict[str, Any]:
    step_us, _, _ = _part(engine, prompts, repeats, lambda clock: contextlib.nullcontext())
    library = cpu_library.library()
    _, c_us, c_calls = _part(
        engine, prompts, repeats, lambda clock: _patched(library, clock, "hr_replay", *cpu_library.RECORDED)
    )
    return {
        "step_us": step_us,
        "c_kernels_us": c_us,
        "c_calls": c_calls,
        "phases_us": _phases(engine, prompts, repeats),
    }


def _phases(engine: Engine, prompts: list[list[int]], repeats: int) -> dict[str, float]:
    """All in the same runs, so that they and `output` add up to those runs' step."""
    steps = engine.parts.runner.steps
    owners = ((engine.decode, "plan"), (steps, "batch_of"), (steps, "logits"), (steps.sampler, "draw"))
    seen: list[list[float]] = []

    @contextlib.contextmanager
    def watch(clock: _Clock) -> Iterator[None]:
        parts = [_Clock(engine, clock) for _ in owners]
        with contextlib.ExitStack() as stack:
            for part, (owner, name) in zip(parts, owners, strict=True):
                stack.enter_context(_patched(owner, part, name))
            yield
        each = [part.part_s / clock.steps * 1e6 for part in parts]
        seen.append([*each, clock.step_s / clock.steps * 1e6 - sum(each)])

    _part(engine, prompts, repeats, watch)
    medians = map(statistics.median, zip(*seen, strict=True))
    return dict(zip((*PHASES, "output"), medians, strict=True))


def _part(
    engine: Engine,
    prompts: list[list[int]],
    repeats: int,
    watch: Callable[[_Clock], contextlib.AbstractContextManager[Any]],
) -> tuple[float, float, float]:
    """Microseconds of a step and of what `watch` has timed in it, and how many calls of that a step made."""
    seen = []
    for _ in range(repeats):
        clock = _Clock(engine)
        engine.decode.run_once = clock.step
        try:
            with watch(clock):
                _generate(engine, prompts)
        finally:
            del engine.decode.run_once
        seen.append((clock.step_s / clock.steps, clock.part_s / clock.steps, clock.calls / clock.steps))
    step_s, part_s, calls = (statistics.median(column) for column in zip(*seen, strict=True))
    return step_s * 1e6, part_s * 1e6, calls


def _generate(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """All of a batch decode together: STEPS steps."""
    outputs = engine.generate(prompts, SamplingParams(max_tokens=STEPS + 1, ignore_eos=True))
    return [samples[0].token_ids for samples in outputs]
