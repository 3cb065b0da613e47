"""The console that commands print their results on, and text on it that is wrapped without spaces at ends of lines."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

_PLAIN_WIDTH = 120
_LEAST_WIDTH = 16


def build_console() -> Console:
    """A console on stdout; as wide as the terminal or as ``COLUMNS`` says, or 120 columns where there is neither."""
    console = Console()
    is_width_known = console.is_terminal or os.environ.get("COLUMNS", "").isdecimal()
    return console if is_width_known else Console(width=_PLAIN_WIDTH)


def print_wrapped(console: Console, text: Text, *, indent: int = 0, label: str = "") -> None:
    """Print text in lines as wide as the console, from column ``indent`` on; ``label`` stands before the first."""
    lines = text.wrap(console, max(console.width - indent, _LEAST_WIDTH))
    for number, line in enumerate(lines):
        before = label.ljust(indent) if number == 0 else " " * indent
        printed = Text.assemble((before, "dim" if label else ""), line)
        printed.rstrip()
        console.print(printed, soft_wrap=True)


def cut(lines: Sequence[str], limit: int) -> list[str]:
    """The first ``limit`` lines, and one that says how many more there are in the JSON form."""
    rest = len(lines) - limit
    return [*lines[:limit], *([f"and {rest:,} more (all with --json)"] if rest > 0 else [])]


def print_labelled(console: Console, rows: Iterable[tuple[str, str]], *, indent: int = 0) -> None:
    """Print values in a column beside their labels; an empty label goes on with the one before."""
    rows = list(rows)
    width = max((len(label) for label, _ in rows), default=0)
    for label, value in rows:
        print_wrapped(console, Text(value), indent=indent + width + 2, label=" " * indent + label)


def shortest_names(paths: Sequence[Path]) -> list[str]:
    """The last parts of each path, as few as tell all of them apart."""
    longest = max((len(path.parts) for path in paths), default=1)
    for depth in range(1, longest):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            return names
    return [str(path) for path in paths]
