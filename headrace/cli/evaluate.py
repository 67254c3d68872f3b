"""`headrace eval`: fresh recall cases, answered by the engine alone or through a mesh.

Recall is exact match of a random value hidden in the context; bits per byte is measured on a text file when one is given,
else quoted from the checkpoint's training log, and the output says which.
"""

from __future__ import annotations

import dataclasses
import json
import math
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from headrace import config as configuration
from headrace.cli import options
from headrace.config import Config
from headrace.errors import CheckpointError, ConfigError
from headrace.evals.recall import SHORTEST, VALUE_KINDS, RecallCase, make_cases
from headrace.protocol.common import SamplingParams
from headrace.text.chat import ChatTemplate
from headrace.text.tokenizer import Tokenizer

DEFAULT_CASES = {256: 200, 1024: 100, 3500: 30}
GROUP_TOKENS = 28_000
"""Prompt tokens asked at once: enough to fill batches, few enough to show progress."""

Ask = Callable[[Sequence[list[int]], Sequence[int]], list[list[int]]]


def evaluate(
    config_file: options.ConfigFile = None,
    flags: options.Flags = None,
    as_json: options.Json = False,
    address: Annotated[str | None, typer.Option(help="Ask this router instead of an engine in this process.")] = None,
    cases: Annotated[str, typer.Option(help="LENGTH:COUNT,... of recall cases.")] = "256:200,1024:100,3500:30",
    value_kind: Annotated[str, typer.Option(help="digits, words or letters.")] = "digits",
    seed: Annotated[int | None, typer.Option(help="Of the cases; default: new ones every time.")] = None,
    text: Annotated[Path | None, typer.Option(help="UTF-8 text to measure bits per byte on.")] = None,
    fast: Annotated[bool, typer.Option("--fast/--exact", help="Mode of the engine.")] = True,
) -> None:
    """Ask the model questions whose answers stand in their context."""
    config = options.load(config_file, flags)
    config = dataclasses.replace(config, engine=dataclasses.replace(config.engine, exact=not fast))
    wanted = _parse_cases(cases)
    if value_kind not in VALUE_KINDS:
        raise ConfigError(f"--value-kind {value_kind!r} is none of {', '.join(VALUE_KINDS)}", field="value_kind")
    directory = configuration.model_directory(config)
    tokenizer = Tokenizer.load(directory)
    seed = secrets.randbelow(2**31) if seed is None else seed
    console = Console(stderr=True)
    started = time.monotonic()
    engine, ask = (
        (None, _ask_router(options.router_address(address, config)))
        if address
        else _open_engine(directory, config, tokenizer.eos_ids)
    )
    result: dict[str, Any] = {
        "model": directory.name,
        "recall": {},
        "cases": {},
        "seed": seed,
        "value_kind": value_kind,
    }
    result["mode"] = "router" if address else ("fast" if fast else "exact")
    for length, count in wanted.items():
        drawn = list(make_cases(lambda s: tokenizer.encode(s, add_bos=False), seed, length, count, (value_kind,)))
        right = _count_right(console, ask, tokenizer, directory, drawn, f"recall at {length} tokens")
        result["recall"][str(length)] = right / count
        result["cases"][str(length)] = count
    result |= _bits_per_byte(directory, tokenizer, engine, text)
    result["seconds"] = round(time.monotonic() - started, 1)
    print(json.dumps(result)) if as_json else _show(result)


def _open_engine(directory: Path, config: Config, eos_ids: tuple[int, ...]):
    from headrace.engine.offline import Engine

    engine = Engine.load(directory, config.engine)

    def ask(prompts: Sequence[list[int]], lengths: Sequence[int]) -> list[list[int]]:
        sampling = [SamplingParams(max_tokens=length, eos_token_ids=eos_ids) for length in lengths]
        return [outputs[0].token_ids for outputs in engine.generate(prompts, sampling)]

    return engine, ask


def _ask_router(address: str) -> Ask:
    import asyncio

    from headrace.client import AsyncClient

    async def ask_all(prompts: Sequence[list[int]], lengths: Sequence[int]) -> list[list[int]]:
        async with AsyncClient(address, timeout_s=300) as client:
            answers = await asyncio.gather(
                *(
                    client.generate(prompt, max_tokens=length, temperature=0.0, repetition_penalty=1.0)
                    for prompt, length in zip(prompts, lengths, strict=True)
                )
            )
        return [answer.samples[0].token_ids for answer in answers]

    return lambda prompts, lengths: asyncio.run(ask_all(prompts, lengths))


def _count_right(
    console: Console, ask: Ask, tokenizer: Tokenizer, directory: Path, cases: Sequence[RecallCase], title: str
) -> int:
    right, done = 0, 0
    template = ChatTemplate.load(directory) if any(case.is_chat for case in cases) else None
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(title, total=len(cases))
        while done < len(cases):
            size = max(1, GROUP_TOKENS // max(1, cases[done].prompt_token_count))
            group = cases[done : done + size]
            prompts = [_prompt_ids(tokenizer, template, case) for case in group]
            outputs = ask(prompts, [case.answer_token_count + 1 for case in group])
            right += sum(case.is_right(tokenizer.decode(ids)) for case, ids in zip(group, outputs, strict=True))
            done += len(group)
            progress.update(task, completed=done)
    return right


def _prompt_ids(tokenizer: Tokenizer, template: ChatTemplate | None, case: RecallCase) -> list[int]:
    if case.is_chat and template is not None:
        return tokenizer.encode(template.render([{"role": "user", "content": case.prompt}]), add_bos=True)
    return tokenizer.encode(case.prompt, add_bos=True)


def _bits_per_byte(directory: Path, tokenizer: Tokenizer, engine: Any, text: Path | None) -> dict[str, Any]:
    if text is None:
        return {
            "bits_per_byte": _logged_bits_per_byte(directory),
            "bits_per_byte_from": "training_log.json: held-out stories, at the end of training",
        }
    if engine is None:
        raise ConfigError("bits per byte is measured by an engine in this process: leave --address out", field="text")
    content = text.read_text()
    from headrace.engine.score import prompt_logprobs

    nats, window = 0.0, engine.parts.max_context // 2
    ids = tokenizer.encode(content, add_bos=False)
    for start in range(0, len(ids), window):
        nats -= float(prompt_logprobs(engine.parts, [tokenizer.bos_id, *ids[start : start + window]]).sum())
    return {
        "bits_per_byte": nats / math.log(2) / max(1, len(content.encode())),
        "bits_per_byte_from": f"{text.name}, in windows of {window} tokens",
    }


def _logged_bits_per_byte(directory: Path) -> float | None:
    """The figure of the training run, or None for checkpoints that are not ours."""
    file = directory / "training_log.json"
    if not file.exists():
        return None
    try:
        return float(json.loads(file.read_text())["result"]["bits_per_byte"])
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{file} has no result.bits_per_byte") from error


def _parse_cases(text: str) -> dict[int, int]:
    try:
        pairs = [part.split(":") for part in text.split(",") if part]
        cases = {int(length): int(count) for length, count in pairs}
        if not cases or min(cases) < SHORTEST or min(cases.values()) < 1:
            raise ValueError(text)
        return cases
    except ValueError as error:
        wanted = f"LENGTH:COUNT,... with lengths from {SHORTEST} and counts from 1"
        raise ConfigError(f"--cases {text!r} is not {wanted}", field="cases") from error


def _show(result: dict[str, Any]) -> None:
    table = Table(title=f"{result['model']}, {result['mode']}, seed {result['seed']}, {result['seconds']} s")
    for column in ("context, tokens", "cases", "recall"):
        table.add_column(column, justify="right")
    for length, share in result["recall"].items():
        table.add_row(length, str(result["cases"][length]), f"{share:.1%}")
    Console().print(table)
    if result["bits_per_byte"] is not None:
        print(f"bits per byte: {result['bits_per_byte']:.3f} ({result['bits_per_byte_from']})")
