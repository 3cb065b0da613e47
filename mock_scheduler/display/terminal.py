"""Draws on the terminal of all commands: a console, wrapped text, tables, and a progress bar.

Contract: nothing is cut off, and no line ends in a space. In a narrow terminal the gaps of a table shrink first; then
the columns of the highest ``drop_order`` go, the rightmost of equal ones first, but never the first column. The bar is
drawn on stderr, only on a terminal, and goes with the work: it changes no output.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rich import progress
from rich.console import Group
from rich.table import Table
from rich.text import Text

from mock_scheduler.display.console import Console, ProgressBar, printable_text
from mock_scheduler.support.text import printable

_PLAIN_WIDTH = 120
_LEAST_WIDTH = 16


def build_console() -> Console:
    """Build a console on stdout, as wide as the terminal or ``COLUMNS``, or 120 columns where there is neither."""
    console = Console()
    is_width_known = console.is_terminal or os.environ.get("COLUMNS", "").isdecimal()
    return console if is_width_known else Console(width=_PLAIN_WIDTH)


def print_lines(console: Console, text: str) -> None:
    """Print a text of several lines as it is, without wrapping or highlights; of an empty one nothing."""
    for line in text.splitlines():
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def print_wrapped(console: Console, text: Text, *, indent: int = 0, label: str = "") -> None:
    """Print text in lines as wide as the console, from column ``indent`` on; ``label`` stands before the first."""
    lines = printable_text(text).wrap(console, max(console.width - indent, _LEAST_WIDTH))
    for number, line in enumerate(lines):
        before = label.ljust(indent) if number == 0 else " " * indent
        printed = Text.assemble((before, "dim" if label else ""), line)
        printed.rstrip()
        console.print(printed, soft_wrap=True)


def cut(lines: Sequence[str], limit: int) -> list[str]:
    """Keep the first ``limit`` lines, and say in one more how many others the JSON form has."""
    rest = len(lines) - limit
    return [*lines[:limit], *([f"and {rest:,} more (all with --json)"] if rest > 0 else [])]


def print_labelled(console: Console, rows: Iterable[tuple[str, str]], *, indent: int = 0) -> None:
    """Print values in a column beside their labels; an empty label goes on with the one before."""
    rows = list(rows)
    width = max((len(label) for label, _ in rows), default=0)
    for label, value in rows:
        print_wrapped(console, Text(value), indent=indent + width + 2, label=" " * indent + label)


def shortest_names(paths: Sequence[Path]) -> list[str]:
    """Shorten each path to its last parts, as few as tell all of them apart."""
    longest = max((len(path.parts) for path in paths), default=1)
    for depth in range(1, longest):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            return names
    return [str(path) for path in paths]


@contextmanager
def show_progress(
    what: str, *, console: Console | None = None, delay_s: float = 1.0
) -> Iterator[Callable[[int, int], None]]:
    """Gives a function to call with how many are done, of how many; the bar appears after ``delay_s``.

    ``console``: ``None`` is this process's stderr.
    """
    console = console or Console(stderr=True)
    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
    )
    bar = ProgressBar(*columns, console=console, transient=True)
    task = bar.add_task(what, total=None)
    started_s = time.monotonic()
    is_drawn = False

    def update(done: int, total: int) -> None:
        nonlocal is_drawn
        bar.update(task, completed=done, total=total)
        if console.is_terminal and not is_drawn and time.monotonic() - started_s >= delay_s:
            is_drawn = True
            bar.start()

    try:
        yield update
    finally:
        if is_drawn:
            bar.stop()


_WIDE_GAP, _NARROW_GAP = 2, 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TextColumn:
    """Holds a column of a table.

    ``header`` may have several lines. A column with a ``least_width`` above 0 folds its cells before another column
    goes: down to this width, and further once only columns of ``drop_order`` 0 are left.
    """

    header: str
    cells: Sequence[str | Text]
    drop_order: int = 0
    least_width: int = 0
    justify: Literal["left", "right"] = "right"

    @property
    def width(self) -> int:
        """The column is as wide as its widest line."""
        return max(map(len, [*self.header.split("\n"), *self.cells]))

    @property
    def needed_width(self) -> int:
        """Another column goes before this one gets narrower."""
        return min(self.width, self.least_width or self.width)


class FittedTable:
    """A table prints itself row by row, so other lines can stand between its rows."""

    def __init__(self, columns: Sequence[TextColumn], console: Console, *, indent: int = 2) -> None:
        self._console = console
        self._indent = indent
        columns = [replace(column, cells=tuple(map(_printable_cell, column.cells))) for column in columns]
        width = console.width - indent
        self._columns, self._gap = _fit(columns, width)
        rigid = sum(column.width for column in self._columns if not column.least_width)
        folding = sum(1 for column in self._columns if column.least_width) or 1
        room = (width - rigid - self._gap * (len(self._columns) - 1)) // folding
        self._widths = [
            min(column.width, max(room, 1)) if column.least_width else column.width for column in self._columns
        ]

    def print_header(self, style: str = "") -> None:
        """Print the headers on one base line."""
        headers = [[Text(line, style) for line in column.header.split("\n")] for column in self._columns]
        self._print([Group(*lines) for lines in headers], vertical="bottom")

    def print_row(self, number: int, style: str = "") -> None:
        """Print one row of cells."""
        cells = (column.cells[number] for column in self._columns)
        self._print([cell if isinstance(cell, Text) else Text(cell, style) for cell in cells], vertical="top")

    def _print(self, cells: Sequence[Text | Group], *, vertical: Literal["top", "bottom"]) -> None:
        table = Table.grid(padding=(0, self._gap, 0, 0))
        for column, width in zip(self._columns, self._widths, strict=True):
            table.add_column(width=width, justify=column.justify, overflow="fold", vertical=vertical)
        table.add_row(*cells)
        room = max(self._console.width - self._indent, 1)
        for line in self._console.render_lines(table, self._console.options.update_width(room), pad=False):
            text = Text.assemble(" " * self._indent, *((part.text, part.style or "") for part in line))
            text.rstrip()
            self._console.print(text, soft_wrap=True)


def _printable_cell(cell: str | Text) -> str | Text:
    return printable(cell) if isinstance(cell, str) else printable_text(cell)


def print_table(columns: Sequence[TextColumn], console: Console) -> None:
    """Print a table, header first."""
    table = FittedTable(columns, console, indent=2)
    table.print_header()
    for number in range(len(columns[0].cells)):
        table.print_row(number)


def _fit(columns: Sequence[TextColumn], width: int) -> tuple[list[TextColumn], int]:
    """Choose the columns with room, and the gap between them."""
    shown, gap = list(columns), _WIDE_GAP
    while len(shown) > 1 and sum(column.needed_width for column in shown) + gap * (len(shown) - 1) > width:
        last = max(reversed(shown[1:]), key=lambda column: column.drop_order)
        if gap == _WIDE_GAP:
            gap = _NARROW_GAP
        elif last.drop_order or not any(column.least_width for column in shown):
            shown.remove(last)
        else:
            break
    return shown, gap
