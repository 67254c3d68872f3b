"""What a request may ask for. Every refusal is InvalidRequest and names the field as it stands in the proto.

Ranges are those written in `common.proto` and `inference.proto`. Nothing here does I/O, and all of it runs before any
worker hears of the request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.errors import InvalidRequest
from headrace.protocol import GenerateCommand, SamplingParams
from services.router.checkpoint import Checkpoint

MAX_LOGPROB_ENTRIES = 524_288
"""Most log-probabilities in one message: n * max_tokens * (logprobs + 1) of a `final_only` answer stays below it."""
_ROLES = ("system", "user", "assistant")
_RANGES = {
    "temperature": (0.0, 10.0),
    "top_k": (0, 2**31 - 1),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "n": (1, 16),
    "max_tokens": (0, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "logprobs": (0, 20),
}


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


def check_shape(command: GenerateCommand, checkpoint: Checkpoint) -> None:
    """Everything that can be known before tokenising."""
    _need(0 <= command.stream_interval <= 1024, "stream_interval", "must be 1 to 1,024, or 0 for the default")
    _need(len(command.cache_salt) <= 128, "cache_salt", "must have at most 128 characters")
    _need(-100 <= command.priority <= 100, "priority", "must be -100 to 100")
    _check_given(command.sampling, checkpoint.vocabulary_size)
    if command.text is not None:
        _check_text(command.text, "text", checkpoint)
    elif command.chat is not None:
        _check_chat(command, checkpoint)
    elif command.token_ids is not None:
        _check_ids(command.token_ids, checkpoint)
    else:
        raise InvalidRequest("prompt: one of text, chat and tokens is needed", field="prompt")


def check_text_size(text: str, field: str, checkpoint: Checkpoint) -> None:
    """Refuses text that cannot fit whatever its tokens are, before time is spent on tokenising it."""
    limit = checkpoint.max_context_tokens * checkpoint.tokenizer.longest_token_bytes
    _need(len(text) <= limit, field, f"has {len(text)} characters; more than {limit} can never fit the context")


def check_prompt_length(count: int, field: str, limit: int) -> None:
    """Refuses an empty prompt and one longer than the context of `limit` tokens."""
    _need(count >= 1, field, "is empty")
    _need(count <= limit, field, f"has {count} tokens; the context holds {limit}")


def prompt_field(command: GenerateCommand) -> str:
    """The proto field a prompt came in."""
    return "text" if command.text is not None else "chat" if command.chat is not None else "tokens.token_ids"


def resolve_sampling(
    given: dict[str, object],
    checkpoint: Checkpoint,
    prompt_tokens: int,
    limit: int,
    default_max_tokens: int,
    draw_seed: Callable[[], int],
) -> SamplingParams:
    """The request over the checkpoint over the proto; seed and end tokens filled in. `limit` is the context in tokens."""
    values = {**checkpoint.default_sampling, **{k: v for k, v in given.items() if v is not None}}
    room = limit - prompt_tokens
    max_tokens = values.pop("max_tokens", min(default_max_tokens, room))
    _need(
        max_tokens <= room,  # type: ignore[operator]
        "sampling.max_tokens",
        f"= {max_tokens} with a prompt of {prompt_tokens} tokens is beyond the context of {limit}",
    )
    values.setdefault("seed", draw_seed())
    values["eos_token_ids"] = checkpoint.eos_token_ids
    sampling = SamplingParams(max_tokens=max_tokens, **values)  # type: ignore[arg-type]
    _need(
        sampling.min_tokens <= sampling.max_tokens,
        "sampling.min_tokens",
        f"= {sampling.min_tokens} is above max_tokens = {sampling.max_tokens}",
    )
    return sampling


def check_final_only(sampling: SamplingParams) -> None:
    """A whole answer in one message must fit one message."""
    entries = sampling.n * sampling.max_tokens * ((sampling.logprobs or 0) + 1)
    if sampling.logprobs is not None:
        _need(
            entries <= MAX_LOGPROB_ENTRIES,
            "final_only",
            f"with {entries} log-probabilities in one message; at most {MAX_LOGPROB_ENTRIES}, or stream them",
        )


def check_capacity(sampling: SamplingParams, prompt_tokens: int, field: str, capacity: Capacity) -> None:
    """Refuses what no worker could ever hold, so that nobody retries it."""
    total = prompt_tokens + sampling.max_tokens
    check_prompt_length(prompt_tokens, field, capacity.max_context_tokens)
    _need(
        total <= capacity.max_context_tokens,
        "sampling.max_tokens",
        f"= {sampling.max_tokens} after {prompt_tokens} tokens is beyond the workers' context of "
        f"{capacity.max_context_tokens}",
    )
    blocks = -(-prompt_tokens // capacity.block_size)
    _need(
        blocks <= capacity.prefill_blocks, field, f"needs {blocks} blocks; a prefill pool has {capacity.prefill_blocks}"
    )
    if sampling.max_tokens <= 1:
        return
    seats = decode_blocks(prompt_tokens, sampling.max_tokens, sampling.n, capacity.block_size)
    _need(
        seats <= capacity.decode_blocks,
        "sampling.max_tokens",
        f"needs {seats} blocks for {sampling.n} x {total} tokens; a decode pool has {capacity.decode_blocks}",
    )
    _need(
        sampling.n <= capacity.max_batch_size,
        "sampling.n",
        f"= {sampling.n}; a decode batch holds {capacity.max_batch_size} samples",
    )


def decode_blocks(prompt_tokens: int, max_tokens: int, samples: int, block_size: int) -> int:
    """Blocks a decode rank reserves: the first sample's all, of every other what follows the shared full prompt blocks."""
    first = -(-(prompt_tokens + max_tokens) // block_size)
    return first + (samples - 1) * (first - prompt_tokens // block_size)


def _check_text(text: str, field: str, checkpoint: Checkpoint) -> None:
    _need(text != "", field, "is empty")
    check_text_size(text, field, checkpoint)


def _check_chat(command: GenerateCommand, checkpoint: Checkpoint) -> None:
    messages = command.chat or ()
    _need(checkpoint.chat.available, "chat", "needs a chat template and this checkpoint has none")
    _need(len(messages) >= 1, "chat.messages", "is empty")
    for index, message in enumerate(messages):
        _need(message.role in _ROLES, f"chat.messages[{index}].role", f"must be one of {', '.join(_ROLES)}")
        _check_text(message.content, f"chat.messages[{index}].content", checkpoint)


def _check_ids(ids: Sequence[int], checkpoint: Checkpoint) -> None:
    field = "tokens.token_ids"
    check_prompt_length(len(ids), field, checkpoint.max_context_tokens)
    _need(
        0 <= min(ids) and max(ids) < checkpoint.vocabulary_size,
        field,
        f"must be 0 to {checkpoint.vocabulary_size - 1}",
    )


def _check_given(given: dict[str, object], vocabulary_size: int) -> None:
    names = {entry.name for entry in dataclasses.fields(SamplingParams)}
    for name in given:
        _need(name in names, f"sampling.{name}", "is unknown")
    for name, (low, high) in _RANGES.items():
        if given.get(name) is not None:
            _need(low <= given[name] <= high, f"sampling.{name}", f"= {given[name]} must be {low} to {high}")  # type: ignore[operator]
    _check_open_range(given, "top_p", lambda x: 0.0 < x <= 1.0, "(0, 1]")
    _check_open_range(given, "min_p", lambda x: 0.0 <= x < 1.0, "[0, 1)")
    _check_open_range(given, "repetition_penalty", lambda x: 0.0 < x <= 10.0, "(0, 10]")
    _check_lists(given, vocabulary_size)


def _check_open_range(given: dict[str, object], name: str, inside: Callable, wanted: str) -> None:
    value = given.get(name)
    if value is not None:
        _need(inside(value), f"sampling.{name}", f"= {value} must be in {wanted}")


def _check_lists(given: dict[str, object], vocabulary_size: int) -> None:
    stops: tuple[int, ...] = tuple(given.get("stop_token_ids") or ())  # type: ignore[arg-type]
    texts: tuple[str, ...] = tuple(given.get("stop") or ())  # type: ignore[arg-type]
    bias: tuple[tuple[int, float], ...] = tuple(given.get("logit_bias") or ())  # type: ignore[arg-type]
    in_vocabulary = f"must name tokens from 0 to {vocabulary_size - 1}"
    _need(len(stops) <= 64, "sampling.stop_token_ids", f"has {len(stops)} entries; at most 64")
    _need(all(0 <= x < vocabulary_size for x in stops), "sampling.stop_token_ids", in_vocabulary)
    _need(len(texts) <= 16, "sampling.stop", f"has {len(texts)} strings; at most 16")
    _need(all(1 <= len(x) <= 256 for x in texts), "sampling.stop", "must hold strings of 1 to 256 characters")
    _need(len(bias) <= 1024, "sampling.logit_bias", f"has {len(bias)} entries; at most 1,024")
    _need(len({token for token, _ in bias}) == len(bias), "sampling.logit_bias", "names a token twice")
    _need(all(0 <= token < vocabulary_size for token, _ in bias), "sampling.logit_bias", in_vocabulary)
    _need(all(-100.0 <= value <= 100.0 for _, value in bias), "sampling.logit_bias", "must be -100 to 100")


def _need(condition: object, field: str, text: str) -> None:
    if not condition:
        raise InvalidRequest(f"{field} {text}", field=field)
