"""Chat messages to the prompt text a checkpoint was trained on, by its own Jinja template.

The template is somebody else's program: it runs in Jinja's immutable sandbox, with the names Hugging Face's
`apply_chat_template` offers it (`messages`, `add_generation_prompt`, the special tokens, `raise_exception`,
`strftime_now`, a plain `tojson`). The text usually begins with the begin token; `Tokenizer.encode` will not add a second.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.errors import CheckpointError, InvalidRequest
from headrace.text.tokenizer import token_text

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class ChatTemplate:
    """One checkpoint's template. A checkpoint without one loads too, serves plain text, and refuses messages."""

    def __init__(self, source: str | None, special_tokens: dict[str, str] | None = None):
        """Raises CheckpointError when `source` is not a Jinja template."""
        self.special_tokens = special_tokens or {}
        try:
            self._template = None if source is None else _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the chat template is not valid Jinja: {error}") from error

    @classmethod
    def load(cls, directory: Path) -> ChatTemplate:
        """`chat_template.jinja` of `directory`, else `chat_template` of its tokenizer_config.json."""
        directory = Path(directory)
        config = _read_tokenizer_config(directory / "tokenizer_config.json")
        file = directory / "chat_template.jinja"
        source = file.read_text(encoding="utf-8") if file.is_file() else _default_template(config.get("chat_template"))
        texts = {name: token_text(config.get(name)) for name in _SPECIAL_NAMES}
        return cls(source, {name: text for name, text in texts.items() if text is not None})

    @property
    def available(self) -> bool:
        """Whether the checkpoint has a template at all."""
        return self._template is not None

    def render(self, messages: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt. Raises InvalidRequest for no messages, no template, or messages the template refuses."""
        if self._template is None:
            raise InvalidRequest(
                "this checkpoint has no chat template; send text or token ids",
                reason="NO_CHAT_TEMPLATE",
                field="messages",
            )
        if not messages:
            raise InvalidRequest("at least one message is needed", field="messages")
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self.special_tokens,
            )
        except Exception as error:  # a foreign program met a caller's data: whatever it raises, these two did not fit
            raise InvalidRequest(f"the chat template refuses these messages: {error}", field="messages") from error


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """JSON as it is; Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str):
    raise jinja2.TemplateError(message)


def _default_template(entry: str | list[dict] | None) -> str | None:
    """A checkpoint may name several templates; the one called `default` is for plain chat."""
    if isinstance(entry, list):
        return next((named["template"] for named in entry if named["name"] == "default"), None)
    return entry


def _read_tokenizer_config(path: Path) -> dict:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
