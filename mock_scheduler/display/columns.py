"""A table of right-aligned columns in plain lines, which gives up columns where the terminal is too narrow.

Contract: no line is wrapped or cut, and none ends in a space; gaps shrink first, and the first column always stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_WIDE_GAP, _NARROW_GAP = "  ", " "


@dataclass(frozen=True, kw_only=True, slots=True)
class TextColumn:
    """``header`` in one line or more; columns of the highest ``drop_order`` are given up first."""

    header: str
    cells: Sequence[str]
    drop_order: int

    @property
    def width(self) -> int:
        """Of its widest line."""
        return max(map(len, [*self.header.split("\n"), *self.cells]))


def lay_out(columns: Sequence[TextColumn], *, width: int) -> Iterator[str]:
    """The lines of the table, header first, of at most ``width`` columns if giving up columns can achieve that."""
    shown, gap = list(columns), _WIDE_GAP
    while len(shown) > 1 and sum(column.width for column in shown) + len(gap) * (len(shown) - 1) > width:
        if gap == _WIDE_GAP:
            gap = _NARROW_GAP
        else:  # of those of equal order, the rightmost goes
            shown.remove(max(reversed(shown[1:]), key=lambda column: column.drop_order))
    headers = [column.header.split("\n") for column in shown]
    height = max(map(len, headers))
    rows = zip(*([""] * (height - len(header)) + header for header in headers), strict=True)
    for row in [*rows, *zip(*(column.cells for column in shown), strict=True)]:
        cells = (cell.rjust(column.width) for cell, column in zip(row, shown, strict=True))
        yield gap.join(cells).rstrip()
