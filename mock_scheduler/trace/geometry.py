"""Tells the elements of a whole tensor a shard holds, and how several shards cover the whole.

Two forms serve two uses. As *indices* by dimension a shard's elements are gathered and scattered one by one; as
*rectangles* they are counted, joined and matched without touching an element, however large the tensor is.

Contract: pure index arithmetic. A tensor is viewed, never copied, and no value is computed with.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product

import numpy as np
import numpy.typing as npt
import torch

from mock_scheduler.errors import TraceError
from mock_scheduler.trace.shards import ShardSpec, blocks_along

_Integers = npt.NDArray[np.int64]

#: Most cells that a count of a union looks at, and how many of them at once.
_MAX_CELLS = 1 << 28
_CELLS_AT_ONCE = 1 << 22
#: Cells that any cut may have, however few elements there are: 2 MB.
_MIN_CELLS = 1 << 18
#: Most rectangles compared with each other at once, and most choices that a search for a cover makes.
_PAIRS_AT_ONCE = 1 << 20
_MAX_CHOICES = 2_000


# --- Elements by index ------------------------------------------------------------------------------------------------


def places_along(spec: ShardSpec, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives the canonical indices of one dimension: in the local tensor and in the whole, int64 ``[n]`` each."""
    none = torch.empty(0, dtype=torch.int64)
    blocks = blocks_along(spec, dim)
    local = [torch.arange(block.local_start, block.local_start + block.length) for block in blocks]
    whole = [torch.arange(block.global_start, block.global_start + block.length) for block in blocks]
    return torch.cat([none, *local]), torch.cat([none, *whole])


def element_places(spec: ShardSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives every canonical element of a shard by flat position, int64 ``[n]`` each.

    Memory follows from the number of stored elements, not from the shape of the local tensor that they are part of.

    Returns:
        The position in the flattened stored piece (it starts at ``flat_range``), and in the flattened whole tensor.
    """
    start, stop = _stored_range(spec)
    if start == stop:
        none = torch.empty(0, dtype=torch.int64)
        return none, none
    if spec.flat_range is not None:
        is_canonical, whole = _places_of_range(spec, start, stop)
        return torch.from_numpy(np.flatnonzero(is_canonical)), torch.from_numpy(whole[is_canonical])
    local_places = torch.zeros((), dtype=torch.int64)
    whole_places = torch.zeros((), dtype=torch.int64)
    for dim, (local_size, size) in enumerate(zip(spec.local_shape, spec.global_shape, strict=True)):
        mine, theirs = places_along(spec, dim)
        local_places = local_places.unsqueeze(-1) * local_size + mine
        whole_places = whole_places.unsqueeze(-1) * size + theirs
    # Row-major, as a flat range counts.
    return local_places.reshape(-1), whole_places.reshape(-1)


def blocks_hold(spec: ShardSpec, dim: int, place: int) -> bool:
    """Tells whether an index of one dimension of the whole tensor lies in a shard's blocks."""
    return any(block.global_start <= place < block.global_start + block.length for block in blocks_along(spec, dim))


def holds_element(spec: ShardSpec, index: Sequence[int]) -> bool:
    """Tells whether a shard holds the element at an index of the whole tensor."""
    position = 0
    for dim, place in enumerate(index):
        found = [
            place - block.global_start + block.local_start
            for block in blocks_along(spec, dim)
            if block.global_start <= place < block.global_start + block.length
        ]
        if not found:
            return False
        position = position * spec.local_shape[dim] + found[0]
    return spec.flat_range is None or spec.flat_range[0] <= position < spec.flat_range[1]


def canonical_mask(spec: ShardSpec) -> torch.Tensor | None:
    """Marks the stored elements belonging to the whole tensor: bool of the stored shape; ``None`` where all do."""
    if spec.flat_range is not None:
        held = torch.from_numpy(_places_of_range(spec, *spec.flat_range)[0])
        return None if bool(held.all()) else held
    mask: torch.Tensor | None = None
    for split in spec.splits:
        line = torch.zeros(spec.local_shape[split.dim], dtype=torch.bool)
        line[places_along(spec, split.dim)[0]] = True
        if not bool(line.all()):
            line = line.view(-1, *([1] * (len(spec.local_shape) - split.dim - 1)))
            mask = line if mask is None else mask & line
    return None if mask is None else mask.expand(spec.local_shape)


def _stored_range(spec: ShardSpec) -> tuple[int, int]:
    """Gives the flat positions of the local tensor that a shard stores."""
    return spec.flat_range or (0, math.prod(spec.local_shape))


def _places_of_range(spec: ShardSpec, start: int, stop: int) -> tuple[npt.NDArray[np.bool_], _Integers]:
    """Tells of flat positions of the local tensor which are canonical, and their places in the flattened whole one."""
    rest = np.arange(start, stop, dtype=np.int64)
    is_canonical = np.ones(len(rest), dtype=np.bool_)
    whole = np.zeros(len(rest), dtype=np.int64)
    scale = 1
    for dim in reversed(range(len(spec.local_shape))):
        rest, index = np.divmod(rest, spec.local_shape[dim])
        blocks = blocks_along(spec, dim)
        if not blocks:
            return np.zeros_like(is_canonical), whole
        places = [(block.local_start, block.global_start, block.length) for block in blocks]
        starts, offsets, lengths = np.array(places, dtype=np.int64).T
        # Blocks ascend in the local tensor, so the last one that begins before an index is its only chance.
        block = np.maximum(np.searchsorted(starts, index, side="right") - 1, 0)
        inside = index - starts[block]
        is_canonical &= (inside >= 0) & (inside < lengths[block])
        whole += (offsets[block] + inside) * scale
        scale *= spec.global_shape[dim]
    return is_canonical, whole


def unflatten(position: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Gives the index of a flat position in a tensor of this shape."""
    index: list[int] = []
    for size in reversed(shape):
        position, place = divmod(position, size)
        index.append(place)
    return tuple(reversed(index))


# --- Elements as rectangles -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Rectangle:
    """Holds the elements of a tensor from ``origin`` on, ``sizes`` of them along each dimension."""

    origin: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.sizes)


ElementSet = tuple[Rectangle, ...]
"""A set of elements: disjoint rectangles, ascending."""

_Part = tuple[Rectangle, torch.Tensor]


def rectangles_of(tensor: torch.Tensor, spec: ShardSpec) -> Iterator[_Part]:
    """Yields every rectangle of the whole tensor a piece holds, and its values as a view of the piece.

    Raises:
        TraceError: the piece has neither ``spec.local_shape`` nor just the elements of its ``flat_range``.
    """
    regions = list(_regions(spec))
    for box, values in _local_boxes(tensor, spec):
        for mine, theirs in regions:
            shared = intersect(box, mine)
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
    """Joins neighbouring rectangles, so one set has one form however it was cut."""
    joined = sorted(rectangles)
    # The last dimension first: joined rows can then join along the dimension before it.
    for dim in reversed(range(len(joined[0].origin) if joined else 0)):
        joined = _join_along(joined, dim)
    return tuple(sorted(joined))


def _regions(spec: ShardSpec) -> Iterator[tuple[Rectangle, Rectangle]]:
    """Yields every rectangle of canonical elements: its place in the local tensor, and its place in the whole."""
    for blocks in product(*(blocks_along(spec, dim) for dim in range(len(spec.global_shape)))):
        sizes = tuple(block.length for block in blocks)
        yield (
            Rectangle(origin=tuple(block.local_start for block in blocks), sizes=sizes),
            Rectangle(origin=tuple(block.global_start for block in blocks), sizes=sizes),
        )


def _local_boxes(tensor: torch.Tensor, spec: ShardSpec) -> list[_Part]:
    """Cuts a piece into boxes of the local tensor: one box, or the boxes of its flat range."""
    start, stop = spec.flat_range or (0, 0)
    choices = [spec.local_shape, *([(stop - start,)] if spec.flat_range else [])]
    if tuple(tensor.shape) not in choices:
        wanted = " or ".join(str(list(choice)) for choice in choices)
        raise TraceError(f"{spec.name} has shape {list(tensor.shape)}, its shard spec says {wanted}")
    if spec.flat_range is None:
        return [(Rectangle(origin=(0,) * len(spec.local_shape), sizes=spec.local_shape), tensor)]
    owned = tensor.reshape(-1)[start:stop] if tuple(tensor.shape) == spec.local_shape else tensor
    parts: list[_Part] = []
    for box in _boxes_of_range(spec.local_shape, start, stop):
        parts.append((box, owned[: box.num_elements].view(box.sizes)))
        owned = owned[box.num_elements :]
    return parts


def _boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Rectangle]:
    """Yields boxes of the flat elements ``start`` to ``stop`` in order: a row's end, whole rows, a row's start."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield Rectangle(origin=(start,) if shape else (), sizes=(stop - start,) if shape else ())
        return
    size = math.prod(shape[1:])
    edges = sorted({start, stop, min(-(-start // size) * size, stop), max(stop // size * size, start)})
    for low, high in pairwise(edges):
        row = low // size
        if low % size == 0 and high % size == 0:
            yield Rectangle(origin=(row, *[0] * len(shape[1:])), sizes=((high - low) // size, *shape[1:]))
        else:
            for box in _boxes_of_range(shape[1:], low - row * size, high - row * size):
                yield Rectangle(origin=(row, *box.origin), sizes=(1, *box.sizes))


def intersect(first: Rectangle, second: Rectangle) -> Rectangle | None:
    """Gives the elements in both rectangles; ``None`` where there are none."""
    origin = tuple(max(mine, theirs) for mine, theirs in zip(first.origin, second.origin, strict=True))
    ends = zip(first.origin, first.sizes, second.origin, second.sizes, strict=True)
    stops = [min(mine + size, theirs + width) for mine, size, theirs, width in ends]
    sizes = tuple(stop - start for stop, start in zip(stops, origin, strict=True))
    return Rectangle(origin=origin, sizes=sizes) if all(size > 0 for size in sizes) else None


def _join_along(rectangles: list[Rectangle], dim: int) -> list[Rectangle]:
    """Joins rectangles lying end to end along one dimension and alike in all others."""

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


# --- Covers of the whole ----------------------------------------------------------------------------------------------
#
# Along each dimension the edges of all blocks cut the whole tensor into cells, and a shard holds a cell entirely or not
# at all. There are about as many cells as blocks, so that a count over cells is exact and costs nothing.


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Coverage:
    """How many shards hold each cell of a whole tensor.

    edges: by dimension, the first index of each cell, and the end. counts: int64, one entry for each cell.
    """

    edges: tuple[_Integers, ...]
    counts: _Integers

    @property
    def is_disjoint(self) -> bool:
        """Whether no two shards hold one element."""
        return bool((self.counts <= 1).all())

    @property
    def is_full(self) -> bool:
        """Whether every element is held."""
        return bool((self.counts > 0).all())

    def present(self) -> torch.Tensor:
        """Marks the elements held: bool of the whole tensor's shape."""
        held: npt.NDArray[np.bool_] = self.counts > 0
        for dim, edges in enumerate(self.edges):
            held = np.repeat(held, np.diff(edges), axis=dim)
        return torch.from_numpy(np.ascontiguousarray(held))


def count_cells(shape: Sequence[int], specs: Sequence[ShardSpec]) -> Coverage:
    """Counts the shards holding each cell; every shard counts with its whole local tensor, without flat ranges.

    Raises:
        TraceError: there are more cells than elements in the local tensors. No layout cuts so, but a forged header may.
    """
    tiled = _find_tiles(shape, specs)
    if tiled is not None:
        return Coverage(edges=tiled, counts=np.ones([len(cells) - 1 for cells in tiled], dtype=np.int64))
    spans = [[_spans(spec, dim) for dim in range(len(shape))] for spec in specs]
    edges = tuple(
        np.unique(np.concatenate([[0, size], *(array for by_dim in spans for array in by_dim[dim])]).astype(np.int64))
        for dim, size in enumerate(shape)
    )
    num_cells = math.prod(len(cells) - 1 for cells in edges)
    most = max(_MIN_CELLS, sum(math.prod(spec.local_shape) for spec in specs))
    if num_cells > most:
        raise TraceError(f"{len(specs)} pieces cut a tensor into {num_cells} cells; expected at most {most}")
    counts = np.zeros([len(cells) - 1 for cells in edges], dtype=np.int64)
    for by_dim in spans:
        # A shard's own cells and no others are touched.
        held = [_held_cells(*ends, cells) for ends, cells in zip(by_dim, edges, strict=True)]
        counts[np.ix_(*held)] += 1
    return Coverage(edges=edges, counts=counts)


def _find_tiles(shape: Sequence[int], specs: Sequence[ShardSpec]) -> tuple[_Integers, ...] | None:
    """Finds the edges of shards that lie side by side along one dimension and hold all; ``None`` where they do not.

    Nearly all tensors are cut so, and to look at these few numbers takes a tenth of the time of counting cells.
    """
    cut = {split.dim for spec in specs for split in spec.splits}
    if len(cut) != 1 or 0 in shape:
        return None
    (dim,) = cut
    blocks = sorted((block.global_start, block.length) for spec in specs for block in blocks_along(spec, dim))
    edges = [0, *accumulate(length for _, length in blocks)]
    if [start for start, _ in blocks] != edges[:-1] or edges[-1] != shape[dim] or not all(size for _, size in blocks):
        return None
    return tuple(np.array(edges if other == dim else (0, size)) for other, size in enumerate(shape))


def fill_local_tensor(specs: Sequence[ShardSpec]) -> bool:
    """Tells whether shards of one local tensor, each a flat range or all of it, hold each element exactly once."""
    numel = math.prod(specs[0].local_shape)
    ranges = sorted(spec.flat_range or (0, numel) for spec in specs)
    starts = [start for start, _ in ranges]
    return [*starts, numel] == [0, *(stop for _, stop in ranges)]


def count_union(rectangles: Sequence[Rectangle]) -> int:
    """Counts the different elements in any of the rectangles.

    Raises:
        TraceError: their edges cut the tensor into more than 2^28 cells. No layout does, but a forged header may.
    """
    if not rectangles or not rectangles[0].origin:
        return min(len(rectangles), 1)
    starts, stops = _bounds_of(rectangles)
    edges = [np.unique(np.concatenate([starts[:, dim], stops[:, dim]])) for dim in range(starts.shape[1])]
    num_cells = math.prod(len(edge) - 1 for edge in edges)
    if num_cells > _MAX_CELLS:
        raise TraceError(
            f"{len(rectangles)} rectangles cut a tensor into {num_cells} cells; expected at most {_MAX_CELLS}"
        )
    # Slab by slab of the dimension with most cells, so that memory is bounded however the tensor is cut.
    longest = max(range(len(edges)), key=lambda dim: len(edges[dim]))
    order = [longest, *(dim for dim in range(len(edges)) if dim != longest)]
    edges = [edges[dim] for dim in order]
    lows = np.stack([np.searchsorted(edge, starts[:, dim]) for dim, edge in zip(order, edges, strict=True)], axis=1)
    highs = np.stack([np.searchsorted(edge, stops[:, dim]) for dim, edge in zip(order, edges, strict=True)], axis=1)
    num_slabs = len(edges[0]) - 1
    step = max(_CELLS_AT_ONCE * num_slabs // max(num_cells, 1), 1)
    slabs = ((first, min(first + step, num_slabs)) for first in range(0, num_slabs, step))
    return sum(_count_slab(edges, lows, highs, slab) for slab in slabs)


def _count_slab(edges: Sequence[_Integers], lows: _Integers, highs: _Integers, slab: tuple[int, int]) -> int:
    """Counts the elements covered in the cells ``slab`` of the first dimension."""
    first, last = slab
    is_near = (lows[:, 0] < last) & (highs[:, 0] > first)
    is_covered = np.zeros([last - first, *(len(edge) - 1 for edge in edges[1:])], dtype=bool)
    for low, high in zip(lows[is_near].tolist(), highs[is_near].tolist(), strict=True):
        low[0], high[0] = max(low[0] - first, 0), high[0] - first
        is_covered[tuple(map(slice, low, high))] = True
    counts = is_covered.astype(np.int64)
    for edge in reversed([edges[0][first : last + 1], *edges[1:]]):
        counts = counts @ np.diff(edge)
    return int(counts)


def find_cover(sets: Sequence[ElementSet], num_elements: int) -> tuple[int, ...] | None:
    """Finds disjoint sets holding ``num_elements`` together; ``None`` where there are none.

    The least element that is not yet covered is the first element of the set covering it. So there is a choice only
    between sets that begin at one element, and the set listed first is preferred.
    """
    order = sorted(range(len(sets)), key=lambda index: (sets[index][0].origin, index))
    sizes = [sum(item.num_elements for item in one) for one in sets]
    # Mostly all sets together are the cover, and nothing need be searched.
    if sum(sizes) == num_elements == count_union([item for one in sets for item in one]):
        return tuple(order)
    bounds = [_bounds_of(one) for one in sets]
    lows = np.array([starts.min(axis=0) for starts, _ in bounds])
    highs = np.array([stops.max(axis=0) for _, stops in bounds])
    # Choices still to be tried, the preferred one last: sets chosen, sets that may follow, number of elements missing.
    # A stack of our own, since a trace of a thousand ranks is deeper than Python's.
    open_choices: list[tuple[tuple[int, ...], list[int], int]] = [((), order, num_elements)]
    # Sets of one trace leave little choice. A search through forged ones could go on for ever.
    num_choices = len(sets) + _MAX_CHOICES
    while open_choices and num_choices:
        num_choices -= 1
        chosen, left, missing = open_choices.pop()
        if missing == 0:
            return chosen
        if not left or missing < 0:
            continue
        start = sets[left[0]][0].origin
        for index in reversed([index for index in left if sets[index][0].origin == start]):
            # Most sets lie far from each other, and their outlines show it at once.
            is_near = ((lows < highs[index]) & (highs > lows[index])).all(axis=1)
            rest = [
                other
                for other in left
                if other != index and not (is_near[other] and _overlap(bounds[other], bounds[index]))
            ]
            open_choices.append(((*chosen, index), rest, missing - sizes[index]))
    return None


_Bounds = tuple[_Integers, _Integers]


def _spans(spec: ShardSpec, dim: int) -> _Bounds:
    """Gives the starts and stops of a shard's blocks along one dimension of the whole tensor, ``[blocks]`` each."""
    blocks = blocks_along(spec, dim)
    starts = np.array([block.global_start for block in blocks], dtype=np.int64)
    return starts, starts + np.array([block.length for block in blocks], dtype=np.int64)


def _held_cells(starts: _Integers, stops: _Integers, edges: _Integers) -> _Integers:
    """Gives the cells of one dimension in blocks that share no index: their positions, block after block."""
    lows, highs = np.searchsorted(edges, starts), np.searchsorted(edges, stops)
    sizes = highs - lows
    # Position within its block, and where that begins: as many steps as the shard has cells.
    inside: _Integers = np.arange(sizes.sum(), dtype=np.int64) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return inside + np.repeat(lows, sizes)


def _bounds_of(rectangles: Sequence[Rectangle]) -> _Bounds:
    """Gives the starts and stops of rectangles along each dimension, ``[rectangles, dims]`` both."""
    starts = np.array([item.origin for item in rectangles], dtype=np.int64).reshape(len(rectangles), -1)
    return starts, starts + np.array([item.sizes for item in rectangles], dtype=np.int64).reshape(starts.shape)


def _overlap(first: _Bounds, second: _Bounds) -> bool:
    """Whether a rectangle of one set shares an element with a rectangle of the other."""
    (starts, stops), (other_starts, other_stops) = first, second
    step = max(_PAIRS_AT_ONCE // max(len(other_starts), 1), 1)
    for begin in range(0, len(starts), step):
        rows = slice(begin, begin + step)
        is_shared = np.ones((len(starts[rows]), len(other_starts)), dtype=bool)
        for dim in range(starts.shape[1]):
            is_shared &= np.less.outer(starts[rows, dim], other_stops[:, dim])
            is_shared &= np.greater.outer(stops[rows, dim], other_starts[:, dim])
        if is_shared.any():
            return True
    return False
