"""Counts the representable numbers between two floats.

Contract: exact for every dtype, across zero too; finite numbers only mean something.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

#: Finite floats of opposite signs are farther apart than this, as integers: 2^(width - 1) less the bits of the largest.
SAME_SIGN: Mapping[torch.dtype, int] = {
    dtype: round(1.0 / torch.finfo(dtype).eps)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}


def largest_distance(left: torch.Tensor, right: torch.Tensor, distance: torch.Tensor, *, same_sign: int) -> int:
    """Returns the largest number of representable numbers between two floats.

    Bits of floats of one sign are ordered as integers are. Across zero, the distances of both from it are added; -0.0
    and 0.0 are one number.

    Args:
        left: Bits of the floats.
        right: Of the other side.
        distance: ``left - right``; overwritten.
        same_sign: Where all are at most this far apart, no signs are opposite; 0 where that is not known.
    """
    largest = _span(distance)
    if largest <= same_sign:
        return largest
    signs = torch.bitwise_xor(left, right, out=distance).numpy()
    opposite = np.flatnonzero(signs < 0) if signs.min() < 0 else signs[:0]  # torch.nonzero takes six times as long
    torch.sub(left, right, out=distance)
    if not opposite.size:
        return largest
    places = torch.from_numpy(opposite)
    # Without the sign bit the bits are the distance from zero. Two may exceed 2^63 together.
    magnitudes = (
        (side.index_select(0, places) & torch.iinfo(side.dtype).max).to(torch.int64).numpy().astype(np.uint64)
        for side in (left, right)
    )
    across = int(sum(magnitudes, np.uint64(0)).max())
    return max(across, _span(distance.index_fill_(0, places, 0)))


def _span(distance: torch.Tensor) -> int:
    low, high = torch.aminmax(distance)
    return max(-int(low), int(high))
