"""How a rank's piece of a tensor lies in the whole one.

A shard is described by blocks along every dimension that is split, so plain splits, gated MLPs (gate and up halves
are split separately, then concatenated), padded vocabularies, context parallelism's zigzag and micro-batches need no
cases of their own: the first dimension of a token tensor is the batch's tokens in canonical order, and a rank's blocks
there are the pieces of rows it computed. A rank of the distributed optimizer holds only a flat range of its
local shard, given by ``flat_range``.
Cutting and merging are exact inverses: no arithmetic touches a value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """``length`` indices of the local tensor from ``local_start`` are those of the whole from ``global_start``."""

    local_start: int
    global_start: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """The indices of one dimension this rank holds."""

    dim: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSpec:
    """Holds one rank's piece of the tensor ``name``.

    ``splits``: ascending by dimension; a dimension without one is held whole. ``local_shape`` may be larger than the
    blocks cover (vocabulary padding): the rest belongs to no canonical element. ``flat_range`` are the elements of the
    flattened local tensor this rank owns; ``None`` means all.
    """

    name: str
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    splits: tuple[Split, ...] = ()
    flat_range: tuple[int, int] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds every element."""
        return not self.splits and self.flat_range is None

    @property
    def elements(self) -> tuple[object, ...]:
        """Equal for two shards of one tensor exactly where they store the same elements at the same places."""
        return self.splits, self.local_shape, self.flat_range


def whole(name: str, shape: tuple[int, ...]) -> ShardSpec:
    """The spec of a tensor this rank holds entirely."""
    return ShardSpec(name=name, global_shape=shape, local_shape=shape)


def even_split(dim: int, *, size: int, rank: int, num_ranks: int, num_parts: int = 1) -> tuple[Split, ...]:
    """Returns the share of one of ``num_ranks`` ranks of a dimension of ``size`` indices in the whole tensor.

    ``num_parts``: the dimension is so many equal parts one after another (2: gate and up), each of them split evenly,
    and a rank's shares of them lie one after another. Nothing where there is one rank. ``size`` must be divisible.
    """
    if num_ranks == 1:
        return ()
    # Each part is split by itself: a rank of a gated MLP holds some gate rows and the same up rows.
    part, share = size // num_parts, size // num_parts // num_ranks
    blocks = (
        Block(local_start=index * share, global_start=index * part + rank * share, length=share)
        for index in range(num_parts)
    )
    return (Split(dim=dim, blocks=tuple(blocks)),)


def blocks_of_indices(indices: Sequence[int]) -> tuple[Block, ...]:
    """The blocks of a dimension whose local index i is ``indices[i]`` in the whole: one for each unbroken run."""
    blocks: list[Block] = []
    start = 0
    for end in range(1, len(indices) + 1):
        if end == len(indices) or indices[end] != indices[end - 1] + 1:
            blocks.append(Block(local_start=start, global_start=indices[start], length=end - start))
            start = end
    return tuple(blocks)


def cut_shard(tensor: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
    """This rank's local tensor out of the whole one; positions belonging to no canonical element are 0.

    ``flat_range`` is ignored: the result always has ``spec.local_shape``.
    """
    if not spec.splits:
        return tensor.clone()
    # Zeros for positions in no block, as a padded vocabulary has them.
    local = tensor.new_zeros(spec.local_shape)
    for mine, theirs in _regions(spec):
        local[mine] = tensor[theirs]
    return local


def place_shard(whole_tensor: torch.Tensor, local: torch.Tensor, spec: ShardSpec) -> None:
    """Copy a local tensor of ``spec.local_shape`` to its place in the whole one."""
    if not spec.splits:
        whole_tensor.copy_(local)
        return
    for mine, theirs in _regions(spec):
        whole_tensor[theirs] = local[mine]


def owned_mask(spec: ShardSpec) -> torch.Tensor:
    """bool ``[*local_shape]``: True on the elements this rank owns."""
    if spec.flat_range is None:
        return torch.ones(spec.local_shape, dtype=torch.bool)
    mask = torch.zeros(spec.local_shape, dtype=torch.bool)
    start, stop = spec.flat_range
    mask.view(-1)[start:stop] = True
    return mask


def blocks_along(spec: ShardSpec, dim: int) -> tuple[Block, ...]:
    """The blocks of one dimension; an unsplit dimension is one block."""
    for split in spec.splits:
        if split.dim == dim:
            return split.blocks
    return (Block(local_start=0, global_start=0, length=spec.global_shape[dim]),)


Region = tuple[slice, ...]


def _regions(spec: ShardSpec) -> Iterator[tuple[Region, Region]]:
    """Every rectangle of canonical elements: where it lies in the local tensor, and where in the whole."""
    for blocks in product(*(blocks_along(spec, dim) for dim in range(len(spec.global_shape)))):
        yield (
            tuple(slice(block.local_start, block.local_start + block.length) for block in blocks),
            tuple(slice(block.global_start, block.global_start + block.length) for block in blocks),
        )
