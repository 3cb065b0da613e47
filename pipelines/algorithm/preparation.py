"""Advantages step by step: what a step's scores are worth, and the coefficient of the KL that moves with them.

On the host in float64, the same wherever it is computed: in every rank of a run, or in the client of a training
service, which has no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.config.schema import PipelineConfig
from mock_scheduler.digests import JSON
from pipelines.algorithm.advantages import TokenAdvantages
from pipelines.algorithm.kl import AdaptiveKl, compute_kl_penalty
from pipelines.algorithm.prepare import prepare_advantages


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseScores:
    """What the models said of a batch's response tokens, float64 ``[M]`` in the batch's order.

    old_logprobs and ref_logprobs are there where ``kl_in_reward.coef`` is above 0, values for ``adv_estimator: gae``.
    """

    old_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    values: torch.Tensor | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Those that are there, by name."""
        named = {"old_logprobs": self.old_logprobs, "ref_logprobs": self.ref_logprobs, "values": self.values}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


def needed_scores(config: PipelineConfig) -> tuple[str, ...]:
    """The fields of ``ResponseScores`` that this algorithm's advantages are made of; empty where rewards suffice."""
    kl = ("old_logprobs", "ref_logprobs") if config.kl_in_reward.coef > 0 else ()
    return (*kl, "values") if config.adv_estimator == "gae" else kl


class AdvantageMaker:
    """Makes the advantages of one step after another; its state is the coefficient of the KL in the reward."""

    def __init__(self, config: PipelineConfig) -> None:
        self._config = config
        self.kl_controller = AdaptiveKl(
            coef=config.kl_in_reward.coef, target=config.kl_in_reward.target, horizon=config.kl_in_reward.horizon
        )

    def make(self, batch: RolloutBatch, scores: ResponseScores) -> tuple[TokenAdvantages, dict[str, float]]:
        """Advantages and their metrics; the coefficient moves on. Raises ``ValueError`` where a score is missing."""
        kl_penalty: torch.Tensor | None = None
        controller = self.kl_controller
        if scores.old_logprobs is not None and scores.ref_logprobs is not None:
            estimator = self._config.kl_in_reward.estimator
            kl = compute_kl_penalty(scores.old_logprobs, scores.ref_logprobs, estimator=estimator, coef=1.0)
            kl_penalty = controller.coef * kl
            # NumPy's sum, since the last bits of torch's follow the number of threads.
            measured_kl = float(kl.numpy().sum() / max(len(kl), 1))
            self.kl_controller = controller.update(measured_kl=measured_kl, num_samples=batch.num_trajectories)
        advantages, metrics = prepare_advantages(batch, self._config, kl_penalty=kl_penalty, values=scores.values)
        return advantages, metrics if kl_penalty is None else {**metrics, "kl_coef": controller.coef}

    def state_dict(self) -> dict[str, JSON]:
        """What goes on besides the models."""
        return {"kl_in_reward": dict(self.kl_controller.state_dict())}

    def load_state_dict(self, state: Mapping[str, JSON]) -> None:
        """Go on from what ``state_dict`` gave.

        What the configuration says counts: a coefficient that adapts goes on only where it adapts to the same target.
        """
        saved = AdaptiveKl.from_state_dict(state["kl_in_reward"])  # type: ignore[arg-type]
        own = self.kl_controller
        if own.target is not None and (own.target, own.horizon) == (saved.target, saved.horizon):
            self.kl_controller = replace(own, coef=saved.coef)
