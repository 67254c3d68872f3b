"""Train the shipped model, judge it, and write its checkpoint and log.

    python -m training.train_tiny --corpus stories.jsonl.xz --tokenizer models/tiny --out out --seconds 375

Made for one GPU of the H200's class and under ten minutes; `--device cpu --tokens-per-step 4096` runs the same code slowly.
"""

import argparse
import os
import platform
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import safetensors
import tokenizers
import torch
from tokenizers import Tokenizer

from training import data, evaluate
from training.export import write_checkpoint, write_json
from training.model import Operations, TinyModel
from training.settings import ModelShape, Settings
from training.trainer import Trainer

AFTER_TRAINING_S = 45.0
"""What export, last evaluation and samples take after training, compilations for the MTP layer included."""

STORY_PROMPTS = (
    "Once upon a time there was a little girl who lived",
    "Once upon a time",
    "The old fox looked at the rabbit and said,",
    "In a small house at the edge of the forest",
    "The king had three sons, and the youngest",
)
RECALL_PROMPTS = (
    "The code of silver pony is 48213. The code of broken lamp is 9907. The boy went home and slept. "
    "What is the code of silver pony?",
    "The code of silver pony is 48213. The code of broken lamp is 9907. The boy went home and slept. "
    "The code of broken lamp is",
)
CHAT_PROMPTS = (
    "The code of silver pony is 48213. The code of broken lamp is 9907. What is the code of silver pony?",
    "Tell me a story about the fox.",
    "Hello!",
)


class Judge:
    """Evaluations of one run: cases and windows are prepared once, results go into the log."""

    def __init__(self, tokenizer: Tokenizer, corpus: data.Corpus, settings: Settings, processes: int):
        self._tokenizer, self._settings = tokenizer, settings
        self._continues = evaluate.word_continuations(tokenizer)
        self._sets = evaluate.build_recall_sets(
            tokenizer, corpus.held_out, settings.seed, settings.cases_per_length, processes
        )
        self._windows, self._bytes = evaluate.held_out_windows(tokenizer, corpus.held_out)

    def scores(self, model: TinyModel, limit: int) -> dict:
        """Recall by context length, and bits per byte on held-out stories."""
        tokens = self._settings.tokens_per_step
        recall = {
            str(cases.length): evaluate.recall_scores(model, cases, self._continues, tokens, limit)
            for cases in self._sets
        }
        bits = evaluate.bits_per_byte(model, self._windows, self._bytes, tokens)
        return {"recall": recall, "bits_per_byte": round(bits, 4), "held_out_bytes": self._bytes}

    def samples(self, model: TinyModel) -> list[dict]:
        """Continuations: stories greedy and sampled, recall greedy, chat greedy."""
        operations, model.operations = model.operations, Operations.make(compiled=False)
        written = self._sample(model, STORY_PROMPTS, 100, evaluate.Sampling(), False)
        written += self._sample(model, STORY_PROMPTS, 120, evaluate.STORY_SAMPLING, False)
        written += self._sample(model, RECALL_PROMPTS, 10, evaluate.Sampling(), False)
        written += self._sample(model, CHAT_PROMPTS, 60, evaluate.Sampling(), True)
        model.operations = operations
        return written

    def _sample(
        self, model: TinyModel, prompts: tuple, count: int, sampling: evaluate.Sampling, chat: bool
    ) -> list[dict]:
        texts = [f"<|begin|><|user|>{p}<|assistant|>" if chat else f"<|begin|>{p}" for p in prompts]
        ids = [self._tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        written = evaluate.continue_prompts(model, ids, count, sampling, self._settings.seed)
        return [
            {"prompt": prompt, "chat": chat, **asdict(sampling), "text": self._tokenizer.decode(ids)}
            for prompt, ids in zip(prompts, written, strict=True)
        ]


def short_scores(scores: dict) -> dict:
    """The few figures worth a printed line."""
    lengths = {
        length: {name: cell["exact"] for name, cell in cells.items() if name in ("all", "value digits", "style story")}
        for length, cells in scores["recall"].items()
    }
    return {"bits_per_byte": scores["bits_per_byte"], **lengths}


def environment(device: torch.device) -> dict:
    """Where and with what the run was made."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    versions |= {"tokenizers": tokenizers.__version__, "safetensors": safetensors.__version__}
    return {"device": name, "cpu_count": os.cpu_count(), "versions": versions}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True, help="JSON lines, plain or .xz")
    parser.add_argument("--tokenizer", type=Path, default=Path("models/tiny"), help="folder with tokenizer.json")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint and training_log.json")
    parser.add_argument("--seconds", type=float, default=Settings.seconds, help="training of the trunk")
    parser.add_argument("--mtp-seconds", type=float, default=Settings.mtp_seconds, help="training of the MTP layer")
    parser.add_argument("--finish-by", type=float, default=535.0, help="seconds from start; training is cut to meet it")
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument("--cases", type=int, default=Settings.cases_per_length, help="recall cases a context length")
    parser.add_argument("--tokens-per-step", type=int, default=Settings.tokens_per_step)
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


def main() -> None:
    arguments, started = parse(), time.monotonic()
    settings = replace(
        Settings(),
        seconds=arguments.seconds,
        mtp_seconds=arguments.mtp_seconds,
        seed=arguments.seed,
        tokens_per_step=arguments.tokens_per_step,
        cases_per_length=arguments.cases,
    )

    def say(what: str) -> None:
        print(f"[{time.monotonic() - started:.0f} s] {what}", flush=True)

    tokenizer = Tokenizer.from_file(str(arguments.tokenizer / "tokenizer.json"))
    processes = max(1, (os.cpu_count() or 2) - 3)
    corpus = data.load(arguments.corpus, tokenizer, settings.seed)
    say(f"{corpus.num_tokens} tokens, {len(corpus.held_out)} works held out")
    judge = Judge(tokenizer, corpus, settings, processes)
    workers = data.Workers(corpus, tokenizer, settings, processes)  # forked before CUDA starts
    say("recall cases drawn, workers started")
    device = torch.device(arguments.device)
    torch.manual_seed(settings.seed)
    torch.set_float32_matmul_precision("high")
    is_gpu = device.type == "cuda"
    shape = ModelShape()
    model = TinyModel(shape, Operations.make(is_gpu), torch.bfloat16 if is_gpu else torch.float32).to(device)
    log = {
        "command": sys.argv,
        "environment": environment(device),
        "settings": asdict(settings),
        "shape": asdict(shape),
    }
    log |= {"corpus_tokens": corpus.num_tokens, "parameters": count_parameters(model), "evaluations": []}

    def evaluate_between(seconds: float) -> None:
        scores = judge.scores(model, settings.cases_between)
        log["evaluations"].append({"seconds": round(seconds, 1), **short_scores(scores)})
        say(f"at {seconds:.0f} s: {short_scores(scores)}")

    trainer = Trainer(model, workers, settings, settings.seconds, evaluate_between)
    trainer.warm_up()
    left = arguments.finish_by - (time.monotonic() - started) - AFTER_TRAINING_S - settings.mtp_seconds - 15
    trainer.planned_seconds = max(1.0, min(settings.seconds, left))
    say(f"compiled; batches waiting {workers.waiting()}; training for {trainer.planned_seconds:.0f} s")
    trainer.train_trunk()
    log["trunk"] = {
        "steps": trainer.steps,
        "seconds": round(trainer.trained_seconds, 1),
        "tokens": trainer.steps * settings.tokens_per_step,
        "curve": trainer.curve.points,
    }
    write_checkpoint(model, arguments.out)  # whatever happens next, the trunk is safe
    write_json(arguments.out / "training_log.json", log)
    say("trunk written")
    log["mtp"] = trainer.train_mtp(settings.mtp_seconds)
    log["mtp"]["draft_is_trunks_choice"] = trainer.draft_agreement()
    workers.stop()
    say(f"draft agreement {log['mtp']['draft_is_trunks_choice']}")
    log["checkpoint_bytes"] = write_checkpoint(model, arguments.out)
    round_to_bf16(model)  # judge what is shipped
    log["result"] = judge.scores(model, settings.cases_per_length)
    say(f"result {short_scores(log['result'])}")
    log["samples"] = judge.samples(model)
    log["total_seconds"] = round(time.monotonic() - started, 1)
    if is_gpu:
        log["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
    write_json(arguments.out / "training_log.json", log)
    for sample in log["samples"]:
        print(f"\n> {sample['prompt']}\n{sample['text']}")
    say(f"written to {arguments.out}")


@torch.no_grad()
def round_to_bf16(model: TinyModel) -> None:
    """Give every parameter the value its checkpoint has."""
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())


def count_parameters(model: TinyModel) -> dict[str, int]:
    """Parameters of trunk and MTP layer; correction biases are counted apart."""
    mtp = sum(parameter.numel() for parameter in model.mtp.parameters())
    every = sum(parameter.numel() for parameter in model.parameters())
    return {"trunk": every - mtp, "mtp": mtp, "correction_bias": sum(buffer.numel() for buffer in model.buffers())}


if __name__ == "__main__":
    main()
