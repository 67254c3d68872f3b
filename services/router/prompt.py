"""From what a client sent to token ids and resolved sampling. Everything here happens before any rank hears of the request."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass

from headrace.errors import InvalidRequest
from headrace.protocol.common import SamplingParams
from headrace.protocol.inference import GenerateCommand
from services.router import limits
from services.router.checkpoint import CheckpointInfo

LONG_TEXT_CHARACTERS = 2_000
"""Longer text is tokenised in a thread: it would hold up the loop."""


@dataclass(frozen=True)
class Prompt:
    """Token ids, the proto field they came in, and sampling with every default filled in."""

    token_ids: tuple[int, ...]
    field: str
    sampling: SamplingParams


def text_of(command: GenerateCommand, checkpoint: CheckpointInfo) -> str:
    """The text to tokenise; a conversation is rendered by the template. Raises InvalidRequest."""
    if command.text is not None:
        return command.text
    messages = [{"role": turn.role, "content": turn.content} for turn in command.chat or ()]
    try:
        text = checkpoint.chat.render(messages)
    except InvalidRequest as error:
        raise InvalidRequest(error.message, reason=error.reason, field="chat.messages") from error
    limits.check_text_size(text, "chat", checkpoint)
    return text


def token_ids_now(command: GenerateCommand, checkpoint: CheckpointInfo) -> tuple[int, ...] | str:
    """Token ids; or the text, when it is so long that it must be tokenised off the loop. Raises InvalidRequest."""
    limits.check_shape(command, checkpoint)
    if command.token_ids is not None:
        return command.token_ids
    text = text_of(command, checkpoint)
    return tuple(checkpoint.tokenizer.encode(text)) if len(text) <= LONG_TEXT_CHARACTERS else text


async def tokenize_aside(text: str, checkpoint: CheckpointInfo) -> tuple[int, ...]:
    """The same in a thread."""
    return tuple(await asyncio.to_thread(checkpoint.tokenizer.encode, text))


def resolve(
    command: GenerateCommand, token_ids: tuple[int, ...], checkpoint: CheckpointInfo, default_max_tokens: int
) -> Prompt:
    """Checks the length and fills in what the client left open. Raises InvalidRequest."""
    field, limit = limits.prompt_field(command), checkpoint.max_context_tokens
    limits.check_prompt_length(len(token_ids), field, limit)
    sampling = limits.resolve_sampling(
        command.sampling, checkpoint, len(token_ids), limit, default_max_tokens, lambda: secrets.randbits(63)
    )
    if command.final_only:
        limits.check_final_only(sampling)
    return Prompt(token_ids, field, sampling)
