"""Numbers and values as short text, and text wrapped to the terminal without spaces at the ends of lines."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_LEAST_WIDTH = 16


def format_bytes(size_bytes: float) -> str:
    """``512 B``, ``1.4 KiB``, ``300 GiB``: up to three digits, units of 1024."""
    for unit in _UNITS:
        if size_bytes < 1000 or unit == _UNITS[-1]:
            break
        size_bytes /= 1024
    return f"{size_bytes:.0f} {unit}" if unit == "B" or size_bytes >= 100 else f"{size_bytes:.1f} {unit}"


def count_of(count: int, noun: str, plural: str | None = None) -> str:
    """``1 row``, ``12,800 rows``."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def shorten(text: str, width: int) -> str:
    """The text, cut to ``width`` with an ellipsis where it is longer."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def print_wrapped(console: Console, text: Text, *, indent: int = 0, label: str = "") -> None:
    """Print text in lines as wide as the console, from column ``indent`` on; ``label`` stands before the first."""
    lines = text.wrap(console, max(console.width - indent, _LEAST_WIDTH))
    for number, line in enumerate(lines):
        line.rstrip()
        before = label.ljust(indent) if number == 0 else " " * indent
        console.print(Text.assemble((before, "dim" if label else ""), line), soft_wrap=True)


def print_labelled(console: Console, rows: Iterable[tuple[str, str]], *, indent: int = 0) -> None:
    """Print values in a column beside their labels; an empty label goes on with the one before."""
    rows = list(rows)
    width = max((len(label) for label, _ in rows), default=0)
    for label, value in rows:
        print_wrapped(console, Text(value), indent=indent + width + 2, label=" " * indent + label)
