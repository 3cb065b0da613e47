"""Which columns of a framework's padded tensors belong to which row's tokens.

Contract: a row's tokens are the columns from the first to the last that the attention mask marks; where it marks none,
the first column alone, since every row has a token. What lies between unmarked is kept like any other value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mock_scheduler.adapters.padded.layout import Frame, PaddedLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSpans:
    """Per row, int64 ``[B]``: ``starts``, the column of the first token in full tensors; ``lengths``, tokens;
    ``splits``, the token that the first column of response tensors stands for. ``widths``: columns of each frame."""

    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    splits: npt.NDArray[np.int64]
    widths: Mapping[Frame, int]

    def columns(self, frame: Frame) -> list[tuple[int, int, int]]:
        """Per row ``(first, stop, token)``: the tensor's columns of the row's tokens, and the token of the first."""
        width = self.widths[frame]
        if frame is Frame.FULL or frame is Frame.SHIFTED:
            offsets = (1 if frame is Frame.SHIFTED else 0) - self.starts
        else:
            offsets = self.splits - width if frame is Frame.PROMPT else self.splits
        first = np.clip(-offsets, 0, width)
        stop = np.maximum(np.clip(self.lengths - offsets, 0, width), first)
        return list(zip(first.tolist(), stop.tolist(), (first + offsets).tolist(), strict=True))


def find_spans(attention: npt.NDArray[np.bool_], layout: PaddedLayout, widths: Mapping[Frame, int]) -> RowSpans:
    """The spans of rows whose tokens ``attention`` ``[B, columns]`` marks; ``splits`` are 0 if padded on the right."""
    num_rows, width = attention.shape
    starts = attention.argmax(axis=1) if width else np.zeros(num_rows, dtype=np.int64)
    stops = width - attention[:, ::-1].argmax(axis=1) if width else np.zeros(num_rows, dtype=np.int64)
    stops = np.where(attention.any(axis=1), stops, np.minimum(starts + 1, width))
    splits = widths[Frame.PROMPT] - starts if layout.is_left_padded else np.zeros(num_rows, dtype=np.int64)
    return RowSpans(starts=starts, lengths=stops - starts, splits=splits, widths=widths)


def gather(values: npt.NDArray[Any], columns: list[tuple[int, int, int]], rows: list[int]) -> npt.NDArray[Any]:
    """The values of these rows' columns, one row after another."""
    pieces = [values[row, columns[row][0] : columns[row][1]] for row in rows]
    return np.concatenate([values[:0].reshape(0), *pieces])


def gather_by_token(
    values: npt.NDArray[Any], columns: list[tuple[int, int, int]], rows: list[int], lengths: npt.NDArray[np.int64]
) -> npt.NDArray[Any]:
    """One value per token of these rows, one row after another; 0 for tokens that have no column."""
    out = np.zeros(int(lengths[rows].sum()) if rows else 0, dtype=values.dtype)
    position = 0
    for row in rows:
        first, stop, token = columns[row]
        out[position + token : position + token + stop - first] = values[row, first:stop]
        position += int(lengths[row])
    return out
