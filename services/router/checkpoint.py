"""What the router knows of the checkpoint: tokenizer, chat template, limits and sampling defaults. No weights, no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headrace.errors import CheckpointError, InvalidRequest
from headrace.model.deepseek.config import ModelConfig
from headrace.protocol.inference import ModelInfo
from headrace.text.chat import ChatTemplate
from headrace.text.tokenizer import Tokenizer
from services.router.ranges import check_sampling

_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class PromptTokenizer(Protocol):
    """What the router asks of a tokenizer."""

    longest_token_bytes: int

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class ChatRenderer(Protocol):
    """What the router asks of a chat template."""

    available: bool

    def render(self, messages: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> str: ...


@dataclass(frozen=True)
class CheckpointInfo:
    """One model directory as a router needs it. Lengths in tokens; `default_sampling` by field of SamplingParams."""

    name: str
    tokenizer: PromptTokenizer
    chat: ChatRenderer
    vocabulary_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    default_sampling: dict[str, object]

    @classmethod
    def load(cls, directory: str | Path, max_context_tokens: int = 0) -> CheckpointInfo:
        """Reads a directory; `max_context_tokens` 0 takes the model's own limit. Raises CheckpointError."""
        path = Path(directory)
        config = ModelConfig.load(path)
        generation = _read_generation(path / "generation_config.json")
        tokenizer = Tokenizer.load(path)
        eos = generation.get("eos_token_id")
        eos_ids = tuple(eos) if isinstance(eos, list) else (eos,) if isinstance(eos, int) else config.eos_token_ids
        limit = config.max_position_embeddings
        return cls(
            name=path.resolve().name,
            tokenizer=tokenizer,
            chat=ChatTemplate.load(path),
            vocabulary_size=config.vocab_size,
            max_context_tokens=min(limit, max_context_tokens or limit),
            eos_token_ids=eos_ids or tokenizer.eos_ids,
            default_sampling=_checked(_sampling_defaults(generation), config.vocab_size, path),
        )

    def info(self) -> ModelInfo:
        """What clients are told."""
        return ModelInfo(
            self.name, self.max_context_tokens, self.vocabulary_size, dict(self.default_sampling), self.chat.available
        )


def _read_generation(path: Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return value


def _sampling_defaults(generation: dict) -> dict[str, object]:
    """`do_sample: false` means greedy, as in Hugging Face; keys that are absent or null keep the proto's defaults."""
    defaults = {name: generation[name] for name in _DEFAULTS if generation.get(name) is not None}
    if generation.get("do_sample") is False:
        defaults["temperature"] = 0.0
    return defaults


def _checked(defaults: dict[str, object], vocabulary_size: int, path: Path) -> dict[str, object]:
    """The same; CheckpointError names a default that no request could use."""
    try:
        check_sampling(defaults, vocabulary_size)
    except (InvalidRequest, TypeError) as error:
        raise CheckpointError(f"{path / 'generation_config.json'}: {error}") from error
    return defaults
