"""Draws a comparison: a grid of worst tensors as a heat map, and one metric of two runs over their steps.

A cell's colour says how far from its bound the tensor is, its text how far from the baseline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mock_scheduler.comparison.walk.metrics import MetricLog, differ
from mock_scheduler.display.pages import (
    axis_title,
    end_of_name,
    finite_or_none,
    plain_layout,
    soft_font,
    thin_out,
)
from mock_scheduler.report.comparison.error_path import Grid, PathPoint
from mock_scheduler.support.digests import JSON
from mock_scheduler.verdict.wording.tensors import (
    bound_ratio,
    describe_details,
    format_bound,
    format_relative,
    format_short_size,
)

_MAX_MARKED = 20
_MAX_TICKS = 28
_MAX_CELL_TEXTS = 260
_MAX_TEXT_COLUMNS = 18
_MAX_GAPS = 60
_LEAST_DECADE, _MOST_DECADE = -6.0, 4.0
_EQUAL = _LEAST_DECADE - 1.0
_SPAN = _MOST_DECADE - _EQUAL
_COLOUR_BAR: JSON = {
    "thickness": 10,
    "outlinewidth": 0,
    "len": 1.0,
    "tickvals": [_EQUAL + 0.3, -6, -3, 0, 3],
    "ticktext": ["equal", "1e-6", "1e-3", "bound", "1000×"],
    "tickfont": soft_font(10),
}
#: Equal bits, blue within the bound, and from yellow to dark red beyond it.
_COLOUR_SCALE: JSON = [
    [0.0, "theme:equal-cell"],
    [0.6 / _SPAN, "theme:equal-cell"],
    [0.6 / _SPAN, "theme:low"],
    [-_EQUAL / _SPAN, "theme:tolerance"],
    [-_EQUAL / _SPAN, "theme:mid"],
    [(2 - _EQUAL) / _SPAN, "theme:high"],
    [1.0, "theme:top"],
]


def grid_figure(grid: Grid, element: str, *, x_title: str) -> JSON:
    """The heat map with texts in its cells where they have room."""
    layout: dict[str, JSON] = {
        **plain_layout(height=86 + 22 * max(len(grid.rows), 3)),
        "margin": {"l": 10, "r": 8, "t": 8, "b": 44},
        "xaxis": {
            "type": "category",
            "title": axis_title(x_title),
            "tickfont": soft_font(11),
            "showgrid": False,
            "nticks": _MAX_TICKS,
        },
        "yaxis": {
            "type": "category",
            "autorange": "reversed",
            "automargin": True,
            "tickfont": {"size": 11, "color": "theme:ink"},
            "showgrid": False,
        },
    }
    return {"id": element, "data": [_heat(grid)], "layout": layout}


def _heat(grid: Grid) -> JSON:
    has_texts = len(grid.rows) * len(grid.columns) <= _MAX_CELL_TEXTS and len(grid.columns) <= _MAX_TEXT_COLUMNS
    texts: dict[str, JSON] = {"texttemplate": "%{text}", "textfont": {"size": 10}} if has_texts else {}
    return {
        "type": "heatmap",
        "x": list(grid.columns),
        "y": [end_of_name(row, 34) for row in grid.rows],
        "z": [[None if cell is None else _shade(cell) for cell in row] for row in grid.cells],
        "text": [["" if cell is None else _cell_text(cell) for cell in row] for row in grid.cells],
        "hovertext": [["" if cell is None else describe_point(cell) for cell in row] for row in grid.cells],
        "hoverinfo": "text",
        "hoverongaps": False,
        "zmin": _EQUAL,
        "zmax": _MOST_DECADE,
        "xgap": 1 if len(grid.columns) <= _MAX_GAPS else 0,
        "ygap": 1,
        "colorscale": _COLOUR_SCALE,
        "colorbar": _COLOUR_BAR,
        **texts,
    }


def _shade(point: PathPoint) -> float:
    ratio = bound_ratio(point.difference)
    if point.tier == "identical" or ratio == 0:
        return _EQUAL
    if not math.isfinite(ratio):
        return _MOST_DECADE
    return min(max(math.log10(ratio), _LEAST_DECADE), _MOST_DECADE)


def _cell_text(point: PathPoint) -> str:
    if point.difference is None:
        return "–"
    return "=" if point.difference.bit_equal else format_short_size(point.difference.relative)


def describe_point(point: PathPoint) -> str:
    """Describe a tensor with all its figures, in lines."""
    lines = [point.key.name, point.key.describe()]
    if point.num_tensors > 1:
        lines.append(f"the worst of {point.num_tensors:,} tensors")
    difference = point.difference
    if difference is None:
        return "\n".join([*lines, *_folded(point.message)])
    estimated = " (estimated)" if difference.low is not None else ""
    lines.append(f"{point.tier}: relative{estimated} {format_relative(difference)}, bound {format_bound(difference)}")
    figures = difference.figures
    if figures is not None:
        ulp = "" if figures.max_ulp is None else f", {figures.max_ulp:,} ULP"
        lines.append(f"max |a-b| {figures.max_abs:.3e}{ulp}; slope {figures.slope:.8g}, cosine {figures.cosine:.8f}")
        lines.append(f"{figures.num_different:,} of {figures.num_elements:,} elements differ")
    for label, text in describe_details(difference):
        lines += _folded(f"{label}: {text}")
    return "\n".join(lines)


def _folded(text: str, width: int = 96) -> list[str]:
    return [text[start : start + width] for start in range(0, len(text), width)]


def metric_figure(
    name: str, logs: tuple[MetricLog, MetricLog], labels: tuple[str, str], element: str, *, floor: float
) -> JSON:
    """Returns both runs' values over steps, and |a - b| / max(|a|, |b|, ``floor``) under them on a log axis."""
    steps = thin_out(
        sorted(step for step in logs[0].keys() | logs[1].keys() if any(name in log.get(step, {}) for log in logs))
    )
    relative = [_relative(logs, step, name, floor) for step in steps]
    data = [_curve(name, logs[side], labels[side], steps, is_candidate=bool(side)) for side in (0, 1)]
    data.append(_bars(steps, relative))
    layout: dict[str, JSON] = {
        **plain_layout(height=270),
        "margin": {"l": 64, "r": 10, "t": 34, "b": 34},
        "title": {"text": name, "font": {"size": 13, "color": "theme:ink"}, "x": 0.01, "y": 0.97},
        "legend": {"orientation": "h", "x": 1, "xanchor": "right", "y": 1.17, "font": soft_font(11)},
        "xaxis": _step_axis(steps),
        "yaxis": {**_small_axis(), "domain": [0.42, 1.0]},
        "yaxis2": _difference_axis(relative),
    }
    layout["annotations"] = [
        {
            "xref": "paper",
            "yref": "paper",
            "x": 0,
            "y": 0.27,
            "yanchor": "bottom",
            "text": "relative difference",
            "showarrow": False,
            "font": soft_font(10),
        }
    ]
    return {"id": element, "data": data, "layout": layout}


def _curve(name: str, log: MetricLog, label: str, steps: Sequence[int], *, is_candidate: bool) -> JSON:
    """The candidate is thin and dotted, so that the baseline shows beneath it where both are the same."""
    colour = "theme:candidate" if is_candidate else "theme:base"
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(steps) <= _MAX_MARKED else "lines",
        "x": list(steps),
        "y": [finite_or_none(log.get(step, {}).get(name, math.nan)) for step in steps],
        "name": label,
        "line": {"color": colour, "dash": "dot" if is_candidate else "solid", "width": 2 if is_candidate else 3},
        "marker": {"size": 5, "color": colour},
    }


def _bars(steps: Sequence[int], relative: Sequence[float | None]) -> JSON:
    return {
        "type": "bar",
        "x": list(steps),
        "y": [value or None for value in relative],
        "name": "relative difference",
        "yaxis": "y2",
        "marker": {"color": "theme:tolerance"},
        "showlegend": False,
    }


def _difference_axis(relative: Sequence[float | None]) -> JSON:
    """Returns whole decades around the differences, three labels at most."""
    axis = {**_small_axis(), "domain": [0.0, 0.26]}
    sizes = [value for value in relative if value]
    if not sizes:
        return {**axis, "range": [0, 1], "tickvals": [0], "ticktext": ["equal"]}
    low, high = math.floor(math.log10(min(sizes))), math.ceil(math.log10(max(sizes)))
    low -= low == high
    decades = range(low, high + 1)
    decades = decades[:: max(-(-(len(decades) - 1) // 2), 1)]
    texts: list[JSON] = [f"1e{decade:d}" for decade in decades]
    ticks: list[JSON] = [10.0**decade for decade in decades]
    return {**axis, "type": "log", "range": [low, high + 0.1], "tickvals": ticks, "ticktext": texts}


def _small_axis() -> dict[str, JSON]:
    return {"gridcolor": "theme:line", "zeroline": False, "tickfont": soft_font(10)}


def _step_axis(steps: Sequence[int]) -> dict[str, JSON]:
    """Whole steps only: plotly labels halves where there are few."""
    ticks: dict[str, JSON] = {"tickvals": list(steps)} if len(steps) <= _MAX_MARKED else {"nticks": 10}
    return {**_small_axis(), "anchor": "y2", **ticks}


def _relative(logs: tuple[MetricLog, MetricLog], step: int, name: str, floor: float) -> float | None:
    values = [log.get(step, {}).get(name) for log in logs]
    if values[0] is None or values[1] is None:
        return None
    return finite_or_none(differ(values[0], values[1], floor=floor)[1])
