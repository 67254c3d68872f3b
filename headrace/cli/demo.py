"""`headrace demo`, which is what `make run` runs: a mesh, two prompts, two waterfalls, and nothing left behind."""

from __future__ import annotations

import json
import random
import signal
import tempfile
import time
from typing import Annotated, Any

import typer
from rich.console import Console

from headrace.cli import options
from headrace.cli.generate import answer_to_json, collect, show
from headrace.cli.trace import draw_spans, ring_directory
from headrace.cli.up import with_working_transfer
from headrace.client import Client
from headrace.config import Config
from headrace.errors import InternalError
from headrace.launch.local import Mesh
from headrace.observe import ring

STORY = "Once upon a time there was a little girl who lived"
STAGES = ("router.generate", "prefill.forward", "prefill.push", "decode.commit", "decode.generate", "router.stream")
"""Spans to wait for before the waterfall is drawn; they come from three processes."""


def demo(
    config_file: options.ConfigFile = None,
    flags: options.Flags = None,
    as_json: options.Json = False,
    max_tokens: Annotated[int, typer.Option(help="Length of the story.")] = 80,
) -> None:
    """Start a mesh, let it tell a story and answer a question, show where the time went, stop it."""
    console = Console(stderr=as_json)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="headrace-demo-") as directory:
        own = [*(flags or ()), f"mesh.run_directory={directory}"]
        config = with_working_transfer(options.load(config_file, own), console)
        started = time.monotonic()
        console.print("Starting router, prefill, decode and kvstore, four processes of this host ...")
        with Mesh(config, config_file=config_file, flags=own, say=lambda text: console.print(f"  {text}")) as mesh:
            console.print(f"Ready after {time.monotonic() - started:.1f} s.\n")
            with Client(mesh.router_address) as client:
                results = [
                    _ask(
                        console,
                        client,
                        config,
                        "A story",
                        STORY,
                        as_json,
                        max_tokens=max_tokens,
                        min_tokens=max_tokens // 2,
                    ),
                    _recall(console, client, config, as_json),
                ]
        console.print("Every process has stopped.")
    if as_json:
        print(json.dumps(results))


def _recall(console: Console, client: Client, config: Config, as_json: bool) -> dict[str, Any]:
    prompt, answer = recall_question(random.SystemRandom())
    greedy = {"temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": 12}
    result = _ask(console, client, config, "A question whose answer stands in the prompt", prompt, as_json, **greedy)
    if not result["text"].strip().startswith(answer):
        raise InternalError(f"the model answered {result['text']!r}, the prompt said {answer}", reason="WRONG_ANSWER")
    console.print(f"[green]Right: the prompt said {answer}.[/green]\n")
    return result


def recall_question(rng: random.Random) -> tuple[str, str]:
    """A prompt with three random codes and a question about the first; and the right answer."""
    codes = [str(rng.randrange(10_000, 100_000)) for _ in range(3)]
    names = ("silver pony", "broken lamp", "green door")
    facts = " ".join(f"The code of {name} is {code}." for name, code in zip(names, codes, strict=True))
    return f"{facts} The boy went home and slept. The code of {names[0]} is", codes[0]


def _ask(
    console: Console, client: Client, config: Config, title: str, prompt: str, as_json: bool, **sampling: object
) -> dict[str, Any]:
    console.print(f"[bold]{title}[/bold]\n{prompt}", end="")
    events = client.stream(prompt, **sampling)
    answer = collect(events) if as_json else show(events)
    assert answer.final is not None
    usage = answer.final.usage
    spans = ring.wait_trace(ring_directory(config), answer.final.trace_id, STAGES)
    if not as_json:
        print()
        draw_spans(console, spans)
    console.print(
        f"{usage.prompt_tokens} prompt tokens, {usage.generated_tokens} generated, first token after "
        f"{answer.final.time_to_first_token_s * 1000:.0f} ms, {answer.final.duration_s * 1000:.0f} ms in all\n"
    )
    return answer_to_json(answer)
