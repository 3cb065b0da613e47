"""Sums over the segments of a jagged array, in NumPy and float64.

NumPy adds in one fixed order on one thread. torch splits a long sum among its threads, so that their number would
enter the last bits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def segment_ids(offsets: IntArray) -> IntArray:
    """The segment of every element, int64 ``[offsets[-1]]``; segment i is ``offsets[i]:offsets[i + 1]``."""
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


def segment_sums(values: FloatArray, offsets: IntArray) -> FloatArray:
    """The sum of every segment, added from first to last; 0 for an empty one."""
    return np.bincount(segment_ids(offsets), weights=values, minlength=len(offsets) - 1).astype(np.float64)


def discount_backwards(values: FloatArray, offsets: IntArray, factor: float) -> FloatArray:
    """y with y_t = x_t + factor · y_{t+1} inside every segment, and y_t = x_t for its last element.

    One step serves all segments that are long enough, so the work in Python grows with the longest one only.
    """
    lengths = np.diff(offsets)
    longest_first = np.argsort(-lengths, kind="stable")
    last = offsets[1:][longest_first] - 1
    ascending = np.sort(lengths)
    result = values.copy()
    for distance in range(1, int(lengths.max(initial=0))):
        num_longer = len(lengths) - int(np.searchsorted(ascending, distance, side="right"))
        positions = last[:num_longer] - distance
        result[positions] += factor * result[positions + 1]
    return result
