"""Lays the elements of a piece out in the canonical order, as windows of it that a sketch is summed over.

A window lies in one block, or in whole ones; ``constants`` defines blocks and rows. One that holds just the elements
of a row of values is read where it lies. Any other is first put together in a memory of zeros, which add nothing. So a
piece cut along its last dimension costs as much as the part of the whole tensor it lies in.
Indices are taken modulo 2^64: those of rows by content (``entries.virtual_start``) go beyond it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from mock_scheduler.trace.geometry import Rectangle
from mock_scheduler.trace.sketch.constants import BLOCK, NUM_SLOTS

#: Indices of the canonical order: one more is 0.
_NUM_INDICES = 1 << 64


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Run:
    """Rows ``[R, L]`` of elements one after another; row r begins at canonical index ``start + r * stride``.

    turn: multiples of 2^64 that were taken off. Runs of two turns may have the same indices: both are summed.
    """

    start: int
    stride: int
    values: torch.Tensor
    turn: int = 0

    @property
    def end(self) -> int:
        """Returns the index after the last element."""
        return self.start + (len(self.values) - 1) * self.stride + self.values.shape[1]

    def rows(self, first: int, last: int, columns: slice) -> Run:
        """Some rows, of each some elements; ``columns`` has a start."""
        start = self.start + first * self.stride + columns.start
        return replace(self, start=start, values=self.values[first:last, columns])

    def clip(self, begin: int, end: int) -> Iterator[Run]:
        """Yields the part within ``begin`` to ``end``: whole rows, and at both edges the rest of a row."""
        num_rows, length = self.values.shape
        first = min(max(-((self.start - begin) // self.stride), 0), num_rows)
        last = min(max((end - self.start - length) // self.stride + 1, 0), num_rows)
        if first > 0:
            row_start = self.start + (first - 1) * self.stride
            low, high = begin - row_start, min(end - row_start, length)
            if low < high:
                yield self.rows(first - 1, first, slice(low, high))
        if first < last:
            yield self.rows(first, last, slice(0, length))
        if max(first, last) < num_rows and first <= last:
            high = min(end - (self.start + last * self.stride), length)
            if high > 0:
                yield self.rows(last, last + 1, slice(0, high))

    def wrap(self) -> Iterator[Run]:
        """Yields the parts of the run between multiples of 2^64, with their indices modulo 2^64."""
        if self.end <= _NUM_INDICES:
            yield self
            return
        for turn in range(self.start // _NUM_INDICES, (self.end - 1) // _NUM_INDICES + 1):
            first = turn * _NUM_INDICES
            for run in self.clip(first, first + _NUM_INDICES):
                yield replace(run, start=run.start - first, turn=turn)


def runs_of(rectangle: Rectangle, values: torch.Tensor, shape: tuple[int, ...]) -> Iterator[Run]:
    """Yields the rectangle as runs of equal distance: trailing whole dimensions lie in one row."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * shape[dim]
    column = _first_of_whole(rectangle.sizes, shape, len(shape))
    row = _first_of_whole(rectangle.sizes, shape, column)
    start = sum(index * stride for index, stride in zip(rectangle.origin, strides, strict=True))
    length = strides[column] * rectangle.sizes[column] if shape else 1
    stride = strides[column - 1] if column else length
    for outer in product(*(range(size) for size in rectangle.sizes[:row])):
        offset = sum(index * strides[dim] for dim, index in enumerate(outer))
        yield from Run(start=start + offset, stride=stride, values=values[outer].reshape(-1, length)).wrap()


def _first_of_whole(sizes: tuple[int, ...], shape: tuple[int, ...], end: int) -> int:
    """The first of the contiguous dimensions before ``end``: all but it are whole."""
    dim = max(end - 1, 0)
    while dim > 0 and sizes[dim] == shape[dim]:
        dim -= 1
    return dim


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Window:
    """Rows of one block, or whole blocks: row ``first_row`` of the canonical order and ``num_elements`` from it on."""

    first_row: int
    num_elements: int
    runs: Sequence[Run]

    def values(self, memory: torch.Tensor) -> torch.Tensor:
        """Returns the elements, flat; elements of no run are zeros. ``memory``: of the runs' dtype; may be returned."""
        first = self.first_row * NUM_SLOTS
        if len(self.runs) == 1 and self.runs[0].start == first and self.runs[0].values.shape == (1, self.num_elements):
            return self.runs[0].values.view(-1)
        window = memory[: self.num_elements]
        if sum(run.values.numel() for run in self.runs) < self.num_elements:
            window.zero_()
        for run in self.runs:
            window.as_strided(run.values.shape, (run.stride, 1), window.storage_offset() + run.start - first).copy_(
                run.values
            )
        return window


def windows_of(runs: Sequence[Run], *, num_elements: int) -> list[Window]:
    """Cuts runs into windows of at most ``num_elements``, in canonical order within each turn.

    ``num_elements``: a number of rows that divides a block, or a multiple of a block.
    """
    by_window: dict[tuple[int, int], list[Run]] = {}
    for run in runs:
        for window in range(run.start // num_elements, (run.end - 1) // num_elements + 1):
            own = by_window.setdefault((run.turn, window), [])
            own.extend(run.clip(window * num_elements, (window + 1) * num_elements))
    return [_window(by_window[place]) for place in sorted(by_window) if by_window[place]]


def _window(runs: Sequence[Run]) -> Window:
    start, end = min(run.start for run in runs), max(run.end for run in runs)
    # Rows within one block; across blocks whole ones, whose constants differ.
    unit = NUM_SLOTS if start // BLOCK == (end - 1) // BLOCK else BLOCK
    first, last = start // unit * unit, -(-end // unit) * unit
    return Window(first_row=first // NUM_SLOTS, num_elements=last - first, runs=runs)
