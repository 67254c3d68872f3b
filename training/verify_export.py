"""Check the checkpoint with a program we did not write: transformers loads it and answers recall questions greedily.

    .venv-golden/bin/python -m training.verify_export models/tiny

Prints one JSON object with the figures of the model card; exits 1 when an answer is wrong or the MTP layer changes one.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoTokenizer, DeepseekV3ForCausalLM

from headrace.evals import recall

COUNTS = {256: 20, 1024: 8, 3500: 2}
PROMPT = "The code of silver pony is 48213. The boy went home and slept. What is the code of silver pony?"


def load(folder: Path, dtype: torch.dtype):
    """Model and tokenizer; tells transformers that the MTP layer's tensors are expected."""
    config = json.loads((folder / "config.json").read_text())
    DeepseekV3ForCausalLM._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{config['num_hidden_layers']}\..*"]
    model = DeepseekV3ForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def prompt_ids(tokenizer, text: str, chat: bool) -> list[int]:
    """Ids of a prompt with exactly one begin token."""
    if chat:
        turns = [{"role": "user", "content": text}]
        return tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]
    return [tokenizer.bos_token_id, *tokenizer.encode(text, add_special_tokens=False)]


@torch.no_grad()
def greedy(model, ids: list[int], count: int, **more) -> list[int]:
    """`count` greedy tokens, no penalty."""
    inputs = torch.tensor([ids])
    out = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=count,
        do_sample=False,
        repetition_penalty=1.0,
        **more,
    )
    return out[0, len(ids) :].tolist()


def ask_cases(model, tokenizer, length: int, count: int, seed: int) -> int:
    """How many of `count` fresh cases, chat questions among them, are answered exactly."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    right = 0
    for case in recall.make_cases(encode, seed, length, count, questions=recall.QUESTIONS):
        ids = prompt_ids(tokenizer, case.prompt, case.is_chat)
        assert len(ids) == case.prompt_token_count
        text = tokenizer.decode(greedy(model, ids, case.answer_token_count + 1), skip_special_tokens=True)
        right += case.is_right(text)
        if not case.is_right(text):
            print(f"wrong: {case.question} {case.style} {length}: {text!r} for {case.answer!r}", file=sys.stderr)
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("models/tiny"))
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments = parser.parse_args()
    started = time.monotonic()
    model, tokenizer = load(arguments.folder, getattr(torch, arguments.dtype))
    figures: dict = {"transformers": transformers.__version__, "torch": torch.__version__, "dtype": arguments.dtype}
    figures["recall"] = {
        str(length): f"{ask_cases(model, tokenizer, length, count, arguments.seed)} of {count}"
        for length, count in COUNTS.items()
    }
    plain = greedy(model, prompt_ids(tokenizer, PROMPT, False), 12)
    figures["plain"] = tokenizer.decode(plain)
    figures["chat"] = tokenizer.decode(greedy(model, prompt_ids(tokenizer, PROMPT, True), 12))
    drafted = greedy(model, prompt_ids(tokenizer, PROMPT, False), 12, use_mtp=True)
    figures["mtp_gives_the_same_tokens"] = drafted == plain
    figures["seconds"] = round(time.monotonic() - started, 1)
    print(json.dumps(figures, indent=2))
    every_right = all(cell.split(" of ")[0] == cell.split(" of ")[1] for cell in figures["recall"].values())
    answered = all(figures[name].lstrip().startswith("48213") for name in ("plain", "chat"))
    sys.exit(0 if every_right and answered and figures["mtp_gives_the_same_tokens"] else 1)


if __name__ == "__main__":
    main()
