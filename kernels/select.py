"""Pick one back end of an op for a device, once, and say why.

Every kernel file ends in `BACKENDS`, best first. `choose` walks that list, logs its choice and returns it. A back end
that was asked for by name and cannot run raises with the reason of every back end: never a silent second choice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)


def _runs_everywhere(device: Any) -> str | None:
    return None


@dataclass(frozen=True)
class Backend:
    """One way to compute an op.

    name     unique within its op; what configuration and logs say
    run      the function (or plan-and-run object) itself
    why_not  takes a torch.device, answers None when it can run there, else one sentence
    """

    name: str
    run: Callable[..., Any]
    why_not: Callable[[Any], str | None] = _runs_everywhere


class BackendUnavailable(RuntimeError):
    """No back end of an op can run here, or the wanted one cannot. Carries every reason."""


def choose(backends: Sequence[Backend], device: Any, wanted: str | None = None, *, op: str = "op") -> Backend:
    """The back end named `wanted`, or the first that runs on `device` when `wanted` is None.

    Raises BackendUnavailable, with the reason of each back end, when `wanted` is unknown or cannot run, or when none can.
    """
    reasons = {backend.name: backend.why_not(device) for backend in backends}
    for backend in backends:
        if reasons[backend.name] is None and wanted in (None, backend.name):
            fields = {"op": op, "backend": backend.name, "device": str(device)}
            logger.info("kernel chosen", extra={"fields": fields})  # as headrace.observe.logs reads them
            return backend
    asked = "no back end" if wanted is None else f"back end {wanted!r}"
    told = "; ".join(f"{name}: {reason or 'available'}" for name, reason in reasons.items())
    raise BackendUnavailable(f"{op}: {asked} can run on {device} ({told})")
