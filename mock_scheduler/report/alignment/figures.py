"""Figures of an alignment's page as HTML and SVG that need no script: heat maps, metric curves, bars of seconds.

Contract: every text is escaped. Colour never stands alone: a cell has its number, a curve its dashes and its legend,
and each figure is described in words for who does not see it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from mock_scheduler.report.alignment.curves import Curve
from mock_scheduler.report.alignment.heat import HeatCell, HeatTable
from mock_scheduler.report.comparison.page_figures import end_of_name
from mock_scheduler.report.comparison.view import format_size
from mock_scheduler.support.text import count_of

_WIDTH, _HEIGHT = 400, 176
_LEFT, _RIGHT, _INSET = 56, 392, 16
_TOP, _MIDDLE, _LOW, _BOTTOM = 26, 96, 112, 152
_MAX_MARKS = 20
_DENSE = 24  # columns, from which on cells have no room for texts
_LEGEND = (
    ("h-equal", "equal bits (=)"),
    ("h-in1", "below 0.1 % of its bound"),
    ("h-in2", "up to 1 %"),
    ("h-in3", "up to 10 %"),
    ("h-in4", "up to its bound"),
    ("h-out1", "beyond its bound, up to 10×"),
    ("h-out2", "up to 1,000×"),
    ("h-out3", "more"),
    ("h-unjudged", "not judged (~)"),
    ("h-none", "no number (?)"),
)


def heat_legend() -> str:
    """What the shades of the heat maps mean."""
    items = "".join(f'<span><i class="{shade}"></i>{escape(text)}</span>' for shade, text in _LEGEND)
    return f'<div class="legend">{items}<span>outlined: first divergence</span></div>'


def heat_table(table: HeatTable) -> str:
    """One heat map as a table with headers."""
    is_dense = len(table.columns) > _DENSE
    every = max(-(-len(table.columns) // 30), 1) if is_dense else 1
    head = "".join(
        f'<th scope="col">{escape(column) if number % every == 0 else ""}</th>'
        for number, column in enumerate(table.columns)
    )
    rows = "".join(
        f'<tr><th scope="row" title="{escape(name)}">{escape(end_of_name(name, 34))}</th>'
        + "".join("<td></td>" if cell is None else _heat_cell(cell, is_dense=is_dense) for cell in cells)
        + "</tr>"
        for name, cells in zip(table.rows, table.cells, strict=True)
    )
    note = f" ({escape(table.note)})" if table.note else ""
    classes = "heat dense" if is_dense else "heat"
    return (
        f'<div><h5>{escape(table.title)}{note}</h5><div class="scroll"><table class="{classes}"><thead><tr>'
        f'<th scope="col">{escape(table.axis)}</th>{head}</tr></thead><tbody>{rows}</tbody></table></div></div>'
    )


def _heat_cell(cell: HeatCell, *, is_dense: bool) -> str:
    """Only what is not equal has words of its own: they are most of a page's size."""
    first = " h-first" if cell.is_first else ""
    words = "" if cell.shade == "equal" else f' title="{escape(cell.words)}"'
    is_beyond = cell.shade.startswith("out") or cell.shade == "none"
    text = ("!" if is_beyond else "") if is_dense else cell.text
    return f'<td class="h-{cell.shade}{first}"{words}>{escape(text)}</td>'


def curve_figure(curve: Curve) -> str:
    """Both runs' values over steps, and their difference under them on a log axis, with its bounds."""
    if not curve.steps:
        return ""
    values = [value for value in (*curve.baseline, *curve.candidate) if value is not None]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    parts = [
        f'<text class="name" x="4" y="13">{escape(end_of_name(curve.name, 30))}</text>',
        f'<text class="fa" x="{_RIGHT}" y="12" text-anchor="end">━ baseline</text>',
        f'<text class="fb" x="{_RIGHT - 62}" y="12" text-anchor="end">┅ candidate</text>',
        *_value_axis(low, high),
        _line("a", curve.steps, curve.baseline, low, high),
        _line("b", curve.steps, curve.candidate, low, high),
        *_difference_bars(curve),
        *_step_axis(curve.steps),
    ]
    ratio = f", {curve.ratio}" if curve.ratio else ""
    distance = "equal at every step" if curve.bit_equal else f"largest |a-b| {format_size(curve.max_difference)}{ratio}"
    title = f"{curve.name} of baseline and candidate over {count_of(len(curve.steps), 'step')}: {distance}"
    return (
        f'<svg class="curve" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )


def _x(steps: Sequence[int], index: int) -> float:
    if len(steps) == 1:
        return (_LEFT + _RIGHT) / 2
    left, right = _LEFT + _INSET, _RIGHT - _INSET
    return left + (right - left) * (steps[index] - steps[0]) / (steps[-1] - steps[0])


def _y(value: float, low: float, high: float) -> float:
    return _MIDDLE - (_MIDDLE - _TOP) * ((value - low) / (high - low) if high > low else 0.5)


def _value_axis(low: float, high: float) -> list[str]:
    """Lines at the lowest and the highest value, with as many digits as tell them apart."""
    ends = [low, high] if high > low else [low]
    told_apart = (digits for digits in range(4, 9) if f"{low:.{digits}g}" != f"{high:.{digits}g}")
    digits = next(told_apart, 9) if high > low else 4
    places = [(value, _y(value, low, high)) for value in ends]
    return [
        f'<line class="axis" x1="{_LEFT}" x2="{_RIGHT}" y1="{place:.1f}" y2="{place:.1f}"/>'
        f'<text x="{_LEFT - 4}" y="{place + 3.5:.1f}" text-anchor="end">{value:.{digits}g}</text>'
        for value, place in places
    ]


def _line(shade: str, steps: Sequence[int], values: Sequence[float | None], low: float, high: float) -> str:
    """A line through all values, broken where there is none; single values are marks."""
    runs: list[list[str]] = [[]]
    for index, value in enumerate(values):
        if value is None:
            runs.append([])
        else:
            runs[-1].append(f"{_x(steps, index):.1f},{_y(value, low, high):.1f}")
    lines = "".join(f'<polyline class="{shade}" points="{" ".join(run)}"/>' for run in runs if len(run) > 1)
    radius = 3.2 if shade == "a" else 1.8
    marks = [point for run in runs for point in run] if len(steps) <= _MAX_MARKS else []
    return lines + "".join(
        f'<circle class="f{shade}" cx="{point.split(",")[0]}" cy="{point.split(",")[1]}" r="{radius}"/>'
        for point in marks
    )


def _difference_bars(curve: Curve) -> list[str]:
    """Bars of |a - b| from the bottom of a log axis of whole decades, and a dash for the bound of each."""
    sizes = [value for value in curve.differences if value]
    bounds = [value for value in curve.bounds if value]
    label = f'<text x="{_LEFT}" y="{_LOW - 3}">|a-b|{", bound dashed" if bounds else ""}</text>'
    base = f'<line class="axis" x1="{_LEFT}" x2="{_RIGHT}" y1="{_BOTTOM}" y2="{_BOTTOM}"/>'
    if not sizes:
        return [label, base, f'<text x="{_LEFT - 4}" y="{_BOTTOM}" text-anchor="end">equal</text>']
    low, high = math.floor(math.log10(min(sizes + bounds))), math.ceil(math.log10(max(sizes + bounds)))
    low -= low == high

    def height(value: float) -> float:
        return _BOTTOM - (_BOTTOM - _LOW) * (math.log10(value) - low) / (high - low)

    width = min(max((_RIGHT - _LEFT) / len(curve.steps) * 0.6, 1.0), 14.0)
    parts = [label, base]
    for index, (value, bound) in enumerate(zip(curve.differences, curve.bounds, strict=True)):
        middle = _x(curve.steps, index)
        if value:
            shade = "x" if bound is not None and value > bound else "d"
            parts.append(
                f'<rect class="{shade}" x="{middle - width / 2:.1f}" y="{height(value) - 1:.1f}" width="{width:.1f}" '
                f'height="{_BOTTOM - height(value) + 1:.1f}"/>'
            )
        if bound:
            parts.append(
                f'<line class="bound" x1="{middle - width:.1f}" x2="{middle + width:.1f}" y1="{height(bound):.1f}" '
                f'y2="{height(bound):.1f}"/>'
            )
    ticks = ((low, float(_BOTTOM)), (high, _LOW + 6.0))
    return parts + [f'<text x="{_LEFT - 4}" y="{place}" text-anchor="end">1e{decade}</text>' for decade, place in ticks]


def _step_axis(steps: Sequence[int]) -> list[str]:
    """The first and the last step."""
    return [
        f'<text x="{_x(steps, index):.1f}" y="{_HEIGHT - 10}" text-anchor="middle">step {steps[index]}</text>'
        for index in sorted({0, len(steps) - 1})
    ]


def bar_table(rows: Sequence[tuple[str, float]], *, total: tuple[str, float] | None, caption: str) -> str:
    """Seconds with bars, in shares of the largest."""
    most = max((seconds for _, seconds in rows), default=0.0) or 1.0
    whole = total[1] if total is not None and total[1] > 0 else 0.0
    body = "".join(
        f'<tr><th scope="row">{escape(label)}</th><td class="n">{seconds:,.1f}</td>'
        f'<td class="n">{f"{seconds / whole:.0%}" if whole else ""}</td>'
        f'<td style="width:60%"><span class="bar" style="width:{100 * seconds / most:.1f}%"></span></td></tr>'
        for label, seconds in rows
    )
    if total is not None:
        label, seconds = total
        body += (
            f'<tr><th scope="row"><b>{escape(label)}</b></th><td class="n"><b>{seconds:,.1f}</b></td>'
            "<td></td><td></td></tr>"
        )
    return (
        f'<table><caption class="note" style="text-align:left">{escape(caption)}</caption><thead><tr>'
        '<th scope="col">what</th><th scope="col" class="n">seconds</th><th scope="col" class="n">share</th>'
        f'<th scope="col"><span class="dim">share of the largest</span></th></tr></thead><tbody>{body}</tbody></table>'
    )
