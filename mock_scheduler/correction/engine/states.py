"""What metrics of rollout correction are made of: mergeable, and the same for every split of the batch.

Contract: one row of sums, maxima and minima per sequence, and the log weight of every token. Merging lays rows side by
side; totals are correctly rounded sums over rows, maxima and quantiles those of all: so no number depends on
micro-batches, on ranks or on order. Nothing here is a mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

#: First position of each bucket of positions, and first number of versions of each bucket of policy lag.
POSITION_EDGES = (0, 16, 64, 256, 1024, 4096, 16384, 65536)
LAG_EDGES = (0, 1, 2, 3, 5, 9)
#: What is summed in a bucket.
BUCKET_SUMS = ("tokens", "log_ratio", "k3", "weight", "weight_squared", "rejected")


def bucket_names(edges: Sequence[int]) -> list[str]:
    """``0``, ``1-4``, ``5+``: the numbers of each bucket."""
    names = [str(low) if high == low + 1 else f"{low}-{high - 1}" for low, high in pairwise(edges)]
    return [*names, f"{edges[-1]}+"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CorrectionStates:
    """Of S sequences with M response tokens. sums, maxima, minima: float64 ``[S]`` by name.

    positions: float64 ``[S, len(POSITION_EDGES), len(BUCKET_SUMS)]``; lags: alike, by policy versions, or ``None``
    where they are not known. log_weights: float32 ``[M]``, of raw weights, without a clamp; empty without weights.
    """

    sums: Mapping[str, FloatArray]
    maxima: Mapping[str, FloatArray]
    minima: Mapping[str, FloatArray]
    positions: FloatArray
    lags: FloatArray | None
    log_weights: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty(0, dtype=np.float32))

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.sums["tokens"])

    @classmethod
    def merge(cls, parts: Sequence[CorrectionStates]) -> CorrectionStates:
        """Of all sequences of these parts, which share none. Raises ``ValueError`` for parts of other rules."""
        return _join(parts, lambda kind, arrays: np.concatenate(arrays))

    @classmethod
    def add(cls, parts: Sequence[CorrectionStates]) -> CorrectionStates:
        """Of the same sequences, of which each part has other tokens: the ranks of a context-parallel group.

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
        """The largest of all sequences; -inf without one."""
        return float(self.maxima[name].max(initial=-math.inf))

    def smallest(self, name: str) -> float:
        """The smallest of all sequences; inf without one."""
        return float(self.minima[name].min(initial=math.inf))


def exact_sum(values: FloatArray) -> float:
    """The sum rounded once, by Shewchuk's algorithm; where it would raise, IEEE's own sum."""
    try:
        return math.fsum(values.tolist())
    except (OverflowError, ValueError):
        with np.errstate(all="ignore"):
            return float(values.sum())


def _join(parts: Sequence[CorrectionStates], join: Callable[[str, list[FloatArray]], FloatArray]) -> CorrectionStates:
    """The parts as one; ``join`` gets the kind of a column and its arrays."""
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
