"""Renders what a notebook shows of a verdict, a recording or a trace: a small table without a script."""

from __future__ import annotations

from collections.abc import Sequence

from mock_scheduler.display.pages import render_fragment

_PACKAGE = "mock_scheduler.api"


def render_summary(
    title: str,
    rows: Sequence[tuple[str, str]],
    *,
    tone: str = "",
    columns: Sequence[str] = (),
    table: Sequence[Sequence[str]] = (),
) -> str:
    """Render labels and texts, and a table beneath them, as HTML; every text is escaped.

    Args:
        tone: ``good``, ``warn`` or ``bad``, which colours the title; empty for none.
        columns: Titles of the table's columns.
        table: Its rows.
    """
    return render_fragment(_PACKAGE, "summary.html", title=title, rows=rows, tone=tone, columns=columns, table=table)
