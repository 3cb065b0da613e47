"""One metric of two runs over their steps as a figure, with its relative difference under it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from mock_scheduler.compare.walk.metrics import MetricLog, differ
from mock_scheduler.report.comparison.page_figures import plain_layout
from mock_scheduler.support.digests import JSON

#: More steps than this are thinned out.
MAX_STEPS = 2000
_MAX_MARKED = 20


def metric_figure(
    name: str, logs: tuple[MetricLog, MetricLog], labels: tuple[str, str], element: str, *, floor: float
) -> JSON:
    """Both runs' values over steps, and |a - b| / max(|a|, |b|, ``floor``) under them on a log axis."""
    steps = _thinned(
        sorted(step for step in logs[0].keys() | logs[1].keys() if any(name in log.get(step, {}) for log in logs))
    )
    relative = [_relative(logs, step, name, floor) for step in steps]
    data = [_curve(name, logs[side], labels[side], steps, is_candidate=bool(side)) for side in (0, 1)]
    data.append(_bars(steps, relative))
    soft: JSON = {"size": 11, "color": "theme:soft"}
    layout: dict[str, JSON] = {
        **plain_layout(height=270),
        "margin": {"l": 64, "r": 10, "t": 34, "b": 34},
        "title": {"text": escape(name), "font": {"size": 13, "color": "theme:ink"}, "x": 0.01, "y": 0.97},
        "legend": {"orientation": "h", "x": 1, "xanchor": "right", "y": 1.17, "font": soft},
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
            "font": {"size": 10, "color": "theme:soft"},
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
        "y": [_finite(log.get(step, {}).get(name, math.nan)) for step in steps],
        "name": escape(label),
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
    """Whole decades around the differences, of which three at most are labelled."""
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
    return {"gridcolor": "theme:line", "zeroline": False, "tickfont": {"size": 10, "color": "theme:soft"}}


def _step_axis(steps: Sequence[int]) -> dict[str, JSON]:
    """Whole steps only, which plotly does not keep to by itself where there are few."""
    ticks: dict[str, JSON] = {"tickvals": list(steps)} if len(steps) <= _MAX_MARKED else {"nticks": 10}
    return {**_small_axis(), "anchor": "y2", **ticks}


def _thinned(steps: Sequence[int]) -> Sequence[int]:
    return steps[:: max(-(-len(steps) // MAX_STEPS), 1)]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _relative(logs: tuple[MetricLog, MetricLog], step: int, name: str, floor: float) -> float | None:
    values = [log.get(step, {}).get(name) for log in logs]
    if values[0] is None or values[1] is None:
        return None
    return _finite(differ(values[0], values[1], floor=floor)[1])
