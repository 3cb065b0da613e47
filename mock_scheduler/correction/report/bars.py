"""Histograms of log ratios: bars around multiples of a round width, so that equal policies have the bar around 0."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from mock_scheduler.recording.inspection.histogram import Bar

MAX_BARS = 41


def count_bars(values: npt.NDArray[np.floating], *, max_bars: int = MAX_BARS) -> tuple[Bar, ...]:
    """At most ``max_bars`` bars of finite values in rising order, those without a value among them.

    A bar counts what is nearest to a multiple of the width, which is 1, 2 or 5 · 10^k. Values that are all equal have
    one bar, of no width.
    """
    if not len(values):
        return ()
    wide = values.astype(np.float64)
    low, high = float(wide.min()), float(wide.max())
    if low == high:
        return (Bar(low=low, high=high, count=len(wide)),)
    width = _round_width((high - low) / (max_bars - 2))
    numbers = np.rint(wide / width).astype(np.int64)
    first = int(numbers.min())
    counts = np.bincount(numbers - first)
    # Rounded to the width's own decimals, since 3 · 0.1 is 0.30000000000000004.
    digits = max(2 - math.floor(math.log10(width)), 0)
    return tuple(
        Bar(
            low=round((first + number - 0.5) * width, digits),
            high=round((first + number + 0.5) * width, digits),
            count=int(count),
        )
        for number, count in enumerate(counts)
    )


def count_middle_bars(values: npt.NDArray[np.floating]) -> tuple[Bar, ...]:
    """Bars of the 1st to the 99th percentile; empty where these reach more than a quarter as far as all."""
    if not len(values):
        return ()
    low, high = np.quantile(values, [0.01, 0.99])
    if not 0 < high - low < (values.max() - values.min()) / 4:
        return ()
    return count_bars(values[(values >= low) & (values <= high)])


def _round_width(least: float) -> float:
    """The smallest of 1, 2 and 5 · 10^k that is at least ``least``, which is above 0."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-12))
