"""`headrace bench kernels`: every op at DeepSeek-R1 shapes on this GPU, in one run with one set of ceilings."""

from __future__ import annotations

import importlib
import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.kernels.harness import measure_ceilings
from headrace.errors import ConfigError

GROUPS = ("row_ops", "latent_ops", "gemm_ops", "nvfp4_ops", "attention_ops")


def run(
    groups: Sequence[str] = GROUPS, progress: Callable[[str], None] = print, keep: Path | None = None
) -> dict[str, Any]:
    """{ceilings, rows, failed, host}. A group that raises is named in `failed`; the others still count.

    keep: a file that is written after every group, so that a run that is cut short leaves what it had. Raises ConfigError without a CUDA device or for an unknown group.
    """
    if unknown := set(groups) - set(GROUPS):
        raise ConfigError(
            f"group {', '.join(sorted(unknown))} is unknown; there are {', '.join(GROUPS)}", field="groups"
        )
    if not torch.cuda.is_available():
        raise ConfigError("the kernel bench needs a CUDA device", field="engine.device")
    device = torch.device("cuda")
    torch.manual_seed(0)
    ceilings = measure_ceilings(device)
    progress(f"ceilings: {ceilings}")
    rows, failed = [], {}
    made = {"ceilings": asdict(ceilings), "rows": rows, "failed": failed, "host": host(device)}
    for group in groups:
        try:
            found = importlib.import_module(f"bench.kernels.{group}").rows(device, ceilings, progress)
            rows += [row.as_json() for row in found]
        except Exception as error:
            failed[group] = f"{type(error).__name__}: {error}"
            progress(f"{group} failed: {failed[group]}")
        torch.cuda.empty_cache()
        if keep is not None:
            keep.write_text(json.dumps(made))
    return made


def host(device: torch.device) -> dict[str, Any]:
    """What it ran on."""
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device),
        "capability": list(torch.cuda.get_device_capability(device)),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
    for name in ("triton", "flashinfer"):
        try:
            found[name] = importlib.import_module(name).__version__
        except ImportError:
            found[name] = None
    return found
