"""Text to token ids and back, byte-level BPE, with neither Rust nor torch.

Encoding is the C++ extension of `pytorch-tokenizers`, loaded alone: importing that package would import the Rust
`tokenizers`. We hand it a tokenizer.json of our own writing (one covering Split, no added tokens) and do here what it
does not do well: find added tokens, cut long text, know begin and end tokens. Decoding is a table of bytes.

The ids are those of Hugging Face `AutoTokenizer` on the same directory, and the begin token exactly once.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.machinery
import importlib.util
import json
import platform
import re
import tempfile
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

from headrace.errors import CheckpointError, InternalError, InvalidRequest
from headrace.text.split_pattern import CutRule, covering_split, kind_of

PIECE_CHARACTERS = 500  # the engine's time is quadratic in a piece; below this the cost of a call dominates
# What may reach the engine in one piece where we know of no place to cut: about a second of its time.
MAX_UNASSIGNED_CHARACTERS = 20_000
MAX_CHARACTERS_OF_UNKNOWN_PATTERN = 200_000


class Tokenizer:
    """Ids and text of one checkpoint. Make one with `load`; it never changes, and threads may share it.

    The engine keeps the interpreter lock while it works on a piece, which is a fraction of a millisecond for most text.
    """

    def __init__(self, spec: dict, *, bos_id: int | None, eos_ids: tuple[int, ...]):
        """`spec` is a parsed tokenizer.json. Raises CheckpointError, with the reason, for one we cannot follow."""
        _refuse_what_we_do_not_do(spec)
        added = spec.get("added_tokens") or []
        split = covering_split(spec.get("pre_tokenizer"))
        self.bos_id = bos_id
        self.eos_ids = eos_ids
        self.special_ids = frozenset(token["id"] for token in added if token["special"])
        self._may_cut: CutRule | None = split.may_cut
        self._bytes = _bytes_by_id(spec["model"]["vocab"], added)
        self._shown = [b"" if i in self.special_ids else value for i, value in enumerate(self._bytes)]
        self.vocab_size = len(self._bytes)
        self.longest_token_bytes = max(map(len, self._bytes))
        self._added_ids = {token["content"]: token["id"] for token in added}
        # Hugging Face looks for the tokens that skip normalising first, then for the others in what is left.
        self._added_patterns = [
            _any_of(token["content"] for token in added if bool(token["normalized"]) == normalized)
            for normalized in (False, True)
        ]
        self._engine = _load_engine(_spec_for_engine(spec, split.pattern))
        self._try_the_engine()

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Read `directory`: tokenizer.json and, for begin and end ids, its config files. Raises CheckpointError."""
        directory = Path(directory)
        spec = _read_json(directory / "tokenizer.json")
        if spec is None:
            raise CheckpointError(f"{directory} has no tokenizer.json")
        names = _read_json(directory / "tokenizer_config.json") or {}
        generation = _read_json(directory / "generation_config.json") or {}
        config = _read_json(directory / "config.json") or {}
        ids = {token["content"]: token["id"] for token in spec.get("added_tokens") or []}

        def named(key: str) -> int | None:
            return ids.get(token_text(names.get(key)))

        bos = _first_given(named("bos_token"), generation.get("bos_token_id"), config.get("bos_token_id"))
        eos = _first_given(generation.get("eos_token_id"), config.get("eos_token_id"), named("eos_token"))
        eos_ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
        return cls(spec, bos_id=bos, eos_ids=eos_ids)

    def encode(self, text: str, *, add_bos: bool = True, allow_special: bool = True) -> list[int]:
        """Token ids of `text`; with `add_bos` the begin token comes first, once, also when the text already has it.

        `allow_special=False` reads the spelling of an added token as ordinary text. Raises InvalidRequest for a string
        that is not Unicode text (a lone surrogate), and for one that would take very long because it has no place to cut.
        """
        ids: list[int] = []
        for piece, added_id in self._around_added_tokens(text) if allow_special else [(text, None)]:
            ids += self._encode_plain(piece) if added_id is None else [added_id]
        if add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD, ids outside the vocabulary become nothing."""
        table = self._shown if skip_special else self._bytes
        size = len(table)
        return b"".join(table[i] for i in ids if 0 <= i < size).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to shown text, perhaps part of a character; nothing for special and unknown ids."""
        return self._shown[token_id] if 0 <= token_id < self.vocab_size else b""

    def _around_added_tokens(self, text: str) -> Iterator[tuple[str, int | None]]:
        """(plain text, None) and (spelling, id of the added token), in order."""
        first, second = self._added_patterns
        for piece, is_added in _partition(text, first):
            for part, is_added_too in [(piece, True)] if is_added else _partition(piece, second):
                yield part, self._added_ids[part] if is_added_too else None

    def _encode_plain(self, text: str) -> list[int]:
        try:
            byte_count = len(text.encode())
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"text is not valid Unicode: {error}", field="text") from error
        ids = [token_id for piece in self._pieces(text) for token_id in self._engine.encode(piece)]
        if sum(len(self._bytes[i]) for i in ids) != byte_count:
            raise InternalError("the tokenizer engine lost a part of the text")
        return ids

    def _pieces(self, text: str) -> Iterator[str]:
        """Cut long text where that changes no id. A stretch without such a place stays whole, and is right too.

        Under a pattern we know such a stretch is one or two pre-tokens, which the engine does in linear time, unless it
        is made of characters whose kind we do not know. Raises InvalidRequest for too many of those.
        """
        start, may_cut = 0, self._may_cut
        if may_cut is None and len(text) > MAX_CHARACTERS_OF_UNKNOWN_PATTERN:
            raise _takes_too_long(
                len(text), MAX_CHARACTERS_OF_UNKNOWN_PATTERN, "characters for this checkpoint's pattern"
            )
        while start < len(text):
            cut = len(text)
            if may_cut and cut - start > PIECE_CHARACTERS:
                candidates = range(start + PIECE_CHARACTERS, cut)
                cut = next((i for i in candidates if may_cut(text, i, start)), cut)
            piece, start = text[start:cut], cut
            if len(piece) > MAX_UNASSIGNED_CHARACTERS and may_cut:
                unassigned = sum(kind_of(character) == "U" for character in piece)
                if unassigned > MAX_UNASSIGNED_CHARACTERS:
                    raise _takes_too_long(unassigned, MAX_UNASSIGNED_CHARACTERS, "characters Unicode has not assigned")
            yield piece

    def _try_the_engine(self) -> None:
        """Every ASCII character and longer ones must come back; a vocabulary without all bytes fails here."""
        text = "".join(map(chr, range(128))) + "word 123 é中か・😀\u0301 \n\n end"
        try:
            back = self.decode(self.encode(text, add_bos=False, allow_special=False), skip_special=False)
        except (InternalError, RuntimeError, IndexError) as error:
            raise CheckpointError(f"the tokenizer engine cannot follow this tokenizer.json: {error}") from error
        if back != text:
            raise CheckpointError(f"the tokenizer engine changes text: {text!r} came back as {back!r}")


def _takes_too_long(count: int, limit: int, what: str) -> InvalidRequest:
    return InvalidRequest(f"text has a stretch of {count} {what}; at most {limit} can be tokenised", field="text")


def token_text(entry: str | dict | None) -> str | None:
    """The spelling of a token named in tokenizer_config.json, where it may be a string or an object."""
    return entry.get("content") if isinstance(entry, dict) else entry


def _read_json(path: Path) -> dict | None:
    """The object in the file, None when there is no file. Raises CheckpointError when it is not JSON."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error


def _first_given(*values: int | list[int] | None) -> int | list[int] | None:
    return next((value for value in values if value is not None), None)


def _refuse_what_we_do_not_do(spec: dict) -> None:
    """Raise CheckpointError with every part of a tokenizer.json that would change ids and that we do not follow."""
    model, reasons = spec["model"], []
    if model.get("type", "BPE") != "BPE":
        reasons.append(f"model type {model['type']}; only BPE is supported")
    for key in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback"):
        if model.get(key):
            reasons.append(f"model.{key} = {model[key]!r}")
    normalizer = spec.get("normalizer")
    if normalizer and not (normalizer["type"] == "Sequence" and not normalizer["normalizers"]):
        reasons.append(f"normalizer {normalizer['type']}")
    for token in spec.get("added_tokens") or []:
        if token["lstrip"] or token["rstrip"] or token["single_word"]:
            reasons.append(f"added token {token['content']!r} strips blanks or wants whole words")
    if (spec.get("decoder") or {}).get("type") != "ByteLevel":
        reasons.append("decoder is not ByteLevel")
    if reasons:
        raise CheckpointError("tokenizer.json is not supported: " + "; ".join(reasons))


def _spec_for_engine(spec: dict, pattern: str) -> dict:
    """The least tokenizer.json that makes the C++ engine give our ids: plain tokens only, one Split."""
    model = dict(spec["model"])
    added_ids = {token["id"] for token in spec.get("added_tokens") or []}
    model["vocab"] = {text: token_id for text, token_id in model["vocab"].items() if token_id not in added_ids}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": None,
        "model": model,
    }


def _load_engine(spec: dict):
    """A C++ HFTokenizer for `spec`. Raises CheckpointError when the engine is missing or refuses it."""
    with _quiet_c_stderr(), tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        engine = _engine_module().HFTokenizer()
        json.dump(spec, file)
        file.flush()
        try:
            engine.load(file.name)
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(f"the tokenizer engine refuses this tokenizer.json: {error}") from error
    return engine


@cache
def _engine_module() -> ModuleType:
    """The extension module of pytorch-tokenizers alone: its package would import Rust."""
    package = importlib.util.find_spec("pytorch_tokenizers")  # finds it, does not import it
    for folder in (package.submodule_search_locations or []) if package else []:
        paths = [Path(folder) / f"pytorch_tokenizers_cpp{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
        if path := next(filter(Path.is_file, paths), None):
            spec = importlib.util.spec_from_file_location("pytorch_tokenizers_cpp", path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    raise CheckpointError("the C++ extension of pytorch-tokenizers is not installed for this Python")


@cache
def _null_stream() -> int | None:
    """A C FILE* to /dev/null, opened once and kept, because another thread may hold it after we have put it back."""
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    return libc.fopen(b"/dev/null", b"w")


@contextlib.contextmanager
def _quiet_c_stderr() -> Iterator[None]:
    """While loading, the engine chats on C's `stderr`. Swap that one pointer; file descriptors and Python are untouched."""
    if platform.libc_ver()[0] != "glibc":  # elsewhere `stderr` may be a constant
        yield
        return
    stream = ctypes.c_void_p.in_dll(ctypes.CDLL(None), "stderr")
    before, stream.value = stream.value, _null_stream()
    try:
        yield
    finally:
        stream.value = before


def _bytes_by_id(vocab: dict[str, int], added: list[dict]) -> list[bytes]:
    """What each id stands for, from 0 to the largest id; ids that nobody uses stand for nothing."""
    texts = vocab | {token["content"]: token["id"] for token in added}
    table = [b""] * (max(texts.values()) + 1)
    for text, token_id in texts.items():
        table[token_id] = _bytes_of(text)
    return table


def _bytes_of(token: str) -> bytes:
    """Bytes of a vocabulary entry; one that is not spelled in the byte alphabet (an added token) is its own UTF-8."""
    alphabet = _byte_alphabet()
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:
        return token.encode()


@cache
def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of GPT-2's spelling: printable Latin-1 stands for itself, the rest for U+0100 and on, in order."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def _any_of(texts: Iterable[str]) -> re.Pattern | None:
    """A pattern for the leftmost, then longest, of `texts`."""
    ordered = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _partition(text: str, pattern: re.Pattern | None) -> Iterator[tuple[str, bool]]:
    """The parts of `text` in order and whether each is a match; empty parts are left out."""
    end = 0
    for match in pattern.finditer(text) if pattern else ():
        if match.start() > end:
            yield text[end : match.start()], False
        yield match[0], True
        end = match.end()
    if end < len(text):
        yield text[end:], False
