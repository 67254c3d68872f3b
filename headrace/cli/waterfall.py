"""Draws stages of a request as bars on one time axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

TEXT_COLUMNS = 62
"""Cells that names, times and notes take; bars get what the terminal has left."""


@dataclass(frozen=True)
class Bar:
    """One row: times in seconds from the start of the request, a note such as `64 tokens, 1,280 bytes`."""

    name: str
    start_s: float
    duration_s: float
    note: str = ""


def draw(console: Console, title: str, bars: Sequence[Bar]) -> None:
    """Prints the waterfall, as wide as the terminal."""
    total = max((bar.start_s + bar.duration_s for bar in bars), default=0.0) or 1e-9
    width = max(10, min(60, console.width - TEXT_COLUMNS))
    table = Table(box=None, pad_edge=False)
    table.add_column("stage", no_wrap=True)
    for name in ("start ms", "took ms"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(f"0 .. {total * 1000:.0f} ms", no_wrap=True, width=width)
    table.add_column("", style="dim", no_wrap=True)
    for bar in bars:
        table.add_row(
            bar.name,
            f"{bar.start_s * 1000:.1f}",
            f"{bar.duration_s * 1000:.1f}",
            _cells(bar.start_s / total, bar.duration_s / total, width),
            bar.note,
        )
    console.print(title, style="dim", highlight=False, soft_wrap=True)
    console.print(table)


def note(tokens: int = 0, num_bytes: int = 0) -> str:
    """`64 tokens` or `1,280 bytes`: bytes where a stage moves them."""
    if num_bytes:
        return f"{num_bytes:,} bytes"
    return f"{tokens} tokens" if tokens else ""


def _cells(start: float, length: float, width: int) -> Text:
    before = min(width - 1, int(start * width))
    count = max(1, min(width - before, round(length * width)))
    return Text(" " * before + "█" * count, style="cyan")
