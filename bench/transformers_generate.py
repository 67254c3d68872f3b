"""The other side of `bench/engine.py`: transformers' own `generate` on the same weights, driven over stdin.

    <python with transformers> bench/transformers_generate.py DIRECTORY --threads N

Reads one JSON object a line: {"dtype": "fp32" | "bf16", "prompts": [[id, ...], ...], "output_tokens": n}; prompts are
left-padded into one batch. Writes one line each: {"seconds": of generate alone, "cpu_seconds": of all its threads,
"token_ids": [[...], ...]}. The first line it writes, when both models are loaded, holds versions and threads. Headrace
is not imported.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch
import transformers

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def load(directory: str, dtype: torch.dtype) -> transformers.PreTrainedModel:
    with open(f"{directory}/config.json", encoding="utf-8") as file:
        layers = json.load(file)["num_hidden_layers"]
    kind = transformers.DeepseekV3ForCausalLM
    kind._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{layers}\..*"]  # the MTP layer
    return kind.from_pretrained(directory, dtype=dtype).eval()


def generate(model: transformers.PreTrainedModel, prompts: list[list[int]], output_tokens: int) -> dict[str, object]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    options = {"max_new_tokens": output_tokens, "min_new_tokens": output_tokens, "do_sample": False, "use_cache": True}
    start, cpu = time.perf_counter(), time.process_time()
    with torch.inference_mode():
        made = model.generate(ids, attention_mask=mask, pad_token_id=0, repetition_penalty=1.0, **options)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "token_ids": made[:, width:].tolist()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory")
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever a library prints is not an answer
    models = {name: load(arguments.directory, dtype) for name, dtype in DTYPES.items()}
    about = {"transformers": transformers.__version__, "torch": torch.__version__, "threads": torch.get_num_threads()}
    print(json.dumps(about), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        answer = generate(models[asked["dtype"]], asked["prompts"], asked["output_tokens"])
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
