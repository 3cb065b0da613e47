"""The figures of a pair and of an update, computed plainly: whole arrays, a Python integer for each distance.

Sums are of 16 lanes for each chunk, added in the order of chunks within a block and of blocks, which is the contract of
``lanes`` and ``figures``: everything else here is written another way than there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from mock_scheduler.comparison.measure import lanes
from mock_scheduler.comparison.thresholds import BLOCK_ELEMENTS, CHUNK_ELEMENTS
from mock_scheduler.support.tensor_bytes import view_as_bits


def plain_figures(baseline: torch.Tensor, candidate: torch.Tensor, kept: torch.Tensor | None = None) -> dict[str, Any]:
    """Returns squares, counts and extremes of two flat tensors, over the elements where ``kept`` is True."""
    kept = torch.ones(len(baseline), dtype=torch.bool) if kept is None else kept
    sums = np.zeros(4)
    for start in range(0, len(baseline), BLOCK_ELEMENTS):
        block = np.zeros(4)
        for begin in range(start, min(start + BLOCK_ELEMENTS, len(baseline)), CHUNK_ELEMENTS):
            stop = min(begin + CHUNK_ELEMENTS, start + BLOCK_ELEMENTS)
            chosen = kept[begin:stop]
            if bool(chosen.any()):
                block += _dots(baseline[begin:stop][chosen], candidate[begin:stop][chosen])
        sums += block
    mine, other = baseline[kept], candidate[kept]
    bits = [view_as_bits(side).numpy() for side in (mine, other)]
    differs = bits[0] != bits[1]
    far = np.where(differs, np.abs(_subtract(mine, other)), 0.0)
    far[np.isnan(far)] = math.inf
    return {
        "num_different": int(differs.sum()),
        "max_abs": float(far.max(initial=0.0)),
        "worst": int(np.flatnonzero(far == far.max())[0] if far.max(initial=0.0) else np.argmax(differs))
        if differs.any()
        else -1,
        "max_ulp": max((abs(a - b) for a, b in zip(*map(_ordered, bits), strict=True)), default=0),
        "squares": tuple(float(each) for each in sums),
        "is_finite": bool(mine.isfinite().all() and other.isfinite().all()),
    }


def _dots(baseline: torch.Tensor, candidate: torch.Tensor) -> npt.NDArray[np.float64]:
    mine, other = baseline.double(), candidate.double()
    finite = mine.isfinite() & other.isfinite()
    differs = view_as_bits(baseline) != view_as_bits(candidate)
    mine, other = mine.where(finite, 0.0), other.where(finite, 0.0)
    exact = torch.from_numpy(_subtract(baseline, candidate)) if baseline.dtype is torch.int64 else mine - other
    difference = exact.where(finite | ~differs, math.inf)
    pairs = ((mine, mine), (mine, other), (other, other), (difference, difference))
    return np.array([plain_dot(left, right) for left, right in pairs])


def plain_dot(left: torch.Tensor, right: torch.Tensor) -> float:
    """Element after element: each is added to lane i % 16, and the upper half of the lanes to the lower one."""
    with np.errstate(over="ignore", invalid="ignore"):
        products = (left.numpy() * right.numpy()).tolist()
    lanes = [0.0] * 16
    for index, product in enumerate(products):
        lanes[index % 16] += product
    for width in (8, 4, 2, 1):
        lanes = [low + high for low, high in zip(lanes[:width], lanes[width:], strict=True)]
    return lanes[0]


def _subtract(baseline: torch.Tensor, candidate: torch.Tensor) -> npt.NDArray[np.float64]:
    if baseline.dtype is torch.int64:
        exact = [left - right for left, right in zip(baseline.tolist(), candidate.tolist(), strict=True)]
        return np.array([float(each) for each in exact], dtype=np.float64)
    with np.errstate(invalid="ignore"):
        return baseline.double().numpy() - candidate.double().numpy()


def _ordered(bits: npt.NDArray[np.signedinteger]) -> list[int]:
    """Bits of floats as integers in the order of the numbers, where both zeros are 0."""
    largest = int(np.iinfo(bits.dtype).max)
    return [each if each >= 0 else -(each & largest) for each in bits.tolist()]


@contextmanager
def without_c() -> Iterator[None]:
    """As where there was no compiler."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_sum_pair", "_sum_changes"):
            patch.setattr(lanes, name, lambda: None)
        yield


def plain_bits(tensor: torch.Tensor, stored: int) -> int | None:
    """The bits of mantissa of a tensor with at least 16 different numbers among its first 4096 that are not 0."""
    values = tensor.reshape(-1)
    values = values[values != 0]
    if len(torch.unique(values[:4096])) < 16:
        return None
    mantissas = view_as_bits(values).numpy() & ((1 << stored) - 1)
    together = int(np.bitwise_or.reduce(mantissas))
    return stored - (together & -together).bit_length() + 1 if together else 0


def plain_changes(
    old: tuple[torch.Tensor, torch.Tensor],
    new: tuple[torch.Tensor, torch.Tensor],
    gradients: tuple[torch.Tensor, torch.Tensor] | None,
    significant: float,
) -> tuple[float, float, float, int]:
    """||d_a - d_b||, ||d_a||, the norm of the rounding, and the number of elements left out, of at most one chunk."""
    mine, other = new[0].double() - old[0].double(), new[1].double() - old[1].double()
    mantissa, exponent = np.frexp(new[0].double().abs().numpy())
    space = torch.from_numpy(np.where(mantissa == 0.0, 0.0, np.ldexp(1.0, exponent - 1)))
    difference, num_excluded = other - mine, 0
    if gradients is not None:
        left, right = (each.numpy() if each.dtype is torch.float64 else each.float().numpy() for each in gradients)
        kept = torch.from_numpy(np.abs(left - right) <= np.abs(left) * significant)
        num_excluded = len(kept) - int(kept.sum())
        mine, difference, space = (each.where(kept, 0.0) for each in (mine, difference, space))
    eps = torch.finfo(new[0].dtype).eps
    return (
        math.sqrt(plain_dot(difference, difference)),
        math.sqrt(plain_dot(mine, mine)),
        math.sqrt(plain_dot(space, space) * eps**2),
        num_excluded,
    )
