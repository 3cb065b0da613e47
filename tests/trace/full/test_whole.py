"""A tensor read by ranges from its slices: the same elements as in one place, copied only where they must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from mock_scheduler.comparison.measure.changes import sum_changes
from mock_scheduler.comparison.measure.distance import is_bit_equal, is_rounded
from mock_scheduler.comparison.measure.figures import sum_pair
from mock_scheduler.trace.full.memory import MemoryPool
from mock_scheduler.trace.full.whole import WholeTensor, find_cut, read_together, slice_up
from mock_scheduler.trace.shards import Block, ShardSpec, Split, cut_shard, even_split, whole

SHAPE = (6, 10, 4)


def cut(dim: int, *, num_parts: int = 1, shape: tuple[int, ...] = SHAPE) -> list[ShardSpec]:
    """Two ranks' shards."""
    local = tuple(size // 2 if place == dim else size for place, size in enumerate(shape))
    splits = [even_split(dim, size=shape[dim], rank=rank, num_ranks=2, num_parts=num_parts) for rank in range(2)]
    return [ShardSpec(name="w", global_shape=shape, local_shape=local, splits=each) for each in splits]


def ranges(spec: ShardSpec, *edges: int) -> list[ShardSpec]:
    """A shard in flat ranges between edges, the first of them last."""
    found = [replace(spec, flat_range=pair) for pair in pairwise(edges)]
    return [*found[1:], found[0]]


def lay(specs: Sequence[ShardSpec], tensor: torch.Tensor) -> WholeTensor:
    """The tensor in the slices of the shards."""

    def load(number: int) -> torch.Tensor:
        spec = specs[number]
        local = cut_shard(tensor, spec)
        return local if spec.flat_range is None else local.reshape(-1)[slice(*spec.flat_range)]

    dim = find_cut(specs)
    assert dim is not None
    return WholeTensor(tensor.shape, slice_up(specs, dim, load), MemoryPool(num_tensors=1))


PADDED = ShardSpec(
    name="w",
    global_shape=SHAPE,
    local_shape=(9, 10, 4),
    splits=(
        Split(
            dim=0,
            blocks=(Block(local_start=1, global_start=3, length=3), Block(local_start=5, global_start=0, length=3)),
        ),
    ),
)
CUTS = {
    "one piece": [whole("w", SHAPE)],
    "rows": cut(0),
    "columns": cut(1),
    "last": cut(2),
    "two parts": cut(0, num_parts=3),
    "two parts of columns": cut(1, num_parts=5),
    "ranges": ranges(whole("w", SHAPE), 0, 7, 101, 240),
    "ranges of rows": [*ranges(cut(0, num_parts=3)[0], 0, 13, 120), cut(0, num_parts=3)[1]],
    "padded": [PADDED],
}


@pytest.mark.parametrize("specs", CUTS.values(), ids=CUTS)
def test_ranges_are_those_of_the_tensor(specs: list[ShardSpec]) -> None:
    tensor = torch.arange(240, dtype=torch.float32).view(SHAPE)
    laid = lay(specs, tensor)
    for start in (0, 1, 39, 40, 41, 119, 120, 239):
        for stop in (start + 1, start + 5, start + 40, start + 97, 240):
            if stop <= 240:
                assert torch.equal(laid.read(start, stop), tensor.view(-1)[start:stop])
    assert (laid.shape, laid.dtype, laid.numel(), laid.dim()) == (SHAPE, torch.float32, 240, 3)
    assert torch.equal(laid.whole(), tensor)
    assert laid.whole() is laid.whole()


def test_a_range_of_one_piece_is_no_copy() -> None:
    tensor = torch.arange(240, dtype=torch.float32).view(SHAPE)
    laid, other = lay(CUTS["rows"], tensor), WholeTensor.of(tensor)
    assert [laid.is_one_piece(*each) for each in ((0, 120), (120, 240), (119, 121))] == [True, True, False]
    assert laid.read(5, 9).data_ptr() == laid.read(0, 1).data_ptr() + 20
    assert other.read(5, 9).data_ptr() == tensor.data_ptr() + 20
    assert other.whole() is tensor
    assert [start for start, _ in read_together([laid, other], 0, 240, 100)] == [0, 100, 200]
    assert [start for start, _ in read_together([laid, other], 120, 240, 100)] == [120]


@pytest.mark.parametrize(
    "specs",
    [
        # Two dimensions are cut; the flat ranges of a cut along columns are no rectangles; no dimension; no element.
        [replace(each, splits=(*cut(0)[0].splits, *each.splits), local_shape=(3, 5, 4)) for each in cut(1)],
        ranges(cut(1)[0], 0, 7, 120),
        [whole("w", ())],
        [whole("w", (3, 0))],
    ],
)
def test_what_is_no_table_is_put_together(specs: list[ShardSpec]) -> None:
    assert find_cut(specs) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_figures_have_the_same_bits_however_tensors_lie(dtype: torch.dtype) -> None:
    shape = (700, 515)
    generator = torch.Generator().manual_seed(3)
    old, gradient = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    new, other = ((old.float() + scale * gradient.float()).to(dtype) for scale in (0.01, 0.0101))
    moved = (gradient.float() * 1.001).to(dtype)
    rows, columns = (
        cut(0, shape=(700, 515)),
        [
            ShardSpec(name="w", global_shape=shape, local_shape=(700, length), splits=(Split(dim=1, blocks=blocks),))
            for length, blocks in (
                (100, (Block(local_start=0, global_start=415, length=100),)),
                (415, (Block(local_start=0, global_start=0, length=415),)),
            )
        ],
    )
    laid = [lay(specs, tensor) for specs, tensor in ((rows, new), (columns, other), (columns, old), (rows, gradient))]
    assert repr(sum_pair(laid[0], laid[1])) == repr(sum_pair(new, other))
    found = sum_changes((laid[2], old), (laid[0], laid[1]), (laid[3], moved), 1e-2, is_same_before=True)
    assert found == sum_changes((old, old), (new, other), (gradient, moved), 1e-2, is_same_before=True)
    assert is_bit_equal(laid[2], old)
    assert not is_bit_equal(laid[0], other)
    assert is_rounded(laid[0], new.double())
    assert not is_rounded(laid[0], other.double())
