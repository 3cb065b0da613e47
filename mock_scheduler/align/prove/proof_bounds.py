"""Bounds of a difference in float64, out of noise in a smaller precision."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mock_scheduler.compare.bounds.bounds import Bounds, BoundsSource, MetricBound, TensorBound
from mock_scheduler.config.instruments import UNIT_ROUNDOFFS
from mock_scheduler.trace.entries import TraceKey

if TYPE_CHECKING:
    from mock_scheduler.compare.bounds.measured import NoiseBounds


def shrinking_factor(precision: str) -> float:
    """How many times rounding is smaller in float64 than in a precision: 5.4e8 for float32, 3.5e13 for bfloat16."""
    return UNIT_ROUNDOFFS[precision] / UNIT_ROUNDOFFS["float64"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WideBounds:
    """The bound in float64 of a difference by rounding in ``precision``: its bound there / √(shrinking factor).

    Rounding shrinks by the whole factor, a wrong computation not at all; half way between, on a logarithmic scale, no
    honest run and no fault comes near.
    """

    inner: Bounds
    precision: str

    @property
    def source(self) -> BoundsSource:
        """That of the inner bounds."""
        return self.inner.source

    @property
    def noise(self) -> NoiseBounds | None:
        """None was measured in float64."""
        return None

    def tensor(self, key: TraceKey) -> TensorBound:
        """The inner one, smaller."""
        bound = self.inner.tensor(key)
        return TensorBound(relative=bound.relative * self._factor, absolute=bound.absolute * self._factor)

    def metric(self, step: int, name: str) -> MetricBound:
        """The inner one, smaller."""
        bound = self.inner.metric(step, name)
        return MetricBound(
            relative=bound.relative * self._factor, floor=bound.floor, absolute=bound.absolute * self._factor
        )

    def level(self) -> str:
        """In a few words."""
        return f"{self.inner.level()}, made smaller for float64"

    def describe(self) -> str:
        """In a sentence."""
        return f"{1 / self._factor:.1e} times less than: {self.inner.describe()}"

    def advice(self) -> str:
        """That of the inner bounds."""
        return self.inner.advice()

    @property
    def _factor(self) -> float:
        return 1.0 / math.sqrt(shrinking_factor(self.precision))
