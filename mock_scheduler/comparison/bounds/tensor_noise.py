"""The noise of one tensor over the perturbed runs, and how far such runs are beyond each other.

*Heavy tails.* A token whose clip turned moves all gradients of its update, and Adam moves a weight whose gradient is
near 0 by a whole step either way; few runs show little of it. So each perturbed run is held to the others: with F the
largest noise of a tensor over the second largest, the largest F of all tensors of a *pool* (kind and update) widens the
bounds of the pool.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from mock_scheduler.comparison.thresholds import LARGEST_TAIL, TAIL_ROOM

Pool = tuple[str, int, int]
"""What heavy tails have in common: kind, or ``metric``; step; update, of metrics 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorNoise:
    """Holds one tensor over the perturbed runs.

    Args:
        relative: Relative difference r of each run; inf where only the baseline is 0.
        absolute: The largest ``||b||`` where the baseline is 0, else 0.
        slopes: ``<a, b> / <a, a>`` of each run; empty where the tensor has none.
        size: ``||a||``, or of a parameter the norm of its change.
    """

    relative: tuple[float, ...]
    absolute: float = 0.0
    slopes: tuple[float, ...] = ()
    size: float = 0.0

    @property
    def usual(self) -> float:
        """Returns p: the median of r."""
        return median(self.relative)

    @property
    def largest(self) -> float:
        """Returns P: the largest r."""
        return max(self.relative)

    @property
    def distance(self) -> float:
        """Returns the largest ``||a - b||``."""
        return self.largest * self.size if self.size else self.absolute

    @property
    def slope_spread(self) -> float:
        """Returns the standard deviation of the slopes about 1; 0 without slopes."""
        # About 1 rather than about their mean: honest runs have no reason to be larger or smaller.
        return math.hypot(*(slope - 1.0 for slope in self.slopes)) / math.sqrt(max(len(self.slopes), 1))


def find_factors(
    samples: Iterable[tuple[Pool, Sequence[float]]], *, usual: float, smallest: float
) -> dict[Pool, float]:
    """Finds, by pool, how many times its noise a figure may differ, where more than ``usual``.

    Args:
        samples: For each tensor or metric, its pool and its noise in every run.
        usual: How many times the noise is allowed anyway.
        smallest: Noise too small to count.
    """
    factors: dict[Pool, float] = {}
    for pool, values in samples:
        ranked = sorted(values)
        # The second largest stands for the bound that the other runs would have given the largest one.
        if len(ranked) > 1 and ranked[-2] > smallest and math.isfinite(ranked[-1]):
            needed = min(TAIL_ROOM * ranked[-1] / ranked[-2], LARGEST_TAIL)
            # One factor for the whole pool: a heavy tail shows in other tensors in other runs.
            if needed > factors.get(pool, usual):
                factors[pool] = needed
    return factors
