"""Which elements of the whole tensor a rank's piece holds, as rectangles; unions and exact covers of such sets.

Contract: pure index arithmetic; a tensor is only viewed, never copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from mock_scheduler.errors import TraceError
from mock_scheduler.trace.shards import Block, ShardSpec


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Rectangle:
    """The elements from ``origin`` on of a tensor, ``sizes`` of them along each dimension."""

    origin: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """1 for a number, which has no dimension."""
        return prod(self.sizes)


#: Of a count of a union: 256 MB of bool.
_MAX_CELLS = 1 << 28

ElementSet = tuple[Rectangle, ...]
"""A set of elements: disjoint rectangles, ascending."""


def rectangles_of(tensor: torch.Tensor, spec: ShardSpec) -> Iterator[tuple[Rectangle, torch.Tensor]]:
    """Every rectangle of the whole tensor that a piece holds, and its values as a view of the piece.

    Raises ``TraceError`` where the piece has neither ``spec.local_shape`` nor just the elements of its ``flat_range``.
    """
    local_boxes = _whole_piece(tensor, spec) if spec.flat_range is None else _ranged_piece(tensor, spec)
    regions = list(_regions(spec))
    for box, values in local_boxes:
        for mine, theirs in regions:
            shared = _intersect(box, mine)
            if shared is None:
                continue
            cut = tuple(
                slice(start - first, start - first + size)
                for start, size, first in zip(shared.origin, shared.sizes, box.origin, strict=True)
            )
            origin = tuple(
                start - local + whole
                for start, local, whole in zip(shared.origin, mine.origin, theirs.origin, strict=True)
            )
            yield Rectangle(origin=origin, sizes=shared.sizes), values[cut]


def join(rectangles: Iterable[Rectangle]) -> ElementSet:
    """The rectangles with neighbours put together, so that a set cut in another way becomes the same."""
    joined = sorted(rectangles)
    for dim in reversed(range(len(joined[0].origin) if joined else 0)):
        joined = _join_along(joined, dim)
    return tuple(sorted(joined))


def count_union(rectangles: Sequence[Rectangle]) -> int:
    """Number of different elements in any of them.

    Raises ``TraceError`` where their edges cut the tensor into more than 2^28 cells, which no layout does.
    """
    if not rectangles or not rectangles[0].origin:
        return min(len(rectangles), 1)
    starts, ends = _bounds_of(rectangles)
    edges = [np.unique(np.concatenate([starts[:, dim], ends[:, dim]])) for dim in range(starts.shape[1])]
    num_cells = prod(len(edge) - 1 for edge in edges)
    if num_cells > _MAX_CELLS:
        raise TraceError(
            f"{len(rectangles)} rectangles cut a tensor into {num_cells} cells; expected at most {_MAX_CELLS}"
        )
    is_covered = np.zeros([len(edge) - 1 for edge in edges], dtype=bool)
    lows = [np.searchsorted(edge, starts[:, dim]).tolist() for dim, edge in enumerate(edges)]
    highs = [np.searchsorted(edge, ends[:, dim]).tolist() for dim, edge in enumerate(edges)]
    for low, high in zip(zip(*lows, strict=True), zip(*highs, strict=True), strict=True):
        is_covered[tuple(map(slice, low, high))] = True
    counts = is_covered.astype(np.int64)
    for edge in reversed(edges):
        counts = counts @ np.diff(edge)
    return int(counts)


def find_cover(sets: Sequence[ElementSet], num_elements: int) -> tuple[int, ...] | None:
    """Which of these sets are disjoint and hold ``num_elements`` together; ``None`` where none do.

    The least element that is not yet covered is the first element of the set that covers it, so that there is a choice
    only between sets that begin alike; there the one that is listed first is preferred.
    """
    order = sorted(range(len(sets)), key=lambda index: (sets[index][0].origin, index))
    sizes = [sum(item.num_elements for item in one) for one in sets]
    if sum(sizes) == num_elements == count_union([item for one in sets for item in one]):
        return tuple(order)
    bounds = [_bounds_of(one) for one in sets]
    lows = np.array([starts.min(axis=0) for starts, _ in bounds])
    highs = np.array([ends.max(axis=0) for _, ends in bounds])
    # Choices still to be tried, the preferred one last: what is chosen, what may follow, and how much is missing.
    open_choices: list[tuple[tuple[int, ...], list[int], int]] = [((), order, num_elements)]
    while open_choices:
        chosen, left, missing = open_choices.pop()
        if missing == 0:
            return chosen
        if not left or missing < 0:
            continue
        start = sets[left[0]][0].origin
        for index in reversed([index for index in left if sets[index][0].origin == start]):
            # Most sets lie far from each other, which their outlines show at once.
            is_near = ((lows < highs[index]) & (highs > lows[index])).all(axis=1)
            rest = [
                other
                for other in left
                if other != index and not (is_near[other] and _overlap(bounds[other], bounds[index]))
            ]
            open_choices.append(((*chosen, index), rest, missing - sizes[index]))
    return None


_Bounds = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


def _bounds_of(rectangles: Sequence[Rectangle]) -> _Bounds:
    """Where each begins and ends along each dimension, ``[rectangles, dims]`` both."""
    starts = np.array([item.origin for item in rectangles], dtype=np.int64).reshape(len(rectangles), -1)
    return starts, starts + np.array([item.sizes for item in rectangles], dtype=np.int64).reshape(starts.shape)


def _overlap(first: _Bounds, second: _Bounds) -> bool:
    """Whether an element is in a rectangle of either."""
    (starts, ends), (other_starts, other_ends) = first, second
    is_shared = np.ones((len(starts), len(other_starts)), dtype=bool)
    for dim in range(starts.shape[1]):
        is_shared &= np.less.outer(starts[:, dim], other_ends[:, dim])
        is_shared &= np.greater.outer(ends[:, dim], other_starts[:, dim])
    return bool(is_shared.any())


def _join_along(rectangles: list[Rectangle], dim: int) -> list[Rectangle]:
    """Puts together what differs in one dimension only and lies end to end in it."""

    def others(item: Rectangle) -> tuple[tuple[int, ...], ...]:
        return tuple(values[:dim] + values[dim + 1 :] for values in (item.origin, item.sizes))

    joined: list[Rectangle] = []
    for item in sorted(rectangles, key=lambda item: (others(item), item.origin[dim])):
        last = joined[-1] if joined else None
        if last is not None and others(last) == others(item) and last.origin[dim] + last.sizes[dim] == item.origin[dim]:
            sizes = list(last.sizes)
            sizes[dim] += item.sizes[dim]
            joined[-1] = Rectangle(origin=last.origin, sizes=tuple(sizes))
        else:
            joined.append(item)
    return joined


_Part = tuple[Rectangle, torch.Tensor]


def _whole_piece(tensor: torch.Tensor, spec: ShardSpec) -> list[_Part]:
    _check_shape(tensor, [spec.local_shape], spec)
    return [(Rectangle(origin=(0,) * len(spec.local_shape), sizes=spec.local_shape), tensor)]


def _ranged_piece(tensor: torch.Tensor, spec: ShardSpec) -> list[_Part]:
    """The boxes of the local tensor that make up its flat range, each of elements one after another."""
    assert spec.flat_range is not None
    start, stop = spec.flat_range
    _check_shape(tensor, [spec.local_shape, (stop - start,)], spec)
    is_local = tuple(tensor.shape) == spec.local_shape
    owned = tensor.reshape(-1)[start:stop] if is_local else tensor
    parts: list[_Part] = []
    for box in _boxes_of_range(spec.local_shape, start, stop):
        values = owned[: box.num_elements].view(box.sizes)
        owned = owned[box.num_elements :]
        parts.append((box, values))
    return parts


def _check_shape(tensor: torch.Tensor, choices: list[tuple[int, ...]], spec: ShardSpec) -> None:
    if tuple(tensor.shape) not in choices:
        wanted = " or ".join(str(list(choice)) for choice in choices)
        raise TraceError(f"{spec.name} has shape {list(tensor.shape)}, its shard spec says {wanted}")


def _boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Rectangle]:
    """Boxes that hold the flat elements ``start`` to ``stop``, in order: a row's end, whole rows, a row's start."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield Rectangle(origin=(start,) if shape else (), sizes=(stop - start,) if shape else ())
        return
    size = prod(shape[1:])
    edges = sorted({start, stop, min(-(-start // size) * size, stop), max(stop // size * size, start)})
    for low, high in pairwise(edges):
        row = low // size
        if low % size == 0 and high % size == 0:
            yield Rectangle(origin=(row, *[0] * len(shape[1:])), sizes=((high - low) // size, *shape[1:]))
        else:
            for box in _boxes_of_range(shape[1:], low - row * size, high - row * size):
                yield Rectangle(origin=(row, *box.origin), sizes=(1, *box.sizes))


def _regions(spec: ShardSpec) -> Iterator[tuple[Rectangle, Rectangle]]:
    """Every rectangle of canonical elements: where it lies in the local tensor, and where in the whole."""
    by_dim = {split.dim: split.blocks for split in spec.splits}
    ranges = [
        by_dim.get(dim, (Block(local_start=0, global_start=0, length=length),))
        for dim, length in enumerate(spec.global_shape)
    ]
    for blocks in product(*ranges):
        sizes = tuple(block.length for block in blocks)
        yield (
            Rectangle(origin=tuple(block.local_start for block in blocks), sizes=sizes),
            Rectangle(origin=tuple(block.global_start for block in blocks), sizes=sizes),
        )


def _intersect(first: Rectangle, second: Rectangle) -> Rectangle | None:
    """The elements in both; ``None`` where there are none."""
    origin = tuple(max(mine, theirs) for mine, theirs in zip(first.origin, second.origin, strict=True))
    ends = zip(first.origin, first.sizes, second.origin, second.sizes, strict=True)
    stops = [min(mine + size, theirs + width) for mine, size, theirs, width in ends]
    sizes = tuple(stop - start for stop, start in zip(stops, origin, strict=True))
    return Rectangle(origin=origin, sizes=sizes) if all(size > 0 for size in sizes) else None
