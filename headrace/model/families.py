"""The families that are served, and which of them a checkpoint belongs to. A new family is a package and a line here."""

from __future__ import annotations

import json
from pathlib import Path

from headrace.errors import CheckpointError
from headrace.model.base import Family
from headrace.model.deepseek.family import DeepSeek

FAMILIES: tuple[Family, ...] = (DeepSeek(),)


def family_of(directory: str | Path) -> Family:
    """The family that serves this checkpoint. Raises CheckpointError naming its architecture and those that are served."""
    path = Path(directory) / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    found = next((family for family in FAMILIES if isinstance(config, dict) and family.serves(config)), None)
    if found is None:
        architecture = config.get("architectures") if isinstance(config, dict) else config
        known = ", ".join(family.name for family in FAMILIES)
        raise CheckpointError(f"{path}: architectures = {architecture!r} belongs to no family that is served ({known})")
    return found
