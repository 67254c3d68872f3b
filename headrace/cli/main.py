"""The command line: one file a command, put together here. Errors of ours end with a sentence and exit code 1 or 2."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from headrace import config as configuration
from headrace.cli import bench, chat, demo, doctor, evaluate, generate, trace, up
from headrace.errors import CallerError, ConfigError, HeadraceError

app = typer.Typer(
    name="headrace",
    help="Serve DeepSeek-class models as a mesh of router, prefill, decode and kvstore.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("up")(up.up)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("trace")(trace.trace)
app.command("eval")(evaluate.evaluate)
app.command("doctor")(doctor.doctor)
app.command("demo")(demo.demo)
app.add_typer(bench.app, name="bench", help="Measure.")


def main() -> None:
    """Entry point of `headrace`."""
    configuration.apply_environment(configuration.THREAD_ENVIRONMENT)
    configuration.find_own_programs()
    try:
        app()
    except HeadraceError as error:
        field = f" [{error.field}]" if error.field and error.field not in error.message else ""
        Console(stderr=True, soft_wrap=True, highlight=False).print(
            f"{error.reason}: {error.message}{field}", style="red", markup=False
        )
        sys.exit(2 if isinstance(error, CallerError | ConfigError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
