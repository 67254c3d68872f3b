"""Draws stages of a request as bars on one time axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class Bar:
    """One row: times in seconds from the start of the request, a note such as `64 tokens, 1.2 MB`."""

    name: str
    where: str
    start_s: float
    duration_s: float
    note: str = ""


def draw(console: Console, title: str, bars: Sequence[Bar], width: int = 40) -> None:
    """Prints the waterfall."""
    total = max((bar.start_s + bar.duration_s for bar in bars), default=0.0) or 1e-9
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("stage")
    table.add_column("where", style="dim")
    table.add_column("start", justify="right")
    table.add_column("took", justify="right")
    table.add_column(f"0 .. {_milliseconds(total)}", no_wrap=True)
    table.add_column("", style="dim")
    for bar in bars:
        table.add_row(
            bar.name,
            bar.where,
            _milliseconds(bar.start_s),
            _milliseconds(bar.duration_s),
            _cells(bar.start_s / total, bar.duration_s / total, width),
            bar.note,
        )
    console.print(table)


def note(tokens: int = 0, num_bytes: int = 0) -> str:
    """`64 tokens, 1.2 MB`, whatever of it is there."""
    parts = [f"{tokens} tokens"] if tokens else []
    if num_bytes:
        parts.append(f"{num_bytes:,} bytes")
    return ", ".join(parts)


def _cells(start: float, length: float, width: int) -> Text:
    before = min(width - 1, int(start * width))
    count = max(1, min(width - before, round(length * width)))
    return Text(" " * before + "█" * count, style="cyan")


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
