"""Adds products in 16 lanes, so that a sum has the same bits on every processor.

Contract: of the elements that are summed together, element i is added to lane i % 16, in order; then the upper half of
the lanes is added to the lower one, until one is left. All is float64, and a product is fused with its sum only where
float64 holds it. ``native.c`` does so too, and reads each element once: it sums dense float32, bfloat16 and float64.
Where it was not built, and for other elements, NumPy gives the same bits, about ten times slower.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from mock_scheduler.comparison.measure.large_tensors import SCRATCH
from mock_scheduler.comparison.thresholds import CHUNK_ELEMENTS, NUM_LANES
from mock_scheduler.support.native import DTYPE_NUMBERS, load_function


def dot(left: torch.Tensor, right: torch.Tensor) -> float:
    """Returns <left, right> of flat float64 tensors, in lanes; overwrites the last of the thread's buffers."""
    size = left.numel()
    products = SCRATCH.wide(3, size + -size % NUM_LANES).numpy()
    # Squares of float64 may overflow.
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        np.multiply(left.numpy(), right.numpy(), out=products[:size])
        products[size:] = 0.0
        # Rows are added in order, as the array is contiguous.
        lanes = np.add.reduce(products.reshape(-1, NUM_LANES), axis=0)
        while len(lanes) > 1:
            lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    return float(lanes[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class PairExtremes:
    """What differs in a part of a pair of tensors; places are counted from the part's start, -1 where there is none.

    Args:
        max_abs: The largest |a - b|.
        num_different: Elements with other bits.
        first: The first of them.
        worst: The first with the largest |a - b|, where that is not 0.
        max_ulp: The largest number of numbers between a and b.
    """

    max_abs: float
    num_different: int
    first: int
    worst: int
    max_ulp: int


def sum_pair_in_c(baseline: torch.Tensor, candidate: torch.Tensor, squares: list[float]) -> PairExtremes | None:
    """Adds <a, a>, <a, b>, <b, b> and ||a - b||² of flat tensors to ``squares``, by chunks; returns what differs.

    ``None``, and nothing is added, where C cannot: another dtype, strides, an element or a sum that is not finite.
    """
    sum_pair = _sum_pair()
    if sum_pair is None or not _can_read([baseline, candidate]):
        return None
    sums, max_abs, counts = (ctypes.c_double * 4)(*squares), ctypes.c_double(), (ctypes.c_int64 * 4)()
    addresses, sizes = (baseline.data_ptr(), candidate.data_ptr()), (baseline.numel(), CHUNK_ELEMENTS)
    if not sum_pair(*addresses, *sizes, DTYPE_NUMBERS[baseline.dtype], sums, ctypes.byref(max_abs), counts):
        return None
    squares[:] = sums
    num_different, first, worst, max_ulp = counts
    return PairExtremes(
        max_abs=max_abs.value,
        num_different=num_different,
        first=first,
        worst=worst,
        max_ulp=max_ulp & 0xFFFFFFFFFFFFFFFF,  # the distance of two float64 may exceed 2^63
    )


def sum_changes_in_c(
    old: Sequence[torch.Tensor],
    new: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    significant: float,
    squares: list[float],
) -> int | None:
    """Adds ||d_a - d_b||², ||d_a||² and the squares of the rounding to ``squares``, as ``changes`` says.

    Each is flat, finite and of both sides; ``old`` may be one tensor of both, and ``grads`` none.

    Returns:
        The number of elements left out; ``None``, and nothing is added, where C cannot.
    """
    sum_changes = _sum_changes()
    if sum_changes is None or not _can_read([*old, *new]) or not _can_read(grads):
        return None
    pointers = (old[0], new[0], *grads[:1]), (old[-1], new[1], *grads[1:])
    sides = (ctypes.c_void_p * 6)()
    for place, side in zip((0, 3), pointers, strict=True):
        sides[place : place + len(side)] = [tensor.data_ptr() for tensor in side]
    sums = (ctypes.c_double * 3)(*squares)
    dtypes = DTYPE_NUMBERS[new[0].dtype], DTYPE_NUMBERS[grads[0].dtype] if grads else -1
    unit = torch.finfo(new[0].dtype).eps ** 2
    num_excluded = int(sum_changes(sides, new[0].numel(), CHUNK_ELEMENTS, *dtypes, significant, unit, sums))
    squares[:] = sums
    return num_excluded


def _can_read(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether C can read them: of one dtype that it knows, and of one element after the other."""
    dtypes = {tensor.dtype for tensor in tensors}
    return len(dtypes) < 2 and dtypes <= DTYPE_NUMBERS.keys() and all(tensor.is_contiguous() for tensor in tensors)


_POINTER, _SIZE, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_double

#: Types of the arguments, and of the result.
SUM_PAIR = [_POINTER, _POINTER, _SIZE, _SIZE, _INT, _POINTER, _POINTER, _POINTER], _INT
SUM_CHANGES = [_POINTER, _SIZE, _SIZE, _INT, _INT, _DOUBLE, _DOUBLE, _POINTER], _SIZE


@lru_cache(maxsize=1)
def _sum_pair() -> Callable[..., Any] | None:
    return load_function(__file__, "sum_pair_1", *SUM_PAIR)


@lru_cache(maxsize=1)
def _sum_changes() -> Callable[..., Any] | None:
    return load_function(__file__, "sum_changes_1", *SUM_CHANGES)
