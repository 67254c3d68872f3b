"""Recall cases: what makes an answer worth checking."""

import random
import re
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from headrace.evals import recall

TINY = Path(__file__).resolve().parents[2] / "models" / "tiny"
_TOKENIZER = Tokenizer.from_file(str(TINY / "tokenizer.json"))


def encode(text: str) -> list[int]:
    return _TOKENIZER.encode(text, add_special_tokens=False).ids


def cases(length: int, count: int, seed: int = 5, **more) -> list[recall.RecallCase]:
    return list(recall.make_cases(encode, seed, length, count, **more))


@pytest.mark.parametrize(("length", "count"), [(96, 24), (256, 48), (1024, 24), (3500, 8)])
def test_a_prompt_is_as_long_as_asked_for(length, count):
    for case in cases(length, count, value_kinds=recall.VALUE_KINDS, questions=recall.QUESTIONS):
        assert length - recall.LENGTH_SLACK < case.prompt_token_count <= length
        assert case.prompt_token_count == len(encode(case.prompt)) + (3 if case.is_chat else 1)


def test_a_prompt_too_short_for_a_fact_and_a_question_is_refused():
    with pytest.raises(ValueError, match="at least 96"):
        recall.make_case(encode, random.Random(1), 95)


def test_the_same_seed_gives_the_same_cases_and_another_seed_none_of_them():
    first, again, other = cases(256, 24), cases(256, 24), cases(256, 24, seed=6)
    assert first == again
    assert not {case.prompt for case in first} & {case.prompt for case in other}
    assert len({case.prompt for case in first}) == 24


def test_more_cases_begin_with_the_same_ones():
    assert cases(256, 12) == cases(256, 24)[:12]


def test_keys_are_held_out_and_a_sixteenth_of_all_keys_is():
    for case in cases(1024, 24):
        assert recall.is_held_out(case.key)
    pairs = [f"{adjective} {noun}" for adjective in recall.ADJECTIVES for noun in recall.NOUNS]
    assert 0.05 < sum(map(recall.is_held_out, pairs)) / len(pairs) < 0.075


def test_the_answer_stands_in_the_context_once_and_beside_its_key():
    for case in cases(1024, 48):
        context = case.prompt[: case.prompt.rindex(case.key)]
        stated = re.findall(rf"\b{re.escape(case.key)}\b[^.\n]*?\b(\d+)\b", context)
        assert stated == [case.answer], case


def test_every_fact_of_a_page_has_its_own_key():
    facts = recall.draw_facts(random.Random(3), 400)
    assert len({fact.key for fact in facts}) == 400


def test_values_cannot_be_guessed():
    values = [case.answer for case in cases(128, 600)]
    assert len(set(values)) > 590
    for place in range(4):
        digits = Counter(value[place] for value in values)
        assert set(digits) == set("0123456789")
        assert max(digits.values()) < 100  # 60 are expected of each
    assert {len(value) for value in values} == {4, 5, 6}


def test_the_asked_fact_is_anywhere_in_the_context():
    thirds = Counter()
    for case in cases(1024, 90, styles=("dense",)):
        thirds[3 * case.prompt.index(case.key) // len(case.prompt)] += 1
    assert min(thirds[third] for third in range(3)) > 10


def test_a_dense_page_is_full_of_facts():
    for case in cases(1024, 12, styles=("dense",)):
        assert len(re.findall(r"\b\d{4,6}\b", case.prompt)) > 50


def test_styles_kinds_and_questions_take_turns():
    drawn = cases(256, 72, value_kinds=recall.VALUE_KINDS, questions=recall.QUESTIONS)
    cells = Counter((case.style, case.value_kind, case.question) for case in drawn)
    assert set(cells.values()) == {3} and len(cells) == 24


def test_filler_of_the_caller_is_used():
    def sentences():
        while True:
            yield " Rivers run slowly to the cold sea."

    case = recall.make_case(encode, random.Random(2), 256, filler=sentences())
    assert case.prompt.count("Rivers run slowly") > 5


@pytest.mark.parametrize(
    ("said", "right"),
    [
        (" 48213", True),
        ("48213.", True),
        (" 48213\n", True),
        (" 482137", False),
        (" 4821", False),
        (" 48213a", False),
        ("", False),
        (" 58213", False),
    ],
)
def test_an_answer_is_right_when_the_value_is_whole_and_ends(said, right):
    case = recall.RecallCase("", "48213", 100, 6, "digits", "dense", "plain", "silver pony")
    assert case.is_right(said) is right


def test_the_answers_ids_are_counted_with_their_blank():
    for case in cases(256, 24, value_kinds=recall.VALUE_KINDS):
        assert case.answer_token_count == len(encode(" " + case.answer))


def test_an_unknown_kind_of_value_is_named():
    with pytest.raises(ValueError, match="roman"):
        recall.draw_value(random.Random(1), "roman")


def test_pieces_encode_as_the_whole_text_does():
    """Training joins ids of pieces; what is asked is encoded whole."""
    rng = random.Random(4)
    for _ in range(40):
        draft = recall.Draft()
        recall.add_sentence(draft, recall.filler_sentence(rng), recall.Kind.FILLER)
        shape = rng.choice(list(recall.SHAPES))
        facts = recall.draw_facts(rng, 3, rng.choice(recall.VALUE_KINDS))
        for fact in facts:
            recall.state(draft, shape, fact)
        for question in rng.sample(recall.QUESTIONS, 3):
            fact = rng.choice(facts)
            recall.answer(draft, fact, recall.ask(draft, question, shape, fact, rng.randrange(3)))
        assert [token for text, _ in draft.pieces for token in encode(text)] == encode(draft.text)
