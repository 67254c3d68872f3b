"""Does the way rows travel change a token? `python -m bench.mesh_links [--config compose/h200.toml] [--set ...]`.

One mesh after another, each form of transfer this configuration can have and the aggregated process: the same greedy
prompts alone and all at once, tokens compared, recall questions checked, times of the stages as the service reports them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import tempfile
from typing import Any

from headrace import config as configuration
from headrace.client import AsyncClient
from headrace.launch.local import Mesh

TOKENS = 24
QUESTIONS = 11
OPTIONS = {"temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": TOKENS, "ignore_eos": True}


def prompts() -> list[str]:
    """A story's beginning, then recall questions of growing length over three facts each."""
    draws = random.Random(7)
    made = ["Once upon a time there was a little girl who lived"]
    for place in range(QUESTIONS):
        codes = [str(draws.randrange(10000, 100000)) for _ in range(3)]
        names = draws.sample(["silver pony", "broken lamp", "green door", "old clock", "red boat"], 3)
        facts = " ".join(f"The code of {name} is {code}." for name, code in zip(names, codes, strict=True))
        filler = "The boy went home and slept. " * (1 + 3 * place)
        made.append(f"{facts} {filler}The code of {names[0]} is")
    return made


async def _ask(address: str) -> tuple[list[Any], list[Any]]:
    """The answers one by one, and all at once."""
    async with AsyncClient(address, timeout_s=120) as client:
        alone = [await client.generate(prompt, **OPTIONS) for prompt in prompts()]
        crowd = await asyncio.gather(*(client.generate(prompt, **OPTIONS) for prompt in prompts()))
    return alone, list(crowd)


def _right(answers: list[Any]) -> int:
    """Recall questions whose answer begins with the code of the prompt."""
    codes = [re.search(r"is (\d+)\. ", prompt).group(1) for prompt in prompts()[1:]]  # type: ignore[union-attr]
    texts = [answer.text.strip() for answer in answers[1:]]
    return sum(text.startswith(code) for text, code in zip(texts, codes, strict=True))


def run(config_file: str | None, flags: list[str]) -> dict[str, Any]:
    """{forms: {name: {right, questions, first_token_ms}}, equal: {name: share of tokens equal to the first form's}}."""
    on_gpu = configuration.load(config_file, flags=flags).engine.device.startswith("cuda")
    forms = {"tcp": []} | ({"nvlink_intra": ["transfer.link=nvlink_intra"]} if on_gpu else {}) | {"aggregated": []}
    tokens: dict[str, list[list[int]]] = {}
    report: dict[str, Any] = {}
    for name, own in forms.items():
        with tempfile.TemporaryDirectory(prefix="headrace-links-") as state:
            given = [*flags, *own, f"mesh.run_directory={state}", f"mesh.name={name}"]
            config = configuration.load(config_file, flags=given)
            with Mesh(config, aggregated=name == "aggregated", config_file=config_file, flags=given) as mesh:
                alone, crowd = asyncio.run(_ask(mesh.router_address))
        for form, answers in ((f"{name}, alone", alone), (f"{name}, all at once", crowd)):
            tokens[form] = [list(answer.samples[0].token_ids) for answer in answers]
        first = statistics.median(answer.final.time_to_first_token_s for answer in alone)
        report[name] = {"right": _right(alone), "questions": QUESTIONS, "first_token_ms": 1e3 * first}
    oracle = next(iter(tokens.values()))
    return {"forms": report, "equal": {form: _equal(oracle, made) for form, made in tokens.items()}}


def _equal(one: list[list[int]], other: list[list[int]]) -> float:
    pairs = [(a, b) for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config")
    parser.add_argument("--set", action="append", default=[], dest="flags")
    arguments = parser.parse_args()
    configuration.apply_environment(configuration.THREAD_ENVIRONMENT)
    print(json.dumps(run(arguments.config, arguments.flags)))
