"""Merged states as numbers: totals over response tokens, and over the sequences that have any."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mock_scheduler.correction.config.rules import Level
from mock_scheduler.correction.engine.states import CorrectionStates, FloatArray, exact_sum


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """States, and which of their sequences have response tokens."""

    states: CorrectionStates
    filled: np.ndarray

    @property
    def num_tokens(self) -> float:
        """Response tokens whose ratio is known."""
        return self.states.total("tokens")

    def mean(self, name: str) -> float:
        """Mean over response tokens."""
        return self.states.total(name) / max(self.num_tokens, 1.0)

    def row_means(self, name: str) -> FloatArray:
        """The mean of each sequence that has response tokens."""
        return np.asarray(self.rows(name) / self.rows("tokens"))

    def rows(self, name: str) -> FloatArray:
        """The sum of each sequence that has response tokens."""
        return np.asarray(self.states.sums[name][self.filled])


def fraction_beyond(view: View, level: Level | None, column: str) -> float:
    """Of tokens, or of sequences, whose tokens share one value."""
    return view.mean(column) if level in ("token", "segment") else mean_of(view.rows(column) > 0)


def moments(view: View, column: str, prefix: str) -> dict[str, float]:
    """Mean, deviation, extremes and effective sample size of weights over response tokens."""
    mean, square = view.mean(column), view.mean(f"{column}_squared")
    return {
        f"{prefix}_mean": mean,
        f"{prefix}_max": view.states.largest(column),
        f"{prefix}_min": view.states.smallest(column),
        f"{prefix}_std": std_of(square, mean, view.num_tokens),
        f"{prefix}_eff_sample_size": effective_sample_size(view, column),
    }


def effective_sample_size(view: View, column: str) -> float:
    """(Σw)² / (N·Σw²), a fraction of 0 to 1; 0 where all weights are 0.

    Sums are divided by the largest weight first, so that nothing overflows or vanishes. Equal weights give exactly 1.
    """
    largest = view.states.largest(column)
    if not largest > 0.0:
        return 0.0
    if largest == view.states.smallest(column):
        return 1.0
    total, squares = view.states.total(column) / largest, view.states.total(f"{column}_squared") / largest / largest
    return min(total * total / (squares * view.num_tokens), 1.0)


def sequence_values(means: FloatArray, prefix: str, *, centre: float) -> dict[str, float]:
    """Over the means of sequences; the deviation is the unbiased one, 0 for a single sequence."""
    return {
        f"{prefix}_seq_mean": mean_of(means),
        f"{prefix}_seq_std": deviation_of(means),
        f"{prefix}_seq_max": float(means.max()),
        f"{prefix}_seq_min": float(means.min()),
        f"{prefix}_seq_max_deviation": float(np.abs(means - centre).max()),
    }


def mean_of(values: np.ndarray) -> float:
    """The mean of numbers or of booleans, correctly rounded before the division; 0 of nothing."""
    return exact_sum(np.asarray(values, dtype=np.float64)) / len(values) if len(values) else 0.0


def deviation_of(values: FloatArray) -> float:
    """The unbiased standard deviation; 0 of fewer than two values."""
    if len(values) < 2:
        return 0.0
    return math.sqrt(exact_sum(np.square(values - mean_of(values))) / (len(values) - 1))


def std_of(mean_square: float, mean: float, num_tokens: float) -> float:
    """The biased standard deviation out of moments, as verl has it; 0 of a single token."""
    return math.sqrt(max(mean_square - mean * mean, 0.0)) if num_tokens > 1 else 0.0
