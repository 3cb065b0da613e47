"""Places metrics of two runs over their steps, with difference and bounds, for a template of SVG.

Contract: colour never stands alone: a curve has its dashes and its legend, and a title says all in words. Read again
from both runs' ``metrics.jsonl``; of more than ``MAX_STEPS`` steps some are left out, evenly. A value that is not
finite, or that a run has not logged, is ``None``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mock_scheduler.comparison.bounds.bounds import Bounds
from mock_scheduler.comparison.walk.metrics import (
    MetricComparison,
    MetricDifference,
    MetricLog,
    load_run_metrics,
)
from mock_scheduler.display.pages import end_of_name, finite_or_none
from mock_scheduler.errors import TraceError
from mock_scheduler.report.comparison.view import metrics_to_show
from mock_scheduler.support.text import count_of
from mock_scheduler.verdict.wording.tensors import describe_times, format_size

MAX_STEPS = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One metric by step. differences: |a - b|. bounds: of these; ``None`` where there is none.

    max_difference: the largest |a - b|. ratio: how much of its bound it is at most, in words; empty where it has none.
    first_exceeding_step: from which on it is beyond its bound; ``None`` where it never is.
    """

    name: str
    steps: tuple[int, ...]
    baseline: tuple[float | None, ...]
    candidate: tuple[float | None, ...]
    differences: tuple[float | None, ...]
    bounds: tuple[float | None, ...]
    bit_equal: bool
    max_difference: float
    ratio: str
    first_exceeding_step: int | None


def load_curves(
    baseline: Path, candidate: Path, metrics: MetricComparison, *, limit: int, bounds: Bounds
) -> tuple[Curve, ...]:
    """The first ``limit`` metrics that differ, as reports order them; where none does, one that is equal.

    ``baseline``, ``candidate``: output folders; empty where their logs are no longer there.
    """
    try:
        logs = load_run_metrics(baseline), load_run_metrics(candidate)
    except TraceError:
        return ()
    chosen = metrics_to_show(metrics) or tuple(item for item in metrics.differences if item.bit_equal)[:1]
    return tuple(_curve(item, logs, bounds) for item in chosen[:limit])


def _curve(metric: MetricDifference, logs: tuple[MetricLog, MetricLog], bounds: Bounds) -> Curve:
    logged = {step for log in logs for step, values in log.items() if metric.name in values}
    steps = thinned(sorted(logged & logs[0].keys() & logs[1].keys()))
    baseline, candidate = ([log[step].get(metric.name) for step in steps] for log in logs)
    differences: list[float | None] = []
    limits: list[float | None] = []
    for step, mine, other in zip(steps, baseline, candidate, strict=True):
        if mine is None or other is None or not math.isfinite(mine - other):
            differences.append(None)
            limits.append(None)
            continue
        differences.append(abs(mine - other))
        limits.append(finite_or_none(bounds.metric(step, metric.name).limit(mine, other)))
    return Curve(
        name=metric.name,
        steps=tuple(steps),
        baseline=tuple(map(finite_or_none, baseline)),
        candidate=tuple(map(finite_or_none, candidate)),
        differences=tuple(differences),
        bounds=tuple(limits),
        bit_equal=metric.bit_equal,
        max_difference=metric.max_abs,
        ratio="" if metric.bit_equal or math.isinf(metric.bound) else describe_times(metric.times_bound),
        first_exceeding_step=metric.first_exceeding_step,
    )


def thinned(steps: Sequence[int]) -> Sequence[int]:
    """Every n-th step, so that there are ``MAX_STEPS`` at most; the last one stays."""
    size = max(-(-len(steps) // MAX_STEPS), 1)
    kept = steps[::size]
    return kept if not steps or kept[-1] == steps[-1] else [*kept[:-1], steps[-1]]


_TOP, _MIDDLE = 26, 96  # of the values
_INSET = 16
_MAX_MARKS = 20
_RADII = {"a": 3.2, "b": 1.8}


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """The figure's frame in pixels; differences are drawn between ``low`` and ``bottom``."""

    width: int = 400
    height: int = 176
    left: int = 56
    right: int = 392
    low: int = 112
    bottom: int = 152


_BOX = Box()


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One run's values. lines: points of each stretch without a gap; marks: single points, where there are few."""

    shade: str
    radius: float
    lines: tuple[tuple[tuple[float, float], ...], ...]
    marks: tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A difference, or a bound of one: ``x`` is its middle, ``y`` its upper end."""

    x: float
    y: float
    width: float
    exceeds: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class CurveDrawing:
    """A figure of one metric. values, decades: places and labels on the axes; steps: those of the first and last."""

    title: str
    name: str
    box: Box
    values: tuple[tuple[float, str], ...]
    sides: tuple[Side, ...]
    bars: tuple[Bar, ...]
    bounds: tuple[Bar, ...]
    decades: tuple[tuple[float, str], ...]
    steps: tuple[tuple[float, int], ...]


def draw_curve(curve: Curve) -> CurveDrawing:
    """Returns both runs' values over steps, and their difference under them on a log axis, with its bounds.

    ``curve`` has at least one step.
    """
    known = [value for value in (*curve.baseline, *curve.candidate) if value is not None]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    ratio = f", {curve.ratio}" if curve.ratio else ""
    distance = "equal at every step" if curve.bit_equal else f"largest |a-b| {format_size(curve.max_difference)}{ratio}"
    bars, bounds, decades = _draw_differences(curve)
    return CurveDrawing(
        title=f"{curve.name} of baseline and candidate over {count_of(len(curve.steps), 'step')}: {distance}",
        name=end_of_name(curve.name, 30),
        box=_BOX,
        values=tuple(_label_values(low, high)),
        sides=(
            _draw_side("a", curve.steps, curve.baseline, low, high),
            _draw_side("b", curve.steps, curve.candidate, low, high),
        ),
        bars=bars,
        bounds=bounds,
        decades=decades,
        steps=tuple((_x(curve.steps, index), curve.steps[index]) for index in sorted({0, len(curve.steps) - 1})),
    )


def _x(steps: Sequence[int], index: int) -> float:
    if len(steps) == 1:
        return (_BOX.left + _BOX.right) / 2
    left, right = _BOX.left + _INSET, _BOX.right - _INSET
    return left + (right - left) * (steps[index] - steps[0]) / (steps[-1] - steps[0])


def _y(value: float, low: float, high: float) -> float:
    return _MIDDLE - (_MIDDLE - _TOP) * ((value - low) / (high - low) if high > low else 0.5)


def _label_values(low: float, high: float) -> list[tuple[float, str]]:
    """Returns the lowest and the highest value, with as many digits as tell them apart."""
    ends = [low, high] if high > low else [low]
    told_apart = (digits for digits in range(4, 9) if f"{low:.{digits}g}" != f"{high:.{digits}g}")
    digits = next(told_apart, 9) if high > low else 4
    return [(_y(value, low, high), f"{value:.{digits}g}") for value in ends]


def _draw_side(shade: str, steps: Sequence[int], values: Sequence[float | None], low: float, high: float) -> Side:
    """A line through all values, broken where there is none."""
    runs: list[list[tuple[float, float]]] = [[]]
    for index, value in enumerate(values):
        if value is None:
            runs.append([])
        else:
            runs[-1].append((_x(steps, index), _y(value, low, high)))
    return Side(
        shade=shade,
        radius=_RADII[shade],
        lines=tuple(tuple(run) for run in runs if len(run) > 1),
        marks=tuple(point for run in runs for point in run) if len(steps) <= _MAX_MARKS else (),
    )


def _draw_differences(curve: Curve) -> tuple[tuple[Bar, ...], tuple[Bar, ...], tuple[tuple[float, str], ...]]:
    """Bars of |a - b| from the bottom of a log axis of whole decades, the bound of each, and the axis's labels."""
    sizes = [value for value in curve.differences if value]
    if not sizes:
        return (), (), ((_BOX.bottom, "equal"),)
    known = sizes + [value for value in curve.bounds if value]
    low, high = math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)))
    low -= low == high

    def height(value: float) -> float:
        return _BOX.bottom - (_BOX.bottom - _BOX.low) * (math.log10(value) - low) / (high - low)

    width = min(max((_BOX.right - _BOX.left) / len(curve.steps) * 0.6, 1.0), 14.0)
    bars, bounds = [], []
    for index, (value, bound) in enumerate(zip(curve.differences, curve.bounds, strict=True)):
        x = _x(curve.steps, index)
        if value:
            exceeds = bound is not None and value > bound
            bars.append(Bar(x=x, y=height(value), width=width, exceeds=exceeds))
        if bound:
            bounds.append(Bar(x=x, y=height(bound), width=width, exceeds=False))
    return tuple(bars), tuple(bounds), ((_BOX.bottom, f"1e{low}"), (_BOX.low + 6.0, f"1e{high}"))
