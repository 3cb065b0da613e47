"""Sums what an update changed in both runs, over the elements with a say (``distance`` says which).

Contract: sums are in float64 and in lanes (``lanes``), by chunks and blocks in a fixed order, so that they have the
same bits on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from mock_scheduler.comparison.measure.lanes import dot, sum_changes_in_c
from mock_scheduler.comparison.measure.large_tensors import SCRATCH, map_blocks, split_blocks, split_chunks
from mock_scheduler.comparison.thresholds import CHUNK_ELEMENTS
from mock_scheduler.support.tensor_bytes import view_as_bits
from mock_scheduler.trace.full.whole import Values, WholeTensor, read_together

Pair = tuple[Values, Values]
"""The same tensor of baseline and candidate."""


@dataclass(kw_only=True, slots=True)
class Changes:
    """Holds squares of d_a - d_b, of d_a and of the rounding of storing, over the elements with a say."""

    squares: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    num_excluded: int = 0

    @property
    def distance(self) -> float:
        """Returns ||d_a - d_b||."""
        return math.sqrt(self.squares[0])

    @property
    def size(self) -> float:
        """Returns ||d_a||."""
        return math.sqrt(self.squares[1])

    @property
    def rounding(self) -> float:
        """Returns the norm of the spacings of the stored numbers."""
        return math.sqrt(self.squares[2])

    def add(self, old: Sequence[torch.Tensor], new: Sequence[torch.Tensor], counts: torch.Tensor | None) -> None:
        """Adds a chunk. ``old``: of both sides, or one tensor of both. ``counts``: bool; ``None``: all elements."""
        first, last = _widen(old[0], 2), _widen(old[-1], 3) if len(old) > 1 else None
        mine = _subtract(_widen(new[0], 0), first)
        other = _subtract(_widen(new[1], 1), first if last is None else last)
        difference = _subtract(other, mine)
        # The spacing of the numbers of the dtype is this times its eps.
        space = _widen(_power_of_two_below(new[0]), 2)
        if counts is not None:
            kept = counts.numpy()
            self.num_excluded += len(kept) - int(np.count_nonzero(kept))
            for values in (mine, difference, space):
                # Six times as fast as filling the others with 0; a square has no sign.
                np.multiply(values.numpy(), kept, out=values.numpy())
                # A change between huge numbers overflows, and infinity times 0 is NaN.
                if not math.isfinite(float(values.sum())):
                    values.masked_fill_(~counts, 0.0)
        # The error of storing is at most half the spacing on each side, so one spacing between them.
        rounding = dot(space, space) * torch.finfo(new[0].dtype).eps ** 2
        self._add_squares((dot(difference, difference), dot(mine, mine), rounding))

    def add_block(self, other: Changes) -> None:
        """Adds the sums over the chunks that follow."""
        self._add_squares(other.squares)
        self.num_excluded += other.num_excluded

    def _add_squares(self, others: Sequence[float]) -> None:
        self.squares = [mine + other for mine, other in zip(self.squares, others, strict=True)]


def sum_changes(
    before: Pair, after: Pair, gradients: Pair | None, significant: float, *, is_same_before: bool
) -> Changes:
    """Sums the changes from ``before`` to ``after``.

    Args:
        before: Of any shape and floating dtype, all finite, as the others.
        after: Of the same shape and dtype.
        gradients: Of the same shape; ``None`` where they tell no elements apart.
        significant: An element has a say where ``|g_a - g_b| <= significant * |g_a|``.
        is_same_before: Both of ``before`` have equal bits.
    """
    olds, num_olds = before[:1] if is_same_before else before, 1 if is_same_before else 2
    sides = [WholeTensor.of(each) for each in (*olds, *after, *(gradients or ()))]

    def add_up(block: tuple[int, int]) -> Changes:
        part = Changes()
        for _, values in read_together(sides, *block, CHUNK_ELEMENTS):
            old, new, grad = values[:num_olds], values[num_olds : num_olds + 2], values[num_olds + 2 :]
            num_excluded = sum_changes_in_c(old, new, grad, significant, part.squares)
            if num_excluded is not None:
                part.num_excluded += num_excluded
                continue
            for start, stop in split_chunks(0, new[0].numel()):
                counts = _find_counted(grad[0][start:stop], grad[1][start:stop], significant) if grad else None
                with np.errstate(over="ignore", invalid="ignore"):
                    part.add([side[start:stop] for side in old], [side[start:stop] for side in new], counts)
        return part

    sums = Changes()
    for part in map_blocks(add_up, split_blocks(sides[-1].numel())):
        # In the order of the blocks, whichever thread was first.
        sums.add_block(part)
    return sums


def _find_counted(mine: torch.Tensor, other: torch.Tensor, significant: float) -> torch.Tensor | None:
    """Returns bool: elements whose gradients differ by little; ``None``: all of them."""
    wide = (torch.float32, torch.float64)  # numpy has no bfloat16
    if mine.dtype not in wide or other.dtype not in wide:
        other = SCRATCH.floats(3, len(other), torch.float32).copy_(other)
    if mine.dtype not in wide:
        mine = SCRATCH.floats(2, len(mine), torch.float32).copy_(mine)
    # numpy compares and counts eight times as fast as torch.
    left, right = mine.numpy(), other.numpy()
    distance = SCRATCH.floats(0, len(left), torch.promote_types(mine.dtype, other.dtype)).numpy()
    largest = SCRATCH.floats(1, len(left), mine.dtype).numpy()
    counts = SCRATCH.flags(len(left))
    # |g_a - g_b| <= s · |g_a|: relative to the element itself, as one gradient holds elements of all sizes.
    np.abs(np.subtract(left, right, out=distance), out=distance)
    np.multiply(np.abs(left, out=largest), significant, out=largest)
    return None if np.less_equal(distance, largest, out=counts.numpy()).all() else counts


def _subtract(values: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Subtracts in place; a third faster than torch does it."""
    left = values.numpy()
    np.subtract(left, other.numpy(), out=left)
    return values


def _widen(values: torch.Tensor, place: int) -> torch.Tensor:
    return SCRATCH.wide(place, len(values)).copy_(values)


def _power_of_two_below(values: torch.Tensor) -> torch.Tensor:
    """Returns, at each value, the power of two below its magnitude; 0 at 0: the number without sign and mantissa."""
    exponent_bits = int(view_as_bits(torch.tensor(math.inf, dtype=values.dtype)))
    bits = view_as_bits(values)
    return torch.bitwise_and(bits, exponent_bits, out=SCRATCH.bits(len(bits), bits.dtype)).view(values.dtype)
