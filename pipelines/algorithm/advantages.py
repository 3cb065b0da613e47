"""Advantages from the rewards of whole groups."""

from __future__ import annotations

from typing import Literal

import torch

GROUP_STD_EPSILON = 1e-6


def compute_grpo_advantages(
    rewards: torch.Tensor, group_index: torch.Tensor, *, method: Literal["mean", "mean_std"]
) -> torch.Tensor:
    """Group-relative advantages, float64 ``[B]``: one number per trajectory, for all of its response tokens.

    rewards: floating ``[B]``; group_index: int64 ``[B]``, 0..G-1. With R the rewards of a group, ``mean`` gives
    R - mean(R), and ``mean_std`` gives (R - mean(R)) / (std(R) + 1e-6) with the unbiased standard deviation
    (DeepSeekMath, arXiv 2402.03300, section 4.1.2; the unbiased form and the epsilon are those of ROLL and verl).
    A group of one trajectory has advantage 0. Computed in float64 on the host, so that no layout changes it.
    """
    rewards = rewards.double().cpu()
    advantages = torch.zeros_like(rewards)
    for group in range(int(group_index.max()) + 1 if len(group_index) else 0):
        members = group_index == group
        centred = rewards[members] - rewards[members].mean()
        if method == "mean_std" and int(members.sum()) > 1:
            centred = centred / (rewards[members].std() + GROUP_STD_EPSILON)
        advantages[members] = centred
    return advantages
