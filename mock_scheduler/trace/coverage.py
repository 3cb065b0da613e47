"""Which elements of a whole tensor its pieces hold: counted by cells, without touching an element.

Along each dimension the starts and ends of all blocks of all pieces cut the whole tensor into cells; each piece holds a
cell entirely or not at all. Cells are as few as blocks are, however large the tensor is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from mock_scheduler.trace.shards import Block, ShardSpec

_Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Coverage:
    """bounds: by dimension, where its cells begin, and the end. counts: by cell, how many pieces hold it."""

    bounds: tuple[_Counts, ...]
    counts: _Counts

    @property
    def is_disjoint(self) -> bool:
        """Whether no two pieces hold one element."""
        return bool((self.counts <= 1).all())

    @property
    def is_full(self) -> bool:
        """Whether every element is held."""
        return bool((self.counts > 0).all())

    def present(self) -> torch.Tensor:
        """bool, of the whole tensor's shape: what is held."""
        held: npt.NDArray[np.bool_] = self.counts > 0
        for dim, bounds in enumerate(self.bounds):
            held = np.repeat(held, np.diff(bounds), axis=dim)
        return torch.from_numpy(np.ascontiguousarray(held))


def count_cells(shape: Sequence[int], specs: Sequence[ShardSpec]) -> Coverage:
    """The coverage by pieces that each hold all canonical elements of their local tensor; flat ranges are ignored."""
    bounds = []
    for dim, size in enumerate(shape):
        ends = [
            (block.global_start, block.global_start + block.length) for spec in specs for block in _blocks(spec, dim)
        ]
        bounds.append(np.unique(np.array([0, size, *(place for pair in ends for place in pair)], dtype=np.int64)))
    counts = np.zeros([len(cells) - 1 for cells in bounds], dtype=np.int64)
    for spec in specs:
        held = np.ones((), dtype=np.int64)
        for dim, cells in enumerate(bounds):
            held = np.multiply.outer(held, _held_cells(_blocks(spec, dim), cells))
        counts += held
    return Coverage(bounds=tuple(bounds), counts=counts)


def fill_local_tensor(specs: Sequence[ShardSpec]) -> bool:
    """Whether pieces of one local tensor, each of a flat range or all of it, hold each of its elements exactly once."""
    numel = math.prod(specs[0].local_shape)
    ranges = sorted(spec.flat_range or (0, numel) for spec in specs)
    starts = [start for start, _ in ranges]
    return [*starts, numel] == [0, *(stop for _, stop in ranges)]


def holds_element(spec: ShardSpec, index: Sequence[int]) -> bool:
    """Whether a piece holds the element at an index of the whole tensor."""
    position = 0
    for dim, place in enumerate(index):
        found = [
            place - block.global_start + block.local_start
            for block in _blocks(spec, dim)
            if block.global_start <= place < block.global_start + block.length
        ]
        if not found:
            return False
        position = position * spec.local_shape[dim] + found[0]
    return spec.flat_range is None or spec.flat_range[0] <= position < spec.flat_range[1]


def element_places(spec: ShardSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Every canonical element of a piece: its position in the flattened stored piece, and in the flattened whole.

    Both int64 ``[n]``.
    """
    local = torch.zeros((), dtype=torch.int64)
    whole = torch.zeros((), dtype=torch.int64)
    for dim, (local_size, size) in enumerate(zip(spec.local_shape, spec.global_shape, strict=True)):
        blocks = _blocks(spec, dim)
        mine = [torch.arange(block.local_start, block.local_start + block.length) for block in blocks]
        theirs = [torch.arange(block.global_start, block.global_start + block.length) for block in blocks]
        local = local.unsqueeze(-1) * local_size + (torch.cat(mine) if mine else torch.arange(0))
        whole = whole.unsqueeze(-1) * size + (torch.cat(theirs) if theirs else torch.arange(0))
    local, whole = local.reshape(-1), whole.reshape(-1)
    if spec.flat_range is None:
        return local, whole
    start, stop = spec.flat_range
    is_owned = (local >= start) & (local < stop)
    return local[is_owned] - start, whole[is_owned]


def canonical_mask(spec: ShardSpec) -> torch.Tensor | None:
    """bool, of the stored shape: which elements belong to the whole tensor; ``None`` where all of them do."""
    mask: torch.Tensor | None = None
    for split in spec.splits:
        size = spec.local_shape[split.dim]
        line = torch.zeros(size, dtype=torch.bool)
        for block in split.blocks:
            line[block.local_start : block.local_start + block.length] = True
        if not bool(line.all()):
            line = line.view(-1, *([1] * (len(spec.local_shape) - split.dim - 1)))
            mask = line if mask is None else mask & line
    if mask is None:
        return None
    mask = mask.expand(spec.local_shape)
    return mask if spec.flat_range is None else mask.reshape(-1)[slice(*spec.flat_range)]


def _blocks(spec: ShardSpec, dim: int) -> tuple[Block, ...]:
    for split in spec.splits:
        if split.dim == dim:
            return split.blocks
    return (Block(local_start=0, global_start=0, length=spec.global_shape[dim]),)


def _held_cells(blocks: Sequence[Block], bounds: _Counts) -> _Counts:
    """By cell of one dimension, 1 where it is in a block, else 0."""
    changes = np.zeros(len(bounds), dtype=np.int64)
    starts = np.array([block.global_start for block in blocks], dtype=np.int64)
    lengths = np.array([block.length for block in blocks], dtype=np.int64)
    np.add.at(changes, np.searchsorted(bounds, starts), 1)
    np.add.at(changes, np.searchsorted(bounds, starts + lengths), -1)
    return np.cumsum(changes)[:-1]
