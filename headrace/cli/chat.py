"""`headrace chat`: a conversation through the checkpoint's chat template."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from headrace.cli import options
from headrace.cli.generate import show
from headrace.client import Client
from headrace.errors import HeadraceError
from headrace.protocol.inference import ChatMessage


def chat(
    message: Annotated[str | None, typer.Argument(help="Say this, print the answer and end; absent: talk.")] = None,
    config_file: options.ConfigFile = None,
    flags: options.Flags = None,
    address: options.Address = None,
    system: Annotated[str, typer.Option(help="What the model is told first.")] = "",
    max_tokens: Annotated[int, typer.Option(help="Most tokens an answer.")] = 256,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default: the checkpoint's.")] = None,
) -> None:
    """Talk to the model. An empty line or Ctrl-D ends."""
    config = options.load(config_file, flags)
    turns = [ChatMessage("system", system)] if system else []
    given = {"max_tokens": max_tokens} | ({} if temperature is None else {"temperature": temperature})
    with Client(options.router_address(address, config)) as client:
        while True:
            said = message if message is not None else _ask()
            if not said:
                return
            turns.append(ChatMessage("user", said))
            if message is not None:
                show(client.stream(turns, **given))
                return
            answer = _answer(client, turns, given)
            if answer:
                turns.append(ChatMessage("assistant", answer))
            else:  # an empty turn would be refused from now on
                turns.pop()


def _answer(client: Client, turns: list[ChatMessage], given: dict[str, object]) -> str:
    """What was answered; "" when nothing was, with the reason on stderr: the conversation goes on."""
    try:
        return show(client.stream(turns, **given)).text
    except HeadraceError as error:
        print(f"\n{error.reason}: {error.message}", file=sys.stderr)
        return ""


def _ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""
