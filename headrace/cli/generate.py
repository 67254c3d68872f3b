"""`headrace generate PROMPT`: one answer, streamed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any

import typer

from headrace.cli import options
from headrace.client import Answer, Client
from headrace.protocol.inference import GenerateEvent


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    config_file: options.ConfigFile = None,
    flags: options.Flags = None,
    address: options.Address = None,
    as_json: options.Json = False,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens to generate.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default: the checkpoint's.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the likeliest k.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="1 is none.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same tokens.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")] = None,
    n: Annotated[int, typer.Option(help="Samples of the same prompt.")] = 1,
    logprobs: Annotated[int | None, typer.Option(help="Log-probabilities, and of so many alternatives.")] = None,
    stream_interval: Annotated[int, typer.Option(help="Tokens per message after the first.")] = 0,
    timeout: Annotated[float, typer.Option(help="Deadline in seconds.")] = 120.0,
) -> None:
    """Continue a prompt through the mesh, printing text as it comes."""
    config = options.load(config_file, flags)
    given = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "stop": tuple(stop or ()) or None,
        "n": n if n != 1 else None,
        "logprobs": logprobs,
    }
    sampling = {name: value for name, value in given.items() if value is not None}
    with Client(options.router_address(address, config), timeout_s=timeout) as client:
        events = client.stream(prompt, stream_interval=stream_interval, **sampling)
        answer = collect(events) if as_json or n > 1 else show(events)
    if as_json:
        print(json.dumps(answer_to_json(answer)))
    elif n > 1:
        for index, sample in enumerate(answer.samples):
            print(f"[{index}] {sample.text}")


def collect(events: Iterator[GenerateEvent]) -> Answer:
    """The whole answer, printing nothing."""
    answer = Answer()
    for event in events:
        answer.add(event)
    return answer


def show(events: Iterator[GenerateEvent]) -> Answer:
    """The whole answer, printing the first sample's text as it comes."""
    answer = Answer()
    for event in events:
        answer.add(event)
        for delta in event.deltas:
            if delta.sample_index == 0:
                sys.stdout.write(delta.text)
                sys.stdout.flush()
    print()
    return answer


def answer_to_json(answer: Answer) -> dict[str, Any]:
    """What `--json` prints: the first sample at the top level, all of them under `samples`, log-probabilities if asked."""
    samples = []
    for sample in answer.samples:
        entry: dict[str, Any] = {
            "text": sample.text,
            "token_ids": sample.token_ids,
            "finish_reason": sample.finish_reason.name.lower(),
        }
        if sample.logprobs:
            entry["logprobs"] = [asdict(logprob) for logprob in sample.logprobs]
        samples.append(entry)
    final = answer.final
    first = samples[0] if samples else {"text": "", "token_ids": [], "finish_reason": "length"}
    return {
        "request_id": answer.request_id,
        "trace_id": final.trace_id if final else "",
        **first,
        "usage": asdict(final.usage) if final else {},
        "stages": [asdict(stage) for stage in final.stages] if final else [],
        "seed": final.seed if final else 0,
        "time_to_first_token_s": final.time_to_first_token_s if final else 0.0,
        "duration_s": final.duration_s if final else 0.0,
        "samples": samples,
    }
