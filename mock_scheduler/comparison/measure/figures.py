"""Computes all figures of the difference of two tensors, in one pass over both.

Contract: figures are computed in float64; bits are compared as integers, so -0.0 differs from 0.0 and one NaN from
another. Tensors are read once, in chunks small enough for the processor's cache, by several threads
(``large_tensors``): memory beyond the tensors is a few chunks for each, and the sums do not depend on their number, nor
on the processor (``lanes``). Contiguous tensors are not copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from mock_scheduler.comparison.measure.lanes import dot, sum_pair_in_c
from mock_scheduler.comparison.measure.large_tensors import SCRATCH, map_blocks, split_blocks, split_chunks
from mock_scheduler.comparison.measure.spacing import SAME_SIGN, largest_distance
from mock_scheduler.comparison.tensors import Figures, WorstElement
from mock_scheduler.comparison.thresholds import BLOCK_ELEMENTS, CHUNK_ELEMENTS
from mock_scheduler.support.tensor_bytes import have_equal_bytes, view_as_bits
from mock_scheduler.trace.full.whole import Values, WholeTensor, read_together

__all__ = ["CHUNK_ELEMENTS", "PairSums", "compute_figures", "flatten_present", "sum_pair", "sum_values"]


def compute_figures(baseline: Values, candidate: Values, *, present: torch.Tensor | None = None) -> Figures:
    """Computes all figures of ``baseline - candidate``, over the elements where ``present`` is True.

    Args:
        baseline: bool, integers or floats on the CPU. NaN and infinity are left out of all sums where both sides have
            the same bits, and count as an infinite difference elsewhere.
        candidate: Of the same dtype and shape.
        present: bool of the tensors' shape, or of its leading dimensions with ones after them, as ``[T, 1]``; ``None``
            is all.

    Raises:
        ValueError: Tensors of two shapes or dtypes, or complex ones.
    """
    return sum_pair(baseline, candidate, present=present).figures


def sum_pair(
    baseline: Values,
    candidate: Values,
    *,
    present: torch.Tensor | None = None,
) -> PairSums:
    """Computes the figures, ||baseline|| and whether all is finite, in the same pass; as ``compute_figures``."""
    left, right = WholeTensor.of(baseline), WholeTensor.of(candidate)
    _check_pair(left, right)
    rows = None if present is None else flatten_present(present, left.shape)
    num_elements = left.numel()
    if rows is not None:
        num_elements = int(torch.count_nonzero(rows)) * (num_elements // max(rows.numel(), 1))

    def add_up(block: tuple[int, int]) -> _Sums:
        part = _Sums(is_floating=left.is_floating_point)
        for chunk in _read_block(left, right, rows, block):
            part.add(chunk)
        return part

    sums = _Sums(is_floating=left.is_floating_point)
    blocks = split_blocks(left.numel()) if rows is None else _split_rows(rows.numel(), left.numel())
    for part in map_blocks(add_up, blocks):
        # In the order of the blocks, so that the sum has the same bits whichever thread was first.
        sums.add_block(part)
    return sums.result(num_elements, left, right)


def sum_values(baseline: WholeTensor, candidate: WholeTensor, present: torch.Tensor | None) -> PairSums:
    """Computes the same as ``sum_pair``; of two dtypes, of their values in float64, which holds those of any float."""
    if baseline.dtype != candidate.dtype:
        return sum_pair(baseline.whole().double(), candidate.whole().double(), present=present)
    return sum_pair(baseline, candidate, present=present)


def flatten_present(present: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Returns bool ``[n]``: a mask of leading dimensions, each element of which stands for ``numel / n`` elements in a
    row.

    Raises:
        ValueError: The mask is not bool, or neither of the shape nor of leading dimensions with ones after.
    """
    leading = len(shape)
    while leading and present.dim() == len(shape) and present.shape[:leading] != shape[:leading]:
        leading -= 1
    if present.dtype is not torch.bool or present.dim() != len(shape) or present.shape[leading:].numel() != 1:
        raise ValueError(
            f"present is {present.dtype} of shape {list(present.shape)}; a mask of a tensor of shape {list(shape)} is "
            "bool and has its shape, or its leading dimensions with ones after them"
        )
    return present.reshape(-1)


def _check_pair(baseline: WholeTensor, candidate: WholeTensor) -> None:
    if baseline.dtype != candidate.dtype or baseline.shape != candidate.shape or baseline.dtype.is_complex:
        raise ValueError(
            f"cannot subtract {candidate.dtype} of shape {list(candidate.shape)} from {baseline.dtype} of shape "
            f"{list(baseline.shape)}: both must have one shape and one dtype, which is not complex"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PairSums:
    """Sums of one pass over two tensors, of the elements that count.

    Args:
        figures: Of the difference.
        norm: ``||a||``.
        other_norm: ``||b||``.
        is_finite: No element of either side is NaN or infinite.
    """

    figures: Figures
    norm: float
    other_norm: float
    is_finite: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chunk:
    """Flat parts of both tensors, of one chunk or several: of ``rows`` of ``row_size`` elements after ``start``;
    ``None``: all that follow.
    """

    baseline: torch.Tensor
    candidate: torch.Tensor
    start: int
    rows: torch.Tensor | None = None
    row_size: int = 1

    def split(self) -> Iterator[_Chunk]:
        """Yields parts of at most ``CHUNK_ELEMENTS``, which are summed by themselves; chosen rows are never more."""
        if self.rows is not None:
            yield self
            return
        for start, stop in split_chunks(0, self.baseline.numel()):
            baseline, candidate = self.baseline[start:stop], self.candidate[start:stop]
            yield _Chunk(baseline=baseline, candidate=candidate, start=self.start + start)

    def find(self, place: int) -> int:
        """Returns the index in the flattened tensor of an element of the chunk."""
        if self.rows is None:
            return self.start + place
        row, column = divmod(place, self.row_size)
        return self.start + int(self.rows[row]) * self.row_size + column


def _read_block(
    left: WholeTensor, right: WholeTensor, rows: torch.Tensor | None, block: tuple[int, int]
) -> Iterator[_Chunk]:
    """Yields the chunks of a block: of elements, or of rows where there is a mask of them."""
    if rows is None:
        yield from _read_dense(left, right, *block)
        return
    row_size = left.numel() // max(rows.numel(), 1)
    rows_per_chunk = max(CHUNK_ELEMENTS // max(row_size, 1), 1)
    for start in range(*block, rows_per_chunk):
        stop = min(start + rows_per_chunk, block[1])
        mask = rows[start:stop]
        if bool(mask.all()):
            yield from _read_dense(left, right, start * row_size, stop * row_size)
        elif bool(mask.any()):
            chosen = mask.nonzero().squeeze(1)
            mine, other = (
                side.read(start * row_size, stop * row_size).view(-1, row_size).index_select(0, chosen).view(-1)
                for side in (left, right)
            )
            yield _Chunk(baseline=mine, candidate=other, start=start * row_size, rows=chosen, row_size=row_size)


def _read_dense(left: WholeTensor, right: WholeTensor, start: int, stop: int) -> Iterator[_Chunk]:
    """Yields all from one element to another."""
    for begin, (baseline, candidate) in read_together([left, right], start, stop, CHUNK_ELEMENTS):
        yield _Chunk(baseline=baseline, candidate=candidate, start=begin)


def _split_rows(num_rows: int, num_elements: int) -> list[tuple[int, int]]:
    """Returns blocks of rows, each of as many elements as a block has, or of one row."""
    step = max(BLOCK_ELEMENTS // max(num_elements // max(num_rows, 1), 1), 1)
    return [(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


class _Sums:
    """Sums over the chunks so far."""

    def __init__(self, *, is_floating: bool) -> None:
        self._is_floating = is_floating
        self._squares = [0.0, 0.0, 0.0, 0.0]
        self._num_different = 0
        self._max_abs = 0.0
        self._max_ulp = 0
        self._worst: int | None = None
        self._is_finite = True

    def add(self, chunk: _Chunk) -> None:
        """Counts elements with other bits, and adds the products of the values."""
        found = sum_pair_in_c(chunk.baseline, chunk.candidate, self._squares)
        if found is None:
            for part in chunk.split():
                self._add_part(part)
            return
        if found.num_different and not self._num_different:
            self._worst = chunk.find(found.first)
        if found.max_abs > self._max_abs:
            self._max_abs, self._worst = found.max_abs, chunk.find(found.worst)
        self._num_different += found.num_different
        self._max_ulp = max(self._max_ulp, found.max_ulp)

    def _add_part(self, chunk: _Chunk) -> None:
        size = chunk.baseline.numel()
        baseline = SCRATCH.wide(0, size)
        # The bytes themselves, and no digest of them: a file may say any digest.
        if have_equal_bytes(chunk.baseline, chunk.candidate):
            self._add_equal(baseline.copy_(chunk.baseline))
            return
        left, right = (view_as_bits(side) for side in (chunk.baseline, chunk.candidate))
        # As integers: 0 where, and only where, the bits are equal.
        distance = torch.sub(left, right, out=SCRATCH.bits(size, left.dtype))
        num_different = int(np.count_nonzero(distance.numpy()))  # torch's takes twice as long
        baseline.copy_(chunk.baseline)
        # The first unequal element stands in as the worst until a finite difference is seen.
        if not self._num_different:
            self._worst = chunk.find(int(distance.ne(0).to(torch.uint8).argmax()))
        self._num_different += num_different
        candidate = SCRATCH.wide(1, size).copy_(chunk.candidate)
        products = _multiply(baseline, candidate)
        unequal = None
        # One check of a sum in place of a pass over the elements: NaN and infinity survive adding.
        if not math.isfinite(sum(products)):
            unequal = self._clear_non_finite(baseline, candidate, distance)
            products = _multiply(baseline, candidate)
        if self._is_floating:
            same_sign = 0 if unequal is not None else SAME_SIGN.get(chunk.baseline.dtype, 0)
            self._max_ulp = max(self._max_ulp, largest_distance(left, right, distance, same_sign=same_sign))
        # Float64 holds integers up to 2^53 exactly, so only int64 needs care.
        exact = chunk.baseline.dtype is torch.int64
        difference = _subtract_exactly(left, right) if exact else torch.sub(baseline, candidate, out=candidate)
        if unequal is not None:
            difference.masked_fill_(unequal, math.inf)
        self._add_difference(chunk, difference, products)

    def add_block(self, other: _Sums) -> None:
        """Adds the sums over the chunks that follow."""
        self._squares = [mine + theirs for mine, theirs in zip(self._squares, other._squares, strict=True)]
        if other._max_abs > self._max_abs or (other._num_different and not self._num_different):
            self._max_abs, self._worst = other._max_abs, other._worst
        self._num_different += other._num_different
        self._max_ulp = max(self._max_ulp, other._max_ulp)
        self._is_finite &= other._is_finite

    def _add_equal(self, values: torch.Tensor) -> None:
        square = dot(values, values)
        if not math.isfinite(square):
            self._is_finite &= bool(values.isfinite().all())
            values.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            square = dot(values, values)
        # <a, a>, <a, b> and <b, b> are one number where a and b are equal; ||a - b||² stays 0.
        for place in range(3):
            self._squares[place] += square

    def _clear_non_finite(
        self, baseline: torch.Tensor, candidate: torch.Tensor, distance: torch.Tensor
    ) -> torch.Tensor:
        """Sets both to 0 where either is not finite; returns bool: where they also differ."""
        non_finite = ~(baseline.isfinite() & candidate.isfinite())
        self._is_finite &= not bool(non_finite.any())
        baseline.masked_fill_(non_finite, 0.0)
        candidate.masked_fill_(non_finite, 0.0)
        return non_finite & distance.ne(0)

    def _add_difference(self, chunk: _Chunk, difference: torch.Tensor, products: tuple[float, float, float]) -> None:
        # ||a - b||² from the differences themselves: <a,a> - 2<a,b> + <b,b> would cancel where the two are near.
        for place, product in enumerate((*products, dot(difference, difference))):
            self._squares[place] += product
        values = difference.numpy()  # torch.aminmax takes twice as long here
        low, high = float(values.min()), float(values.max())
        largest = max(-low, high)
        if largest > self._max_abs:
            self._max_abs = largest
            # The first of equally large ones, whichever its sign, so that the place does not depend on the chunks.
            ends = ((-low, values.argmin), (high, values.argmax))
            self._worst = chunk.find(min(int(find()) for size, find in ends if size == largest))

    def result(self, num_elements: int, baseline: WholeTensor, candidate: WholeTensor) -> PairSums:
        """Returns the figures of all chunks; without any chunk, of equal tensors."""
        mine, product, other, difference = self._squares
        norm, is_equal = math.sqrt(mine), not self._num_different
        worst = None
        if self._worst is not None:
            index = tuple(int(place) for place in np.unravel_index(self._worst, tuple(baseline.shape)))
            values = [float(side.read(self._worst, self._worst + 1)) for side in (baseline, candidate)]
            worst = WorstElement(index=index, baseline=values[0], candidate=values[1])
        figures = Figures(
            num_elements=num_elements,
            num_different=self._num_different,
            max_abs=self._max_abs,
            norm=math.sqrt(difference),
            relative=_divide(math.sqrt(difference), norm, both_zero=0.0),
            slope=1.0 if is_equal else _divide(product, mine, both_zero=1.0 if other == 0.0 else math.inf),
            cosine=1.0 if is_equal else _cosine(mine, product, other),
            max_ulp=self._max_ulp if self._is_floating else None,
            worst=worst,
        )
        return PairSums(figures=figures, norm=norm, other_norm=math.sqrt(other), is_finite=self._is_finite)


def _multiply(baseline: torch.Tensor, candidate: torch.Tensor) -> tuple[float, float, float]:
    """Returns <a, a>, <a, b> and <b, b>."""
    pairs = ((baseline, baseline), (baseline, candidate), (candidate, candidate))
    mine, product, other = (dot(left, right) for left, right in pairs)
    return mine, product, other


def _subtract_exactly(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Returns float64: the difference of int64 values, not all of which float64 holds, rounded once."""
    # Both halves of a difference of int64 are below 2^33, so float64 holds them; only their sum is rounded.
    high = ((left >> 32) - (right >> 32)).double()
    low = ((left & 0xFFFFFFFF) - (right & 0xFFFFFFFF)).double()
    return high.mul_(2.0**32).add_(low)


def _divide(numerator: float, denominator: float, *, both_zero: float) -> float:
    if denominator:
        return math.inf if math.isinf(numerator) else numerator / denominator
    return math.inf if numerator else both_zero


def _cosine(mine: float, product: float, other: float) -> float:
    if mine == 0.0 or other == 0.0:
        return 1.0 if mine == other else 0.0
    # Divided one root after the other, since the product of two squares may overflow.
    return max(-1.0, min(1.0, product / math.sqrt(mine) / math.sqrt(other)))
