"""Counts that say where the parts of rows begin."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def count_before(flags: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Counts the flags before each place, and before the end: int64 ``[len(flags) + 1]``."""
    # NumPy's sum, since torch's waits for its threads, for milliseconds where the cores are busy.
    return np.concatenate([[0], flags.cumsum(dtype=np.int64)])


def compute_response_offsets(row_offsets: npt.NDArray[np.int64], mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """The start of each row's logprobs, int64 ``[B + 1]``; no row is empty, as ``reduceat`` needs."""
    offsets = np.zeros(len(row_offsets), dtype=np.int64)
    if len(row_offsets) > 1:
        # As bytes and in small integers where a row's sum fits, which NumPy adds up several times faster.
        sums = np.int32 if len(mask) < 2**31 else np.int64
        np.add.reduceat(mask.view(np.uint8), row_offsets[:-1], dtype=sums).cumsum(dtype=np.int64, out=offsets[1:])
    return offsets
