"""How a rank's piece of a tensor lies in the whole one.

A shard is described by blocks along one dimension, so that plain splits, gated MLPs (gate and up halves are split
separately, then concatenated), padded vocabularies and replicated tensors need no cases of their own. A rank of the
distributed optimizer holds only a flat range of its local shard; ``flat_range`` says which.
Cutting and merging are exact inverses: no arithmetic touches a value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """``length`` indices of the local tensor from ``local_start`` are those of the whole from ``global_start``."""

    local_start: int
    global_start: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSpec:
    """One rank's piece of the tensor ``name``.

    ``dim`` is the dimension that ``blocks`` index; ``None`` where the rank holds all of it. ``local_shape`` may be
    larger than the blocks cover (vocabulary padding): the rest belongs to no canonical element. ``flat_range`` are the
    elements of the flattened local tensor that this rank owns; ``None`` means all.
    """

    name: str
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dim: int | None = None
    blocks: tuple[Block, ...] = ()
    flat_range: tuple[int, int] | None = None


def whole(name: str, shape: tuple[int, ...]) -> ShardSpec:
    """The spec of a tensor that this rank holds entirely."""
    return ShardSpec(name=name, global_shape=shape, local_shape=shape)


def cut_shard(tensor: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
    """This rank's local tensor out of the whole one; positions that belong to no canonical element are 0.

    ``flat_range`` is ignored: the result always has ``spec.local_shape``.
    """
    if spec.dim is None:
        return tensor.clone()
    local = tensor.new_zeros(spec.local_shape)
    for block in spec.blocks:
        source = tensor.narrow(spec.dim, block.global_start, block.length)
        local.narrow(spec.dim, block.local_start, block.length).copy_(source)
    return local


def place_shard(whole_tensor: torch.Tensor, local: torch.Tensor, spec: ShardSpec) -> None:
    """Copy a local tensor of ``spec.local_shape`` to its place in the whole one."""
    if spec.dim is None:
        whole_tensor.copy_(local)
        return
    for block in spec.blocks:
        source = local.narrow(spec.dim, block.local_start, block.length)
        whole_tensor.narrow(spec.dim, block.global_start, block.length).copy_(source)


def owned_mask(spec: ShardSpec) -> torch.Tensor:
    """bool ``[*local_shape]``: True on the elements that this rank owns."""
    if spec.flat_range is None:
        return torch.ones(spec.local_shape, dtype=torch.bool)
    mask = torch.zeros(spec.local_shape, dtype=torch.bool)
    start, stop = spec.flat_range
    mask.view(-1)[start:stop] = True
    return mask
