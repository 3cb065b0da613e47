"""Perturbed weights and embeddings: of one rounding, the same whatever is cut or batched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mock_scheduler.config.instruments import UNIT_ROUNDOFFS, PerturbationConfig
from mock_scheduler.megatron.perturbation import Perturbation, perturb_embedding
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


class Embedding(torch.nn.Module):
    """Gives ones, ``[s, b, 4]``, or a tp rank's half of the line."""

    def __init__(self, tp_size: int) -> None:
        super().__init__()
        self.tp_size = tp_size

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None) -> torch.Tensor:
        rows, length = input_ids.shape
        return torch.ones(length // self.tp_size, rows, 4)


def embed(tokens: torch.Tensor, positions: torch.Tensor | None, *, tp_rank: int = 0, tp_size: int = 1) -> torch.Tensor:
    """The perturbed output of a chunk's embedding."""
    gpt: Any = torch.nn.Module()
    gpt.embedding = Embedding(tp_size)
    gpt.pg_collection = SimpleNamespace(tp=SimpleNamespace(rank=lambda: tp_rank))
    perturb_embedding(gpt, PerturbationConfig(seed=1))
    output: torch.Tensor = gpt.embedding(input_ids=tokens, position_ids=positions)
    return output


TOKENS = torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.arange(8).expand(2, 8)


def test_slices_of_context_and_sequence_parallelism_and_packed_rows_move_as_whole_rows_do() -> None:
    moved = embed(TOKENS, POSITIONS)
    assert not torch.equal(moved, torch.ones_like(moved))
    zigzag = torch.tensor([0, 1, 6, 7])
    assert torch.equal(embed(TOKENS[:, zigzag], POSITIONS[:, zigzag]), moved[zigzag])
    second = embed(TOKENS, POSITIONS, tp_rank=1, tp_size=2)
    assert torch.equal(second, moved[4:])
    packed = embed(TOKENS.reshape(1, 16), POSITIONS.reshape(1, 16))
    assert torch.equal(packed.view(2, 8, 4).transpose(0, 1), moved)


def test_one_line_of_positions_holds_for_every_row() -> None:
    assert torch.equal(embed(TOKENS, POSITIONS[:1]), embed(TOKENS, POSITIONS))


@pytest.mark.parametrize("positions", [None, torch.zeros(3, 2, 8, dtype=torch.int64)])
def test_a_token_without_a_position_moves_by_its_id(positions: torch.Tensor | None) -> None:
    tokens = torch.tensor([[5, 7, 5]])
    moved = embed(tokens, positions)
    assert torch.equal(moved[0], moved[2])
    assert not torch.equal(moved[0], moved[1])


def test_a_chunk_without_an_embedding_is_left_alone() -> None:
    gpt: Any = torch.nn.Module()
    perturb_embedding(gpt, PerturbationConfig(seed=1))
    assert not list(gpt.children())
