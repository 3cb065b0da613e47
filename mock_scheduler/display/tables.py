"""Tables on the terminal: rich lays them out, and a narrow terminal has fewer columns.

Contract: nothing is cut off, and no line ends in a space. Gaps shrink first; then the columns of the highest
``drop_order`` go, the rightmost of equal ones first. The first column always stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDE_GAP, _NARROW_GAP = 2, 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TextColumn:
    """A column of a table.

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
        self._print([Text(column.header, style) for column in self._columns], vertical="bottom")

    def print_row(self, number: int, style: str = "") -> None:
        """Print one row of cells."""
        cells = (column.cells[number] for column in self._columns)
        self._print([cell if isinstance(cell, Text) else Text(cell, style) for cell in cells], vertical="top")

    def _print(self, cells: Sequence[Text], *, vertical: Literal["top", "bottom"]) -> None:
        table = Table.grid(padding=(0, self._gap, 0, 0))
        for column, width in zip(self._columns, self._widths, strict=True):
            table.add_column(width=width, justify=column.justify, overflow="fold", vertical=vertical)
        table.add_row(*cells)
        room = max(self._console.width - self._indent, 1)
        for line in self._console.render_lines(table, self._console.options.update_width(room), pad=False):
            text = Text.assemble(" " * self._indent, *((part.text, part.style or "") for part in line))
            text.rstrip()
            self._console.print(text, soft_wrap=True)


def print_table(columns: Sequence[TextColumn], console: Console, *, indent: int = 2) -> None:
    """Print a table, header first."""
    table = FittedTable(columns, console, indent=indent)
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
