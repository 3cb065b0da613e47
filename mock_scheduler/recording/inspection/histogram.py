"""Counts of numbers in bounded memory, and the bars a histogram of them has.

Contract: exact while no more than 4,096 different values were added; from then on values are rounded down to multiples
of a power of two, just wide enough. Count, mean, deviation, minimum and maximum stay those of the values themselves.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_MAX_VALUES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """How numbers are spread; ``std``: of the population; quantiles are occurring numbers (nearest rank)."""

    count: int
    mean: float
    std: float
    minimum: float
    p10: float
    median: float
    p90: float
    maximum: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """``count`` numbers of ``low`` up to, not including, ``high``; exactly ``low`` where the two are equal."""

    low: float
    high: float
    count: int


class NumberCounts:
    """Counts finite numbers added in any portions."""

    def __init__(self) -> None:
        self._counts: Counter[float] = Counter()
        self._width = 0.0  # of a bin; 0: values are exact
        self._num = 0
        self._mean = self._sum_squares = 0.0
        self._minimum, self._maximum = math.inf, -math.inf

    def add(self, values: Sequence[float]) -> None:
        """Count these too."""
        if not values:
            return
        self._merge_moments(values)
        self._minimum, self._maximum = min(self._minimum, *values), max(self._maximum, *values)
        self._counts.update(self._bin(value) for value in values)
        while len(self._counts) > _MAX_VALUES:
            self._coarsen()

    def spread(self) -> Spread | None:
        """How they are spread; ``None`` where there are none."""
        if not self._num:
            return None
        return Spread(
            count=self._num,
            mean=self._mean,
            std=math.sqrt(self._sum_squares / self._num),
            minimum=self._minimum,
            p10=self._quantile(0.1),
            median=self._quantile(0.5),
            p90=self._quantile(0.9),
            maximum=self._maximum,
        )

    def bars(self, max_bars: int) -> tuple[Bar, ...]:
        """At most ``max_bars`` (2 or more) bars in rising order: one per value, or else bins 1, 2 or 5 · 10^k wide.

        A value has a bar of its own where there are few values, or where they come twice or more on average.
        """
        num_values = len(self._counts)
        if not self._width and (num_values <= max_bars // 2 or num_values <= min(max_bars, self._num // 2)):
            return tuple(Bar(low=value, high=value, count=count) for value, count in sorted(self._counts.items()))
        # One bin less than asked for, since bins start at multiples of their width and not at the minimum.
        width = round_width((self._maximum - self._minimum) / (max_bars - 1))
        binned: Counter[int] = Counter()
        for value, count in self._counts.items():
            binned[_bin_number(max(value, self._minimum), width)] += count
        first, last = min(binned), max(binned)
        return tuple(Bar(low=n * width, high=(n + 1) * width, count=binned[n]) for n in range(first, last + 1))

    def _merge_moments(self, values: Sequence[float]) -> None:
        """Mean and sum of squared deviations of both parts together (Chan, Golub, LeVeque 1983, equation 2.1)."""
        num = len(values)
        mean = math.fsum(values) / num
        total, shift = self._num + num, mean - self._mean
        self._sum_squares += math.fsum((value - mean) ** 2 for value in values) + shift**2 * self._num * num / total
        self._mean += shift * num / total
        self._num = total

    def _quantile(self, fraction: float) -> float:
        """The smallest number that at least this fraction does not exceed."""
        rank, seen = math.ceil(fraction * self._num), 0
        for value, count in sorted(self._counts.items()):
            seen += count
            if seen >= rank:
                return max(value, self._minimum)
        return self._maximum

    def _bin(self, value: float) -> float:
        return math.floor(value / self._width) * self._width if self._width else value

    def _coarsen(self) -> None:
        """Bins twice as wide, or the first bins, of which the range needs at most as many as are allowed."""
        least = (self._maximum - self._minimum) / _MAX_VALUES
        self._width = self._width * 2 or 2.0 ** math.ceil(math.log2(least))
        counts: Counter[float] = Counter()
        for value, count in self._counts.items():
            counts[self._bin(value)] += count
        self._counts = counts


def round_width(least: float) -> float:
    """The smallest of 1, 2 and 5 · 10^k that is at least ``least``, a number above 0."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-12))


def _bin_number(value: float, width: float) -> int:
    # A quotient just below a whole number is that number: 0.3 / 0.1 is 2.9999999999999996.
    return math.floor(value / width + 1e-9)
