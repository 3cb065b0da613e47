"""Clips and normalises rewards of trajectories, and discounts them turn by turn; in float64 on the host."""

from __future__ import annotations

from typing import Literal

import torch

from mock_scheduler.correction.config.rules import LoneSurvivor
from pipelines.algorithm.arrays import discount_backwards, offset_problems, raise_value_error, size_problems

Grouping = Literal["traj_group_id", "batch"]
Method = Literal["none", "mean", "mean_std"]

STD_EPSILON = 1e-6


def clip_rewards(rewards: torch.Tensor, limit: float | None) -> torch.Tensor:
    """Returns rewards of trajectories cut to [-limit, limit], in their own shape, as float64; ``None`` cuts nothing."""
    rewards = rewards.double().cpu()
    return rewards if limit is None else rewards.clamp(-limit, limit)


def normalize_rewards(
    rewards: torch.Tensor,
    group_index: torch.Tensor,
    *,
    grouping: Grouping,
    method: Method,
    taking_part: torch.Tensor | None = None,
    lone_survivor: LoneSurvivor = "reward",
) -> torch.Tensor:
    """Returns rewards of trajectories, float64 ``[N]``, relative to the rewards of their group or of the whole batch.

    rewards: floating ``[N]``; group_index: int64 ``[N]``, 0..G-1. With R the compared rewards, ``mean`` gives R -
    mean(R), and ``mean_std`` gives (R - mean(R)) / (std(R) + 1e-6) with the unbiased standard deviation (DeepSeekMath,
    arXiv 2402.03300, section 4.1.2; the unbiased form and the epsilon as in ROLL and verl). ``none`` gives R. A
    trajectory with nothing to be compared with gets 0 by ``mean`` and ``mean_std``.

    taking_part: bool ``[N]``, ``None`` for all; others are in no mean or deviation, and get 0 by ``mean`` and
    ``mean_std``. A trajectory left alone by their absence gets its own R, or 0 with ``lone_survivor: zero``. Raises
    ``ValueError`` where sizes differ.
    """
    sizes = {"group_index": group_index, "taking_part": taking_part}
    raise_value_error("rewards", size_problems(sizes, len(rewards), "reward"))
    rewards = rewards.double().cpu()
    if method == "none":
        return rewards
    index = group_index.cpu() if grouping == "traj_group_id" else torch.zeros_like(group_index, device="cpu")
    normalized = torch.zeros_like(rewards)
    for group in range(int(index.max()) + 1 if len(index) else 0):
        members = members_taking_part(index == group, taking_part)
        if is_left_alone(index == group, members):
            normalized[members] = rewards[members] if lone_survivor == "reward" else 0.0
        elif bool(members.any()):
            centred = rewards[members] - rewards[members].mean()
            if method == "mean_std" and int(members.sum()) > 1:
                centred = centred / (rewards[members].std() + STD_EPSILON)
            normalized[members] = centred
    return normalized


def members_taking_part(members: torch.Tensor, taking_part: torch.Tensor | None) -> torch.Tensor:
    """Selects the compared members of a group, bool ``[N]``; ``taking_part`` ``None`` leaves out none."""
    return members if taking_part is None else members & taking_part.cpu()


def is_left_alone(members: torch.Tensor, compared: torch.Tensor) -> bool:
    """Says whether one of several members is compared with none, as all others take no part."""
    return int(compared.sum()) == 1 and int(members.sum()) > 1


def compute_turn_returns(turn_rewards: torch.Tensor, turn_offsets: torch.Tensor, *, gamma: float) -> torch.Tensor:
    """Discounted return of every turn, float64 ``[K]``: R_k = Σ_{j ≥ k} gamma^(j - k) · r_j over its trajectory.

    turn_rewards: floating ``[K]``, in order; turn_offsets: int64 ``[N + 1]``, where each trajectory's turns start,
    whether they are in one row or in several. Raises ``ValueError`` where the offsets do not fit.
    """
    problems = offset_problems(
        "turn_offsets", turn_offsets, num_segments=max(len(turn_offsets) - 1, 0), total=len(turn_rewards)
    )
    raise_value_error("turn returns", problems)
    returns = discount_backwards(turn_rewards.double().cpu().numpy(), turn_offsets.cpu().numpy(), gamma)
    return torch.from_numpy(returns)
