"""Compared metrics as a table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from mock_scheduler.compare.walk.metrics import MetricDifference
from mock_scheduler.report.comparison.view import format_bound_share

_NUM_COLUMN_HEADERS = ("max |a-b|", "max relative", "at step", "first differs", "of bound")


def metrics_table(differences: Sequence[MetricDifference]) -> Table:
    """One row per metric: its largest differences, where they are, and how many times its bound; red beyond that."""
    table = Table(title_justify="left", box=None, padding=(0, 2))
    table.add_column("metric", overflow="fold")
    for header in _NUM_COLUMN_HEADERS:
        table.add_column(header, justify="right", no_wrap=True)
    for difference in differences:
        table.add_row(*metric_cells(difference), style=_style(difference))
    return table


def metric_cells(difference: MetricDifference) -> tuple[str, ...]:
    """The table's row in markup."""
    differs = not difference.bit_equal
    return (
        escape(difference.name),
        f"{difference.max_abs:.2e}" if differs else "0",
        f"{difference.max_relative:.2e}" if differs else "0",
        str(difference.max_relative_step) if differs else "-",
        str(difference.first_different_step) if differs else "never",
        format_bound_share(difference),
    )


def _style(difference: MetricDifference) -> str:
    if difference.first_exceeding_step is not None:
        return "red"
    return "dim" if difference.bit_equal else ""
