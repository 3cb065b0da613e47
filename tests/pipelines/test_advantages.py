"""Group-relative advantages against numbers worked out by hand."""

from __future__ import annotations

import math

import torch

from pipelines.algorithm.advantages import compute_grpo_advantages


def test_mean_std_divides_by_the_unbiased_deviation_plus_epsilon() -> None:
    """Rewards 0, 1, 1, 2: mean 1, deviations -1, 0, 0, 1, unbiased variance 2 / 3."""
    advantages = compute_grpo_advantages(
        torch.tensor([0.0, 1.0, 1.0, 2.0]), torch.tensor([0, 0, 0, 0]), method="mean_std"
    )
    unit = 1.0 / (math.sqrt(2.0 / 3.0) + 1e-6)
    assert advantages.dtype is torch.float64
    assert advantages.tolist() == [-unit, 0.0, 0.0, unit]


def test_mean_only_centres() -> None:
    advantages = compute_grpo_advantages(torch.tensor([0.0, 1.0, 3.0, 4.0]), torch.tensor([0, 0, 0, 0]), method="mean")
    assert advantages.tolist() == [-2.0, -1.0, 1.0, 2.0]


def test_groups_do_not_see_each_other_wherever_their_rows_are() -> None:
    rewards = torch.tensor([1.0, 10.0, 3.0, 30.0])
    advantages = compute_grpo_advantages(rewards, torch.tensor([0, 1, 0, 1]), method="mean")
    assert advantages.tolist() == [-1.0, -10.0, 1.0, 10.0]


def test_equal_rewards_give_advantage_zero_and_no_nan() -> None:
    advantages = compute_grpo_advantages(torch.tensor([0.5, 0.5, 0.5]), torch.tensor([0, 0, 0]), method="mean_std")
    assert advantages.tolist() == [0.0, 0.0, 0.0]


def test_a_group_of_one_has_advantage_zero() -> None:
    advantages = compute_grpo_advantages(torch.tensor([7.0, 1.0, 3.0]), torch.tensor([0, 1, 1]), method="mean_std")
    assert advantages[0].item() == 0.0
    assert advantages[1].item() == -1.0 / (math.sqrt(2.0) + 1e-6)


def test_no_rows_give_no_advantages() -> None:
    advantages = compute_grpo_advantages(torch.empty(0), torch.empty(0, dtype=torch.int64), method="mean_std")
    assert advantages.tolist() == []
