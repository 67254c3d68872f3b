"""`headrace bench ...`: what is measured, on this host, by the code in `bench/`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from headrace import config as configuration
from headrace.cli import options
from headrace.errors import ConfigError

app = typer.Typer(no_args_is_help=True)


Keep = Annotated[Path | None, typer.Option(help="Also write the JSON here, after every part.")]


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
    rivals: Annotated[
        list[str] | None,
        typer.Option("--against", help="Another engine on the same weights; may be repeated. Default: all made here."),
    ] = None,
) -> None:
    """Prefill and decode speed of the engine alone, beside other engines on the same weights."""
    from bench import engine as measure

    config = options.load(config_file, flags)
    result = measure.run(
        configuration.model_directory(config),
        progress=_progress(),
        streams=_numbers(streams),
        modes=_words(modes),
        rivals=_interpreters(rivals),
    )
    if as_json:
        print(json.dumps(result))
        return
    columns = ("streams", "mode", "prefill_tokens_per_s", "decode_tokens_per_s")
    _show("engine alone", columns, result["rows"])
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
    result = measure.run(
        configuration.model_directory(config),
        streams=streams,
        mode=mode,
        stream_interval=stream_interval,
        progress=_progress(),
    )
    print(json.dumps(result, indent=None if as_json else 2))


@app.command("stream")
def stream(
    as_json: options.Json = False,
    keep: Keep = None,
    quick: Annotated[
        bool, typer.Option(help="Every part, a few hundred requests: the figures are not steady.")
    ] = False,
    requests: Annotated[int, typer.Option(help="Requests a point. 0: as planned.")] = 0,
    rivals: Annotated[bool, typer.Option(help="Also measure the routers of `make routers`.")] = True,
) -> None:
    """What a request and a token cost each process, with mock engines, beside a bare gRPC stream and other routers."""
    from bench.stream import run as measure
    from bench.stream.plan import QUICK, Plan

    plan = QUICK if quick else Plan()
    plan = dataclasses.replace(plan, requests=requests or plan.requests)
    result = measure.run(plan, with_rivals=rivals, progress=_progress(), keep=keep)
    if as_json:
        print(json.dumps(result))
        return
    costs = [{"process": name} | _flat(cost) for name, cost in result["processes"].items()]
    columns = ("us_per_request", *(f"us_per_token at {interval}" for interval in plan.intervals), "residual")
    _show("CPU of each process", ("process", *columns), costs)
    _show("routers in Rust", ("name", *columns, "why_not"), [_flat(rival) for rival in result["rivals"]])
    _show("goals", ("name", "measured", "goal", "unit", "met"), result["goals"])
    print(json.dumps({name: result[name] for name in ("host", "floor", "first_token", "streams_1024")}, indent=2))


@app.command("transfer")
def transfer(
    as_json: options.Json = False,
    links: Annotated[str, typer.Option(help="tcp, nvlink_intra or both, comma-separated.")] = "tcp,nvlink_intra",
    memory: Annotated[str, typer.Option(help="cpu, cuda or both, comma-separated.")] = "cpu,cuda",
    blocks: Annotated[str, typer.Option(help="Sizes of a push, in blocks of 73,728 bytes.")] = "",
) -> None:
    """GB/s of KV rows between two processes of this host, by size, link and memory."""
    from bench import transfer as measure

    wanted = [case for case in measure.CASES if case[0] in _words(links) and case[1] in _words(memory)]
    if not wanted:
        known = "; ".join(f"{link} with {place}" for link, place in measure.CASES)
        raise ConfigError(f"--links {links} with --memory {memory}: there are {known}", field="links")
    result = measure.run(cases=wanted, sizes=_numbers(blocks) or measure.SIZES, progress=_progress())
    if as_json:
        print(json.dumps(result))
        return
    _show("rows between two processes", ("link", "memory", "shape", "bytes", "us", "gb_s", "equal"), result["rows"])
    for entry in result["skipped"]:
        print(f"{entry['link']} with {entry['memory']} memory: {entry['why']}")


@app.command("kernels")
def kernels(
    as_json: options.Json = False,
    keep: Keep = None,
    groups: Annotated[str, typer.Option(help="Groups of ops, comma-separated. Default: all.")] = "",
) -> None:
    """Every op at DeepSeek-R1 shapes on this GPU, beside the hardware's limit and the best public kernel."""
    from bench.kernels import suite

    result = suite.run(groups=_words(groups) or suite.GROUPS, progress=_progress(), keep=keep)
    if as_json:
        print(json.dumps(result))
        return
    columns = ("op", "shape", "backend", "us", "fraction_of_limit", "ratio_to_best_public", "best_public", "max_error")
    _show("ops", columns, result["rows"])
    print(json.dumps({key: value for key, value in result.items() if key != "rows"}, indent=2))


@app.command("rank")
def rank(
    as_json: options.Json = False,
    keep: Keep = None,
    model: Annotated[str, typer.Option(help="A published model whose shapes are used.")] = "deepseek-r1",
    ep: Annotated[int, typer.Option(help="Ranks that share the experts.")] = 32,
    weight_dtype: Annotated[str, typer.Option(help="fp8, nvfp4 or bf16.")] = "fp8",
    batches: Annotated[str, typer.Option(help="Decode batch sizes, comma-separated.")] = "64,128,256,512",
    context: Annotated[int, typer.Option(help="Tokens in the pool of each running sequence.")] = 3072,
    prefill_tokens: Annotated[
        str, typer.Option(help="Tokens of a prefill step, comma-separated.")
    ] = "4096,8192,16384,32768,65536,131072",
) -> None:
    """One rank's share of a published model on this GPU, inside the engine, beside its roofline."""
    from bench import rank as measure

    result = measure.run(
        model=model,
        ep=ep,
        weight_dtype=weight_dtype,
        decode_batches=_numbers(batches),
        context=context,
        prefill_tokens=_numbers(prefill_tokens),
        progress=_progress(),
        keep=keep,
    )
    if as_json:
        print(json.dumps(result))
        return
    columns = ("phase", "batch", "context", "tokens_per_step", "tokens_per_s", "roofline_tokens_per_s", "fraction")
    _show(f"one of {ep} ranks of {model}; communication is not included", columns, result["rows"])
    print(json.dumps({key: value for key, value in result.items() if key not in ("rows", "per_op")}, indent=2))


def _interpreters(names: Sequence[str] | None) -> dict[str, Path]:
    """Rival -> its interpreter: those asked for, or every one whose environment has been made here."""
    from bench.against import RIVALS

    found = {name: RIVALS[name].interpreter() for name in names or RIVALS if name in RIVALS}
    for name in names or ():
        if name not in RIVALS:
            raise ConfigError(f"--against {name}: there are {', '.join(RIVALS)}", field="against")
        if found[name] is None:
            how = "make golden" if name == "transformers" else "make llama"
            raise ConfigError(f"--against {name} has no environment here yet: `{how}` makes it", field="against")
    return {name: python for name, python in found.items() if python is not None}


def _flat(cost: dict[str, Any]) -> dict[str, Any]:
    """A cost with a column for each interval."""
    return cost | {f"us_per_token at {interval}": us for interval, us in cost.get("us_per_token", {}).items()}


def _progress():
    return Console(stderr=True, highlight=False).print


def _words(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _numbers(text: str) -> tuple[int, ...]:
    """Raises ConfigError for what is no list of whole numbers above 0."""
    try:
        numbers = tuple(int(part) for part in _words(text))
    except ValueError as error:
        raise ConfigError(f"{text!r} is not a list of whole numbers", field=text) from error
    if any(number < 1 for number in numbers):
        raise ConfigError(f"{text!r}: each must be at least 1", field=text)
    return numbers


def _show(title: str, columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    Console().print(table)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "" if value is None else str(value)
