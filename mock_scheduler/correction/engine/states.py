"""Merges states of rollout correction, and makes totals over merged ones, for metrics.

Contract: states have one row of sums, maxima and minima per sequence, and the log weight of every token. Merging lays
rows side by side; totals are correctly rounded sums over rows, and maxima and quantiles are over all: so no number
depends on micro-batches, on ranks or on order. No state is a mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mock_scheduler.correction.config.rules import Level

FloatArray = npt.NDArray[np.float64]

#: Below every number: the first bucket of policy lag is of policies newer than the one under training.
AHEAD = -(2**63)
#: First position of each bucket of positions, and first number of versions of each bucket of policy lag.
POSITION_EDGES = (0, 16, 64, 256, 1024, 4096, 16384, 65536)
LAG_EDGES = (AHEAD, 0, 1, 2, 3, 5, 9)
#: The sums of a bucket.
BUCKET_SUMS = ("tokens", "log_ratio", "k3", "weight", "weight_squared", "rejected")


def bucket_names(edges: Sequence[int]) -> list[str]:
    """Returns ``ahead``, ``0``, ``1-4``, ``5+``: the numbers of each bucket."""
    names = [
        "ahead" if low == AHEAD else str(low) if high == low + 1 else f"{low}-{high - 1}"
        for low, high in pairwise(edges)
    ]
    return [*names, f"{edges[-1]}+"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CorrectionStates:
    """States of S sequences with M response tokens. sums, maxima, minima: float64 ``[S]`` by name.

    positions: float64 ``[S, len(POSITION_EDGES), len(BUCKET_SUMS)]``; lags: the same by policy versions,
    ``None`` where not known. log_weights: float32 ``[M]``, of raw weights, without a clamp; empty without weights.
    """

    sums: Mapping[str, FloatArray]
    maxima: Mapping[str, FloatArray]
    minima: Mapping[str, FloatArray]
    positions: FloatArray
    lags: FloatArray | None
    log_weights: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty(0, dtype=np.float32))

    @property
    def num_sequences(self) -> int:
        """Returns S."""
        return len(self.sums["tokens"])

    @classmethod
    def merge(cls, parts: Sequence[CorrectionStates]) -> CorrectionStates:
        """Puts parts together that share no sequence. Raises ``ValueError`` for parts of other rules."""
        # Rows are kept apart: sums of sums would depend on the order of merging.
        return _join(parts, lambda kind, arrays: np.concatenate(arrays))

    @classmethod
    def add(cls, parts: Sequence[CorrectionStates]) -> CorrectionStates:
        """Adds parts that have other tokens of the same sequences: the ranks of a context-parallel group.

        Raises ``ValueError`` for parts of other rules, or of another number of sequences.
        """
        combine: dict[str, Callable[[FloatArray], FloatArray]] = {
            "sums": np.add.reduce,
            "maxima": np.maximum.reduce,
            "minima": np.minimum.reduce,
        }
        if len({part.num_sequences for part in parts}) > 1:
            raise ValueError(f"parts have {[part.num_sequences for part in parts]} sequences; expected the same of all")
        return _join(parts, lambda kind, arrays: combine[kind](np.stack(arrays)))

    def total(self, name: str) -> float:
        """The correctly rounded sum over sequences, whatever their order; NaN and infinities as IEEE adds them."""
        return exact_sum(self.sums[name])

    def largest(self, name: str) -> float:
        """Returns the largest of all sequences; -inf without one."""
        return float(self.maxima[name].max(initial=-math.inf))

    def smallest(self, name: str) -> float:
        """Returns the smallest of all sequences; inf without one."""
        return float(self.minima[name].min(initial=math.inf))


def exact_sum(values: FloatArray) -> float:
    """The sum rounded once, by Shewchuk's algorithm; where it would raise, IEEE's own sum."""
    try:
        return math.fsum(values.tolist())
    except (OverflowError, ValueError):
        with np.errstate(all="ignore"):
            return float(values.sum())


def _join(parts: Sequence[CorrectionStates], join: Callable[[str, list[FloatArray]], FloatArray]) -> CorrectionStates:
    """Joins the parts; ``join`` gets the kind of a column and its arrays."""
    if not parts:
        raise ValueError("there are no parts to put together")
    first = parts[0]
    if len(parts) == 1:
        return first
    for part in parts:
        names = [set(kind) ^ set(own) for kind, own in zip(_columns(first), _columns(part), strict=True)]
        if any(names):
            raise ValueError(f"parts were made by other rules: {sorted(set().union(*names))} are not in all of them")
    kinds = ("sums", "maxima", "minima")
    columns = {
        kind: {name: join(kind, [getattr(part, kind)[name] for part in parts]) for name in getattr(first, kind)}
        for kind in kinds
    }
    lags = [part.lags for part in parts if part.lags is not None]
    return CorrectionStates(
        **columns,
        positions=join("sums", [part.positions for part in parts]),
        lags=join("sums", lags) if len(lags) == len(parts) else None,
        log_weights=np.concatenate([part.log_weights for part in parts]),
    )


def _columns(states: CorrectionStates) -> tuple[Mapping[str, FloatArray], ...]:
    return states.sums, states.maxima, states.minima


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """States as totals; filled: bool ``[S]``, the sequences that have response tokens."""

    states: CorrectionStates
    filled: np.ndarray

    @property
    def num_tokens(self) -> float:
        """Returns the number of response tokens with a known ratio."""
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
    """Returns the fraction of tokens in ``column``, or of sequences where all tokens of a sequence share one value."""
    return view.mean(column) if level in ("token", "segment") else mean_of(view.rows(column) > 0)


def moments(view: View, column: str, prefix: str) -> dict[str, float]:
    """Computes mean, deviation, extremes and effective sample size of weights over response tokens."""
    mean, square = view.mean(column), view.mean(f"{column}_squared")
    return {
        f"{prefix}_mean": mean,
        f"{prefix}_max": view.states.largest(column),
        f"{prefix}_min": view.states.smallest(column),
        f"{prefix}_std": std_of(square, mean, view.num_tokens),
        f"{prefix}_eff_sample_size": effective_sample_size(view, column),
    }


def effective_sample_size(view: View, column: str) -> float:
    """Computes Kish's effective sample size (Σw)² / (N·Σw²), a fraction of 0 to 1; 0 where all weights are 0."""
    largest = view.states.largest(column)
    if not largest > 0.0:
        return 0.0
    if largest == view.states.smallest(column):
        return 1.0
    # Divided by the largest weight first, so that nothing overflows or vanishes.
    total, squares = view.states.total(column) / largest, view.states.total(f"{column}_squared") / largest / largest
    return min(total * total / (squares * view.num_tokens), 1.0)


def sequence_values(means: FloatArray, prefix: str, *, centre: float) -> dict[str, float]:
    """Computes statistics of the means of sequences; the deviation is unbiased, 0 for a single sequence."""
    return {
        f"{prefix}_seq_mean": mean_of(means),
        f"{prefix}_seq_std": deviation_of(means),
        f"{prefix}_seq_max": float(means.max()),
        f"{prefix}_seq_min": float(means.min()),
        f"{prefix}_seq_max_deviation": float(np.abs(means - centre).max()),
    }


def mean_of(values: np.ndarray) -> float:
    """The mean of numbers or of booleans, whose sum is correctly rounded; 0 of nothing."""
    return exact_sum(np.asarray(values, dtype=np.float64)) / len(values) if len(values) else 0.0


def deviation_of(values: FloatArray) -> float:
    """Returns the unbiased standard deviation; 0 of fewer than two values."""
    if len(values) < 2:
        return 0.0
    return math.sqrt(exact_sum(np.square(values - mean_of(values))) / (len(values) - 1))


def std_of(mean_square: float, mean: float, num_tokens: float) -> float:
    """The biased standard deviation from moments, as verl has it; 0 of a single token."""
    return math.sqrt(max(mean_square - mean * mean, 0.0)) if num_tokens > 1 else 0.0
