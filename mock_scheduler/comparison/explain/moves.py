"""Recognises differences made of the same values in other places: a shift, or a permutation along a dimension.

Contract: at most 1 Mi elements are looked at: all indices of the dimension in question, and evenly spaced ones of the
others; a dimension longer than 1 Mi is cut off there. The same values in another order are a permutation only where
moved rows differ by much more than noise, since noise alone reorders rows of nearly equal values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from mock_scheduler.comparison.explain.permutations import Holders, find_blocks, find_holders_fault
from mock_scheduler.comparison.residuals import Reorder, Residual, Sample, Shift
from mock_scheduler.comparison.thresholds import (
    BETTER_ORDER,
    FEWEST_COLUMNS,
    FEWEST_SHIFTED,
    KEPT_NORM,
    LARGEST_DEGREE,
    LONGEST_SHIFT,
    MOST_MATCHED,
    MOVED,
    SAMPLE_ELEMENTS,
    SHIFTED_SHARE,
)
from mock_scheduler.trace.entries import DimName


def find_move(
    baseline: torch.Tensor,
    candidate: torch.Tensor,
    *,
    present: torch.Tensor | None,
    degrees: Sequence[int],
    dims: tuple[DimName, ...],
    enough: float,
    holders: Mapping[int, Holders] | None = None,
) -> Residual | None:
    """Finds a shift by up to three, or a permutation, explaining at least ``enough`` of the difference.

    Args:
        baseline: Any shape.
        candidate: Of the same shape.
        present: bool: elements that count.
        degrees: Numbers of pieces a dimension may be split into.
        dims: What each dimension counts, or empty.
        enough: Share of ||a - b||².
        holders: By dimension, what the candidate's ranks hold.
    """
    sides = [
        _Rows.read(
            baseline, candidate, present, dim=dim, name=dims[dim] if dims else dim, holders=(holders or {}).get(dim)
        )
        for dim in range(baseline.dim())
        if baseline.shape[dim] > 1
    ]
    # Shifts first: a shift is a permutation too, and the plainer word.
    for find in (_find_shift, _find_permutation):
        for rows in sides:
            if rows.square:
                found = find(rows, degrees)
                if found is not None and found.explained >= enough:
                    return found
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """Holds float64 ``[n, columns]``: a tensor by the indices of one dimension, ``name``; 0 where absent."""

    baseline: torch.Tensor
    candidate: torch.Tensor
    present: torch.Tensor
    square: float
    name: DimName | int
    sample: Sample | None
    holders: Holders | None

    @classmethod
    def read(
        cls,
        baseline: torch.Tensor,
        candidate: torch.Tensor,
        present: torch.Tensor | None,
        *,
        dim: int,
        name: DimName | int,
        holders: Holders | None,
    ) -> _Rows:
        """Reads the rows along ``dim``."""
        mine, other = (_thin(side, dim).double() for side in (baseline, candidate))
        there = torch.ones((), dtype=torch.bool).expand(mine.shape)
        if present is not None:
            there = _thin(present.expand(baseline.shape), dim)
        sample = None
        if mine.numel() != baseline.numel():
            sample = Sample(num_seen=mine.numel(), num_elements=baseline.numel())
        mine, other = (side.where(there & side.isfinite(), 0.0) for side in (mine, other))
        square = float((mine - other).square().sum())
        return cls(
            baseline=mine, candidate=other, present=there, square=square, name=name, sample=sample, holders=holders
        )


def _thin(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns ``[n, columns]``: all indices of ``dim``, as far as they fit, and evenly spaced ones of the others."""
    # The rows themselves stay next to each other: of every second row no shift by one could be seen.
    rows = tensor.movedim(dim, 0)[:SAMPLE_ELEMENTS]
    room = max(SAMPLE_ELEMENTS // max(rows.shape[0], 1), 1)
    for other in range(1, rows.dim()):
        rows = rows[(slice(None),) * other + (slice(None, None, math.ceil(rows.shape[other] / room) or 1),)]
        room = max(room // max(rows.shape[other], 1), 1)
    return rows.reshape(rows.shape[0], -1)


def _find_shift(rows: _Rows, degrees: Sequence[int]) -> Residual | None:
    """Finds k with b at index i equal to a at index i - k; the ends have no counterpart and do not count."""
    best: Residual | None = None
    num_rows = rows.baseline.shape[0]
    # An overlap of few rows is matched by chance.
    for distance in range(1, min(LONGEST_SHIFT, num_rows - FEWEST_SHIFTED) + 1):
        for shift in (distance, -distance):
            source = slice(0, num_rows - distance) if shift > 0 else slice(distance, num_rows)
            target = slice(distance, num_rows) if shift > 0 else slice(0, num_rows - distance)
            both = rows.present[source] & rows.present[target]
            # Both differences are over the overlap, so their ratio is a share of the same elements.
            there = (rows.candidate[target] - rows.baseline[target]).where(both, 0.0).square().sum()
            remainder = (rows.candidate[target] - rows.baseline[source]).where(both, 0.0).square().sum()
            explained = 1.0 - float(remainder / there) if float(there) >= SHIFTED_SHARE * rows.square else 0.0
            if best is None or explained > best.explained:
                detail = Shift(dim=rows.name)
                best = Residual(
                    kind="shift", value=float(shift), explained=explained, detail=detail, sample=rows.sample
                )
    return best


def _find_permutation(rows: _Rows, degrees: Sequence[int]) -> Residual | None:
    """Finds an order with row i of b equal to row ``order[i]`` of a."""
    norms = [math.sqrt(float(side.square().sum())) for side in (rows.baseline, rows.candidate)]
    if (norms[0] - norms[1]) ** 2 > KEPT_NORM * rows.square:  # a permutation keeps the norm
        return None
    best: tuple[float, torch.Tensor] | None = None
    for order in _orders(rows, degrees):
        moved = order != torch.arange(order.numel())
        if not bool(moved.any()) or not _has_moved(rows, moved):
            continue
        remainder = float((rows.candidate - rows.baseline[order]).square().sum())
        explained = 1.0 - remainder / rows.square
        # A later order must be clearly better: earlier ones are the plainer mistakes.
        if best is None or explained > best[0] + BETTER_ORDER:
            best = (explained, order)
    if best is None:
        return None
    explained, order = best
    blocks = find_blocks(order)
    detail = Reorder(dim=rows.name, order=blocks, holders=find_holders_fault(order, rows.holders))
    return Residual(
        kind="permutation", value=float(blocks.num_moved), explained=explained, detail=detail, sample=rows.sample
    )


def _has_moved(rows: _Rows, moved: torch.Tensor) -> bool:
    difference = (rows.candidate[moved] - rows.baseline[moved]).square().sum()
    return bool(difference >= MOVED * rows.baseline[moved].square().sum())


def _orders(rows: _Rows, degrees: Sequence[int]) -> Iterator[torch.Tensor]:
    """Yields orders layouts confuse, then the one in which rows are found again."""
    num_rows = rows.baseline.shape[0]
    straight = torch.arange(num_rows)
    if num_rows > 2:
        # Of two rows, the reverse is an exchange, which the pieces below try.
        yield straight.flip(0)
    pieces = {2, *degrees} - {1}
    for degree in sorted(item for item in pieces if item <= LARGEST_DEGREE and num_rows % item == 0):
        # An exchange leaves the difference in two pieces, so only the two that hold most of it are tried.
        swapped = _swap_pieces(rows, degree)
        if swapped is not None:
            yield swapped
        if num_rows % (2 * degree) == 0:  # the halves of a gated layer, interleaved by rank or one after another
            yield straight.view(2, degree, -1).transpose(0, 1).reshape(-1)
            yield straight.view(degree, 2, -1).transpose(0, 1).reshape(-1)
    found = _match_exactly(rows)
    if found is None and rows.baseline.shape[1] >= FEWEST_COLUMNS:
        found = _match_nearly(rows)
    if found is not None:
        yield found


def _swap_pieces(rows: _Rows, degree: int) -> torch.Tensor | None:
    """Returns the order with two of ``degree`` equal pieces exchanged, the two with the largest differences."""
    energies = (rows.candidate - rows.baseline).square().sum(1).view(degree, -1).sum(1)
    first, second = energies.topk(2).indices.tolist()
    order = torch.arange(rows.baseline.shape[0]).view(degree, -1)
    return order[[second if i == first else first if i == second else i for i in range(degree)]].reshape(-1)


def _match_exactly(rows: _Rows) -> torch.Tensor | None:
    """Finds all unequal rows again to the bit; ``None`` if they are not there, mostly alike, or too many."""
    # Rows that stayed need no partner: a permutation of the others alone explains the difference.
    changed = (rows.baseline != rows.candidate).any(1).nonzero().squeeze(1)
    if not 2 <= changed.numel() <= MOST_MATCHED:
        return None
    # One column is a cheap test that nearly all other differences fail.
    columns = [side[changed, 0].sort().values for side in (rows.baseline, rows.candidate)]
    if not torch.equal(*columns):  # whole rows take long to sort
        return None
    values = torch.cat([rows.baseline[changed], rows.candidate[changed]])
    kinds, labels = torch.unique(values, dim=0, return_inverse=True)
    mine, other = labels[: changed.numel()], labels[changed.numel() :]
    # Rows that are mostly copies of each other match in any order.
    if 2 * kinds.shape[0] < changed.numel() or not torch.equal(mine.sort().values, other.sort().values):
        return None
    order = torch.arange(rows.baseline.shape[0])
    order[changed[other.argsort(stable=True)]] = changed[mine.argsort(stable=True)]
    return order


def _match_nearly(rows: _Rows) -> torch.Tensor:
    """Returns the order sorting one fixed projection of the rows alike in both."""
    # Fixed weights without a common period, so that the same rows give the same order in every run.
    weights = torch.arange(1, rows.baseline.shape[1] + 1, dtype=torch.float64).mul_(math.sqrt(2.0)).cos_()
    order = torch.empty(rows.baseline.shape[0], dtype=torch.int64)
    # One number for each row: rounding moves it little, so both sides sort the same rows to the same places.
    order[(rows.candidate @ weights).argsort()] = (rows.baseline @ weights).argsort()
    return order
