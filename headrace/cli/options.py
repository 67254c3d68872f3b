"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace import config as configuration
from headrace.config import Config
from headrace.errors import ConfigError
from headrace.launch.local import find_router

ConfigFile = Annotated[str | None, typer.Option("--config", help="TOML file with settings.")]
Flags = Annotated[list[str] | None, typer.Option("--set", help="A setting, as part.key=value; may be repeated.")]
Address = Annotated[
    str | None, typer.Option("--address", help="host:port of a router; default: the mesh on this host.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object instead of text for people.")]


def load(config_file: str | None, flags: list[str] | None) -> Config:
    """The settings a command runs with."""
    return configuration.load(config_file, flags or ())


def router_address(address: str | None, config: Config) -> str:
    """The router to talk to. Raises ConfigError for an address that is none, or when no mesh runs here."""
    if not address:
        return find_router(config)
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(f"--address {address!r} is not host:port", field="address")
    return address
