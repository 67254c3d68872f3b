"""From a file, the environment and flags to checked settings.

Order: defaults < TOML file < environment (`HEADRACE__ENGINE__MAX_BATCH_SIZE=64`) < flags (`engine.max_batch_size=64`). An unknown key or
a bad value raises ConfigError with the key's path.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.config.check import check
from headrace.config.environment import whole
from headrace.config.tree import Config
from headrace.errors import ConfigError


def load(
    path: str | Path | None = None, flags: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Config:
    """The settings of this process.

    `path` names a TOML file; absent, the file named by `HEADRACE_CONFIG` if that is set. `flags` are `part.key=value`.
    Raises ConfigError naming the key's path for unknown keys, bad values and settings that cannot work together.
    """
    environment = whole(environment)
    tree: dict[str, Any] = {}
    path = path or environment.get("HEADRACE_CONFIG") or None
    if path is not None:
        _merge(tree, _read_toml(Path(path)))
    for name, text in environment.items():
        if name.startswith("HEADRACE__"):
            _assign(tree, name.removeprefix("HEADRACE__").lower().split("__"), text)
    for flag in flags:
        key, separator, text = flag.partition("=")
        if not separator:
            raise ConfigError(f"flag {flag!r} is not of the form part.key=value", field=key)
        _assign(tree, key.split("."), text)
    config = _build(Config, tree, "")
    check(config)
    return config


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", field=str(path)) from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise ConfigError(f"{path} is not TOML: {error}", field=str(path)) from error


def _merge(tree: dict[str, Any], other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, dict):
            _merge(tree.setdefault(key, {}), value)
        else:
            tree[key] = value


def _assign(tree: dict[str, Any], keys: Sequence[str], text: str) -> None:
    node = tree
    for key in keys[:-1]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise ConfigError(f"{'.'.join(keys)} is below a value", field=".".join(keys))
    node[keys[-1]] = _Text(text)


class _Text(str):
    """A value that came as text and takes the type of its field."""


def _build(kind: type, tree: Mapping[str, Any], path: str) -> Any:
    hints = typing.get_type_hints(kind)
    names = {entry.name for entry in dataclasses.fields(kind)}
    for key in tree:
        if key not in names:
            known = ", ".join(sorted(names))
            raise ConfigError(f"unknown setting {path}{key}; known here: {known}", field=f"{path}{key}")
    values = {key: _convert(hints[key], value, f"{path}{key}") for key, value in tree.items()}
    return kind(**values)


def _convert(kind: Any, value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path} must be a table", field=path)
        return _build(typing.cast(type, kind), value, path + ".")
    if typing.get_origin(kind) is types.UnionType:
        if isinstance(value, _Text) and value.lower() in ("", "none", "auto"):
            return None
        return _convert(next(arm for arm in typing.get_args(kind) if arm is not types.NoneType), value, path)
    if typing.get_origin(kind) is tuple:
        arm = typing.get_args(kind)[0]
        return tuple(_convert(arm, item, path) for item in _items(arm, value, path))
    try:
        return _scalar(kind, value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path} = {value!r} is not a valid {kind.__name__}", field=path) from error


def _items(kind: type, value: Any, path: str) -> list[Any]:
    """The items of a list, or of a text that names them: numbers with `,` or `;` between, texts with `;`."""
    if isinstance(value, str):
        text = str(value) if kind is str else value.replace(",", ";")
        return [_Text(part.strip()) for part in text.split(";") if part.strip()]
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{path} = {value!r} is not a list", field=path)
    return list(value)


def _scalar(kind: type, value: Any) -> Any:
    if kind is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, _Text) and value.lower() in ("true", "1", "yes", "on"):
            return True
        if isinstance(value, _Text) and value.lower() in ("false", "0", "no", "off"):
            return False
        raise ValueError(value)
    if kind is str:
        if not isinstance(value, str):
            raise TypeError(value)
        return str(value)
    if isinstance(value, bool) or (isinstance(value, str) and not isinstance(value, _Text)):
        raise TypeError(value)
    if kind is int and isinstance(value, float):
        raise ValueError(value)
    number = kind(value)
    if not 0 <= number < math.inf:  # no setting is negative; NaN would pass every later check
        raise ValueError(value)
    return number
