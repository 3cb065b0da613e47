"""Bounds that a test states, so that what it plants is beyond them by a number that can be worked out by hand."""

from __future__ import annotations

from mock_scheduler.comparison.bounds.bounds import UNBOUNDED, Bounds, StatedBounds
from mock_scheduler.config.align import ToleranceConfig


def stated(
    *,
    metric: float = 1e-4,
    activation: float = 1e-4,
    gradient: float = 1e-4,
    update: float = 5e-3,
) -> Bounds:
    """All bounds; of metrics relative to 1e-3 at least."""
    tolerance = ToleranceConfig(
        metric=metric, metric_floor=1e-3, activation=activation, gradient=gradient, update=update
    )
    return StatedBounds(tolerance=tolerance, otherwise=UNBOUNDED)
