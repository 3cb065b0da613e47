"""A whole tensor, whose elements are read from where the ranks' files lie in memory.

A tensor cut along one dimension is a table: its rows are the indices of the dimensions before that one, and each piece
has some columns of all rows. Where the first dimension is cut, there is one row. A range of elements that lies in one
piece is read without a copy; others are copied range by range, into memory that stays in the processor's cache.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from mock_scheduler.trace.full.memory import MemoryPool
from mock_scheduler.trace.shards import Block, ShardSpec, blocks_along

#: Most slices of a table of several rows: each range that is read is copied from all of them.
_MAX_COLUMN_SLICES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """Holds the columns from ``start`` on of all rows: ``values`` ``[num_rows, num_columns]``, dense along columns."""

    start: int
    values: torch.Tensor

    @property
    def stop(self) -> int:
        """Returns the column after the last one."""
        return self.start + self.values.shape[1]


class WholeTensor:
    """A tensor in slices, put together only where somebody asks for all of it. Any number of threads may read ranges.

    Args:
        shape: Of the whole tensor.
        slices: By their first columns; they hold every element once.
        memory: Where it is put together; ``None`` where one slice holds all of it.
    """

    def __init__(self, shape: Sequence[int], slices: Sequence[Slice], memory: MemoryPool | None = None) -> None:
        self.shape = torch.Size(shape)
        self.dtype = slices[0].values.dtype
        self._slices = tuple(slices)
        self._starts = [each.start for each in slices]
        self._row_size = slices[-1].stop
        self._memory = memory
        self._whole: torch.Tensor | None = None

    @staticmethod
    def of(tensor: Values) -> WholeTensor:
        """Returns a tensor that lies in one place; a view where it is dense."""
        if isinstance(tensor, WholeTensor):
            return tensor
        made = WholeTensor(tensor.shape, [Slice(start=0, values=tensor.reshape(1, tensor.numel()))])
        made._whole = tensor
        return made

    def numel(self) -> int:
        """Returns the number of elements."""
        return self.shape.numel()

    def dim(self) -> int:
        """Returns the number of dimensions."""
        return len(self.shape)

    @property
    def is_floating_point(self) -> bool:
        """Whether elements are floats."""
        return self.dtype.is_floating_point

    def whole(self) -> torch.Tensor:
        """Returns all of it, of its shape; made once, by one thread at a time."""
        if self._whole is None:
            first = self._slices[0]
            if len(self._slices) == 1 or self._memory is None:
                self._whole = first.values.reshape(self.shape)
            else:
                self._whole = self._memory.allocate(self.shape, self.dtype, is_filled=True)
                table = self._whole.view(len(first.values), self._row_size)
                for each in self._slices:
                    table[:, each.start : each.stop] = each.values
        return self._whole

    def is_one_piece(self, start: int, stop: int) -> bool:
        """Whether a range of the flattened tensor is read without a copy."""
        if len(self._slices) == 1 and self._slices[0].values.is_contiguous():
            return True
        column = start % self._row_size
        return column + stop - start <= self._slices[bisect_right(self._starts, column) - 1].stop

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Returns flat elements, from one to before another: a view where it can be one, else a copy."""
        if len(self._slices) == 1 and self._slices[0].values.is_contiguous():
            return self._slices[0].values.view(-1)[start:stop]
        first, last = start // self._row_size, max(stop - 1, start) // self._row_size
        offset = first * self._row_size
        if first == last:
            return self._read_row(first, start - offset, stop - offset)
        if self._row_size > stop - start:
            middle = last * self._row_size
            return torch.cat([self.read(start, middle), self.read(middle, stop)])
        rows = torch.empty(last + 1 - first, self._row_size, dtype=self.dtype)
        for each in self._slices:
            rows[:, each.start : each.stop] = each.values[first : last + 1]
        return rows.view(-1)[start - offset : stop - offset]

    def _read_row(self, row: int, start: int, stop: int) -> torch.Tensor:
        found: list[torch.Tensor] = []
        for place in range(bisect_right(self._starts, start) - 1, len(self._slices)):
            each = self._slices[place]
            if found and each.start >= stop:
                break
            found.append(each.values[row, max(start - each.start, 0) : stop - each.start])
        return found[0] if len(found) == 1 else torch.cat(found)


Values = torch.Tensor | WholeTensor
"""A tensor in one place, or in slices."""


def read_together(
    sides: Sequence[WholeTensor], start: int, stop: int, chunk: int
) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Yields the same elements of all sides, in ranges: the first one's index, and flat elements of each side.

    ``chunk``: elements of a range, where they are copied.
    """
    if all(side.is_one_piece(start, stop) for side in sides):
        yield start, [side.read(start, stop) for side in sides]
        return
    for begin in range(start, stop, chunk):
        yield begin, [side.read(begin, min(begin + chunk, stop)) for side in sides]


def find_cut(specs: Sequence[ShardSpec]) -> int | None:
    """Returns the dimension along which pieces cut a tensor; 0 where they do not. ``None``: they make no table.

    ``specs``: of pieces that hold every element of one tensor once.
    """
    shape = specs[0].global_shape
    if not math.prod(shape) or not shape:
        return None
    uncut = [(Block(local_start=0, global_start=0, length=size),) for size in shape]
    cut = {dim for spec in specs for dim, blocks in enumerate(uncut) if blocks_along(spec, dim) != blocks}
    dim = min(cut, default=0)
    rest = (*range(dim), *range(dim + 1, len(shape)))
    if len(cut) > 1 or any(spec.local_shape[other] != shape[other] for spec in specs for other in rest):
        return None
    if math.prod(shape[:dim]) == 1:
        return dim
    # A flat range is no rectangle of a table of several rows.
    is_table = all(spec.flat_range is None for spec in specs)
    return dim if is_table and sum(len(blocks_along(spec, dim)) for spec in specs) <= _MAX_COLUMN_SLICES else None


def slice_up(specs: Sequence[ShardSpec], dim: int, load: Callable[[int], torch.Tensor]) -> list[Slice]:
    """Returns the slices of a tensor that is cut along ``dim``, by their first columns.

    ``load``: gives the stored elements of the piece of this number.
    """
    shape = specs[0].global_shape
    num_rows, unit = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
    slices = []
    for number, spec in enumerate(specs):
        stored = load(number).reshape(num_rows, -1)
        # Of a flat range, stored elements begin at its first one.
        first, last = spec.flat_range or (0, math.prod(spec.local_shape))
        for block in blocks_along(spec, dim):
            start, stop = (
                min(max(end * unit, first), last) for end in (block.local_start, block.local_start + block.length)
            )
            if start < stop:
                place = start + (block.global_start - block.local_start) * unit
                slices.append(Slice(start=place, values=stored[:, start - first : stop - first]))
    return sorted(slices, key=lambda each: each.start)
