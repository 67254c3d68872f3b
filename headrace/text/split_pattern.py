"""Say a checkpoint's pre-tokenizer as one Split that the C++ engine reads the same way, and know where text may be cut.

The C++ engine keeps what a Split matches and drops the rest, so the one pattern handed to it must cover every character,
and its regular expressions (PCRE2) and those of Hugging Face `tokenizers` (Oniguruma) mean different things by a few
escapes. `covering_split` therefore spells those out, adds what is missing, replaces a chain it knows by an equivalent
single pattern, and raises CheckpointError for everything it cannot vouch for.

The engine's time also grows with the square of the text's length. A `CutRule` names places where text may be cut into
pieces that are encoded one by one: no pre-token crosses such a place, and no pre-token before it looks past it.
Source: the patterns of the two families; the rewriting and the cut rules are ours, `tests/core/test_tokenizer.py` tries
both on every short string over one character of each kind.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass

from headrace.errors import CheckpointError

# (text, index, start of the piece) -> may text be cut before text[index]?
CutRule = Callable[[str, int, int], bool]

BLANK = r"\t\n\x{b}\x{c}\r\x{85}\p{Z}"
BLANK_CHARACTERS = frozenset(
    "\t\n\x0b\x0c\r\x20\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
)
LINE_BREAKS = frozenset("\r\n")


@dataclass(frozen=True)
class CoveringSplit:
    """One pattern that matches all text, and where text under it may be cut (None: nowhere that we can prove)."""

    pattern: str
    may_cut: CutRule | None


def covering_split(pre_tokenizer: dict | None) -> CoveringSplit:
    """Pattern equivalent to a tokenizer.json `pre_tokenizer`. Raises CheckpointError when there is none we know of."""
    chain = tuple(portable_pattern(pattern) for pattern in _split_patterns(pre_tokenizer))
    if chain in KNOWN_CHAINS:
        return KNOWN_CHAINS[chain]
    if len(chain) == 1:
        return CoveringSplit(f"{chain[0]}|(?:(?!{chain[0]})[\\x{{0}}-\\x{{10ffff}}])+", None)
    raise CheckpointError(f"tokenizer.json chains {len(chain)} Splits that have no known single form: {chain}")


def _split_patterns(pre_tokenizer: dict | None) -> list[str]:
    """The patterns of the Splits before the final ByteLevel, in order."""
    if not pre_tokenizer:
        raise CheckpointError("tokenizer.json has no pre_tokenizer; a Split and a ByteLevel are needed")
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    *splits, last = steps
    if last["type"] != "ByteLevel" or last.get("use_regex", True) or last.get("add_prefix_space", True):
        raise CheckpointError(f"pre_tokenizer must end in a ByteLevel without regex and prefix space, not {last}")
    for split in splits:
        if split["type"] != "Split" or split.get("behavior") != "Isolated" or split.get("invert"):
            raise CheckpointError(f"pre_tokenizer step is not a plain isolated Split: {split}")
        if "Regex" not in split["pattern"]:
            raise CheckpointError(f"Split on a plain string is not supported: {split['pattern']}")
    if not splits:
        raise CheckpointError("pre_tokenizer has no Split")
    return [split["pattern"]["Regex"] for split in splits]


_TOKEN = re.compile(
    r"\\x\{(?P<braced>[0-9A-Fa-f]+)\}|\\x(?P<two>[0-9A-Fa-f]{2})|\\u(?P<four>[0-9A-Fa-f]{4})"
    r"|(?P<property>\\[pP]\{\^?\w+\})|\\(?P<escape>[\s\S])|(?P<group>\((?:\?(?:[:=!]|i:))?(?!\?))|(?P<plain>[\s\S])"
)
_SPELLED_OUT = {"r": r"\r", "n": r"\n", "t": r"\t", "d": r"\p{Nd}", "f": r"\x{c}"}


def portable_pattern(pattern: str) -> str:
    """The pattern with every escape spelled so that both engines agree. Raises CheckpointError for what has no such form."""
    parts: list[str] = []
    in_class = False
    for token in _TOKEN.finditer(pattern):
        code_point = token["braced"] or token["two"] or token["four"]
        if code_point:
            parts.append(f"\\x{{{int(code_point, 16):x}}}")
        elif token["escape"]:
            parts.append(_portable_escape(token["escape"], in_class, pattern))
        else:
            text = token[0]
            if text in "^$." and not in_class or text == "[" and in_class or pattern.startswith("}+", token.start()):
                raise _unclear(text, pattern)
            if text == "[":
                in_class = True
            elif text == "]":
                in_class = False
            parts.append(text)
    # A leading ^ negates a class; the scan above refuses it only outside of one.
    result = "".join(parts)
    if "&&" in result or "(?<" in result or "(?>" in result:
        raise _unclear("&& or a look-behind", pattern)
    return result


def _portable_escape(letter: str, in_class: bool, pattern: str) -> str:
    if letter == "s":
        return BLANK if in_class else f"[{BLANK}]"
    if letter == "S" and not in_class:
        return f"[^{BLANK}]"
    if letter in _SPELLED_OUT:
        return _SPELLED_OUT[letter]
    if letter.isalnum():
        raise _unclear("\\" + letter, pattern)
    return "\\" + letter


def _unclear(what: str, pattern: str) -> CheckpointError:
    return CheckpointError(f"regular-expression engines may disagree about {what!r} in the Split pattern {pattern!r}")


# --- Where text may be cut. Kinds: blank W, letter or mark L/M, number N, punctuation or symbol P/S, the rest R (controls,
# format, private use), unknown U (not assigned in this Python's tables, so another engine's may differ).


def kind_of(character: str) -> str:
    """One letter: W, L, M, N, P, S, R or U, as above."""
    if character in BLANK_CHARACTERS:
        return "W"
    category = unicodedata.category(character)
    return {"C": "U" if category == "Cn" else "R", "Z": "W"}.get(category[0], category[0])


def _may_cut_in_both(before: str, after: str, kinds: str) -> bool:
    """Places where both families below end a pre-token and start the next without looking back or ahead."""
    if kinds[1] == "W" and kinds[0] != "W" and after not in LINE_BREAKS:
        return True  # only another blank or a line break could have kept this blank with what stands before it
    if before in LINE_BREAKS and kinds[1] != "W":
        return True
    if "U" in kinds:
        return False
    if (kinds[0] == "N") != (kinds[1] == "N"):
        return True  # numbers join only numbers, and count as the end of text for blanks before them
    return kinds[0] in "LM" and kinds[1] in "WPSR"


def _may_cut_ours(text: str, index: int, start: int) -> bool:
    before, after = text[index - 1], text[index]
    kinds = kind_of(before) + kind_of(after)
    return _may_cut_in_both(before, after, kinds) or kinds == "NN" or kinds[0] in "PSR" and kinds[1] in "LM"


def _may_cut_deepseek(text: str, index: int, start: int) -> bool:
    before, after = text[index - 1], text[index]
    if _is_kana_or_han(before) != _is_kana_or_han(after):
        return True  # the second Split isolates these runs
    kinds = kind_of(before) + kind_of(after)
    if _may_cut_in_both(before, after, kinds):
        return True
    if kinds == "NN":
        return (index - _run_start(text, index, start)) % 3 == 0
    if kinds[0] in "PS" and kinds[1] in "LM":
        return not (before.isascii() and after.isascii())
    return kinds[0] in "PS" and kinds[1] == "R" or kinds[0] == "R" and kinds[1] in "PS"


def _run_start(text: str, index: int, start: int) -> int:
    """Where the numbers that end before `index` begin; a piece starts at a cut, so no further back than `start`."""
    while index > start and kind_of(text[index - 1]) == "N":
        index -= 1
    return index


def _is_kana_or_han(character: str) -> bool:
    return "\u4e00" <= character <= "\u9fa5" or "\u3040" <= character <= "\u30ff"


# --- The families we know by heart.

# Ours: every character belongs to exactly one of number, letter or mark, blank, other; each has an alternative.
_OURS = "|".join(
    (
        r"\p{N}",
        r" ?[\p{L}\p{M}]+",
        rf" ?[^{BLANK}\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*",
        rf"[{BLANK}]*[\r\n]+",
        rf"[{BLANK}]+(?![^{BLANK}\p{{N}}])",
        rf"[{BLANK}]+",
    )
)

# DeepSeek V3 and R1 split three times: runs of numbers, runs of kana and Han (K), then everything by a GPT-like pattern.
# The first two take whole runs of a set of characters, so the third sees text made of K only, or of neither; numbers
# match nothing in it. One pattern says the same: the third once over K and once over the rest, each time with all other
# characters standing for the end of text, and what the third leaves unmatched as runs of its own.
_K_RANGES = r"一-龥\x{3040}-ゟ゠-ヿ"
_PUNCTUATED_WORD = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_DEEPSEEK_CHAIN = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    rf"{_PUNCTUATED_WORD}|[^{{CRLF}}\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[{{CRLF}}]*"
    rf"|[{BLANK}]*[{{CRLF}}]+|[{BLANK}]+(?![^{BLANK}])|[{BLANK}]+".replace("{CRLF}", "\r\n"),
)
_IN_K, _NOT_K = f"(?=[{_K_RANGES}])", f"(?![{_K_RANGES}])"
_DEEPSEEK = "|".join(
    (
        r"\p{N}{1,3}",
        rf"(?:{_IN_K}[^\p{{L}}\p{{P}}\p{{S}}])?(?:{_IN_K}[\p{{L}}\p{{M}}])+",
        rf"(?:{_IN_K}[\p{{P}}\p{{S}}])+",
        rf"(?:{_IN_K}[^\p{{L}}\p{{M}}\p{{P}}\p{{S}}](?!{_IN_K}[\p{{L}}\p{{M}}]))+",
        _PUNCTUATED_WORD,
        rf"[^\r\n\p{{L}}\p{{P}}\p{{S}}\p{{N}}{_K_RANGES}]?(?:{_NOT_K}[\p{{L}}\p{{M}}])+",
        rf" ?(?:{_NOT_K}[\p{{P}}\p{{S}}])+[\r\n]*",
        rf"[{BLANK}]*[\r\n]+",
        rf"[{BLANK}]+(?![^{BLANK}\p{{N}}{_K_RANGES}])",
        rf"[{BLANK}]+",
        rf"(?:{_NOT_K}[^{BLANK}\p{{L}}\p{{M}}\p{{N}}\p{{P}}\p{{S}}](?!{_NOT_K}[\p{{L}}\p{{M}}]))+",
    )
)

KNOWN_CHAINS: dict[tuple[str, ...], CoveringSplit] = {
    (_OURS,): CoveringSplit(_OURS, _may_cut_ours),
    _DEEPSEEK_CHAIN: CoveringSplit(_DEEPSEEK, _may_cut_deepseek),
}
