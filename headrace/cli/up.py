"""`headrace up`: a mesh on this host, in the foreground."""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from headrace.cli import options
from headrace.config import Config
from headrace.launch.local import Mesh, MeshPlan, plan
from headrace.transfer.mooncake import why_not_mooncake


def up(
    config_file: options.ConfigFile = None,
    flags: options.Flags = None,
    aggregated: Annotated[bool, typer.Option("--aggregated", help="One worker process: the oracle.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print processes, ports and addresses, start nothing.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Start router, prefill, decode and kvstore here and keep them running until Ctrl-C."""
    console = Console(stderr=True)
    config = with_working_transfer(options.load(config_file, flags), console, aggregated=aggregated)
    if dry_run:
        show_plan(plan(config, aggregated=aggregated), as_json)
        return
    for number in (signal.SIGTERM, signal.SIGINT):  # a shell's background job starts with SIGINT ignored
        signal.signal(number, _interrupt)
    mesh = Mesh(config, aggregated=aggregated, config_file=config_file, flags=flags or (), say=console.print)
    started = time.monotonic()
    try:
        with console.status("Starting the mesh ..."):
            mesh.start()
        console.print(f"Ready after {time.monotonic() - started:.1f} s. Clients connect to:")
        print(json.dumps({"router": mesh.router_address}) if as_json else mesh.router_address, flush=True)
        while True:
            time.sleep(0.5)
            mesh.check()
    except KeyboardInterrupt:
        console.print("Stopping ...")
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        mesh.stop()


def with_working_transfer(config: Config, console: Console, *, aggregated: bool = False) -> Config:
    """The same settings, with the `grpc` transfer and a warning where Mooncake's libraries are missing."""
    why_not = None if aggregated or config.transfer.backend != "mooncake" else why_not_mooncake()
    if why_not is None:
        return config
    console.print(
        f"Warning: KV travels over the slower grpc transfer, because {why_not}",
        style="yellow",
        markup=False,
        soft_wrap=True,
    )
    return dataclasses.replace(config, transfer=dataclasses.replace(config.transfer, backend="grpc"))


def show_plan(mesh: MeshPlan, as_json: bool) -> None:
    """Processes, ports, addresses."""
    if as_json:
        print(json.dumps(dataclasses.asdict(mesh)))
        return
    table = Table(title=f"mesh {mesh.mesh}, state in {mesh.run_directory}")
    for column in ("process", "address"):
        table.add_column(column)
    for process in mesh.processes:
        table.add_row(process.name, f"{mesh.host}:{process.port}")
    table.add_row("redis", mesh.redis_url + ("" if mesh.redis_port is None else "  (bundled)"))
    table.add_row("mooncake", f"{mesh.host}:{mesh.transfer_ports[0]}-{mesh.transfer_ports[1]}, two ports a worker")
    Console().print(table)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
