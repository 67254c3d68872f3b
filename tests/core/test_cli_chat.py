"""The conversation that `headrace chat` keeps, over a router that is made up here."""

from __future__ import annotations

import pytest

from headrace.cli import chat
from headrace.errors import Overloaded
from headrace.protocol.inference import GenerateEvent, SampleDelta


@pytest.fixture
def talk(monkeypatch):
    """talk(said, answers, message=None): what each call was sent, as (role, content) pairs. An answer may be an error."""

    def run(said, answers, message=None):
        lines, sent, waiting = iter([*said, ""]), [], iter(answers)

        class Client:
            def __init__(self, address):
                pass

            def __enter__(self):
                return self

            def __exit__(self, *exception):
                pass

            def stream(self, turns, **given):
                sent.append([(turn.role, turn.content) for turn in turns])
                answer = next(waiting)
                if isinstance(answer, Exception):
                    raise answer
                yield GenerateEvent("r", (SampleDelta(0, 0, (5,), answer),))

        monkeypatch.setattr(chat, "Client", Client)
        monkeypatch.setattr(chat, "_ask", lambda: next(lines))
        chat.chat(message, address="127.0.0.1:1", system="", max_tokens=4, temperature=None)
        return sent

    return run


def test_every_turn_is_sent_with_those_before_it(talk):
    assert talk(["a", "b"], ["A", "B"])[-1] == [("user", "a"), ("assistant", "A"), ("user", "b")]


@pytest.mark.parametrize("nothing", ["", Overloaded("full")])
def test_a_turn_without_an_answer_is_forgotten_and_the_conversation_goes_on(talk, nothing):
    assert talk(["a", "b", "c"], ["A", nothing, "C"])[-1] == [("user", "a"), ("assistant", "A"), ("user", "c")]


def test_one_message_that_fails_ends_the_command_with_its_error(talk):
    with pytest.raises(Overloaded):
        talk([], [Overloaded("full")], message="hello")
