"""Micro-batches: shifted, padded to a multiple, in canonical order, and the same whatever the layout."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mock_scheduler.batch import RolloutBatch
from pipelines.megatron.trainer import PolicyTrainer, sum_and_max_difference
from pipelines.micro_batches import MicroBatch, build_micro_batches, padded_length
from tests.recording.builders import SAMPLING, make_row


def make_batch(*lengths: int) -> RolloutBatch:
    """Row i has tokens 10·(i + 1), 10·(i + 1) + 1, …; the first two are the prompt."""
    rows = [
        make_row(
            0,
            index,
            tokens=[10 * (index + 1) + position for position in range(length)],
            response=[position >= 2 for position in range(length)],
            rollout_logprobs=[-0.25 * (position + 1) for position in range(max(length - 2, 0))],
        )
        for index, length in enumerate(lengths)
    ]
    return RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=len(lengths))


def build(batch: RolloutBatch, *, size: int, multiple_of: int = 1) -> list[MicroBatch]:
    advantages = torch.arange(1, len(batch) + 1, dtype=torch.float64)
    return build_micro_batches(batch, advantages, micro_batch_size=size, multiple_of=multiple_of)


def test_position_t_predicts_token_t_plus_1() -> None:
    (micro_batch,) = build(make_batch(4, 3), size=2)
    assert micro_batch.tokens.tolist() == [[10, 11, 12, 13], [20, 21, 22, 0]]
    assert micro_batch.targets.tolist() == [[11, 12, 13, 0], [21, 22, 0, 0]]
    assert micro_batch.response_mask.tolist() == [[False, True, True, False], [False, True, False, False]]
    assert micro_batch.advantages.tolist() == [[0.0, 1.0, 1.0, 0.0], [0.0, 2.0, 0.0, 0.0]]
    assert micro_batch.advantages.dtype is torch.float32
    assert micro_batch.rollout_logprobs.tolist() == [[0.0, -0.25, -0.5, 0.0], [0.0, -0.25, 0.0, 0.0]]


def test_moving_a_micro_batch_moves_every_tensor() -> None:
    """A tensor that is added and not moved would leave the update on two devices."""
    (micro_batch,) = build(make_batch(4, 3), size=2)
    moved = micro_batch.to(torch.device("meta"))
    tensors = {name: getattr(moved, name) for name in MicroBatch.__dataclass_fields__ if name != "index"}
    assert {name: tensor.device.type for name, tensor in tensors.items()} == dict.fromkeys(tensors, "meta")
    assert moved.index == micro_batch.index


def test_the_difference_of_logprobs_is_summed_over_response_tokens_only() -> None:
    one = torch.tensor([[-1.0, -2.0, torch.nan]])
    other = torch.tensor([[-1.5, -1.75, 0.0]])
    mask = torch.tensor([[True, True, False]])
    assert sum_and_max_difference(one, other, mask).tolist() == [0.75, 0.5]
    assert sum_and_max_difference(one, other, torch.zeros(1, 3, dtype=torch.bool)).tolist() == [0.0, 0.0]
    assert sum_and_max_difference(one, other, ~mask).isnan().tolist() == [True, True]


def test_every_response_token_is_a_target_once() -> None:
    batch = make_batch(5, 3, 7, 4)
    micro_batches = build(batch, size=2, multiple_of=8)
    predicted = torch.cat([micro_batch.targets[micro_batch.response_mask] for micro_batch in micro_batches])
    assert predicted.tolist() == batch.tokens[batch.response_mask].tolist()


@pytest.mark.parametrize(("lengths", "multiple", "expected"), [((5, 3), 8, 8), ((8, 3), 8, 8), ((9, 3), 8, 16)])
def test_all_rows_are_padded_to_one_multiple(lengths: tuple[int, ...], multiple: int, expected: int) -> None:
    batch = make_batch(*lengths)
    assert padded_length(batch, multiple_of=multiple) == expected
    # One width for all, though the second micro-batch alone would be shorter: pipeline stages need one shape.
    assert [tuple(part.tokens.shape) for part in build(batch, size=1, multiple_of=multiple)] == [(1, expected)] * 2


def test_rows_keep_their_order_and_the_last_micro_batch_what_is_left() -> None:
    micro_batches = build(make_batch(3, 3, 3, 3, 3), size=2)
    assert [micro_batch.index for micro_batch in micro_batches] == [0, 1, 2]
    assert [micro_batch.tokens[:, 0].tolist() for micro_batch in micro_batches] == [[10, 20], [30, 40], [50]]


def test_arrival_order_changes_nothing() -> None:
    batch = make_batch(5, 3, 4)
    shuffled = RolloutBatch.from_trajectories(reversed(batch.rows()), sampling=SAMPLING, group_size=3)
    for one, other in zip(build(batch, size=2), build(shuffled, size=2), strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.response_mask.tolist() == other.response_mask.tolist()


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_replicas_share_the_micro_batches_out_without_loss_or_copy(dp_size: int) -> None:
    micro_batches = build(make_batch(3, 4, 5, 6, 3, 4, 5, 6), size=2)
    shares = [
        PolicyTrainer.owned(
            SimpleNamespace(runtime=SimpleNamespace(dp_size=dp_size, dp_rank=dp_rank)),  # type: ignore[arg-type]
            micro_batches,
        )
        for dp_rank in range(dp_size)
    ]
    assert [[part.index for part in share] for share in shares] == [
        list(range(dp_rank, 4, dp_size)) for dp_rank in range(dp_size)
    ]
    assert sorted(part.index for share in shares for part in share) == [0, 1, 2, 3]
