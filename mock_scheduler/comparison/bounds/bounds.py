"""Has the bounds of a comparison; those a user states, those of float64, and no bound at all.

Bounds have three sources. *Noise*: perturbing the baseline by one rounding moved every tensor and metric by so much
(``measured``); it decides wherever it is known. *Theory*: rounding grows with the depth of a network
(``noise.theory``); it stands in where nothing was measured. *Stated*: by the user, one by one, over either. Their words
are in ``verdict.wording.bounds``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

from mock_scheduler.comparison.bounds.bound import BoundsSource, MetricBound, TensorBound
from mock_scheduler.comparison.bounds.measured import NoiseBounds
from mock_scheduler.config.align import ToleranceConfig
from mock_scheduler.config.instruments import UNIT_ROUNDOFFS, TraceKind
from mock_scheduler.trace.entries import PHASES, Phase, TraceKey


class Bounds(Protocol):
    """Bounds every tensor and metric of a comparison."""

    @property
    def source(self) -> BoundsSource:
        """Where the bounds are from; ``stated`` where any of them is."""

    @property
    def noise(self) -> NoiseBounds | None:
        """The measured noise, which slopes, places and drifts are judged by too; ``None`` where none was measured."""

    def tensor(self, key: TraceKey) -> TensorBound:
        """Returns the bound of one tensor; ``relative`` is infinite where nothing is known, so it is not judged."""

    def metric(self, step: int, name: str) -> MetricBound:
        """Returns the bound of one logged value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UniformBounds:
    """Holds one bound of every tensor and metric: the last bit where ``is_exact``, else none at all."""

    is_exact: bool

    @property
    def source(self) -> BoundsSource:
        """Returns ``stated``."""
        return "stated"

    @property
    def noise(self) -> NoiseBounds | None:
        """``None``: nothing was measured."""
        return None

    def tensor(self, key: TraceKey) -> TensorBound:
        """Returns 0 or infinity."""
        return TensorBound(relative=0.0 if self.is_exact else math.inf)

    def metric(self, step: int, name: str) -> MetricBound:
        """Returns 0 or infinity."""
        return MetricBound(absolute=0.0 if self.is_exact else math.inf)


#: Nothing is beyond these: for measuring how far two runs are apart.
UNBOUNDED: Bounds = UniformBounds(is_exact=False)
#: Whatever differs in one bit is beyond these.
EXACT: Bounds = UniformBounds(is_exact=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class StatedBounds:
    """Bounds a user states; for all else ``otherwise`` holds."""

    tolerance: ToleranceConfig
    otherwise: Bounds

    @property
    def source(self) -> BoundsSource:
        """``stated`` where anything is."""
        return "stated" if self.states_any else self.otherwise.source

    @property
    def noise(self) -> NoiseBounds | None:
        """Returns the noise measured beside the stated bounds."""
        return self.otherwise.noise

    def states(self, kind: TraceKind | None) -> bool:
        """Whether the user states the bound of a kind, or of metrics (``None``)."""
        return (self.tolerance.metric if kind is None else self._of_kind(kind)) is not None

    @property
    def states_any(self) -> bool:
        """Whether anything is stated."""
        return any(value is not None for value in self._all())

    @property
    def states_all(self) -> bool:
        """Whether ``otherwise`` bounds nothing."""
        return None not in self._all()

    def tensor(self, key: TraceKey) -> TensorBound:
        """Returns the stated bound of the tensor's kind. Unlike measured noise, it has no rounding in it yet."""
        stated = self._of_kind(key.kind)
        # The unit is a fact of how a model computes, and stays true where the user states the bound.
        otherwise = self.otherwise.tensor(key)
        return otherwise if stated is None else TensorBound(relative=stated, has_rounding=True, unit=otherwise.unit)

    def metric(self, step: int, name: str) -> MetricBound:
        """Returns the stated bound, which is the same at every step."""
        if self.tolerance.metric is None:
            return self.otherwise.metric(step, name)
        return MetricBound(relative=self.tolerance.metric, floor=self.tolerance.metric_floor or 0.0)

    def _of_kind(self, kind: TraceKind) -> float | None:
        if kind in ("parameter", "weight"):
            return self.tolerance.update
        # From the backward pass on everything is a gradient or made of one.
        return self.tolerance.gradient if PHASES[kind] >= Phase.BACKWARD else self.tolerance.activation

    def _all(self) -> tuple[float | None, ...]:
        stated = self.tolerance
        return stated.metric, stated.activation, stated.gradient, stated.update


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherCodeBounds:
    """The inner bounds, of a candidate with code of its own: its updates may be rounded otherwise when they are stored.

    An update is made element by element, so that two layouts of one code never round it apart, and noise has nothing
    of it; another optimizer's code does, by the spacing of the parameter's numbers.
    """

    inner: Bounds

    @property
    def source(self) -> BoundsSource:
        """Returns the source of the inner bounds."""
        return self.inner.source

    @property
    def noise(self) -> NoiseBounds | None:
        """Returns the noise of the inner bounds."""
        return self.inner.noise

    def tensor(self, key: TraceKey) -> TensorBound:
        """Returns the inner bound; of a parameter, with the rounding of storing it."""
        bound = self.inner.tensor(key)
        return replace(bound, has_rounding=True) if key.kind == "parameter" else bound

    def metric(self, step: int, name: str) -> MetricBound:
        """Returns the inner bound."""
        return self.inner.metric(step, name)


def is_calibrated(bounds: Bounds, kind: TraceKind | None) -> bool:
    """Whether tensors of a kind, or metrics (``None``), are bounded by more than theory.

    Nobody knows how near theory is to this model's rounding. In float64 there is next to none, so theory decides there.
    """
    if isinstance(bounds, StatedBounds):
        return bounds.states(kind) or is_calibrated(bounds.otherwise, kind)
    return isinstance(bounds, WideBounds) or bounds.source != "theory"


def shrinking_factor(precision: str) -> float:
    """Returns how many times smaller rounding is in float64: 5.4e8 than in float32, 3.5e13 than in bfloat16."""
    # The error of a sum is proportional to the unit roundoff (Higham 2002, section 4.2), whatever its order.
    return UNIT_ROUNDOFFS[precision] / UNIT_ROUNDOFFS["float64"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WideBounds:
    """Holds the inner bounds, divided by √(shrinking factor).

    Rounding shrinks by the whole factor, a wrong computation not at all; half way between, on a logarithmic scale, no
    honest run and no fault comes near.
    """

    inner: Bounds
    precision: str

    @property
    def source(self) -> BoundsSource:
        """Returns the source of the inner bounds."""
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
        # The floor is a size of the metric, and no error, so it does not shrink.
        return MetricBound(
            relative=bound.relative * self.factor, floor=bound.floor, absolute=bound.absolute * self.factor
        )

    @property
    def factor(self) -> float:
        """How much smaller a bound is in float64: 0 to 1."""
        return 1.0 / math.sqrt(shrinking_factor(self.precision))
