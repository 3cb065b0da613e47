"""Tables and lists of a comparison's page, as HTML; every text that goes in is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from mock_scheduler.compare.tensors import TensorComparison, TensorDifference
from mock_scheduler.compare.thresholds import NUM_ULPS
from mock_scheduler.compare.walk.metrics import MetricDifference
from mock_scheduler.report.comparison.view import (
    TierCounts,
    describe_details,
    format_bound,
    format_bound_share,
    format_relative,
    format_size,
    format_slope,
    tensors_to_show,
)

MAX_TENSORS = 50
MAX_LINES = 50
MAX_METRICS = 100

#: Where what a page does not show is.
MORE = "as many as 1,000 with --json"

_NUM_NEAREST = 10
_NUM_OPEN = 5  # rows whose worst element is shown without a click


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Labels and texts side by side."""
    items = "".join(f"<dt>{escape(label)}</dt><dd>{escape(text)}</dd>" for label, text in rows)
    return f'<dl class="facts">{items}</dl>'


def bullets(lines: Sequence[str]) -> str:
    """The first ``MAX_LINES`` as a list; empty where there are none."""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines[:MAX_LINES])
    return f"<ul>{items}</ul>" if items else ""


def more_line(count: int) -> str:
    """How many more lines there are than a list shows; empty where it shows all."""
    rest = count - MAX_LINES
    return f'<p class="note">and {rest:,} more ({MORE})</p>' if rest > 0 else ""


def tiers_html(counts: Sequence[TierCounts]) -> str:
    """How many tensors of each kind are how far apart, with a bar; only the columns that have a number."""
    columns = [
        ("identical", "identical", [item.identical for item in counts]),
        (f"within {NUM_ULPS} ULP", "ulp", [item.ulp for item in counts]),
        ("within bound", "tolerance", [item.tolerance for item in counts]),
        ("undecided", "undecided", [item.undecided for item in counts]),
        ("diverged", "diverged", [item.diverged for item in counts]),
        ("missing", "missing", [item.missing for item in counts]),
        ("unobserved", "unobserved", [item.unobserved for item in counts]),
        ("of these not judged", "dim", [item.unjudged for item in counts]),
    ]
    shown = [column for column in columns if any(column[2])]
    head = "".join(f'<th class="n">{escape(header)}</th>' for header, _, _ in shown)
    rows = "".join(
        f"<tr><td>{escape(item.kind.replace('_', ' '))}</td><td>{_stack(item)}</td>"
        + "".join(_count_cell(values[row], tone) for _, tone, values in shown)
        + "</tr>"
        for row, item in enumerate(counts)
    )
    note = (
        "Tensors of all steps and updates. Missing: on one side only, or nothing that can be subtracted, "
        "as of another shape or NaN on one side."
    )
    return (
        f'<section><h2>How far apart, by kind</h2><p class="note">{note}</p><div class="scroll"><table>'
        f"<thead><tr><th>kind</th><th></th>{head}</tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def _count_cell(value: int, tone: str) -> str:
    return f'<td class="n t-{tone}"><b>{value:,}</b></td>' if value else '<td class="n dim">·</td>'


def _stack(item: TierCounts) -> str:
    parts = (
        ("identical", item.identical),
        ("ulp", item.ulp),
        ("tolerance", item.tolerance),
        ("undecided", item.undecided),
        ("diverged", item.diverged),
        ("missing", item.missing),
    )
    total = sum(count for _, count in parts) or 1
    bars = "".join(
        f'<i class="t-{tier}" style="width:{100 * count / total:.2f}%" title="{tier}: {count:,}"></i>'
        for tier, count in parts
        if count
    )
    return f'<div class="stack">{bars}</div>'


def tensors_html(tensors: TensorComparison) -> str:
    """The tensors beyond their bound as computed, or else the nearest to it; empty where all are identical."""
    heading, chosen = tensors_to_show(tensors)
    if not chosen:
        return ""
    is_nearest = not tensors.exceeding and not tensors.undecided
    limit = _NUM_NEAREST if is_nearest else MAX_TENSORS
    is_sketch = tensors.level == "sketch"
    headers = ["relative (estimated)" if is_sketch else "relative", "bound"]
    headers += [] if is_sketch else ["max |a-b|", "ULP", "slope", "cosine"]
    head = "".join(f'<th class="n">{header}</th>' for header in headers)
    rows = "".join(
        _tensor_row(item, is_sketch=is_sketch, is_open=number < _NUM_OPEN) for number, item in enumerate(chosen[:limit])
    )
    rest = 0 if is_nearest else len(chosen) - limit
    more = f'<p class="note">and {rest:,} more ({MORE})</p>' if rest > 0 else ""
    return (
        f'<section class="long"><h2>{escape(heading)}</h2><div class="scroll"><table><thead><tr>'
        f"<th>step, update</th>"
        f"<th>kind</th><th>tensor</th>{head}</tr></thead><tbody>{rows}</tbody></table></div>{more}</section>"
    )


def _tensor_row(difference: TensorDifference, *, is_sketch: bool, is_open: bool) -> str:
    key = difference.key
    details = describe_details(difference)
    words = _words(details if is_open else [row for row in details if row[0] != "worst"])
    hidden = "" if is_open else _words([row for row in details if row[0] == "worst"])
    if hidden:
        words += f"<details><summary>worst element</summary>{hidden}</details>"
    is_within = not difference.exceeds and not difference.is_undecided
    tag = f'<br><span class="tag t-{difference.tier}">{difference.tier}</span>' if is_within else ""
    cells = [format_relative(difference), format_bound(difference)]
    cells += [] if is_sketch else _figure_cells(difference)
    numbers = "".join(f'<td class="n">{escape(cell)}</td>' for cell in cells)
    return (
        f"<tr><td>{key.step}, {key.update}</td><td>{escape(key.kind.replace('_', ' '))}{tag}</td>"
        f'<td class="name">{escape(key.name)}{words}</td>{numbers}</tr>'
    )


def _words(rows: Sequence[tuple[str, str]]) -> str:
    return "".join(f'<span class="words"><b>{escape(label)}</b> {escape(text)}</span>' for label, text in rows)


def _figure_cells(difference: TensorDifference) -> list[str]:
    figures = difference.figures
    if figures is None:
        return [format_size(difference.max_abs), "–", "–", "–"]
    ulp = "–" if figures.max_ulp is None else f"{figures.max_ulp:,}"
    return [format_size(figures.max_abs), ulp, format_slope(figures.slope), f"{figures.cosine:.7f}"]


def metrics_html(differences: Sequence[MetricDifference]) -> str:
    """Metrics that differ, with their largest differences; empty where none does."""
    if not differences:
        return ""
    rows = "".join(
        f'<tr><td class="name">{escape(item.name)}</td><td class="n">{format_size(item.max_abs)}</td>'
        f'<td class="n{" t-diverged" if item.first_exceeding_step is not None else ""}">'
        f"{format_size(item.max_relative)}</td>"
        f'<td class="n">{item.max_relative_step}</td><td class="n">{format_bound_share(item)}</td>'
        f'<td class="n">{item.first_different_step}</td>'
        f'<td class="n">{"–" if item.first_exceeding_step is None else item.first_exceeding_step}</td></tr>'
        for item in differences[:MAX_METRICS]
    )
    rest = len(differences) - MAX_METRICS
    more = f'<p class="note">and {rest:,} more that differ ({MORE})</p>' if rest > 0 else ""
    return (
        '<div class="scroll"><table><thead><tr><th>metric</th><th class="n">max |a-b|</th>'
        '<th class="n">max relative</th><th class="n">at step</th><th class="n">of its bound</th>'
        '<th class="n">first differs at step</th><th class="n">beyond its bound from step</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{more}"
    )
