"""`headrace trace [ID]`: the waterfall of one request, read from the mesh's ring files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headrace import config as configuration
from headrace.cli import options
from headrace.cli.waterfall import Bar, draw, note
from headrace.config import Config
from headrace.errors import NotFound
from headrace.observe import ring


def trace(
    which: Annotated[str | None, typer.Argument(metavar="[ID]", help="Trace or request id; default: the last.")] = None,
    config_file: options.ConfigFile = None,
    flags: options.Flags = None,
    as_json: options.Json = False,
) -> None:
    """Draw where the time of a request went."""
    config = options.load(config_file, flags)
    directory = ring_directory(config)
    spans = ring.trace(directory, which)
    if not spans:
        raise NotFound(f"no trace{f' {which}' if which else ''} in {directory}")
    if as_json:
        print(json.dumps([asdict(span) for span in spans]))
        return
    draw_spans(Console(), spans)


def ring_directory(config: Config) -> Path:
    """Where the mesh's processes write their spans: `telemetry.ring_directory`, or `traces` below the run directory."""
    own = config.telemetry.ring_directory
    return Path(own) if own else configuration.run_directory(config) / "traces"


def draw_spans(console: Console, spans: Sequence[ring.Span]) -> None:
    """The waterfall of one trace."""
    zero = min(span.start_s for span in spans)
    bars = []
    for span in spans:
        attributes = span.attributes
        tokens = attributes.get("tokens", 0) or 0
        text = note(int(tokens), int(attributes.get("bytes", 0) or 0))
        if span.error:
            text = f"{text} failed: {span.error}".strip()
        bars.append(Bar(span.name, span.start_s - zero, span.duration_s, text))
    request = next((span.attributes.get("request_id") for span in spans if span.attributes.get("request_id")), "")
    draw(console, f"trace {spans[0].trace_id}  request {request}", bars)
