"""What perturbed runs of a baseline made of one tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorNoise:
    """One tensor over the perturbed runs. relative: r of each; inf where only the baseline is 0.

    absolute: the largest ||b|| where the baseline is 0, else 0. slopes: <a, b> / <a, a> of each; empty where the
    tensor has none. size: ||a||, or of a parameter that of its change.
    """

    relative: tuple[float, ...]
    absolute: float = 0.0
    slopes: tuple[float, ...] = ()
    size: float = 0.0

    @property
    def usual(self) -> float:
        """p: the median."""
        return median(self.relative)

    @property
    def largest(self) -> float:
        """P: the largest."""
        return max(self.relative)

    @property
    def distance(self) -> float:
        """The largest ||a - b||."""
        return self.largest * self.size if self.size else self.absolute

    @property
    def slope_spread(self) -> float:
        """The standard deviation of the slopes about 1; 0 where there is none."""
        return math.sqrt(sum((slope - 1.0) ** 2 for slope in self.slopes) / max(len(self.slopes), 1))
