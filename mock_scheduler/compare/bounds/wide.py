"""Bounds in float64 for a difference that may be rounding in another precision."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mock_scheduler.compare.bounds.bound import BoundsSource, MetricBound, TensorBound
from mock_scheduler.compare.bounds.bounds import Bounds
from mock_scheduler.compare.bounds.measured import NoiseBounds
from mock_scheduler.config.instruments import UNIT_ROUNDOFFS
from mock_scheduler.trace.entries import TraceKey


def shrinking_factor(precision: str) -> float:
    """Returns how many times smaller rounding is in float64: 5.4e8 than in float32, 3.5e13 than in bfloat16."""
    return UNIT_ROUNDOFFS[precision] / UNIT_ROUNDOFFS["float64"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WideBounds:
    """The inner bounds, divided by √(shrinking factor).

    Rounding shrinks by the whole factor, a wrong computation not at all; half way between, on a logarithmic scale, no
    honest run and no fault comes near.
    """

    inner: Bounds
    precision: str

    @property
    def source(self) -> BoundsSource:
        """The source of the inner bounds."""
        return self.inner.source

    @property
    def noise(self) -> NoiseBounds | None:
        """``None``: none was measured in float64."""
        return None

    def tensor(self, key: TraceKey) -> TensorBound:
        """Returns the inner bound, smaller."""
        bound = self.inner.tensor(key)
        # Rounding of the pool is left out: in float64 it is far below even the smaller bound.
        return TensorBound(relative=bound.relative * self.factor, absolute=bound.absolute * self.factor)

    def metric(self, step: int, name: str) -> MetricBound:
        """Returns the inner bound, smaller."""
        bound = self.inner.metric(step, name)
        return MetricBound(
            relative=bound.relative * self.factor, floor=bound.floor, absolute=bound.absolute * self.factor
        )

    @property
    def factor(self) -> float:
        """How much smaller a bound is in float64: 0 to 1."""
        return 1.0 / math.sqrt(shrinking_factor(self.precision))
