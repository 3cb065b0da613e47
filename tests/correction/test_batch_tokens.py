"""Which response tokens of a batch are one sequence, one turn and of which policy version."""

from __future__ import annotations

import pytest
import torch

from mock_scheduler.batch import RolloutBatch, SampleIdentity, SamplingParams, Termination, Trajectory
from mock_scheduler.correction.batch_tokens import BatchTokens
from mock_scheduler.correction.config.rules import CorrectionSpec
from mock_scheduler.errors import CorrectionError

SEGMENT = CorrectionSpec(weight="segment")
TOKEN = CorrectionSpec(weight="token")


def row(env: int, turn: int, mask: list[int], versions: list[int]) -> Trajectory:
    num = sum(mask)
    return Trajectory(
        identity=SampleIdentity(scheduler_id="default", group_id=0, episode_id=0, env_id=env, turn=turn),
        tokens=torch.arange(len(mask), dtype=torch.int32),
        response_mask=torch.tensor(mask, dtype=torch.bool),
        rollout_logprobs=torch.full((num,), -1.0),
        turn_rewards=torch.zeros(len(versions)),
        policy_versions=torch.tensor(versions, dtype=torch.int32),
        termination=Termination.TERMINATED,
        prompt_length=1,
        tag="x",
    )


def tokens_of(*rows: Trajectory, version: int = 5) -> BatchTokens:
    sampling = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, logprobs_mode="processed")
    batch = RolloutBatch.from_trajectories(rows, sampling=sampling, group_size=None)
    return BatchTokens(batch=batch, policy_version=version)


def test_the_rows_of_a_trajectory_are_one_sequence_with_its_turns_counted_on() -> None:
    tokens = tokens_of(row(0, 0, [0, 1, 1], [3]), row(0, 1, [0, 0, 1], [4]), row(1, 0, [0, 1, 0, 1, 1], [5, 2]))
    assert tokens.first_rows == [0, 2]
    assert tokens.offsets.tolist() == [0, 3, 6]
    assert tokens.turns is not None
    assert tokens.turn_ids is not None
    assert tokens.turns.tolist() == [0, 0, 1, 2, 3, 3]
    assert tokens.turn_ids.tolist() == [0, 0, 1, 0, 1, 1]
    assert tokens.versions_behind is not None
    assert tokens.versions_behind.tolist() == [2, 2, 1, 0, 3, 3]


def test_some_trajectories_are_corrected_as_they_are_among_all() -> None:
    tokens = tokens_of(row(0, 0, [0, 1, 1], [3]), row(1, 0, [0, 1, 0, 1, 1], [5, 2]), row(2, 0, [0, 1], [4]))
    inputs = tokens.inputs(torch.tensor([-1.0, -2.0, -3.0]), SEGMENT, trajectories=(1, 2))
    assert tokens.token_range(1, 2) == slice(2, 5)
    assert inputs.cu_seqlens is not None
    assert inputs.cu_seqlens.tolist() == [0, 3]
    assert inputs.turn_ids is not None
    assert inputs.turn_ids.tolist() == [0, 1, 1]
    assert inputs.versions_behind is not None
    assert inputs.versions_behind.tolist() == [0, 3, 3]


def test_turns_that_the_mask_does_not_tell_apart_are_an_error_for_rules_of_turns_alone() -> None:
    tokens = tokens_of(row(0, 0, [0, 1, 1, 1], [4, 4]))
    assert tokens.turns is None
    assert tokens.versions_behind is not None  # the row has one version
    assert tokens.versions_behind.tolist() == [1, 1, 1]
    assert tokens.inputs(torch.zeros(3), TOKEN).turn_ids is None
    with pytest.raises(CorrectionError, match="env 0/turn 0: 2 turns in 1 runs"):
        tokens.inputs(torch.zeros(3), SEGMENT)


def test_versions_of_turns_that_cannot_be_told_apart_are_not_guessed() -> None:
    assert tokens_of(row(0, 0, [0, 1, 1, 1], [4, 3])).versions_behind is None
