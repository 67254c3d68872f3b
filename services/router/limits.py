"""What a request may ask for. Every refusal is InvalidRequest and names the field as it stands in the proto.

Ranges are those written in `common.proto` and `inference.proto`. Nothing here does I/O, and all of it runs before any
worker hears of the request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.cache.seats import blocks_for, blocks_needed
from headrace.errors import InvalidRequest
from headrace.protocol.common import SamplingParams
from headrace.protocol.inference import GenerateCommand
from services.router.checkpoint import CheckpointInfo
from services.router.ranges import check_sampling, need

MAX_LOGPROB_ENTRIES = 524_288
"""Most log-probabilities in one message: n * max_tokens * (logprobs + 1) of a `final_only` answer stays below it."""
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Capacity:
    """What the workers hold: context in tokens, the largest pool of each kind in blocks, samples in one decode batch."""

    max_context_tokens: int
    prefill_blocks: int
    decode_blocks: int
    block_size: int
    max_batch_size: int


def check_request_id(request_id: str) -> None:
    """1 to 128 printable ASCII characters (it travels in metadata), neither beginning nor ending in a blank."""
    if not 1 <= len(request_id) <= 128 or not request_id.isascii() or not request_id.isprintable():
        raise InvalidRequest("request_id must be 1 to 128 printable ASCII characters", field="request_id")
    if request_id != request_id.strip():
        raise InvalidRequest("request_id must not begin or end with a blank", field="request_id")


def check_shape(command: GenerateCommand, checkpoint: CheckpointInfo) -> None:
    """Everything that can be known before tokenising."""
    need(0 <= command.stream_interval <= 1024, "stream_interval", "must be 1 to 1,024, or 0 for the default")
    need(len(command.cache_salt) <= 128, "cache_salt", "must have at most 128 characters")
    need(-100 <= command.priority <= 100, "priority", "must be -100 to 100")
    check_sampling(command.sampling, checkpoint.vocabulary_size)
    if command.text is not None:
        _check_text(command.text, "text", checkpoint)
    elif command.chat is not None:
        _check_chat(command, checkpoint)
    elif command.token_ids is not None:
        _check_ids(command.token_ids, checkpoint)
    else:
        raise InvalidRequest("prompt: one of text, chat and tokens is needed", field="prompt")


def check_text_size(text: str, field: str, checkpoint: CheckpointInfo) -> None:
    """Refuses text that cannot fit whatever its tokens are, before time is spent on tokenising it."""
    limit = checkpoint.max_context_tokens * checkpoint.tokenizer.longest_token_bytes
    need(len(text) <= limit, field, f"has {len(text)} characters; more than {limit} can never fit the context")


def check_prompt_length(count: int, field: str, limit: int) -> None:
    """Refuses an empty prompt and one longer than the context of `limit` tokens."""
    need(count >= 1, field, "is empty")
    need(count <= limit, field, f"has {count} tokens; the context holds {limit}")


def prompt_field(command: GenerateCommand) -> str:
    """The proto field a prompt came in."""
    return "text" if command.text is not None else "chat" if command.chat is not None else "tokens.token_ids"


def resolve_sampling(
    given: dict[str, object],
    checkpoint: CheckpointInfo,
    prompt_tokens: int,
    limit: int,
    default_max_tokens: int,
    draw_seed: Callable[[], int],
) -> SamplingParams:
    """The request over the checkpoint over the proto; seed and end tokens filled in. `limit` is the context in tokens."""
    values = {**checkpoint.default_sampling, **{k: v for k, v in given.items() if v is not None}}
    room = limit - prompt_tokens
    max_tokens = values.pop("max_tokens", min(default_max_tokens, room))
    need(
        max_tokens <= room,  # type: ignore[operator]
        "sampling.max_tokens",
        f"= {max_tokens} with a prompt of {prompt_tokens} tokens is beyond the context of {limit}",
    )
    values.setdefault("seed", draw_seed())
    values["eos_token_ids"] = checkpoint.eos_token_ids
    sampling = SamplingParams(max_tokens=max_tokens, **values)  # type: ignore[arg-type]
    need(
        sampling.min_tokens <= sampling.max_tokens,
        "sampling.min_tokens",
        f"= {sampling.min_tokens} is above max_tokens = {sampling.max_tokens}",
    )
    return sampling


def check_final_only(sampling: SamplingParams) -> None:
    """A whole answer in one message must fit one message."""
    entries = sampling.n * sampling.max_tokens * ((sampling.logprobs or 0) + 1)
    if sampling.logprobs is not None:
        need(
            entries <= MAX_LOGPROB_ENTRIES,
            "final_only",
            f"with {entries} log-probabilities in one message; at most {MAX_LOGPROB_ENTRIES}, or stream them",
        )


def check_capacity(sampling: SamplingParams, prompt_tokens: int, field: str, capacity: Capacity) -> None:
    """Refuses what no worker could ever hold, so that nobody retries it."""
    total = prompt_tokens + sampling.max_tokens
    check_prompt_length(prompt_tokens, field, capacity.max_context_tokens)
    need(
        total <= capacity.max_context_tokens,
        "sampling.max_tokens",
        f"= {sampling.max_tokens} after {prompt_tokens} tokens is beyond the workers' context of "
        f"{capacity.max_context_tokens}",
    )
    blocks = blocks_for(prompt_tokens, capacity.block_size)
    need(
        blocks <= capacity.prefill_blocks, field, f"needs {blocks} blocks; a prefill pool has {capacity.prefill_blocks}"
    )
    if sampling.max_tokens <= 1:
        return
    seats = blocks_needed(prompt_tokens, [total] * sampling.n, capacity.block_size)
    need(
        seats <= capacity.decode_blocks,
        "sampling.max_tokens",
        f"needs {seats} blocks for {sampling.n} x {total} tokens; a decode pool has {capacity.decode_blocks}",
    )
    need(
        sampling.n <= capacity.max_batch_size,
        "sampling.n",
        f"= {sampling.n}; a decode batch holds {capacity.max_batch_size} samples",
    )


def _check_text(text: str, field: str, checkpoint: CheckpointInfo) -> None:
    need(text != "", field, "is empty")
    check_text_size(text, field, checkpoint)


def _check_chat(command: GenerateCommand, checkpoint: CheckpointInfo) -> None:
    messages = command.chat or ()
    need(checkpoint.chat.available, "chat", "needs a chat template and this checkpoint has none")
    need(len(messages) >= 1, "chat.messages", "is empty")
    for index, message in enumerate(messages):
        need(message.role in _ROLES, f"chat.messages[{index}].role", f"must be one of {', '.join(_ROLES)}")
        _check_text(message.content, f"chat.messages[{index}].content", checkpoint)


def _check_ids(ids: Sequence[int], checkpoint: CheckpointInfo) -> None:
    field = "tokens.token_ids"
    check_prompt_length(len(ids), field, checkpoint.max_context_tokens)
    need(
        0 <= min(ids) and max(ids) < checkpoint.vocabulary_size,
        field,
        f"must be 0 to {checkpoint.vocabulary_size - 1}",
    )
