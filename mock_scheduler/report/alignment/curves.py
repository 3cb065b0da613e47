"""Metrics of two runs over their steps, with their difference and its bounds, as plain data for a figure.

Contract: read again from both runs' ``metrics.jsonl``; of more than ``MAX_STEPS`` steps some are left out, evenly.
A value that is not finite, or that a run has not logged, is ``None``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mock_scheduler.compare.bounds.bounds import Bounds
from mock_scheduler.compare.walk.metrics import MetricComparison, MetricDifference, MetricLog, load_metrics
from mock_scheduler.errors import TraceError
from mock_scheduler.report.comparison.view import metrics_to_show
from mock_scheduler.support.run_files import METRICS_FILE
from mock_scheduler.verdict.wording.numbers import describe_times

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
        logs = load_metrics(baseline / METRICS_FILE), load_metrics(candidate / METRICS_FILE)
    except TraceError:
        return ()
    chosen = metrics_to_show(metrics) or tuple(item for item in metrics.differences if item.bit_equal)[:1]
    return tuple(_curve(item, logs, bounds) for item in chosen[:limit])


def _curve(metric: MetricDifference, logs: tuple[MetricLog, MetricLog], bounds: Bounds) -> Curve:
    logged = {step for log in logs for step, values in log.items() if metric.name in values}
    steps = thinned(sorted(logged & logs[0].keys() & logs[1].keys()))
    baseline, candidate = ([log[step].get(metric.name) for step in steps] for log in logs)
    differences, limits = [], []
    for step, mine, other in zip(steps, baseline, candidate, strict=True):
        is_known = mine is not None and other is not None and math.isfinite(mine - other)
        differences.append(abs(mine - other) if is_known else None)  # type: ignore[operator]
        limits.append(_finite(bounds.metric(step, metric.name).limit(mine, other)) if is_known else None)  # type: ignore[arg-type]
    return Curve(
        name=metric.name,
        steps=tuple(steps),
        baseline=tuple(map(_finite, baseline)),
        candidate=tuple(map(_finite, candidate)),
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


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
