"""`headrace bench ...`: what is measured, on this host, by the code in `bench/`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from headrace import config as configuration
from headrace.cli import options

app = typer.Typer(no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Measure."""


@app.command("engine")
def engine(
    config_file: options.ConfigFile = None,
    flags: options.Flags = None,
    as_json: options.Json = False,
    streams: Annotated[str, typer.Option(help="Concurrent streams, comma-separated.")] = "1,8,32,64",
    modes: Annotated[str, typer.Option(help="exact, fast or both, comma-separated.")] = "exact,fast",
    transformers_python: Annotated[
        Path | None, typer.Option(help="Interpreter that has transformers; `make golden` makes .venv-golden.")
    ] = None,
) -> None:
    """Prefill and decode speed of the engine alone, beside transformers on the same weights."""
    from bench import engine as measure

    config = options.load(config_file, flags)
    python = transformers_python or _default_python()
    result = measure.run(
        configuration.model_directory(config),
        progress=Console(stderr=True).print,
        streams=tuple(int(part) for part in streams.split(",")),
        modes=tuple(modes.split(",")),
        transformers_python=python,
    )
    if as_json:
        print(json.dumps(result))
        return
    table = Table(title="engine alone, tokens per second")
    for column in ("streams", "mode", "prefill", "decode"):
        table.add_column(column, justify="right")
    for row in result["rows"]:
        prefill, decode = f"{row['prefill_tokens_per_s']:.0f}", f"{row['decode_tokens_per_s']:.0f}"
        table.add_row(str(row["streams"]), row["mode"], prefill, decode)
    Console().print(table)
    print(json.dumps({key: value for key, value in result.items() if key != "rows"}, indent=2))


@app.command("mesh")
def mesh(
    config_file: options.ConfigFile = None,
    flags: options.Flags = None,
    as_json: options.Json = False,
    streams: Annotated[int, typer.Option(help="Concurrent streams.")] = 32,
    mode: Annotated[str, typer.Option(help="exact or fast.")] = "fast",
    stream_interval: Annotated[int, typer.Option(help="Tokens per message after the first.")] = 1,
) -> None:
    """Tokens per second through a mesh of this host, beside the engine alone."""
    from bench import mesh as measure

    config = options.load(config_file, flags)
    console = Console(stderr=True)
    result = measure.run(
        configuration.model_directory(config),
        streams=streams,
        mode=mode,
        stream_interval=stream_interval,
        progress=console.print,
    )
    print(json.dumps(result, indent=None if as_json else 2))


def _default_python() -> Path | None:
    own = Path(__file__).resolve().parents[2] / ".venv-golden" / "bin" / "python"
    return own if own.exists() else None
