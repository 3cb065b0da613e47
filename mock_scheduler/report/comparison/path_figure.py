"""Draws the error's path: every tensor of an update in the order of computation, on a log axis."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mock_scheduler.display.pages import axis_title, end_of_name, plain_layout, soft_font
from mock_scheduler.report.comparison.error_path import ErrorPath, PathPoint, PointTier
from mock_scheduler.report.comparison.figures import describe_point
from mock_scheduler.support.digests import JSON
from mock_scheduler.trace.entries import PHASES, Phase

_PHASE_NAMES = {
    Phase.START: "start",
    Phase.DATA: "data",
    Phase.RECOMPUTATION: "recomputation",
    Phase.FORWARD: "forward",
    Phase.SCORES: "scores",
    Phase.LOSS: "loss",
    Phase.BACKWARD: "backward",
    Phase.GRADIENT: "gradients",
    Phase.NORM: "norm",
    Phase.UPDATE: "update",
}
_TIER_NAMES: tuple[tuple[PointTier, str, str], ...] = (
    ("identical", "identical", "circle"),
    ("ulp", "within a few ULP", "circle"),
    ("tolerance", "within its bound", "circle"),
    ("undecided", "undecided", "diamond"),
    ("diverged", "beyond its bound", "diamond"),
    ("missing", "no number", "x"),
)
_MAX_TICKS = 28
_LEAST_SHARE = 0.05  # of the axis, for a phase whose name is level


def path_figure(path: ErrorPath, element: str) -> JSON:
    """Returns the relative difference of every tensor in the order of computation, with bounds and error bars."""
    floor, top = _limits(path.points)
    data: list[JSON] = [_bounds(path.points)]
    for tier, label, symbol in _TIER_NAMES:
        chosen = [(index, point) for index, point in enumerate(path.points) if point.tier == tier]
        if chosen:
            count = sum(point.tier == tier for point in path.all_points)
            data.append(_tier_markers(chosen, tier, f"{label} ({count:,})", symbol, floor=floor, top=top))
    shapes, annotations = _phase_bands(path.points)
    layout: dict[str, JSON] = {
        **plain_layout(height=430),
        "margin": {"l": 66, "r": 14, "t": 74, "b": 54},
        "legend": {"orientation": "h", "x": 0, "y": 1.2, "yanchor": "top", "font": {"color": "theme:ink"}},
        "xaxis": _layer_axis(path.points),
        "yaxis": _size_axis(floor, top),
        "shapes": shapes,
        "annotations": annotations + _first_mark(path.points, floor=floor, top=top),
    }
    return {"id": element, "data": data, "layout": layout}


def _layer_axis(points: Sequence[PathPoint]) -> JSON:
    ticks = _layer_ticks(points)
    return {
        "range": [-1, len(points)],
        "tickvals": [position for position, _ in ticks],
        "ticktext": [text for _, text in ticks],
        "title": axis_title("layer, in the order of computation"),
        "tickfont": soft_font(11),
        "showgrid": False,
        "zeroline": False,
    }


def _size_axis(floor: float, top: float) -> JSON:
    """Returns a log axis with a place below all numbers for equal bits, and one above for tensors without a number."""
    low, high = math.log10(floor), math.log10(top)
    decades = _decades(low, high)
    return {
        "type": "log",
        "range": [low - 0.4, high + 1.0],
        "tickvals": [floor, *(10.0**decade for decade in decades), top],
        "ticktext": ["identical", *(f"1e{decade:d}" for decade in decades), "no number"],
        "title": axis_title("relative difference"),
        "tickfont": soft_font(11),
        "gridcolor": "theme:line",
        "zeroline": False,
    }


def _limits(points: Sequence[PathPoint]) -> tuple[float, float]:
    """Place equal bits and tensors without a number a decade and more outside of all numbers."""
    values = [point.difference.relative for point in points if point.difference is not None]
    values += [bound for bound in map(_bound_of, points) if bound is not None]
    positive = [value for value in values if value > 0 and math.isfinite(value)]
    low, high = (min(positive), max(positive)) if positive else (1e-8, 1e-3)
    return 10.0 ** (math.floor(math.log10(low)) - 1), 10.0 ** (math.ceil(math.log10(high)) + 1)


def _decades(low: float, high: float) -> list[int]:
    """Every decade between the outer two, or every second or third where there are many."""
    inner = range(round(low) + 1, round(high))
    return list(inner[:: max(-(-len(inner) // 9), 1)])


def _bound_of(point: PathPoint) -> float | None:
    difference = point.difference
    if difference is None or not math.isfinite(difference.tolerance) or difference.tolerance <= 0:
        return None
    return difference.tolerance


def _bounds(points: Sequence[PathPoint]) -> JSON:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": list(range(len(points))),
        "y": [_bound_of(point) for point in points],
        "line": {"color": "theme:soft", "width": 1, "dash": "dash", "shape": "hvh"},
        "name": "bound",
        "hoverinfo": "skip",
    }


def _tier_markers(
    chosen: Sequence[tuple[int, PathPoint]], tier: PointTier, label: str, symbol: str, *, floor: float, top: float
) -> JSON:
    heights = [_height(point, floor=floor, top=top) for _, point in chosen]
    trace: dict[str, JSON] = {
        "type": "scatter",
        "mode": "markers",
        "x": [index for index, _ in chosen],
        "y": list(heights),
        "name": label,
        "marker": {
            "color": f"theme:{tier}",
            "symbol": f"{symbol}-open" if tier == "identical" else symbol,
            "size": [14 if point.is_first else 9 if tier in ("diverged", "missing") else 7 for _, point in chosen],
            "line": {"width": 1},
        },
        "hovertext": [describe_point(point) for _, point in chosen],
        "hoverinfo": "text",
    }
    bars = [_error_bar(point, height, floor) for (_, point), height in zip(chosen, heights, strict=True)]
    if any(up or down for up, down in bars):
        trace["error_y"] = {
            "type": "data",
            "symmetric": False,
            "array": [up for up, _ in bars],
            "arrayminus": [down for _, down in bars],
            "thickness": 1,
            "width": 2,
        }
    return trace


def _error_bar(point: PathPoint, height: float, floor: float) -> tuple[float, float]:
    """How far a sketch's error bar reaches up and down."""
    difference = point.difference
    if difference is None or difference.low is None or difference.high is None or not math.isfinite(difference.high):
        return 0.0, 0.0
    return max(difference.high - height, 0.0), max(height - max(difference.low, floor), 0.0)


def _height(point: PathPoint, *, floor: float, top: float) -> float:
    if point.difference is None or not math.isfinite(point.difference.relative):
        return top
    return point.difference.relative or floor


def _phase_bands(points: Sequence[PathPoint]) -> tuple[list[JSON], list[JSON]]:
    """Shade every second phase, and write each one's name at the top."""
    phases = [PHASES[point.key.kind] for point in points]
    starts = [index for index, phase in enumerate(phases) if index == 0 or phase is not phases[index - 1]]
    shapes: list[JSON] = []
    annotations: list[JSON] = []
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], len(points)], strict=True)):
        if number % 2 == 0:
            shapes.append(_band(start, end))
        is_wide = (end - start) / len(points) > _LEAST_SHARE
        annotations.append(_phase_name(_PHASE_NAMES[phases[start]], (start + end - 1) / 2, is_wide=is_wide))
    return shapes, annotations


def _band(start: int, end: int) -> JSON:
    return {
        "type": "rect",
        "xref": "x",
        "yref": "paper",
        "x0": start - 0.5,
        "x1": end - 0.5,
        "y0": 0,
        "y1": 1,
        "fillcolor": "theme:band",
        "line": {"width": 0},
        "layer": "below",
    }


def _phase_name(text: str, middle: float, *, is_wide: bool) -> JSON:
    return {
        "xref": "x",
        "yref": "paper",
        "x": middle,
        "y": 1.0,
        "yanchor": "bottom",
        "text": text,
        "textangle": 0 if is_wide else -35,
        "showarrow": False,
        "font": soft_font(11),
    }


def _first_mark(points: Sequence[PathPoint], *, floor: float, top: float) -> list[JSON]:
    index = next((index for index, point in enumerate(points) if point.is_first), None)
    if index is None:
        return []
    height = _height(points[index], floor=floor, top=top)
    is_right = index > len(points) / 2
    return [
        {
            "xref": "x",
            "yref": "y",
            "x": index,
            "y": math.log10(height),
            "text": f"first divergence\n{end_of_name(points[index].key.name, 48)}",
            "showarrow": True,
            "arrowcolor": "theme:diverged",
            "arrowwidth": 1.5,
            "axref": "x",
            "ayref": "y",
            "ax": index + (-1 if is_right else 1) * 0.03 * len(points),
            "ay": math.log10(top) + 0.6,
            "xanchor": "right" if is_right else "left",
            "align": "left",
            "font": {"size": 12, "color": "theme:diverged"},
            "bgcolor": "theme:card",
            "borderpad": 3,
        }
    ]


def _layer_ticks(points: Sequence[PathPoint]) -> list[tuple[int, str]]:
    """Where each layer's tensors begin, with its number; fewer of them where there are many."""
    starts: list[tuple[int, str]] = []
    before: object = None
    for index, point in enumerate(points):
        here = (PHASES[point.key.kind], point.place.layer)
        if here != before and point.place.layer is not None:
            starts.append((index, str(point.place.layer)))
        before = here
    return starts[:: max(-(-len(starts) // _MAX_TICKS), 1)]
