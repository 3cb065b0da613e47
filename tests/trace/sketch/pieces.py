"""Pieces of tensors in every way in which one may lie in memory and in the whole."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mock_scheduler.trace.shards import Block, ShardSpec, Split, cut_shard, even_split, whole
from mock_scheduler.trace.sketch.constants import BLOCK, NUM_SLOTS


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)


def at(start: int, num_rows: int, width: int) -> ShardSpec:
    """Rows of a token tensor from any place on."""
    return ShardSpec(
        name="x",
        global_shape=(1 << 62, width),
        local_shape=(num_rows, width),
        splits=(Split(dim=0, blocks=(Block(local_start=0, global_start=start, length=num_rows),)),),
    )


def pieces(dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, ShardSpec]]:
    """Whole ones of all sizes, columns, ranges, rows at far places, and other strides in memory."""
    for size in (1, 7, 8, 9, NUM_SLOTS - 1, NUM_SLOTS, NUM_SLOTS + 1, BLOCK, 2 * BLOCK + 12345):
        yield normal(size, dtype=dtype), whole("x", (size,))
    shape = (70, 3000)
    tensor = normal(*shape, dtype=dtype)
    for splits in (even_split(1, size=3000, rank=1, num_ranks=3), even_split(0, size=70, rank=1, num_ranks=2)):
        local = (70, 1000) if splits[0].dim else (35, 3000)
        spec = ShardSpec(name="x", global_shape=shape, local_shape=local, splits=splits)
        yield cut_shard(tensor, spec), spec
    yield (
        tensor.view(-1)[1234:200_001],
        ShardSpec(name="x", global_shape=shape, local_shape=shape, flat_range=(1234, 200_001)),
    )
    yield normal(40, 2048, dtype=dtype), at(2**61 + 17, 40, 2048)
    yield normal(6, 3000, dtype=dtype), at(2**64 // 3000 - 3, 6, 3000)
    yield tensor.t(), whole("x", (3000, 70))
    yield tensor[:, ::2], whole("x", (70, 1500))
    yield torch.empty(0, 5, dtype=dtype), whole("x", (0, 5))
