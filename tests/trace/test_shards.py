"""How pieces lie in the whole: plain splits, gated MLPs, padding, flat ranges."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from mock_scheduler.trace.shards import Block, ShardSpec, Split, cut_shard, owned_mask, place_shard, whole


def split_spec(shape: tuple[int, ...], *, dim: int, index: int, parts: int) -> ShardSpec:
    length = shape[dim] // parts
    local_shape = tuple(length if axis == dim else size for axis, size in enumerate(shape))
    block = Block(local_start=0, global_start=index * length, length=length)
    return ShardSpec(name="w", global_shape=shape, local_shape=local_shape, splits=(Split(dim=dim, blocks=(block,)),))


def test_a_gated_mlp_shard_takes_its_part_of_both_halves() -> None:
    gate_and_up = torch.arange(8.0)
    spec = ShardSpec(
        name="w",
        global_shape=(8,),
        local_shape=(4,),
        splits=(
            Split(
                dim=0,
                blocks=(Block(local_start=0, global_start=2, length=2), Block(local_start=2, global_start=6, length=2)),
            ),
        ),
    )
    assert cut_shard(gate_and_up, spec).tolist() == [2.0, 3.0, 6.0, 7.0]


def test_padding_is_zero_and_belongs_to_no_canonical_element() -> None:
    spec = ShardSpec(
        name="w",
        global_shape=(3,),
        local_shape=(2,),
        splits=(Split(dim=0, blocks=(Block(local_start=0, global_start=2, length=1),)),),
    )
    assert cut_shard(torch.tensor([5.0, 6.0, 7.0]), spec).tolist() == [7.0, 0.0]
    target = torch.full((3,), -1.0)
    place_shard(target, torch.tensor([7.0, 9.0]), spec)
    assert target.tolist() == [-1.0, -1.0, 7.0]


def test_owned_mask_marks_the_flat_range() -> None:
    spec = ShardSpec(name="w", global_shape=(2, 3), local_shape=(2, 3), flat_range=(2, 5))
    assert owned_mask(spec).tolist() == [[False, False, True], [True, True, False]]
    assert owned_mask(whole("w", (2,))).tolist() == [True, True]


@given(dim=st.integers(0, 1), parts=st.sampled_from([1, 2, 4]), seed=st.integers(0, 99))
def test_cut_then_place_gives_the_same_bits(dim: int, parts: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randint(-(2**31), 2**31, (4, 8), generator=generator, dtype=torch.int32).view(torch.float32)
    merged = torch.zeros_like(tensor)
    for index in range(parts):
        spec = split_spec((4, 8), dim=dim, index=index, parts=parts)
        place_shard(merged, cut_shard(tensor, spec), spec)
    assert torch.equal(merged.view(torch.int32), tensor.view(torch.int32))
