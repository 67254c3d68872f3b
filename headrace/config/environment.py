"""The only place that reads and writes the environment, and what else a process finds by it."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from headrace.config.tree import Config

CHECKOUT = Path(__file__).resolve().parents[2]
"""Where this code stands: what `models/tiny` and `services` mean to every process of a mesh, wherever it was started."""
THREAD_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""For every process that computes on a CPU, before torch loads. With libgomp's default of spinning, two workers on two cores
slow each other down more than tenfold."""


def run_directory(config: Config, environment: Mapping[str, str] | None = None) -> Path:
    """Where this mesh keeps its plan, logs and traces."""
    environment = os.environ if environment is None else environment
    if config.mesh.run_directory:
        return Path(config.mesh.run_directory).expanduser().absolute()
    state = environment.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "headrace" / config.mesh.name


def model_directory(config: Config) -> Path:
    """The checkpoint, absolute: as given, seen from where we stand or else from the checkout."""
    given = Path(config.model.directory).expanduser()
    if given.is_absolute() or given.exists():
        return given.absolute()
    return CHECKOUT / given


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process we start: ours plus `extra`."""
    return {**os.environ, **extra}


def apply_environment(values: Mapping[str, str]) -> None:
    """Sets variables that a library reads when it loads; called by process starts before they import it."""
    os.environ.update(values)


def find_own_programs() -> None:
    """Puts the programs installed beside this Python last on PATH: FlashInfer calls `ninja` by its name alone, and nobody need
    have activated the environment."""
    own = sysconfig.get_path("scripts")
    path = os.environ.get("PATH", os.defpath)
    if own not in path.split(os.pathsep):
        apply_environment({"PATH": f"{path}{os.pathsep}{own}"})


def environment_value(name: str) -> str | None:
    """One variable, for checks that a library will see what it needs."""
    return os.environ.get(name)


def whole(environment: Mapping[str, str] | None = None) -> Mapping[str, str]:
    """`environment`, or this process's when None."""
    return os.environ if environment is None else environment
