"""What the mesh costs: output tokens per second through four processes, beside the engine alone; `headrace bench mesh`.

The same prompts, mode and thread count on both sides, run in turn. The engine alone runs in this process while the mesh idles; the
mesh is asked by one asyncio client of this process. Time counts from the first prompt sent to the last token received.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import engine as alone
from headrace import config as configuration
from headrace.client import AsyncClient
from headrace.launch.local import Mesh


def run(
    directory: str | Path,
    *,
    streams: int = 32,
    mode: str = "fast",
    repeats: int = 3,
    stream_interval: int = 1,
    progress: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """{streams, mode, engine_tokens_per_s, mesh_tokens_per_s, ratio, ready_s, ...}; medians of `repeats` runs in turn."""
    exact = str(mode == "exact").lower()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as state:
        flags = [f"model.directory={directory}", f"mesh.run_directory={state}", f"engine.exact={exact}"]
        config = configuration.load(flags=flags)
        parts = alone.open_engine(directory, mode, streams, config.engine.num_threads)
        batch = alone.prompts(streams, parts.parts.transformer.vocab_size)
        progress("starting the mesh")
        began = time.monotonic()
        with Mesh(config, flags=flags) as mesh:
            ready_s = time.monotonic() - began
            alone.measure(parts, batch)
            asyncio.run(_through(mesh.router_address, batch, stream_interval))
            engine_s, mesh_s = [], []
            for index in range(repeats):
                progress(f"run {index + 1} of {repeats}")
                engine_s.append(alone.measure(parts, batch).total_s)
                mesh_s.append(asyncio.run(_through(mesh.router_address, batch, stream_interval)))
    tokens = streams * alone.OUTPUT_TOKENS
    engine_rate, mesh_rate = tokens / statistics.median(engine_s), tokens / statistics.median(mesh_s)
    return {
        "streams": streams,
        "mode": mode,
        "engine_tokens_per_s": round(engine_rate, 1),
        "mesh_tokens_per_s": round(mesh_rate, 1),
        "ratio": round(mesh_rate / engine_rate, 3),
        "ready_s": round(ready_s, 1),
        "stream_interval": stream_interval,
        "workload": {"prompt_tokens": alone.PROMPT_TOKENS, "output_tokens": alone.OUTPUT_TOKENS, "repeats": repeats},
    }


async def _through(address: str, batch: list[list[int]], stream_interval: int) -> float:
    """Seconds for all prompts at once through the mesh."""
    options = {"max_tokens": alone.OUTPUT_TOKENS, "ignore_eos": True, "temperature": 0.0, "repetition_penalty": 1.0}
    async with AsyncClient(address, timeout_s=600) as client:
        began = time.perf_counter()
        answers = await asyncio.gather(
            *(client.generate(prompt, stream_interval=stream_interval, **options) for prompt in batch)
        )
        took = time.perf_counter() - began
    assert all(len(answer.samples[0].token_ids) == alone.OUTPUT_TOKENS for answer in answers)
    return took
