"""Clip, normalisation and discounting of rewards against numbers worked out by hand and a literal reference."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mock_scheduler.batch import RolloutBatch, Trajectory
from pipelines.algorithm.rewards import clip_rewards, compute_turn_returns, normalize_rewards
from pipelines.batching.trajectories import build_trajectory_table, find_turn_ends
from tests.batches import SAMPLING, make_row

F, T = False, True
ROOT_2, ROOT_8 = math.sqrt(2.0) + 1e-6, math.sqrt(8.0) + 1e-6


def batch_of(*rows: Trajectory) -> RolloutBatch:
    return RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=None)


def masked_row(env_id: int, mask: list[bool], turn_rewards: list[float], *, turn: int = 0) -> Trajectory:
    return make_row(
        0,
        env_id,
        turn=turn,
        tokens=range(len(mask)),
        response=mask,
        rollout_logprobs=[-1.0] * sum(mask),
        turn_rewards=turn_rewards,
        prompt_length=0,
    )


def test_clip_cuts_both_sides_and_none_cuts_nothing() -> None:
    rewards = torch.tensor([-3.0, -1.0, 0.5, 4.0])
    assert clip_rewards(rewards, 1.5).tolist() == [-1.5, -1.0, 0.5, 1.5]
    assert clip_rewards(rewards, None).tolist() == [-3.0, -1.0, 0.5, 4.0]
    assert clip_rewards(rewards, None).dtype is torch.float64


@pytest.mark.parametrize(
    ("grouping", "method", "expected"),
    [
        ("traj_group_id", "none", [1.0, 3.0, 10.0, 14.0]),
        ("traj_group_id", "mean", [-1.0, 1.0, -2.0, 2.0]),
        # Unbiased deviations of (1, 3) and (10, 14): the square roots of 2 and 8.
        ("traj_group_id", "mean_std", [-1 / ROOT_2, 1 / ROOT_2, -2 / ROOT_8, 2 / ROOT_8]),
        # Mean of all four: 7; deviations -6, -4, 3, 7; unbiased variance 110 / 3.
        ("batch", "mean", [-6.0, -4.0, 3.0, 7.0]),
        ("batch", "mean_std", [x / (math.sqrt(110 / 3) + 1e-6) for x in (-6.0, -4.0, 3.0, 7.0)]),
    ],
)
def test_rewards_are_normalised_by_group_or_batch(grouping: str, method: str, expected: list[float]) -> None:
    rewards, groups = torch.tensor([1.0, 3.0, 10.0, 14.0]), torch.tensor([0, 0, 1, 1])
    found = normalize_rewards(rewards, groups, grouping=grouping, method=method).tolist()
    assert found == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("grouping", ["traj_group_id", "batch"])
@pytest.mark.parametrize(("method", "expected"), [("none", 5.0), ("mean", 0.0), ("mean_std", 0.0)])
def test_a_trajectory_alone_is_normalised_to_zero(grouping: str, method: str, expected: float) -> None:
    result = normalize_rewards(torch.tensor([5.0]), torch.tensor([0]), grouping=grouping, method=method)
    assert result.tolist() == [expected]


def test_group_index_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^rewards: group_index has shape \[3\]; expected \[2\], one per reward$"):
        normalize_rewards(torch.zeros(2), torch.zeros(3, dtype=torch.int64), grouping="batch", method="mean")


def test_turn_returns_are_discounted_inside_their_trajectory() -> None:
    """Rewards 1, 2, 4 and 8 of two trajectories of three and one turn; gamma 1/2: 1 + 1 + 1, 2 + 2, 4 and 8."""
    returns = compute_turn_returns(torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([0, 3, 4]), gamma=0.5)
    assert returns.tolist() == [3.0, 4.0, 4.0, 8.0]
    assert compute_turn_returns(torch.empty(0), torch.tensor([0, 0, 0]), gamma=0.5).tolist() == []


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 3], "turn returns: turn_offsets must rise from 0 to 2"),
        ([0, 2, 1, 2], "turn returns: turn_offsets must rise from 0 to 2"),
        ([], r"turn returns: turn_offsets has shape \[0\]; expected \[1\]"),
    ],
)
def test_turn_offsets_that_do_not_fit_are_refused(offsets: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        compute_turn_returns(torch.zeros(2), torch.tensor(offsets, dtype=torch.int64), gamma=1.0)


@given(
    trajectories=st.lists(st.lists(st.integers(-8, 8), max_size=6), max_size=6),
    gamma=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
)
def test_turn_returns_equal_the_sum_of_the_definition(trajectories: list[list[int]], gamma: float) -> None:
    """R_k = Σ_{j ≥ k} gamma^(j - k) · r_j, written out."""
    sizes = [len(rewards) for rewards in trajectories]
    offsets = torch.tensor([0, *torch.tensor(sizes, dtype=torch.int64).cumsum(0).tolist()])
    flat = torch.tensor([float(value) for rewards in trajectories for value in rewards], dtype=torch.float64)
    expected = [
        sum(gamma ** (j - k) * rewards[j] for j in range(k, len(rewards)))
        for rewards in trajectories
        for k in range(len(rewards))
    ]
    found = compute_turn_returns(flat, offsets, gamma=gamma).tolist()
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_rows_of_one_trajectory_count_once() -> None:
    """Trajectory 0 in two rows of one turn each, trajectory 1 in one row of two turns."""
    batch = batch_of(
        masked_row(0, [F, T], [1.0], turn=0),
        masked_row(0, [F, T, T], [2.0], turn=1),
        masked_row(1, [F, T, F, T], [4.0, 8.0]),
    )
    table = build_trajectory_table(batch)
    assert table.rewards.tolist() == [3.0, 12.0]
    assert table.group_index.tolist() == [0, 0]
    assert table.turn_rewards.tolist() == [1.0, 2.0, 4.0, 8.0]
    assert table.turn_offsets.tolist() == [0, 2, 4]
    assert table.token_offsets.tolist() == [0, 3, 5]


def test_a_reward_of_negative_zero_keeps_its_sign() -> None:
    table = build_trajectory_table(batch_of(replace(make_row(turn_rewards=[-0.0]), reward=-0.0)))
    assert math.copysign(1.0, table.rewards.item()) == -1.0


@pytest.mark.parametrize(
    ("mask", "turn_rewards", "ends"),
    [
        ([F, T, T, F, T], [1.0, 2.0], [2, 3]),
        ([T, F, T, F, F], [1.0, 2.0], [1, 2]),
        ([F, T, F, T, T], [1.0], [3]),  # all runs of a row of one turn are that turn's
        ([F, F], [1.0], [0]),
        ([F, F], [1.0, 2.0], [0, 0]),
        ([F, T], [], []),
        ([F, F], [], []),
    ],
)
def test_a_turn_ends_with_its_run_of_response_tokens(
    mask: list[bool], turn_rewards: list[float], ends: list[int]
) -> None:
    """Alone, and between a row that ends in a response token and one that starts with one."""
    before, after = masked_row(0, [F, T], [0.0]), masked_row(2, [T, F], [0.0])
    row = masked_row(1, mask, turn_rewards)
    assert find_turn_ends(batch_of(row)).tolist() == ends
    num_tokens = sum(mask)
    expected = [1, *(end + 1 for end in ends), num_tokens + 2]
    assert find_turn_ends(batch_of(before, row, after)).tolist() == expected


def test_turns_that_cannot_be_told_apart_are_refused_by_name() -> None:
    batch = batch_of(masked_row(0, [F, T, F, T], [1.0, 1.0]), masked_row(1, [F, T, T], [1.0, 2.0]))
    with pytest.raises(ValueError, match=r"^response_mask does not") as caught:
        find_turn_ends(batch)
    assert str(caught.value) == (
        "response_mask does not tell the turns of 1 rows apart, so their rewards have no token to land on: "
        "default/group 0/episode 0/env 1/turn 0: 2 turns in 1 runs. Give every turn one unbroken run of response "
        "tokens with an observation after it, or use adv_estimator grpo or rloo, or reward_normalization.method "
        "mean_std, which need no reward per turn"
    )


def test_a_long_list_of_such_rows_is_cut() -> None:
    batch = batch_of(*(masked_row(env_id, [T, T], [1.0, 2.0]) for env_id in range(11)))
    with pytest.raises(ValueError, match=r"of 11 rows apart.*env 7/turn 0: 2 turns in 1 runs; and 3 more\. Give"):
        find_turn_ends(batch)


def test_a_batch_without_rows_has_no_trajectories() -> None:
    table = build_trajectory_table(batch_of())
    assert table.rewards.tolist() == []
    assert table.token_offsets.tolist() == table.turn_offsets.tolist() == [0]
