"""How far a candidate may be from its baseline: what a bound is, and the bounds that a user states.

There are three sources, and no fixed number in any of them. *Noise*: what perturbing the baseline by one rounding made
of every tensor and metric (``noise.measured``), which decides where it is there. *Theory*: how rounding grows with the
depth of a network (``theory``), where nothing was measured. *Stated*: by the user, one by one, over either.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from mock_scheduler.config.align import ToleranceConfig
from mock_scheduler.config.trace import TraceKind
from mock_scheduler.trace.entries import PHASES, Phase, TraceKey

if TYPE_CHECKING:
    from mock_scheduler.compare.bounds.measured import NoiseBounds

BoundsSource = Literal["noise", "theory", "stated"]

#: Where no element differs by more units in the last place than this, reports say so; it decides nothing.
NUM_ULPS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorBound:
    """The bound of ||a - b||, or of an update ||d_a - d_b||: ``relative`` · ||a|| + ``absolute``.

    ``has_rounding``: whether the rounding that such a tensor cannot be without, as ``judging`` says, is added to it; it
    is part of what was measured. ``unit``: the spacing at 1 of the numbers that its values are made of, where that is
    coarser than its own dtype's. ``is_estimate``: it was extrapolated, so that what is beyond it is suspicious only.
    ``fraction``: of the elements of what is no floating-point number, which may differ.
    """

    relative: float
    absolute: float = 0.0
    has_rounding: bool = False
    unit: float = 0.0
    is_estimate: bool = False
    fraction: float = 0.0

    @property
    def is_exact(self) -> bool:
        """Whether nothing may differ."""
        return not (self.relative or self.absolute or self.has_rounding or self.fraction)


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricBound:
    """The bound of a metric's |a - b|: ``relative`` · max(|a|, |b|, ``floor``) + ``absolute``; ``is_estimate``."""

    relative: float = 0.0
    floor: float = 0.0
    absolute: float = 0.0
    is_estimate: bool = False

    def limit(self, mine: float, other: float) -> float:
        """The largest |a - b| of these two values."""
        if math.isinf(self.relative) or math.isinf(self.absolute):
            return math.inf
        return self.relative * max(abs(mine), abs(other), self.floor) + self.absolute


class Bounds(Protocol):
    """What every tensor and metric of a comparison is held to."""

    @property
    def source(self) -> BoundsSource:
        """Where they are from; ``stated`` where any of them is."""

    @property
    def noise(self) -> NoiseBounds | None:
        """What was measured, by which slopes, places and drifts are judged too; ``None`` where nothing was."""

    def tensor(self, key: TraceKey) -> TensorBound:
        """Of one tensor; ``relative`` is infinite where nothing is known of it, so that it is not judged."""

    def metric(self, step: int, name: str) -> MetricBound:
        """Of one logged value."""

    def level(self) -> str:
        """A few words for a verdict: ``the noise of 5 perturbed runs``."""

    def describe(self) -> str:
        """Every bound, with the formula of what it bounds, in one or two sentences."""

    def advice(self) -> str:
        """How bounds that decide more would be had; empty where these are measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _SameForAll:
    """One bound of every tensor and one of every metric, and how they are called."""

    tensors: TensorBound
    metrics: MetricBound
    name: str
    text: str

    @property
    def source(self) -> BoundsSource:
        return "stated"

    @property
    def noise(self) -> NoiseBounds | None:
        return None

    def tensor(self, key: TraceKey) -> TensorBound:
        return self.tensors

    def metric(self, step: int, name: str) -> MetricBound:
        return self.metrics

    def level(self) -> str:
        return self.name

    def describe(self) -> str:
        return self.text

    def advice(self) -> str:
        return ""


#: Nothing is beyond these: for measuring how far two runs are apart.
UNBOUNDED: Bounds = _SameForAll(
    tensors=TensorBound(relative=math.inf),
    metrics=MetricBound(absolute=math.inf),
    name="no bound",
    text="Nothing is bounded.",
)
#: Whatever differs in one bit is beyond these.
EXACT: Bounds = _SameForAll(
    tensors=TensorBound(relative=0.0),
    metrics=MetricBound(),
    name="the last bit",
    text="Everything equal to the last bit.",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StatedBounds:
    """What a user states; for all else ``otherwise`` holds. What is stated is not measured, so rounding is added."""

    tolerance: ToleranceConfig
    otherwise: Bounds

    @property
    def source(self) -> BoundsSource:
        """``stated`` where anything is."""
        return "stated" if self._stated() else self.otherwise.source

    @property
    def noise(self) -> NoiseBounds | None:
        """What was measured beside it."""
        return self.otherwise.noise

    def tensor(self, key: TraceKey) -> TensorBound:
        """The stated bound of its kind."""
        stated = self._of_kind(key.kind)
        otherwise = self.otherwise.tensor(key)
        return otherwise if stated is None else TensorBound(relative=stated, has_rounding=True, unit=otherwise.unit)

    def metric(self, step: int, name: str) -> MetricBound:
        """The stated bound, the same at every step."""
        if self.tolerance.metric is None:
            return self.otherwise.metric(step, name)
        return MetricBound(relative=self.tolerance.metric, floor=self.tolerance.metric_floor or 0.0)

    def level(self) -> str:
        """``the stated bounds``, and what holds where none is stated."""
        if not self._stated():
            return self.otherwise.level()
        return "the stated bounds" if self._is_complete() else f"the stated bounds and {self.otherwise.level()}"

    def describe(self) -> str:
        """The stated ones, then the others."""
        stated = self._stated()
        if not stated:
            return self.otherwise.describe()
        rest = "" if self._is_complete() else f" All else: {self.otherwise.describe()}"
        return f"Stated: {'; '.join(stated)}; each beyond rounding; integers equal.{rest}"

    def advice(self) -> str:
        """That of the others, where they decide anything."""
        return "" if self._is_complete() else self.otherwise.advice()

    def _of_kind(self, kind: TraceKind) -> float | None:
        if kind in ("parameter", "weight"):
            return self.tolerance.update
        return self.tolerance.gradient if PHASES[kind] >= Phase.BACKWARD else self.tolerance.activation

    def _is_complete(self) -> bool:
        stated = self.tolerance
        return None not in (stated.metric, stated.activation, stated.gradient, stated.update)

    def _stated(self) -> list[str]:
        stated = self.tolerance
        rows = (
            ("||a-b|| / ||a|| of what the forward pass computes at most", stated.activation),
            ("of gradients and the optimizer's state", stated.gradient),
            ("of the change d by an update ||d_a-d_b|| / ||d_a||", stated.update),
            (f"metrics |a-b| / max(|a|, |b|, {stated.metric_floor or 0:g})", stated.metric),
        )
        return [f"{what} {value:g}" for what, value in rows if value is not None]
