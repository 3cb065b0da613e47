"""Perturbed weights and embeddings: of one rounding, the same whatever is cut or batched."""

from __future__ import annotations

import pytest
import torch

from mock_scheduler.config.instruments import UNIT_ROUNDOFFS
from mock_scheduler.megatron.perturbation import Perturbation
from mock_scheduler.support.tensor_bytes import dtype_name
from mock_scheduler.trace.shards import ShardSpec, cut_shard, even_split, whole

NAME = "decoder.layers.0.mlp.linear_fc1.weight"
MOVE = Perturbation(seed=1, unit_roundoffs=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_weight_moves_by_one_rounding_that_survives_being_stored(dtype: torch.dtype) -> None:
    """In units of u, stored weights are off by ξ and up to half a spacing of 1 or 2: between 1 and 1.3 in the mean."""
    generator = torch.Generator().manual_seed(3)
    full = torch.randn(400, 400, generator=generator)
    moved = MOVE.of_weight(full, whole(NAME, (400, 400)), dtype).to(dtype).double()
    off = (moved - full.to(dtype).double()) / full.to(dtype).double() / UNIT_ROUNDOFFS[dtype_name(dtype)]
    assert 0.95 < float(off.square().mean().sqrt()) < 1.35
    assert abs(float(off.mean())) < 0.05
    assert float((off == 0).double().mean()) < 0.6


def test_a_perturbation_is_of_its_seed_and_name_and_leaves_what_is_zero() -> None:
    full, spec = torch.ones(8), whole(NAME, (8,))
    moved = MOVE.of_weight(full, spec, torch.float64)
    assert torch.equal(moved, MOVE.of_weight(full, spec, torch.float64))
    other = Perturbation(seed=2, unit_roundoffs=1.0)
    assert not torch.equal(moved, other.of_weight(full, spec, torch.float64))
    assert not torch.equal(moved, MOVE.of_weight(full, whole("other", (8,)), torch.float64))
    assert torch.equal(MOVE.of_weight(torch.zeros(8), spec, torch.float32), torch.zeros(8, dtype=torch.float64))


def test_a_shard_moves_as_its_place_in_the_whole_weight_does() -> None:
    full = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    moved = MOVE.of_weight(full, whole(NAME, (6, 4)), torch.float32)
    for rank in (0, 1):
        splits = even_split(0, size=6, rank=rank, num_ranks=2)
        spec = ShardSpec(name=NAME, global_shape=(6, 4), local_shape=(3, 4), splits=splits)
        assert torch.equal(MOVE.of_weight(cut_shard(full, spec), spec, torch.float32), cut_shard(moved, spec))


def test_an_embedding_moves_by_token_and_position_in_whatever_batch_it_stands() -> None:
    tokens = torch.randint(0, 50, (3, 40), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(40).expand(3, 40)
    output = torch.ones(40, 3, 64, dtype=torch.float64)
    everything = MOVE.of_embedding(output, tokens, positions)
    part = MOVE.of_embedding(output[10:20, 1:2], tokens[1:2, 10:20], positions[1:2, 10:20])
    assert torch.equal(part, everything[10:20, 1:2])
    noise = (everything - 1.0) / 2.0**-53
    assert abs(float(noise.mean())) < 0.05
    assert 0.9 < float(noise.std()) < 1.4  # stored with a spacing of 1 or 2 of these units
