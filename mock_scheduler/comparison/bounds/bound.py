"""One bound: how far a tensor or a logged value of the candidate may be from the baseline's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

BoundsSource = Literal["noise", "theory", "stated"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorBound:
    """Holds the bound of ``||a - b||``, or of an update ``||d_a - d_b||``: ``relative`` · ``||a||`` + ``absolute``.

    Args:
        relative: The relative difference allowed (``thresholds`` has the word).
        absolute: A norm allowed besides.
        has_rounding: The rounding of any tensor of its kind (``measure.distance``) is added; measured noise has it
            already.
        unit: Spacing at 1 of the numbers its values are made of, where coarser than their own dtype's.
        is_estimate: The bound was extrapolated; beyond it, a tensor is suspicious only.
        fraction: Fraction of the elements allowed to differ, for a tensor of integers.
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
    """Holds the bound of a metric's ``|a - b|``: ``relative`` · ``max(|a|, |b|, floor)`` + ``absolute``.

    ``is_estimate``: as of a ``TensorBound``.
    """

    relative: float = 0.0
    floor: float = 0.0
    absolute: float = 0.0
    is_estimate: bool = False

    def limit(self, mine: float, other: float) -> float:
        """Returns the largest ``|a - b|`` that two values may have."""
        # Infinity times a floor of 0 would be NaN, which nothing exceeds and nothing is within.
        if math.isinf(self.relative) or math.isinf(self.absolute):
            return math.inf
        return self.relative * max(abs(mine), abs(other), self.floor) + self.absolute
