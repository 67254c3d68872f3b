"""Read the story corpus and split its works into training and held-out ones.

The corpus is a JSON-lines file, plain or xz-compressed; each line is one work with at least `title`, `tier` and `text`.
Paragraphs of a text are separated by one blank line.
"""

import json
import lzma
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_MODULUS = 50


@dataclass(frozen=True)
class Work:
    """One book or tale: its title, its tier (`children` or `simple`) and its whole text."""

    title: str
    tier: str
    text: str


def read_works(path: Path) -> Iterator[Work]:
    """Yield every work of the corpus in file order; raises KeyError where a line lacks a field."""
    opener = lzma.open if path.suffix == ".xz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            fields = json.loads(line)
            yield Work(fields["title"], fields["tier"], fields["text"])


def is_held_out(title: str) -> bool:
    """Whether a work is kept out of tokenizer and model training: CRC-32 of its title is 0 mod 50."""
    return zlib.crc32(title.encode("utf-8")) % HELD_OUT_MODULUS == 0
