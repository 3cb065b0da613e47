"""Distributions of log ratios: histograms, and means by position or policy lag.

Bars lie around multiples of a round width, so that equal policies have the bar around 0.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from mock_scheduler.correction.engine.states import BUCKET_SUMS, FloatArray, bucket_names, exact_sum
from mock_scheduler.correction.report.view import Bucket
from mock_scheduler.recording.inspection.histogram import Bar, round_width

MAX_BARS = 41


def count_bars(values: npt.NDArray[np.floating], *, max_bars: int = MAX_BARS) -> tuple[Bar, ...]:
    """Counts finite values in at most ``max_bars`` bars, in rising order, empty ones included.

    A bar counts the values nearest to a multiple of the width, which is 1, 2 or 5 · 10^k. Values that are all equal
    have one bar, of no width.
    """
    if not len(values):
        return ()
    wide = values.astype(np.float64)
    low, high = float(wide.min()), float(wide.max())
    if low == high:
        return (Bar(low=low, high=high, count=len(wide)),)
    width = round_width((high - low) / (max_bars - 2))
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
    """Counts the values of the 1st to the 99th percentile; empty where these reach over a quarter of the range."""
    if not len(values):
        return ()
    low, high = np.quantile(values, [0.01, 0.99])
    if not 0 < high - low < (values.max() - values.min()) / 4:
        return ()
    return count_bars(values[(values >= low) & (values <= high)])


def sum_buckets(table: FloatArray, edges: tuple[int, ...]) -> list[Bucket]:
    """Makes means of the buckets that have tokens; table: float64 ``[S, len(edges), len(BUCKET_SUMS)]``."""
    buckets = []
    for index, name in enumerate(bucket_names(edges)):
        sums = {column: exact_sum(table[:, index, place]) for place, column in enumerate(BUCKET_SUMS)}
        tokens = sums["tokens"]
        if tokens:
            buckets.append(
                Bucket(
                    name=name,
                    tokens=int(tokens),
                    kl=-sums["log_ratio"] / tokens,
                    k3_kl=sums["k3"] / tokens,
                    mean_ratio=sums["weight"] / tokens,
                    effective_sample_size=min(sums["weight"] ** 2 / (tokens * sums["weight_squared"]), 1.0),
                )
            )
    return buckets


def sequence_sample_size(log_weights: FloatArray) -> float:
    """Kish's effective sample size (Σw)² / (S·Σw²) of weights of sequences, 0 to 1; NaN without a sequence."""
    if not len(log_weights):
        return math.nan
    # Relative to the largest weight, so that nothing overflows; it is 1 then, so no sum is 0.
    weights = (torch.from_numpy(log_weights) - log_weights.max()).exp()
    return min(float(weights.sum() ** 2 / (len(weights) * weights.square().sum())), 1.0)
