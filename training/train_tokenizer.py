"""Train the byte-level BPE of `models/tiny` and write every tokenizer file.

    python -m training.train_tokenizer --corpus stories.jsonl.xz --out models/tiny

One Split covers every character, so engines that drop what a Split does not match (the C++ one) give the same ids as
Hugging Face `tokenizers`. `\\s` is spelled out because regular-expression engines disagree about U+180E.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from training.corpus import is_held_out, read_works

VOCAB_SIZE = 8192
MAX_TOKEN_LENGTH = 16
CONTEXT_LENGTH = 4096
BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
SPECIAL_TOKENS = (BEGIN, END, PAD, "<|system|>", "<|user|>", "<|assistant|>", "<|spare_0|>", "<|spare_1|>")

BLANK = r"\t\n\x0b\x0c\r\x{85}\p{Z}"
SPLIT_PATTERN = "|".join(
    (
        r"\p{N}",  # one digit is one token: numbers are copied digit by digit
        r" ?[\p{L}\p{M}]+",
        rf" ?[^{BLANK}\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*",
        rf"[{BLANK}]*[\r\n]+",
        rf"[{BLANK}]+(?![^{BLANK}\p{{N}}])",
        rf"[{BLANK}]+",
    )
)

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ '<|system|>' + message['content'] | trim }}"
    "{% elif message['role'] == 'user' %}{{ '<|user|>' + message['content'] | trim }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|assistant|> ' + message['content'] | trim + eos_token }}"
    "{% else %}{{ raise_exception('role must be system, user or assistant') }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def training_paragraphs(corpus: Path) -> Iterator[str]:
    """Paragraphs of the works that are not held out: all of the children tier, every fourth one of the others."""
    for work in read_works(corpus):
        if is_held_out(work.title):
            continue
        paragraphs = work.text.split("\n\n")
        kept = paragraphs if work.tier == "children" else paragraphs[::4]
        yield from (paragraph + "\n\n" for paragraph in kept)


def train(corpus: Path) -> Tokenizer:
    """Learn the merges; specials get ids 0-7, the 256 bytes follow."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=MAX_TOKEN_LENGTH,
    )
    tokenizer.train_from_iterator(training_paragraphs(corpus), trainer)
    return tokenizer


def tokenizer_config() -> dict:
    """What Hugging Face's AutoTokenizer reads beside tokenizer.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT_LENGTH,
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True, help="JSON lines, plain or .xz")
    parser.add_argument("--out", type=Path, required=True, help="folder for tokenizer.json and its neighbours")
    arguments = parser.parse_args()
    started = time.monotonic()
    tokenizer = train(arguments.corpus)
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(arguments.out / "tokenizer.json"))
    write_json(arguments.out / "tokenizer_config.json", tokenizer_config())
    specials = {"bos_token": BEGIN, "eos_token": END, "pad_token": PAD}
    write_json(arguments.out / "special_tokens_map.json", specials)
    (arguments.out / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    print(f"{tokenizer.get_vocab_size()} entries in {time.monotonic() - started:.0f} s -> {arguments.out}")


if __name__ == "__main__":
    main()
