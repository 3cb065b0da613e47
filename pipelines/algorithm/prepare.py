"""From a rollout batch and its configuration to the advantages of its response tokens, and what to log of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.correction.config.rules import LoneSurvivor
from pipelines.algorithm.advantages import (
    AdvantageConfig,
    AdvantageInputs,
    TokenAdvantages,
    compute_advantages,
    taking_part,
    trajectory_rewards,
)
from pipelines.algorithm.checks import raise_value_error
from pipelines.algorithm.rewards import clip_rewards
from pipelines.algorithm.trajectories import build_trajectory_table, find_turn_ends
from pipelines.config.schema import PipelineConfig


def advantage_config(config: PipelineConfig) -> AdvantageConfig:
    """The keys of a configuration that advantages depend on."""
    return AdvantageConfig(
        adv_estimator=config.adv_estimator,
        grouping=config.reward_normalization.grouping,
        method=config.reward_normalization.method,
        reward_clip=config.reward_clip,
        advantage_clip=config.advantage_clip,
        whiten_advantages=config.whiten_advantages,
        gamma=config.gamma,
        lambd=config.lambd,
    )


def prepare_advantages(
    batch: RolloutBatch,
    config: PipelineConfig,
    *,
    kl_penalty: torch.Tensor | None,
    values: torch.Tensor | None,
    kept: torch.Tensor | None = None,
    exclude_rejected: bool = True,
    lone_survivor: LoneSurvivor = "reward",
) -> tuple[TokenAdvantages, dict[str, float]]:
    """Advantages and returns of all response tokens of a batch, and their metrics; the same on every rank.

    kl_penalty: floating ``[M]``, as ``kl.compute_kl_penalty`` gives it, already times its coefficient; given exactly
    where ``kl_in_reward.coef`` is above 0. values: floating ``[M]``, given exactly for ``adv_estimator: gae``. kept:
    bool ``[M]``, False for tokens that rollout correction rejects; ``None`` rejects none. All have one entry per
    response token of the batch, in its order. exclude_rejected, lone_survivor: as in ``AdvantageConfig``. The metrics
    are those of ``compute_metrics``.
    Raises ``ValueError`` naming what is missing, has no effect, or has another size.
    """
    _check_penalty(config, kl_penalty)
    settings = replace(advantage_config(config), exclude_rejected=exclude_rejected, lone_survivor=lone_survivor)
    table = build_trajectory_table(batch)
    inputs = AdvantageInputs(
        rewards=table.rewards,
        group_index=table.group_index,
        turn_rewards=table.turn_rewards,
        turn_offsets=table.turn_offsets,
        token_offsets=table.token_offsets,
        turn_ends=find_turn_ends(batch) if settings.places_turns else None,
        kl_penalty=kl_penalty,
        values=values,
        kept=kept,
    )
    result = compute_advantages(inputs, settings)
    return result, compute_metrics(inputs, settings, result)


def _check_penalty(config: PipelineConfig, kl_penalty: torch.Tensor | None) -> None:
    coef = config.kl_in_reward.coef
    if (kl_penalty is None) == (coef == 0):
        return
    is_given = "is missing" if kl_penalty is None else "is given"
    raise_value_error("kl_in_reward", [f"coef is {coef}, and kl_penalty {is_given}; give it exactly where coef > 0"])


def compute_metrics(inputs: AdvantageInputs, config: AdvantageConfig, result: TokenAdvantages) -> dict[str, float]:
    """Metrics of a batch's advantages, in float64.

    ``advantage_…`` and ``return_…``: ``mean``, ``std`` (population), ``min`` and ``max`` over the response tokens that
    are kept, 0 where the batch has none; advantages as training gets them, after whitening and clip.
    ``groups_without_variance``: fraction of groups whose clipped rewards are all equal, which teach nothing by
    comparison; rewards and groups that rejection leaves out do not count. ``kl_in_reward``: mean penalty per response
    token, only where there is one.
    """
    kept = slice(None) if inputs.kept is None else inputs.kept.cpu()
    metrics = {
        f"{prefix}_{name}": value
        for prefix, tokens in (("advantage", result.advantages), ("return", result.returns))
        for name, value in _describe(tokens[kept]).items()
    }
    gamma = 1.0 if config.is_per_token else config.gamma
    rewards = clip_rewards(trajectory_rewards(inputs, gamma=gamma), config.reward_clip)
    compared = taking_part(inputs, config)
    members = slice(None) if compared is None else compared
    metrics["groups_without_variance"] = _fraction_of_equal_groups(rewards[members], inputs.group_index[members])
    if inputs.kl_penalty is not None:
        metrics["kl_in_reward"] = _describe(inputs.kl_penalty)["mean"]
    return metrics


def _describe(values: torch.Tensor) -> dict[str, float]:
    array = values.detach().double().cpu().numpy()
    if len(array) == 0:
        return dict.fromkeys(("mean", "std", "min", "max"), 0.0)
    mean = array.sum() / len(array)
    std = np.sqrt(np.square(array - mean).sum() / len(array))
    return {"mean": float(mean), "std": float(std), "min": float(array.min()), "max": float(array.max())}


def _fraction_of_equal_groups(rewards: torch.Tensor, group_index: torch.Tensor) -> float:
    num_groups = int(group_index.max()) + 1 if len(group_index) else 0
    if num_groups == 0:
        return 0.0
    num_members = group_index.bincount(minlength=num_groups)
    highest = rewards.new_full((num_groups,), -torch.inf).scatter_reduce(0, group_index, rewards, "amax")
    lowest = rewards.new_full((num_groups,), torch.inf).scatter_reduce(0, group_index, rewards, "amin")
    return float((highest == lowest)[num_members > 0].double().mean())
