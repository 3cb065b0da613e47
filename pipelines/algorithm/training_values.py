"""Makes the values that a step trains with: its correction, its advantages, and the coefficient that moves with them.

On the host in float64, the same wherever it is computed: in every rank of a run, or in the client of a training
service, which has no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.correction import CorrectionResult
from mock_scheduler.correction.config.rules import LoneSurvivor
from mock_scheduler.support.digests import JSON
from pipelines.algorithm.advantages import (
    AdvantageConfig,
    AdvantageInputs,
    TokenAdvantages,
    compute_advantages,
    taking_part,
    trajectory_rewards,
)
from pipelines.algorithm.arrays import raise_value_error
from pipelines.algorithm.correction import BatchCorrector, check_correctable, corrected_step_metrics, correction_spec
from pipelines.algorithm.kl import AdaptiveKl, compute_kl_penalty
from pipelines.algorithm.rewards import clip_rewards
from pipelines.batching.trajectories import build_trajectory_table, find_turn_ends
from pipelines.config.schema import PipelineConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseScores:
    """Holds the models' scores of a batch's response tokens, float64 ``[M]`` in the batch's order.

    old_logprobs is there where ``kl_in_reward.coef`` is above 0 or rollouts are corrected before the updates,
    ref_logprobs for the former, values for ``adv_estimator: gae``.
    """

    old_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    values: torch.Tensor | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the present scores by name."""
        named = {"old_logprobs": self.old_logprobs, "ref_logprobs": self.ref_logprobs, "values": self.values}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainingValues:
    """Holds a batch's values for training, one entry per response token, in its order.

    advantages, returns: float64 ``[M]``. weights: floating ``[M]``, importance weights; ``None`` for none. kept: bool
    ``[M]``, False at rejected tokens; ``None`` where nothing is rejected.
    """

    advantages: torch.Tensor
    returns: torch.Tensor
    weights: torch.Tensor | None = None
    kept: torch.Tensor | None = None


def needed_scores(config: PipelineConfig) -> tuple[str, ...]:
    """Lists the fields of ``ResponseScores`` that this algorithm needs; empty where rewards suffice."""
    spec = correction_spec(config)
    names = []
    if config.kl_in_reward.coef > 0 or (spec is not None and not spec.bypass):
        names.append("old_logprobs")
    if config.kl_in_reward.coef > 0:
        names.append("ref_logprobs")
    if config.adv_estimator == "gae":
        names.append("values")
    return tuple(names)


class ValueMaker:
    """Makes the training values of one step after another; its state is the coefficient of the KL in the reward."""

    def __init__(self, config: PipelineConfig) -> None:
        self._config = config
        self._spec = correction_spec(config)
        self.kl_controller = AdaptiveKl(
            coef=config.kl_in_reward.coef, target=config.kl_in_reward.target, horizon=config.kl_in_reward.horizon
        )

    def make(
        self, batch: RolloutBatch, scores: ResponseScores, *, policy_version: int
    ) -> tuple[TrainingValues, dict[str, float]]:
        """Makes correction, advantages and their metrics; the coefficient moves on.

        policy_version: of the policy under training. In bypass whoever has the policy corrects tokens update by update.
        Raises ``ValueError`` where a score is missing, ``CorrectionError`` where rollouts cannot be corrected.
        """
        spec = self._spec
        if spec is not None:
            check_correctable(batch, self._config)
        if spec is None or spec.bypass:
            return self._make(batch, scores, corrected=None)
        if scores.old_logprobs is None:
            raise ValueError("rollout_correction: old_logprobs are missing; they are what rollouts are corrected to")
        corrector = BatchCorrector(batch, spec, policy_version=policy_version)
        old_logprobs = self.as_computed(scores.old_logprobs)
        corrected = corrector.correct(old_logprobs, rules_with_advantages=False)
        values, metrics = self._make(batch, scores, corrected=corrected)
        if spec.needs_advantages:
            corrected = corrector.correct(old_logprobs, advantages=values.advantages)
        values = replace(values, weights=corrected.weights_by_token, kept=corrected.kept)
        return values, metrics | corrected_step_metrics([corrected], spec)

    def as_computed(self, logprobs: torch.Tensor) -> torch.Tensor:
        """Converts log-probabilities ``[M]`` to the dtype of training; float64 holds them exactly."""
        return logprobs.to(torch.float64 if self._config.precision == "float64" else torch.float32)

    def _make(
        self, batch: RolloutBatch, scores: ResponseScores, *, corrected: CorrectionResult | None
    ) -> tuple[TrainingValues, dict[str, float]]:
        kl_penalty: torch.Tensor | None = None
        controller = self.kl_controller
        if scores.old_logprobs is not None and scores.ref_logprobs is not None:
            estimator = self._config.kl_in_reward.estimator
            kl = compute_kl_penalty(scores.old_logprobs, scores.ref_logprobs, estimator=estimator, coef=1.0)
            kl_penalty = controller.coef * kl
            # NumPy's sum, since the last bits of torch's follow the number of threads.
            measured_kl = float(kl.numpy().sum() / max(len(kl), 1))
            self.kl_controller = controller.update(measured_kl=measured_kl, num_samples=batch.num_trajectories)
        spec = self._spec
        advantages, metrics = prepare_advantages(
            batch,
            self._config,
            kl_penalty=kl_penalty,
            values=scores.values,
            kept=None if corrected is None else corrected.kept,
            exclude_rejected=spec is None or spec.exclude_rejected_from_baseline,
            lone_survivor="reward" if spec is None else spec.lone_survivor,
        )
        values = TrainingValues(advantages=advantages.advantages, returns=advantages.returns)
        return values, metrics if kl_penalty is None else {**metrics, "kl_coef": controller.coef}

    def state_dict(self) -> dict[str, JSON]:
        """Returns the state besides the models."""
        return {"kl_in_reward": dict(self.kl_controller.state_dict())}

    def load_state_dict(self, state: Mapping[str, JSON]) -> None:
        """Goes on from a ``state_dict``.

        The configuration decides: an adaptive coefficient goes on only where it adapts to the same target.
        """
        saved = AdaptiveKl.from_state_dict(state["kl_in_reward"])  # type: ignore[arg-type]
        own = self.kl_controller
        if own.target is not None and (own.target, own.horizon) == (saved.target, saved.horizon):
            self.kl_controller = replace(own, coef=saved.coef)


def advantage_config(config: PipelineConfig) -> AdvantageConfig:
    """Reads the keys that advantages depend on."""
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
    """Computes advantages and returns of all response tokens of a batch, and their metrics; the same on every rank.

    Args:
        kl_penalty: floating ``[M]``, times its coefficient, as of ``compute_kl_penalty``; given exactly where
            ``kl_in_reward.coef`` is above 0.
        values: floating ``[M]``, given exactly for ``adv_estimator: gae``.
        kept: bool ``[M]``, False for tokens rejected by rollout correction; ``None`` rejects none.
        exclude_rejected, lone_survivor: as in ``AdvantageConfig``.

    Raises:
        ValueError: names every argument that is missing, has no effect, or has another size.
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
    """Computes metrics of a batch's advantages, in float64.

    ``advantage_…`` and ``return_…``: ``mean``, ``std`` (population), ``min`` and ``max`` over kept response tokens, 0
    where the batch has none; advantages as training gets them, after whitening and clip. ``groups_without_variance``:
    fraction of groups whose clipped rewards are all equal, so a comparison teaches nothing; rejected rewards and groups
    do not count. ``kl_in_reward``: mean penalty per response token, only where there is one.
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
