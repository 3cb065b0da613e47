"""How a difference is spread over a tensor: whether it has a direction, and whether parts of it have none.

Another kernel rounds every element of a tensor on its own, up as often as down. So the parts of ``<a, b - a>`` have
either sign, and with random signs their sum is normally distributed whatever their sizes are: ``sum / sqrt(sum of
squares)`` is a number of standard deviations; so it is with the signs alone. Elements of one row share roundings (the
divisor of a norm), as do those of one column (a weight), and equal rows (one token met twice) round alike; so rows and
columns are each taken as a whole.

Contract: sums are in float64. Of a tensor above ``PLACE_SAMPLE_ELEMENTS``, evenly spaced rows are looked at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from mock_scheduler.comparison.explain.narrowing import used_bits
from mock_scheduler.comparison.residuals import Spread
from mock_scheduler.comparison.thresholds import PLACE_SAMPLE_ELEMENTS
from mock_scheduler.support.tensor_bytes import view_as_bits


def measure_spread(
    baseline: torch.Tensor,
    candidate: torch.Tensor,
    *,
    present: torch.Tensor | None = None,
    boundaries: Mapping[int, Sequence[int]] | None = None,
) -> Spread | None:
    """Measures it; ``None`` for integers, scalars and where nothing is finite to compare.

    Args:
        baseline: ``[rows, ...]``, of any floating-point dtype.
        candidate: Of the same shape and dtype.
        present: bool, broadcast to the shape: elements that count.
        boundaries: By dimension, the indices where pieces of ranks begin.
    """
    if not baseline.is_floating_point() or baseline.dim() == 0 or not baseline.numel():
        return None
    row_size = max(baseline.numel() // max(baseline.shape[0], 1), 1)
    step = max(math.ceil(baseline.numel() / PLACE_SAMPLE_ELEMENTS), 1)
    mask = None if present is None else present.expand(baseline.shape)[::step].reshape(-1, row_size)
    left, right = (side[::step].reshape(-1, row_size) for side in (baseline, candidate))
    bits = [view_as_bits(side.contiguous()).reshape(-1, row_size) for side in (left, right)]
    is_other = bits[0] != bits[1]
    a, change = left.double(), right.double() - left.double()
    if mask is not None:
        is_other &= mask
        a, change = a.where(mask, 0.0), change.where(mask, 0.0)
    live = ((a != 0) | is_other).any(dim=1)
    if not bool(live.any()) or not bool(change.isfinite().all()):
        return None
    a, change, is_other = a[live], change[live], is_other[live]
    is_other_row = is_other.any(dim=1)
    densities = is_other[is_other_row].double().mean(dim=1)
    edges = _edges_of_columns(baseline.shape, boundaries or {})
    has_part = [bool(is_other[:, start:stop].any()) for start, stop in pairwise(edges)]
    return Spread(
        direction_z=_find_direction(a, change),
        num_rows=len(a),
        num_equal_rows=len(a) - int(is_other_row.sum()),
        row_size=row_size,
        density=float(densities.median()) if len(densities) else 0.0,
        num_parts=len(has_part),
        num_equal_parts=has_part.count(False),
        num_bits=used_bits(left[live] if mask is None else left[mask]),
    )


def _find_direction(a: torch.Tensor, change: torch.Tensor) -> float:
    """Counts standard deviations from chance, by rows and by columns; the smaller number."""
    products, is_vector = a * change, a.shape[1] == 1
    # As rows of one element, millions of numbers take twenty times as long to sort.
    _, same = torch.unique(a[:, 0], return_inverse=True) if is_vector else torch.unique(a, dim=0, return_inverse=True)
    by_row = torch.zeros(int(same.max()) + 1, dtype=torch.float64).index_add_(0, same, products.sum(dim=1))
    sides = [by_row] if is_vector else [by_row, products.sum(dim=0)]
    return min(_deviations(side) for side in sides)


def _deviations(parts: torch.Tensor) -> float:
    """Counts them by the parts' sizes, or by their signs alone, where a few large parts hide the others."""
    signs = parts.sign()
    return max(abs(float(each.sum())) / float(each.norm()) if bool(each.any()) else 0.0 for each in (parts, signs))


def _edges_of_columns(shape: Sequence[int], boundaries: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    """Finds the edges of ranks' pieces along the second dimension, in elements of a row."""
    if len(shape) < 2:
        return 0, 1
    rest = math.prod(shape[2:])
    inner = {start for start in boundaries.get(1, ()) if 0 < start < shape[1]}
    return tuple(rest * edge for edge in (0, *sorted(inner), shape[1]))
