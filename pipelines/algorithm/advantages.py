"""Advantages and returns of all response tokens of a batch; in float64 on the host, so that no layout changes them.

Each estimator takes ``AdvantageInputs`` and gives ``TokenAdvantages``; whitening and clipping follow for all alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mock_scheduler.correction.config.rules import LoneSurvivor
from pipelines.algorithm.arrays import (
    FloatArray,
    discount_backwards,
    offset_problems,
    raise_value_error,
    segment_ids,
    segment_sums,
    size_problems,
)
from pipelines.algorithm.rewards import (
    Grouping,
    Method,
    clip_rewards,
    compute_turn_returns,
    is_left_alone,
    members_taking_part,
    normalize_rewards,
)
from pipelines.config.algorithm import AdvantageEstimator

WHITENING_EPSILON = 1e-8


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageConfig:
    """How advantages are made; the fields are the configuration's keys, and the defaults switch a part off.

    exclude_rejected: trajectories without a kept response token are in no mean or deviation of rewards. lone_survivor:
    the value of a group's only trajectory left after exclusion: its reward, as of a baseline of 0, or 0.
    """

    adv_estimator: AdvantageEstimator
    grouping: Grouping = "traj_group_id"
    method: Method = "mean_std"
    reward_clip: float | None = None
    advantage_clip: float | None = None
    whiten_advantages: bool = False
    gamma: float = 1.0
    lambd: float = 1.0
    exclude_rejected: bool = True
    lone_survivor: LoneSurvivor = "reward"

    @property
    def is_per_token(self) -> bool:
        """Whether the tokens of one trajectory have advantages of their own."""
        return self.adv_estimator in ("gae", "reinforce_plus_plus")

    @property
    def places_turns(self) -> bool:
        """Whether the reward of a turn lands on the last token of the same turn, whose place must then be known."""
        return self.is_per_token and self.method != "mean_std"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageInputs:
    """N trajectories with K turns and M response tokens; raises ``ValueError`` with every contradiction of sizes.

    rewards: floating ``[N]``, the total of a trajectory; group_index: int64 ``[N]``, 0..G-1; turn_rewards: floating
    ``[K]``; turn_offsets, token_offsets: int64 ``[N + 1]``, the turns and response tokens of each trajectory, in order.
    turn_ends: int64 ``[K]``, the number of response tokens up to the end of each turn, over the whole batch; needed
    where ``AdvantageConfig.places_turns``. kl_penalty: floating ``[M]``, already times its coefficient, to be taken off
    the reward. values: floating ``[M]``, the critic's value of the state before each sampled token. kept: bool ``[M]``,
    False for tokens rejected by rollout correction; ``None`` rejects none.
    """

    rewards: torch.Tensor
    group_index: torch.Tensor
    turn_rewards: torch.Tensor
    turn_offsets: torch.Tensor
    token_offsets: torch.Tensor
    turn_ends: torch.Tensor | None = None
    kl_penalty: torch.Tensor | None = None
    values: torch.Tensor | None = None
    kept: torch.Tensor | None = None

    def __post_init__(self) -> None:
        num, num_turns = len(self.rewards), len(self.turn_rewards)
        num_tokens = int(self.token_offsets[-1]) if self.token_offsets.numel() else 0
        problems = size_problems({"rewards": self.rewards, "group_index": self.group_index}, num, "trajectory")
        problems += offset_problems("turn_offsets", self.turn_offsets, num_segments=num, total=num_turns)
        problems += offset_problems("token_offsets", self.token_offsets, num_segments=num, total=num_tokens)
        problems += size_problems({"turn_rewards": self.turn_rewards, "turn_ends": self.turn_ends}, num_turns, "turn")
        per_token = {"kl_penalty": self.kl_penalty, "values": self.values, "kept": self.kept}
        problems += size_problems(per_token, num_tokens, "response token")
        if self.kept is not None and self.kept.dtype != torch.bool:
            problems.append(f"kept is {self.kept.dtype}; expected torch.bool")
        raise_value_error("advantage inputs", problems)

    def rejected_trajectories(self) -> torch.Tensor | None:
        """Finds trajectories with response tokens but without a kept one, bool ``[N]``; ``None`` without ``kept``."""
        if self.kept is None:
            return None
        num_kept = segment_sums(_as_array(self.kept), self.token_offsets.numpy())
        return (self.token_offsets.diff() > 0) & (torch.from_numpy(num_kept) == 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenAdvantages:
    """Holds float64 ``[M]`` each, one number per response token of the batch, in its order.

    returns: the source of the advantages. For ``gae`` advantage + value, the critic's target; for
    ``reinforce_plus_plus`` the discounted return of the token; for ``grpo`` and ``rloo`` the trajectory's reward.
    """

    advantages: torch.Tensor
    returns: torch.Tensor


def compute_advantages(inputs: AdvantageInputs, config: AdvantageConfig) -> TokenAdvantages:
    """Computes the configured estimator's advantages, whitened and then clipped where the configuration says so.

    Advantages of ``reinforce_plus_plus`` are always whitened, and once. Rejected tokens have advantage 0 and are in no
    mean or deviation of whitening; their reward still belongs to their trajectory. Raises ``ValueError`` where
    ``values`` or ``turn_ends`` are missing, or an estimator has no use for given ``values``.
    """
    _check_use(inputs, config)
    if config.adv_estimator == "gae":
        result = _compute_gae(inputs, config)
    elif config.adv_estimator == "reinforce_plus_plus":
        result = _compute_reinforce_plus_plus(inputs, config)
    else:
        result = _compute_group_relative(inputs, config)
    kept = slice(None) if inputs.kept is None else inputs.kept.cpu()
    advantages = torch.zeros_like(result.advantages)
    advantages[kept] = result.advantages[kept]
    if config.whiten_advantages or config.adv_estimator == "reinforce_plus_plus":
        advantages[kept] = whiten(advantages[kept])
    if config.advantage_clip is not None:
        advantages = advantages.clamp(-config.advantage_clip, config.advantage_clip)
    return TokenAdvantages(advantages=advantages, returns=result.returns)


def _check_use(inputs: AdvantageInputs, config: AdvantageConfig) -> None:
    problems = []
    if config.adv_estimator == "gae" and inputs.values is None:
        problems.append("values are missing: gae needs the critic's value of every response token")
    if config.adv_estimator != "gae" and inputs.values is not None:
        problems.append("values are given, which this estimator has no use for; leave them out, or use gae")
    if config.places_turns and inputs.turn_ends is None:
        problems.append("turn_ends are missing: the reward of a turn lands on its last response token")
    raise_value_error(f"adv_estimator {config.adv_estimator}", problems)


def compute_rloo_advantages(
    rewards: torch.Tensor,
    group_index: torch.Tensor,
    *,
    taking_part: torch.Tensor | None = None,
    lone_survivor: LoneSurvivor = "reward",
) -> torch.Tensor:
    """Returns leave-one-out advantages, float64 ``[N]``: R_i - mean of the other rewards of its group.

    (RLOO, Ahmadian et al., arXiv 2402.14740.) A group of one trajectory has advantage 0. taking_part, lone_survivor:
    as ``rewards.normalize_rewards``.
    """
    rewards = rewards.double().cpu()
    advantages = torch.zeros_like(rewards)
    for group in range(int(group_index.max()) + 1 if len(group_index) else 0):
        group_members = group_index.cpu() == group
        members = members_taking_part(group_members, taking_part)
        num = int(members.sum())
        if is_left_alone(group_members, members) and lone_survivor == "reward":
            advantages[members] = rewards[members]
        elif num > 1:
            own = rewards[members]
            advantages[members] = own - (own.sum() - own) / (num - 1)
    return advantages


def whiten(values: torch.Tensor) -> torch.Tensor:
    """(x - mean) / (std + 1e-8) over all entries of a 1-D tensor, float64; unbiased std, 0 for a single entry."""
    array = values.double().cpu().numpy()
    if len(array) == 0:
        return torch.from_numpy(array.copy())
    # NumPy's sum has one order; torch's follows the number of threads.
    centred = array - array.sum() / len(array)
    std = np.sqrt((centred * centred).sum() / max(len(array) - 1, 1))
    return torch.from_numpy(centred / (std + WHITENING_EPSILON))


def _compute_group_relative(inputs: AdvantageInputs, config: AdvantageConfig) -> TokenAdvantages:
    """``grpo`` and ``rloo``: one advantage per trajectory, of its reward after clip, KL penalty and normalisation."""
    rewards = clip_rewards(trajectory_rewards(inputs, gamma=config.gamma), config.reward_clip)
    if inputs.kl_penalty is not None:
        penalty = segment_sums(_as_array(inputs.kl_penalty), inputs.token_offsets.numpy())
        rewards = rewards - torch.from_numpy(penalty)
    advantages = _normalize(rewards, inputs, config)
    if config.adv_estimator == "rloo":
        advantages = compute_rloo_advantages(
            advantages,
            inputs.group_index,
            taking_part=taking_part(inputs, config),
            lone_survivor=config.lone_survivor,
        )
    num_tokens = inputs.token_offsets.diff()
    return TokenAdvantages(
        advantages=advantages.repeat_interleave(num_tokens), returns=rewards.repeat_interleave(num_tokens)
    )


def taking_part(inputs: AdvantageInputs, config: AdvantageConfig) -> torch.Tensor | None:
    """Finds the trajectories whose rewards are compared, bool ``[N]``; ``None`` where all are."""
    rejected = inputs.rejected_trajectories() if config.exclude_rejected else None
    return None if rejected is None else ~rejected


def _normalize(rewards: torch.Tensor, inputs: AdvantageInputs, config: AdvantageConfig) -> torch.Tensor:
    return normalize_rewards(
        rewards,
        inputs.group_index,
        grouping=config.grouping,
        method=config.method,
        taking_part=taking_part(inputs, config),
        lone_survivor=config.lone_survivor,
    )


def trajectory_rewards(inputs: AdvantageInputs, *, gamma: float) -> torch.Tensor:
    """Computes rewards of trajectories before clip and normalisation, float64 ``[N]``.

    The stored total for gamma 1. Else the return of its first turn, Σ_k gamma^k · r_k over its turns k = 0, 1, …; the
    part of the stored total beyond the sum of the turns counts as part of the last turn.
    """
    rewards = inputs.rewards.double().cpu()
    if gamma == 1.0:
        return rewards
    offsets = inputs.turn_offsets.numpy()
    turn_rewards = _as_array(inputs.turn_rewards).copy()
    surplus = rewards.numpy() - segment_sums(turn_rewards, offsets)
    has_turns = np.diff(offsets) > 0
    turn_rewards[offsets[1:][has_turns] - 1] += surplus[has_turns]
    returns = compute_turn_returns(torch.from_numpy(turn_rewards), inputs.turn_offsets, gamma=gamma).numpy()
    result = rewards.numpy().copy()
    result[has_turns] = returns[offsets[:-1][has_turns]]
    return torch.from_numpy(result)


def compute_token_rewards(inputs: AdvantageInputs, config: AdvantageConfig) -> torch.Tensor:
    """Computes the reward of each response token, float64 ``[M]``: ``gae`` and ``reinforce_plus_plus`` start here.

    The total of a trajectory is clipped, and then normalised. With ``mean_std`` it lands on the trajectory's last
    response token, since parts of a reward have no place in the distribution of totals: divided by the deviation of
    nearly equal totals, they would be huge. Else each turn's reward lands on the turn's last response token, and the
    rest of the total (beyond its turns, and all taken off by clip and mean) on the last one of the trajectory. A turn
    without response tokens passes its reward to the one before; a reward before the first response token lands nowhere,
    as no token led to it. Last, the KL penalty is taken off every token.
    """
    offsets = inputs.token_offsets.numpy()
    clipped = clip_rewards(inputs.rewards, config.reward_clip)
    surplus = _normalize(clipped, inputs, config).numpy()
    token_rewards = np.zeros(int(offsets[-1]))
    if config.places_turns and inputs.turn_ends is not None:
        turn_rewards, turn_offsets = _as_array(inputs.turn_rewards), inputs.turn_offsets.numpy()
        landing = inputs.turn_ends.numpy() - 1
        has_token = landing >= offsets[:-1][segment_ids(turn_offsets)]
        np.add.at(token_rewards, landing[has_token], turn_rewards[has_token])
        surplus = surplus - segment_sums(turn_rewards, turn_offsets)
    has_tokens = np.diff(offsets) > 0
    token_rewards[offsets[1:][has_tokens] - 1] += surplus[has_tokens]
    if inputs.kl_penalty is not None:
        token_rewards -= _as_array(inputs.kl_penalty)
    return torch.from_numpy(token_rewards)


def _compute_reinforce_plus_plus(inputs: AdvantageInputs, config: AdvantageConfig) -> TokenAdvantages:
    """Returns G_t = r_t + gamma · G_{t+1} over the response tokens of a trajectory (REINFORCE++, arXiv 2501.03262)."""
    token_rewards = compute_token_rewards(inputs, config).numpy()
    returns = torch.from_numpy(discount_backwards(token_rewards, inputs.token_offsets.numpy(), config.gamma))
    return TokenAdvantages(advantages=returns, returns=returns)


def _compute_gae(inputs: AdvantageInputs, config: AdvantageConfig) -> TokenAdvantages:
    """Computes generalised advantage estimation over a trajectory's response tokens (arXiv 1506.02438, eq. 16).

    δ_t = r_t + γ·V_{t+1} - V_t and A_t = δ_t + γλ·A_{t+1}, where t + 1 is the next response token, over prompts,
    observations and rows. V and A are 0 after the last token, for a trajectory that was cut too: the critic is
    evaluated only where a token was sampled, so the value of the state after a cut is not known.
    """
    values = _as_array(inputs.values) if inputs.values is not None else np.zeros(int(inputs.token_offsets[-1]))
    offsets = inputs.token_offsets.numpy()
    next_values = np.append(values[1:], 0.0)[: len(values)]
    next_values[offsets[1:][np.diff(offsets) > 0] - 1] = 0.0
    deltas = compute_token_rewards(inputs, config).numpy() + config.gamma * next_values - values
    advantages = discount_backwards(deltas, offsets, config.gamma * config.lambd)
    return TokenAdvantages(advantages=torch.from_numpy(advantages), returns=torch.from_numpy(advantages + values))


def _as_array(tensor: torch.Tensor) -> FloatArray:
    return tensor.detach().double().cpu().numpy()
