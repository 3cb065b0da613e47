"""Checks shapes and offsets of jagged arrays, and adds over their segments, in NumPy and float64.

NumPy adds in one fixed order on one thread. torch splits a long sum among its threads, so their number would enter the
last bits.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch


def raise_value_error(subject: str, problems: list[str]) -> None:
    """Raise ``ValueError`` that lists the problems; nothing where there are none."""
    if problems:
        raise ValueError(f"{subject}: {'; '.join(problems)}")


def check_equal_shapes(subject: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ``ValueError`` naming every tensor whose shape is not that of the first."""
    expected_name, expected = next(iter(tensors.items()))
    problems = [
        f"{name} has shape {list(tensor.shape)}, {expected_name} has {list(expected.shape)}"
        for name, tensor in tensors.items()
        if tensor.shape != expected.shape
    ]
    raise_value_error(subject, problems)


def size_problems(tensors: Mapping[str, torch.Tensor | None], size: int, unit: str) -> list[str]:
    """Lists tensors of another shape than ``[size]``; ``None`` is passed over. ``unit``: the thing of an entry."""
    return [
        f"{name} has shape {list(tensor.shape)}; expected [{size}], one per {unit}"
        for name, tensor in tensors.items()
        if tensor is not None and tensor.shape != (size,)
    ]


def offset_problems(name: str, offsets: torch.Tensor, *, num_segments: int, total: int) -> list[str]:
    """Says how offsets differ from ``[num_segments + 1]`` numbers rising from 0 to ``total``; else empty."""
    if offsets.shape != (num_segments + 1,):
        return [f"{name} has shape {list(offsets.shape)}; expected [{num_segments + 1}]"]
    if int(offsets[0]) != 0 or int(offsets[-1]) != total or bool((offsets.diff() < 0).any()):
        return [f"{name} must rise from 0 to {total}"]
    return []


FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def segment_ids(offsets: IntArray) -> IntArray:
    """The segment of every element, int64 ``[offsets[-1]]``; segment i is ``offsets[i]:offsets[i + 1]``."""
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


def segment_sums(values: FloatArray, offsets: IntArray) -> FloatArray:
    """Returns the sum of every segment, added from first to last; 0 for an empty one."""
    return np.bincount(segment_ids(offsets), weights=values, minlength=len(offsets) - 1).astype(np.float64)


def discount_backwards(values: FloatArray, offsets: IntArray, factor: float) -> FloatArray:
    """Returns y with y_t = x_t + factor · y_{t+1} inside every segment, and y_t = x_t for its last element.

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
