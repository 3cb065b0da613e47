"""Compared tensors on the terminal: figures in columns under their step and kind, and details of the first few."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from mock_scheduler.compare.tensors import TensorComparison, TensorDifference
from mock_scheduler.display.text import print_wrapped
from mock_scheduler.report.comparison.view import (
    describe_details,
    format_bound,
    format_size,
    format_slope,
    tensors_to_show,
)

_NUM_SHOWN = 10
_NUM_NEAREST = 3
_NUM_DETAILED = 3
_LEAST_NAME_WIDTH = 24
_GAP = "  "
_INDENT = "    "


@dataclass(frozen=True, kw_only=True, slots=True)
class _Column:
    header: str
    width: int
    cell_of: Callable[[TensorDifference], str]


def print_tensors(tensors: TensorComparison, console: Console, *, more: str) -> None:
    """Print those beyond their bound, or else the nearest to it; ``more`` says where the others are."""
    heading, chosen = tensors_to_show(tensors)
    if not chosen:
        return
    is_nearest = not tensors.exceeding and not tensors.undecided
    shown = chosen[: _NUM_NEAREST if is_nearest else _NUM_SHOWN]
    columns, name_width = _fit(_columns(tensors.level == "sketch"), console.width)
    console.print()
    console.print(Text(heading, style="bold"), soft_wrap=True)
    headers = (column.header.rjust(column.width) for column in columns)
    console.print(Text(f"{_INDENT}{'':<{name_width}}{_GAP}{_GAP.join(headers)}", style="dim"), soft_wrap=True)
    group = ""
    for number, difference in enumerate(shown):
        key = difference.key
        if group != (group := f"  step {key.step}, update {key.update}: {key.kind.replace('_', ' ')}"):
            console.print(Text(group, style="dim"), soft_wrap=True)
        _print_row(difference, columns, name_width, console)
        if number < _NUM_DETAILED:
            for label, text in describe_details(difference):
                print_wrapped(console, Text(text, style="dim"), indent=18, label=f"      {label}")
    if len(chosen) > len(shown) and not is_nearest:
        console.print(Text(f"  and {len(chosen) - len(shown):,} more{more}"), soft_wrap=True)


def _columns(is_sketch: bool) -> list[_Column]:
    relative = _Column(header="relative", width=8, cell_of=_relative)
    bound = _Column(header="bound", width=10, cell_of=format_bound)
    if is_sketch:
        bar = _Column(header="error bar", width=18, cell_of=_error_bar)
        return [_Column(header="estimated", width=9, cell_of=_relative), bar, bound]
    return [
        relative,
        bound,
        _Column(header="max |a-b|", width=9, cell_of=lambda item: format_size(item.max_abs)),
        _Column(header="ULP", width=7, cell_of=_ulp),
        _Column(header="slope", width=9, cell_of=_slope),
        _Column(header="cosine", width=9, cell_of=_cosine),
    ]


def _fit(columns: Sequence[_Column], width: int) -> tuple[list[_Column], int]:
    """The columns that leave room for names, from the left, and that room."""
    shown = list(columns)
    while True:
        room = width - len(_INDENT) - sum(column.width + len(_GAP) for column in shown)
        if room >= _LEAST_NAME_WIDTH or len(shown) == 1:
            return shown, max(room, 1)
        shown.pop()


def _print_row(difference: TensorDifference, columns: Sequence[_Column], name_width: int, console: Console) -> None:
    """One line, or two where the name is longer than its column."""
    name = difference.key.name
    style = "red" if difference.exceeds else "yellow" if difference.is_undecided else ""
    cells = _GAP.join(column.cell_of(difference).rjust(column.width) for column in columns)
    if len(name) > name_width:
        console.print(Text(f"{_INDENT}{name}", style=style), soft_wrap=True)
        name = ""
    console.print(Text.assemble((f"{_INDENT}{name:<{name_width}}", style), f"{_GAP}{cells}"), soft_wrap=True)


def _relative(difference: TensorDifference) -> str:
    return format_size(difference.relative)


def _error_bar(difference: TensorDifference) -> str:
    if difference.low is None or difference.high is None:
        return "-"
    return f"{format_size(difference.low)} to {format_size(difference.high)}"


def _slope(difference: TensorDifference) -> str:
    return "-" if difference.figures is None else format_slope(difference.figures.slope)


def _cosine(difference: TensorDifference) -> str:
    return "-" if difference.figures is None else f"{difference.figures.cosine:.6f}"


def _ulp(difference: TensorDifference) -> str:
    if difference.figures is None or difference.figures.max_ulp is None:
        return "-"
    ulp = difference.figures.max_ulp
    return f"{ulp:,}" if ulp < 1_000_000 else f"{ulp:.1e}"
