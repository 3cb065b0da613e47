"""The algorithm's sections of several keys, and checks of the loss; plain keys are in ``schema``; imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from mock_scheduler.config.base import ConfigSection, NonNegativeFloat
from mock_scheduler.correction.config.rules import CorrectionSpec

AdvantageEstimator = Literal["grpo", "gae", "reinforce_plus_plus", "rloo"]
KlEstimator = Literal["k1", "k2", "k3"]
PolicyLoss = Literal["ppo", "gmpo"]
LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]


class RewardNormalizationConfig(ConfigSection):
    """How rewards are normalised before advantages are made of them.

    ``grouping``: over the trajectories of a group (``traj_group_id``) or of the whole batch (``batch``).
    ``method``: ``mean`` takes the mean off, ``mean_std`` also divides by the standard deviation, ``none`` does nothing.
    """

    grouping: Literal["traj_group_id", "batch"] = "traj_group_id"
    method: Literal["none", "mean", "mean_std"] = "mean_std"


class CriticConfig(ConfigSection):
    """Holds the critic of ``adv_estimator: gae``: the policy's layers with a value head, in the same layout.

    ``value_clip``: the loss is clipped where a value moves further from its value before the step; ``None`` does not
    clip. ``warmup_steps``: first steps, with training of the critic alone.
    """

    lr: float = Field(default=1e-3, gt=0.0)
    """The critic's learning rate; its schedule has the form of the policy's."""
    value_clip: float | None = Field(default=0.5, gt=0.0)
    warmup_steps: int = Field(default=0, ge=0)


class KlInRewardConfig(ConfigSection):
    """The KL penalty in the reward: ``coef`` times the estimate of KL(policy ‖ reference) is taken off per token.

    ``target`` and ``horizon``: where both are set, the coefficient follows the measured KL (PPO's adaptive controller).
    """

    coef: NonNegativeFloat = 0.0
    """0: no penalty."""
    estimator: KlEstimator = "k1"
    """Estimate of the KL (joschu.net/blog/kl-approx)."""
    target: float | None = Field(default=None, gt=0.0)
    horizon: int | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _check_controller(self) -> KlInRewardConfig:
        if (self.target is None) != (self.horizon is None):
            raise ValueError("target and horizon belong together: set both for an adaptive coefficient, or neither")
        if self.target is not None and self.coef == 0:
            raise ValueError("target has no effect with coef 0; set the coefficient to begin with")
        if self.estimator != "k1" and self.coef == 0:
            raise ValueError(
                f"estimator {self.estimator} has no effect with coef 0, which takes no penalty off the reward; set "
                "coef above 0, or leave the estimator out"
            )
        return self


def check_critic(critic: CriticConfig, *, estimator: AdvantageEstimator, min_lr: float, max_steps: int) -> None:
    """Refuses critic settings without effect, or with an untrained policy.

    Raises:
        ValueError: names the keys, and the remedy.
    """
    if estimator != "gae":
        given, default = critic.model_dump(), CriticConfig().model_dump()
        changed = ", ".join(f"critic.{key} {value}" for key, value in given.items() if value != default[key])
        if changed:
            raise ValueError(
                f"adv_estimator {estimator} leaves these keys without effect: {changed}; set adv_estimator=gae, which "
                "alone has a critic, or leave them out"
            )
        return
    if min_lr > critic.lr:
        raise ValueError(
            f"training.min_lr {min_lr} is larger than critic.lr {critic.lr}, and both models decay to the one min_lr; "
            f"set training.min_lr to at most {critic.lr}, or raise critic.lr"
        )
    if critic.warmup_steps >= max_steps:
        raise ValueError(
            f"critic.warmup_steps {critic.warmup_steps} leaves no step of max_steps {max_steps} in which the policy is "
            f"trained; set it to at most {max_steps - 1}"
        )


def policy_loss_problems(
    policy_loss: PolicyLoss,
    loss_agg_mode: LossAggMode,
    *,
    is_per_token: bool,
    shares_sequences: bool,
    packs_sequences: bool,
    has_rows_of_turns: bool,
    has_dual_clip: bool,
    is_bypass: bool,
) -> list[str]:
    """Lists obstacles to computing this loss; GMPO needs every sequence as one whole line of one rank."""
    problems = []
    if loss_agg_mode != "token-mean" and not is_per_token:
        problems.append(
            f"loss_agg_mode {loss_agg_mode} is a mean over an update's sequences, and "
            "training.calculate_per_token_loss false makes means of micro-batches; set it to true"
        )
    if policy_loss != "gmpo":
        return problems
    conflicts = {
        f"loss_agg_mode {loss_agg_mode}: set seq-mean-token-sum, the mean over sequences": (
            loss_agg_mode != "seq-mean-token-sum"
        ),
        "parallel.context_parallel_size above 1 shares sequences among ranks": shares_sequences,
        "training.sequence_packing puts several sequences into a line": packs_sequences,
        "rollout_form step makes a row of every turn": has_rows_of_turns,
        "dual_clip has no part in it": has_dual_clip,
        "algorithm.rollout_correction.bypass_mode has losses of its own": is_bypass,
    }
    return problems + [f"policy_loss gmpo: {text}" for text, is_there in conflicts.items() if is_there]


def denominator_problems(correction: CorrectionSpec, loss_agg_mode: LossAggMode) -> list[str]:
    """Lists terms over all response tokens that could not be means beside ``rs_denominator: kept``."""
    if correction.rs_denominator != "kept":
        return []
    problems = []
    if correction.bypass and loss_agg_mode != "token-mean":
        problems.append(
            f"algorithm.rollout_correction.rs_denominator kept with bypass_mode and loss_agg_mode {loss_agg_mode}: "
            "entropy and KL are over all response tokens, and the sequences' factors are of kept ones; use original, "
            "or token-mean"
        )
    if correction.rollout_kl_coef > 0 and not correction.bypass:
        problems.append(
            "algorithm.rollout_correction.rs_denominator kept with rollout_kl_coef: that term is over all response "
            "tokens, and would be divided by the kept ones; use original"
        )
    return problems
