"""Sums a tensor's elements into the parts of a sketch, one piece at a time, on the device where the piece is.

A piece is walked through in windows of the canonical order, a cache's worth at a time: one holding just the elements
of a whole window is read where it lies, any other is first put into a window of zeros, which add nothing. So a piece
cut along its last dimension costs as much as the part of the whole tensor it lies in.
Indices are taken modulo 2^64: those of rows by content (``entries.virtual_start``) go beyond it.
Every sum has a fixed order: there are no atomic operations, and a number of threads changes rounding at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from mock_scheduler.errors import TraceError
from mock_scheduler.trace.geometry import Rectangle, rectangles_of
from mock_scheduler.trace.shards import ShardSpec
from mock_scheduler.trace.sketch.constants import (
    BLOCK,
    NUM_SLOTS,
    ROWS,
    UPPER_HALF,
    block_constants,
    constants_of_block,
    tables,
)

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Blocks of a window, of which the host takes one, to stay in its cache: what keeps a GPU busy.
_BLOCKS_ON_DEVICE = 64
#: Indices of the canonical order: one more is 0.
_NUM_INDICES = 1 << 64
_SIGNED_UPPER_HALF = UPPER_HALF - (1 << 64)


class SketchSums:
    """Sums over the added pieces of one tensor, all of one dtype; they stay on the device of the first."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        if dtype.is_complex:
            raise TraceError(
                f"a tensor of {dtype} has no sketch; trace its real and its imaginary part, or trace.level=full"
            )
        self.dtype = dtype
        self.num_elements = 0
        self.num_nan = 0
        self.num_infinite = 0
        self.slots = torch.zeros(NUM_SLOTS, dtype=torch.float64, device=device)
        self.sum_of_squares = torch.zeros((), dtype=torch.float64, device=device)
        self.fingerprint = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def add(self, tensor: torch.Tensor, spec: ShardSpec) -> list[Rectangle]:
        """Add a piece, and return the elements of the whole it holds.

        Raises ``TraceError`` where its shape is not its spec's.
        """
        parts = list(rectangles_of(tensor.detach(), spec))
        runs = [
            run
            for rectangle, values in parts
            for whole_run in _runs(rectangle, values, spec.global_shape)
            for run in whole_run.wrap()
        ]
        self.num_elements += sum(rectangle.num_elements for rectangle, _ in parts)
        # First as if all were finite, which costs less; NaN and infinities show in the sum of squares.
        sums = self._sum(runs, tensor.device, is_finite=True)
        if not bool(torch.isfinite(sums.sum_of_squares)):
            sums = self._sum(runs, tensor.device, is_finite=False)
        own = self.slots.device
        self.slots += sums.slots.to(own)
        self.sum_of_squares += sums.sum_of_squares.to(own)
        self.fingerprint += sums.fingerprint.to(own)
        self.num_nan += int(sums.num_nan)
        self.num_infinite += int(sums.num_infinite)
        return [rectangle for rectangle, _ in parts]

    def _sum(self, runs: list[_Run], device: torch.device, *, is_finite: bool) -> _WindowSums:
        sums = _WindowSums(device, is_finite=is_finite)
        is_host = _is_host(device)
        add = sums.add_rows if is_host else sums.add_blocks
        for row, window in _windows(runs, self.dtype, num_blocks=1 if is_host else _BLOCKS_ON_DEVICE):
            add(row, window)
        return sums


class _WindowSums:
    """Sums over windows; ``is_finite``: NaN and infinities are not looked for, and make ``sum_of_squares`` so too."""

    def __init__(self, device: torch.device, *, is_finite: bool) -> None:
        self.is_finite = is_finite
        self.num_nan: torch.Tensor | int = 0
        self.num_infinite: torch.Tensor | int = 0
        self.slots = torch.zeros(NUM_SLOTS, dtype=torch.float64, device=device)
        self.sum_of_squares = torch.zeros((), dtype=torch.float64, device=device)
        self.fingerprint = torch.zeros((), dtype=torch.int64, device=device)
        self._scratch = torch.empty(0, dtype=torch.float64, device=device)

    def add_rows(self, row: int, window: torch.Tensor) -> None:
        """Add rows of one block, from ``row`` on; on the host, in a scratch memory within the cache."""
        size = window.numel()
        if len(self._scratch) < size:
            self._scratch = torch.empty(size, dtype=torch.float64)
        values = self._scratch[:size]
        block, first = divmod(row, ROWS)
        table, (sign, shift, key) = tables(window.device), constants_of_block(block)
        own = slice(first * NUM_SLOTS, first * NUM_SLOTS + size)
        words = values.view(torch.int64)
        _write_words(words, window)
        # int64 wraps around, which is arithmetic mod 2^64.
        self.fingerprint.add_(torch.dot(words, table.keys[own]), alpha=key)
        self._convert(values, window)
        columns = values.mul_(table.signs[own]).view(-1, NUM_SLOTS).sum(dim=0)
        # A block's shift turns its columns round: the end of the row goes to the first slots.
        self.slots[shift:].add_(columns[: NUM_SLOTS - shift], alpha=sign)
        self.slots[:shift].add_(columns[NUM_SLOTS - shift :], alpha=sign)

    def add_blocks(self, row: int, window: torch.Tensor) -> None:
        """Add rows of one block or whole blocks, from ``row`` on, on any device and without waiting for it."""
        block, first = divmod(row, ROWS)
        num_rows = window.numel() // NUM_SLOTS
        num_blocks = max(num_rows // ROWS, 1)
        num_rows //= num_blocks
        table, constants = tables(window.device), block_constants(window.device, block, num_blocks)
        own = slice(first * NUM_SLOTS, (first + num_rows) * NUM_SLOTS)
        words = torch.empty_like(window, dtype=torch.int64)
        _write_words(words, window)
        words = words.view(num_blocks, -1).mul_(table.keys[own]).sum(dim=1)
        self.fingerprint += words.mul_(constants.keys).sum()
        values = torch.empty_like(window, dtype=torch.float64)
        self._convert(values, window)
        signed = values.view(num_blocks, -1).mul_(table.signs[own])
        columns = signed.view(num_blocks, num_rows, NUM_SLOTS).sum(dim=1)
        # The same turn, by index, for all blocks at once.
        source = (table.slots - constants.shifts[:, None]).remainder_(NUM_SLOTS)
        self.slots += columns.gather(1, source).mul_(constants.signs[:, None]).sum(dim=0)

    def _convert(self, values: torch.Tensor, window: torch.Tensor) -> None:
        """Write the window as float64 to ``values``, and count and square it."""
        values.copy_(window)
        if not self.is_finite:
            is_nan, is_infinite = values.isnan(), values.isinf()
            self.num_nan = self.num_nan + is_nan.sum()
            self.num_infinite = self.num_infinite + is_infinite.sum()
            values.masked_fill_(is_nan | is_infinite, 0.0)
        # On a device a BLAS call need not have a fixed order.
        self.sum_of_squares += torch.dot(values, values) if _is_host(values.device) else values.square().sum()


def _is_host(device: torch.device) -> bool:
    return device.type == "cpu"


def _write_words(words: torch.Tensor, window: torch.Tensor) -> None:
    """Write to int64 ``words`` the word of each element's bits for the fingerprint.

    Bits of 64-bit elements are taken as halves, since their highest ones alone would lose most bits of the key.
    """
    size = window.element_size()
    bits = window.view(_INTEGERS[size])
    if size < 8:
        words.copy_(bits)
        return
    torch.bitwise_right_shift(bits, 32, out=words)
    words.mul_(_SIGNED_UPPER_HALF).add_(bits & 0xFFFFFFFF)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Run:
    """Rows ``[R, L]`` of elements one after another; row r begins at canonical index ``start + r * stride``."""

    start: int
    stride: int
    values: torch.Tensor

    @property
    def end(self) -> int:
        """Returns the index after the last element."""
        return self.start + (len(self.values) - 1) * self.stride + self.values.shape[1]

    def rows(self, first: int, last: int, columns: slice) -> _Run:
        """Some rows, of each some elements; ``columns`` has a start."""
        start = self.start + first * self.stride + columns.start
        return _Run(start=start, stride=self.stride, values=self.values[first:last, columns])

    def clip(self, begin: int, end: int) -> Iterator[_Run]:
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

    def wrap(self) -> Iterator[_Run]:
        """Yields the parts of the run between multiples of 2^64, with their indices modulo 2^64."""
        if self.end <= _NUM_INDICES:
            yield self
            return
        for turn in range(self.start // _NUM_INDICES, (self.end - 1) // _NUM_INDICES + 1):
            first = turn * _NUM_INDICES
            for run in self.clip(first, first + _NUM_INDICES):
                yield _Run(start=run.start - first, stride=run.stride, values=run.values)


def _runs(rectangle: Rectangle, values: torch.Tensor, shape: tuple[int, ...]) -> Iterator[_Run]:
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
        yield _Run(start=start + offset, stride=stride, values=values[outer].reshape(-1, length))


def _first_of_whole(sizes: tuple[int, ...], shape: tuple[int, ...], end: int) -> int:
    """The first of the contiguous dimensions before ``end``: all but it are whole."""
    dim = max(end - 1, 0)
    while dim > 0 and sizes[dim] == shape[dim]:
        dim -= 1
    return dim


def _windows(runs: list[_Run], dtype: torch.dtype, *, num_blocks: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields windows holding all runs, each with its first row and its elements, in canonical order.

    A window lies in ``num_blocks`` blocks; it is rows of one of them, or whole ones.
    """
    width = BLOCK * num_blocks
    by_window: dict[int, list[_Run]] = {}
    for run in runs:
        for window in range(run.start // width, (run.end - 1) // width + 1):
            by_window.setdefault(window, []).extend(run.clip(window * width, (window + 1) * width))
    for window in sorted(by_window):
        if by_window[window]:
            yield _fill_window(by_window[window], dtype)


def _fill_window(runs: list[_Run], dtype: torch.dtype) -> tuple[int, torch.Tensor]:
    """The first row of a window the runs lie in, and its elements; elements of no run are zeros."""
    start, end = min(run.start for run in runs), max(run.end for run in runs)
    # Rows within one block; across blocks whole ones, whose constants differ.
    unit = NUM_SLOTS if start // BLOCK == (end - 1) // BLOCK else BLOCK
    first, last = start // unit * unit, -(-end // unit) * unit
    if len(runs) == 1 and len(runs[0].values) == 1 and (start, end) == (first, last):
        return first // NUM_SLOTS, runs[0].values.view(-1)
    window = torch.zeros(last - first, dtype=dtype, device=runs[0].values.device)
    for run in runs:
        num_rows, length = run.values.shape
        window.as_strided((num_rows, length), (run.stride, 1), run.start - first).copy_(run.values)
    return first // NUM_SLOTS, window
