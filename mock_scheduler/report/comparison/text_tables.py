"""Tables of a comparison on the terminal: counts by kind, tensors with details of the first few, and metrics."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from mock_scheduler.comparison.tensors import TensorComparison, TensorDifference
from mock_scheduler.comparison.thresholds import NUM_ULPS
from mock_scheduler.comparison.walk.metrics import MetricDifference
from mock_scheduler.display.console import Console
from mock_scheduler.display.terminal import FittedTable, TextColumn, print_table, print_wrapped
from mock_scheduler.report.comparison.view import TierCounts, tensors_to_show
from mock_scheduler.verdict.wording.tensors import (
    describe_details,
    format_bound,
    format_bound_share,
    format_size,
    format_slope,
)

_NUM_SHOWN = 10
_NUM_NEAREST = 3
_NUM_DETAILED = 3
_LEAST_NAME_WIDTH = 64  # up to which columns go rather than that a name is folded
_NONE = "-"


def print_tiers(counts: Sequence[TierCounts], console: Console) -> None:
    """Print how many tensors of each kind are how far apart: one row for each, and no column of zeros."""
    if not counts:
        return
    columns = (
        ("identical", [item.identical for item in counts], "green"),
        (f"{NUM_ULPS} ulp", [item.ulp for item in counts], ""),
        ("in\nbound", [item.tolerance for item in counts], ""),
        ("un-\ndecided", [item.undecided for item in counts], "yellow"),
        ("diverged", [item.diverged for item in counts], "red"),
        ("missing", [item.missing for item in counts], "red"),
        ("un-\nobserved", [item.unobserved for item in counts], "dim"),
        ("not\njudged", [item.unjudged for item in counts], "dim"),
    )
    kinds = [item.kind.replace("_", " ") for item in counts]
    shown = [
        TextColumn(header="tensors by kind", cells=kinds, least_width=_LEAST_NAME_WIDTH, justify="left"),
        TextColumn(header="compared", cells=[f"{item.compared:,}" for item in counts]),
        *(
            TextColumn(header=header, cells=[_count(value, style) for value in values])
            for header, values, style in columns
            if any(values)
        ),
    ]
    console.print()
    print_table(shown, console)


def _count(value: int, style: str) -> Text:
    return Text(f"{value:,}", style) if value else Text(_NONE, "dim")


def print_tensors(tensors: TensorComparison, console: Console, *, more: str) -> None:
    """Print those beyond their bound, or else the nearest to it; ``more`` says where the others are."""
    heading, chosen = tensors_to_show(tensors)
    if not chosen:
        return
    is_nearest = not tensors.exceeding and not tensors.undecided
    shown = chosen[: _NUM_NEAREST if is_nearest else _NUM_SHOWN]
    table = FittedTable(_tensor_columns(shown, is_sketch=tensors.level == "sketch"), console, indent=4)
    console.print()
    console.print(Text(heading, style="bold"), soft_wrap=True)
    table.print_header("dim")
    group = ""
    for number, difference in enumerate(shown):
        key = difference.key
        if group != (group := f"  step {key.step}, update {key.update}: {key.kind.replace('_', ' ')}"):
            console.print(Text(group, style="dim"), soft_wrap=True)
        table.print_row(number)
        if number < _NUM_DETAILED:
            for label, text in describe_details(difference):
                print_wrapped(console, Text(text, style="dim"), indent=18, label=f"      {label}")
    if len(chosen) > len(shown) and not is_nearest:
        console.print(Text(f"  and {len(chosen) - len(shown):,} more{more}"), soft_wrap=True)


def _tensor_columns(shown: Sequence[TensorDifference], *, is_sketch: bool) -> list[TextColumn]:
    names = [Text(item.key.name, "red" if item.exceeds else "yellow" if item.is_undecided else "") for item in shown]
    columns = [
        TextColumn(header="", cells=names, least_width=_LEAST_NAME_WIDTH, justify="left"),
        TextColumn(
            header="estimated" if is_sketch else "relative", cells=[format_size(item.relative) for item in shown]
        ),
    ]
    if is_sketch:
        columns.append(TextColumn(header="error bar", cells=list(map(_error_bar, shown))))
    columns.append(TextColumn(header="bound", cells=list(map(format_bound, shown))))
    if not is_sketch:
        figures = list(map(_figures, shown))
        columns += [
            TextColumn(header=header, drop_order=order, cells=[row[order - 1] for row in figures])
            for order, header in enumerate(("max |a-b|", "ULP", "slope", "cosine"), start=1)
        ]
    return columns


def _error_bar(difference: TensorDifference) -> str:
    if difference.low is None or difference.high is None:
        return _NONE
    return f"{format_size(difference.low)} to {format_size(difference.high)}"


def _figures(difference: TensorDifference) -> tuple[str, ...]:
    figures, size = difference.figures, format_size(difference.max_abs)
    if figures is None:
        return (size, _NONE, _NONE, _NONE)
    ulp = figures.max_ulp
    short = _NONE if ulp is None else f"{ulp:,}" if ulp < 1_000_000 else f"{ulp:.1e}"
    return (size, short, format_slope(figures.slope), f"{figures.cosine:.6f}")


def print_metrics(differences: Sequence[MetricDifference], console: Console) -> None:
    """Print one row per differing metric: its largest differences, and how many times its bound; red beyond that."""
    headers = ("max |a-b|", "max relative", "at step", "first differs", "of bound")
    styles = ["red" if item.first_exceeding_step is not None else "" for item in differences]
    rows = [
        (
            f"{item.max_abs:.2e}",
            f"{item.max_relative:.2e}",
            str(item.max_relative_step),
            str(item.first_different_step),
            format_bound_share(item),
        )
        for item in differences
    ]
    names = [item.name for item in differences]
    table = FittedTable(
        [
            TextColumn(header="metric", cells=names, least_width=_LEAST_NAME_WIDTH, justify="left"),
            *(TextColumn(header=header, cells=[row[place] for row in rows]) for place, header in enumerate(headers)),
        ],
        console,
    )
    table.print_header("bold")
    for number, style in enumerate(styles):
        table.print_row(number, style)
