"""A grid of worst tensors as a heat map: the colour says how far from its bound, the text how far from the baseline."""

from __future__ import annotations

import math
from html import escape

from mock_scheduler.report.comparison.error_path import Grid, PathPoint
from mock_scheduler.report.comparison.page_figures import describe_point, end_of_name, plain_layout
from mock_scheduler.report.comparison.view import format_size
from mock_scheduler.support.digests import JSON
from mock_scheduler.verdict.wording.numbers import bound_ratio

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
    "tickfont": {"size": 10, "color": "theme:soft"},
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
            "title": {"text": x_title, "font": {"size": 12, "color": "theme:soft"}},
            "tickfont": {"size": 11, "color": "theme:soft"},
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
        "y": [escape(end_of_name(row, 34)) for row in grid.rows],
        "z": [[None if cell is None else _shade(cell) for cell in row] for row in grid.cells],
        "text": [["" if cell is None else _cell_text(cell) for cell in row] for row in grid.cells],
        "customdata": [["" if cell is None else describe_point(cell) for cell in row] for row in grid.cells],
        "hovertemplate": "%{customdata}<extra></extra>",
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
    return "=" if point.difference.bit_equal else format_size(point.difference.relative).replace("e-0", "e-")
